"""Tests that are called before they run, which tells what they will need."""

from __future__ import annotations

import inspect
import warnings
from contextlib import suppress
from functools import partial

import pytest

from cunorm.cuda import devices


def pretend_on(patch: pytest.MonkeyPatch, arch: int) -> None:
    patch.setattr(devices, "compute_capability", lambda index: arch)


def passes(*args, **kwargs) -> None:
    pass


def rehearse(item: pytest.Item, **stand_ins) -> None:
    """Calls a test with stand-ins for fixtures, as far as it gets; what is wrong it says later.

    The checks of its module that are functions, `assert_...`, look at nothing.
    """
    outcomes = Exception, pytest.fail.Exception, pytest.skip.Exception
    with (
        warnings.catch_warnings(),
        suppress(*outcomes),
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("ignore")
        fixtures = {"monkeypatch": patch, "pretend": partial(pretend_on, patch), **stand_ins}
        for name in [name for name in vars(item.module) if name.startswith("assert_")]:
            patch.setattr(item.module, name, passes)
        taken = inspect.signature(item.obj).parameters.keys() & fixtures.keys()
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        item.obj(**{name: fixtures[name] for name in taken}, **parameters)
