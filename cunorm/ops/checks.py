"""Checks of what users pass: parameters of ops, and memory that calls write."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

from cunorm import arrays, errors
from cunorm.arrays import ArraySpec
from cunorm.call import Call

_MOST_CLEAR = 256  # sets of addresses that a guard remembers


class OverlapGuard:
    """What a call writes may share memory with nothing else, except that an output may be an input.

    Layouts are known when a plan is made, addresses only at each call: what remains to be done
    then is to compare a few numbers.
    """

    def __init__(self, call: Call, labels: Sequence[str]) -> None:
        """`labels` name the outputs that come with the call: all of them, or none."""
        self.op = call.op
        self.names = [*call.inputs, *labels]
        self.specs: list[ArraySpec | None] = [*call.inputs.values()]
        if labels:
            self.specs += call.outputs.values()
        extents = [(0, 0) if s is None else s.extent for s in self.specs]
        first_out = len(call.inputs)
        self.mutated = frozenset(i for i, name in enumerate(call.inputs) if name in call.mutated)
        # What lies nearer to the other than these distances shares memory with its extent.
        self.pairs: list[tuple[int, int, int, int]] = []
        for one in range(len(self.specs)):
            low, high = extents[one]
            for other in range(one):
                if self.specs[one] is None or self.specs[other] is None:
                    continue
                if one < first_out and one not in self.mutated and other not in self.mutated:
                    continue
                other_low, other_high = extents[other]
                self.pairs.append((one, other, other_low - high, other_high - low))
        self._first_out = first_out
        # Addresses come again, since memory comes from pools: those that passed need no check.
        self.clear: set[tuple[int, ...]] = set()

    def check(self, pointers: Sequence[int]) -> None:
        """Raise ValueError where something would be written over what is not it."""
        addresses = tuple(pointers)
        for one, other, nearest_below, nearest_above in self.pairs:
            if nearest_below < addresses[one] - addresses[other] < nearest_above:
                self._look_closer(one, other, addresses[one], addresses[other])
        if len(self.clear) >= _MOST_CLEAR:
            self.clear.clear()
        self.clear.add(addresses)

    def _look_closer(self, one: int, other: int, pointer: int, other_pointer: int) -> None:
        if pointer == other_pointer and self._may_coincide(one, other):
            return
        spec, other_spec = self.specs[one], self.specs[other]
        if arrays.share_memory(pointer, spec, other_pointer, other_spec):  # type: ignore[arg-type]
            raise self._error(one, other)

    def _may_coincide(self, one: int, other: int) -> bool:
        """Whether the later of two arrays is an output that may be the earlier one exactly."""
        if other >= self._first_out or other in self.mutated:
            return False
        return one >= self._first_out and self.specs[one] == self.specs[other]

    def _error(self, one: int, other: int) -> ValueError:
        if one in self.mutated:
            return errors.mutated_overlap(self.op, self.names[one], self.names[other])
        if other in self.mutated:
            return errors.mutated_overlap(self.op, self.names[other], self.names[one])
        return errors.overlap(self.op, self.names[one], self.names[other])


def out_label(index: int, count: int) -> str:
    """What errors call an output."""
    return "out" if count == 1 else f"out[{index}]"


def checked_number(op: str, argument: str, number: Any) -> float:
    """A number as a float; infinite where a float cannot hold it."""
    try:
        value = float(number)
    except OverflowError:  # an int beyond all floats
        value = inf
    except (TypeError, ValueError):
        raise errors.wrong_type(op, argument, "a number", number) from None
    if isinstance(number, (str, bytes)):
        raise errors.wrong_type(op, argument, "a number", number)
    return value


def checked_eps(op: str, eps: Any) -> float:
    """eps as a float; it must be finite and not negative."""
    value = checked_number(op, "eps", eps)
    if not (isfinite(value) and value >= 0):
        raise errors.wrong_value(op, "eps", "finite and not negative", eps)
    return value


def checked_momentum(op: str, momentum: Any) -> float:
    """momentum as a float from 0 to 1."""
    value = checked_number(op, "momentum", momentum)
    if not 0 <= value <= 1:
        raise errors.wrong_value(op, "momentum", "from 0 to 1", momentum)
    return value


def checked_flag(op: str, argument: str, flag: Any) -> bool:
    """A flag as a bool; a word or a number would be a mistake."""
    if type(flag).__name__ not in ("bool", "bool_"):
        raise errors.wrong_type(op, argument, "a bool", flag)
    return bool(flag)


def checked_groups(op: str, num_groups: Any) -> int:
    """num_groups as an int of at least one."""
    try:
        value = operator.index(num_groups)
    except TypeError:
        raise errors.wrong_type(op, "num_groups", "an int", num_groups) from None
    if value < 1:
        raise errors.wrong_value(op, "num_groups", "at least 1", num_groups)
    return value


def checked_channel_axis(op: str, channel_axis: Any) -> int:
    """channel_axis as an int: 1 or -1."""
    if type(channel_axis) is int and channel_axis in (1, -1):
        return channel_axis
    try:
        value = operator.index(channel_axis)
    except TypeError:
        raise errors.wrong_type(op, "channel_axis", "an int", channel_axis) from None
    if value not in (1, -1):
        raise errors.wrong_value(op, "channel_axis", "1 or -1", channel_axis)
    return value


def checked_shape(op: str, shape: Any) -> tuple[int, ...]:
    """normalized_shape as a tuple of ints."""
    if isinstance(shape, (str, bytes)):
        raise errors.wrong_type(op, "normalized_shape", "an int or a sequence of ints", shape)
    try:
        sizes = (operator.index(shape),)
    except TypeError:
        try:
            sizes = tuple(operator.index(n) for n in shape)
        except TypeError:
            raise errors.wrong_type(
                op, "normalized_shape", "an int or a sequence of ints", shape
            ) from None
    if not sizes or min(sizes) < 0:
        raise errors.wrong_value(
            op, "normalized_shape", "one or more sizes that are not negative", shape
        )
    return sizes
