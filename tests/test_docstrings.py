"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import cunorm

# The examples are written for the host; what needs a GPU shows no output.
MODULES = [
    module.name
    for module in pkgutil.walk_packages(cunorm.__path__, "cunorm.")
    if module.name != "cunorm.__main__" and ".cuda_src" not in module.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize(
    "name", ["functional.row", "functional.batch", "functional.group", "ops.row"]
)
def test_there_are_examples(name):
    module = importlib.import_module(f"cunorm.{name}")
    found = doctest.DocTestFinder(exclude_empty=True).find(module)
    assert sum(len(test.examples) for test in found) >= 3


@pytest.mark.parametrize("name", sorted(set(cunorm.__all__) - {"BUILTIN", "__version__"}))
def test_every_public_name_is_documented(name):
    thing = getattr(cunorm, name)
    assert inspect.getdoc(thing)
    if inspect.isfunction(thing):
        text = inspect.getdoc(thing)
        for parameter in inspect.signature(thing).parameters:
            assert parameter in text, f"{name} does not explain {parameter}"
