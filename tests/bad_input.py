"""Calls with bad input: what makes their arrays, and how they are checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

NO_ARRAY = "must be an array (CuPy, NumPy, torch or DLPack)"
FLOATS = "float16, bfloat16, float32 or float64"


class Arrays:
    """Makes the arrays of a case and remembers what was in them."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.made: list[tuple[Any, bytes]] = []

    def new(self, *shape: int, dtype: Any = np.float32) -> Any:
        array = np.array(3 * self.rng.standard_normal(shape)).astype(dtype)
        self.made.append((array, array.tobytes()))
        return array

    def zero_stride(self, *shape: int) -> Any:
        """A writable array whose rows are all the same memory."""
        base = self.new(shape[-1])
        return np.lib.stride_tricks.as_strided(base, shape, (0,) * (len(shape) - 1) + base.strides)

    def read_only(self, *shape: int) -> Any:
        array = self.new(*shape)
        array.flags.writeable = False
        return array

    @property
    def x(self) -> Any:
        return self.new(4, 6)

    @property
    def row(self) -> Any:
        return self.new(6)

    def check_untouched(self) -> None:
        for array, before in self.made:
            assert array.tobytes() == before


class Case(NamedTuple):
    id: str
    call: Callable[[Arrays], Any]
    error: type[Exception]
    message: str | re.Pattern[str]  # a pattern where wording belongs to others


def check(case: Case) -> None:
    """The call raises what it must, says so in the right words, and changes nothing."""
    arrays = Arrays()
    with pytest.raises(case.error) as raised:
        case.call(arrays)
    assert type(raised.value) is case.error
    message = str(raised.value)
    if isinstance(case.message, re.Pattern):
        assert case.message.fullmatch(message), message
    else:
        assert message == case.message
    arrays.check_untouched()
