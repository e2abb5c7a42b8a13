"""What the ops over the last axes share: which axes those are, and the shapes of parameters."""

from __future__ import annotations

from typing import Any

from cunorm import errors
from cunorm.arrays import ArraySpec
from cunorm.ops.base import STATISTICS, Op


class RowOp(Op):
    """A norm over the last axes of x; statistics are one number per row."""

    normalized_shape: tuple[int, ...] | None = None  # None: the last axis, whatever its length

    @property
    def attributes(self) -> dict[str, Any]:
        return {}

    def _row_shape(self, x: ArraySpec) -> tuple[int, ...]:
        """The trailing shape of x that is normalized."""
        shape, name = self.normalized_shape, self.x_name
        if shape is None:
            if not x.shape:
                raise errors.wrong_value(self.name, name, "an array of one or more axes", x.shape)
            return x.shape[-1:]
        if len(shape) > len(x.shape) or x.shape[len(x.shape) - len(shape) :] != shape:
            raise errors.wrong_value(
                self.name,
                "normalized_shape",
                f"the trailing shape of {name}, which has shape {x.shape}",
                shape,
            )
        return shape

    def _expected_shape(self, argument: str, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        row = self._row_shape(x)
        if argument in STATISTICS:
            return self._statistic_shape(x, axis)
        return x.shape if argument in self.like_x else row

    def _statistic_shape(self, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        return x.shape[: len(x.shape) - len(self._row_shape(x))]


class AdaptiveOp(RowOp):
    """Layer norm modulated by arrays that broadcast to x along its leading axes."""

    modulation = frozenset({"scale", "shift", "gate"})

    def _expected_shape(self, argument: str, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        expected = super()._expected_shape(argument, x, axis)
        return x.shape if argument in self.modulation else expected

    def _shape_fits(self, argument: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        if argument not in self.modulation:
            return shape == expected
        tail = expected[len(expected) - len(shape) :]
        return (
            0 < len(shape) <= len(expected)
            and shape[-1] == expected[-1]
            and all(n in (1, m) for n, m in zip(shape, tail, strict=True))
        )

    def _shape_wording(self, argument: str, expected: tuple[int, ...]) -> str:
        if argument not in self.modulation:
            return str(expected)
        return f"{expected} or one that broadcasts to it along leading axes"
