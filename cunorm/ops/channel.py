"""What the ops with channels share: where the channels are, one parameter for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from cunorm import errors
from cunorm.arrays import ArraySpec
from cunorm.ops.base import Op
from cunorm.ops.checks import checked_channel_axis

RUNNING = ("running_mean", "running_var")


class ChannelOp(Op):
    """An op on arrays ``(N, C, ...)`` or ``(N, ..., C)``; parameters have one value per channel."""

    def _axis(self, channel_axis: Any) -> int:
        return 1 if channel_axis is None else checked_channel_axis(self.name, channel_axis)

    def _channels(self, x: ArraySpec, axis: int | None) -> int:
        if len(x.shape) < 2:
            raise errors.wrong_value(self.name, "x", "an array of two or more axes", x.shape)
        return x.shape[1 if axis is None else axis]

    def _spatial(self, x: ArraySpec, axis: int | None) -> int:
        """Values of one channel of one sample."""
        return prod(x.shape[1:-1] if axis == -1 else x.shape[2:])

    def _expected_shape(self, argument: str, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        channels = self._channels(x, axis)
        return x.shape if argument in self.like_x else (channels,)


class RunningOp(ChannelOp):
    """An op that reads running statistics, or updates them in place."""

    computes: bool  # statistics of x are computed, and running ones follow them
    flag: str  # what decides so, as errors say it

    def _check_together(
        self, inputs: Mapping[str, ArraySpec | None], x: ArraySpec, axis: int | None
    ) -> None:
        absent = [name for name in RUNNING if inputs[name] is None]
        if absent and not self.computes:
            raise errors.wrong_value(self.name, absent[0], f"an array with {self.flag}", None)
        if len(absent) == 1:
            other = RUNNING[1 - RUNNING.index(absent[0])]
            raise errors.wrong_value(self.name, absent[0], f"an array like {other}", None)
        if self.computes and x.size > 0:
            self._check_enough(x, axis)

    def _check_enough(self, x: ArraySpec, axis: int | None) -> None:
        """Refuse an x with so few values that its variance says nothing."""
        raise NotImplementedError

    def _mutated(self, inputs: Mapping[str, Any]) -> tuple[str, ...]:
        if not self.computes:
            return ()
        return tuple(name for name in RUNNING if inputs[name] is not None)
