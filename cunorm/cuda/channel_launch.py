"""Launches of batch, group and instance norm: what is packed, and how a call runs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from cunorm import dtypes
from cunorm.arrays import ArraySpec
from cunorm.call import Call
from cunorm.cuda.channel_choices import BRIEF
from cunorm.cuda.channel_layout import even_step
from cunorm.cuda.compiler import Kernel
from cunorm.cuda.launch import Launcher
from cunorm.cuda.layout import row_numbers
from cunorm.cuda.plans import LaunchPlan

ARRAYS = ("x", "grad_out", "y")  # ChannelArray in channel_args.cuh
SMALL = ("weight", "bias", "running_mean", "running_var", "mean", "rstd")  # Small, there
WORKSPACES = ("moments", "partial", "coefficients", "progress")
NUMBER = "number"  # of the launch, behind them

_CYCLE_SHIFT = 37  # Cycle::kShift
_CYCLE_REACH = 1 << 18  # Cycle::kReach
_DIVIDED = 1 << 31  # numbers below it, a Divisor divides


@dataclass(frozen=True)
class Numbers:
    """The numbers of ChannelArgs, in its words."""

    sets: int
    inner_sets: int
    channels: int
    vectors: int
    count: int  # elements of a set
    outer_step: tuple[int, int, int] = (0, 0, 0)
    run_step: tuple[int, int, int] = (0, 0, 0)
    inner_step: int = 0
    length: int = 1
    channel: int = 1
    runs: int = 1
    segments: int = 1
    segment_rows: int = 1
    set_columns: int = 0
    set_channels: int = 1
    coefficient_step: int = 0
    eps: float = 0.0
    momentum: float = 0.0
    groups: int = 0
    lag: int = 0
    batches: int = 0
    together: int = 1
    words: int = 0
    frozen: bool = False
    running_as_x: bool = False

    def head(self, wide: str, small: Sequence[ArraySpec | None]) -> bytes:
        """ChannelArgs up to its addresses; `small` as in SMALL."""
        length, length_by, length_shift = _divisor(self.length)
        inner, inner_by, inner_shift = _divisor(self.inner_sets if self.sets < _DIVIDED else 0)
        flags = [s is not None and s.dtype == wide for s in small]
        flags += [self.frozen, self.running_as_x]
        return struct.pack(
            "3d2f6I2HIq",
            *row_numbers(self.count, self.eps),
            *(number if number < BRIEF else 0 for number in (self.vectors, self.sets)),
            *(length, length_by, inner, inner_by),
            *(length_shift, inner_shift, sum(flag << i for i, flag in enumerate(flags))),
            self.run_step[0],
        )

    def tail(
        self, wide: str, small: Sequence[ArraySpec | None], out: Sequence[ArraySpec | None]
    ) -> bytes:
        """ChannelArgs after its addresses; `out`: grad_weight and grad_bias."""
        length, length_by, length_shift = _divisor(self.length)
        channel, channel_by, channel_shift = _divisor(self.channel)
        unbiased = 1.0 / (self.count - 1) if self.count > 1 else float("nan")
        return struct.pack(
            "2d6qqQ3q4q3q2qqQ5q2i11I4x",
            *(self.momentum, unbiased),
            *[0 if s is None else even_step(s) or 0 for s in small],
            *_cycle(self.channel),
            *self.run_step,
            *(self.sets, self.inner_sets, self.channels, self.set_channels),
            *self.outer_step,
            *(self.inner_step, self.coefficient_step),
            *_cycle(self.length),
            *(self.vectors, self.runs, self.segments, self.segment_rows),
            self.set_columns,
            *[s is not None and s.dtype == wide for s in out],
            *(length, length_by, channel, channel_by),
            *(max(length_shift, 32) - 32, max(channel_shift, 32) - 32),
            *(self.groups, self.lag, self.batches, self.together, self.words),
        )


def _cycle(size: int) -> tuple[int, int]:
    """A Cycle: a size, and what to multiply by instead of dividing by it."""
    return size, -(-(1 << _CYCLE_SHIFT) // size) if size <= _CYCLE_REACH else 0


def _divisor(size: int) -> tuple[int, int, int]:
    """A Divisor, and its shift: by which numbers below 2^31 are divided exactly."""
    if not 0 < size < _DIVIDED:
        return 0, 0, 0
    shift = 31 + (size - 1).bit_length()
    return size, -(-(1 << shift) // size), shift


class Step(NamedTuple):
    """One launch: the kernel as a C++ expression, its grid and block, and its numbers."""

    expression: str
    grid: int
    block: int
    numbers: Numbers
    shared_memory: int = 0
    cluster: int = 1
    for_replay: bool = False  # only where the launches go into a graph


class ChannelPlan(LaunchPlan):
    """Launches of batch, group or instance norm.

    Parameters
    ----------
    call : Call
        What is asked for.
    file : str
        The .cu file of the kernels.
    steps : sequence of Step
        The launches, in order.
    roles : mapping
        Which input or output of the call stands where a place of ChannelArgs is named otherwise.
    workspaces : mapping
        Specs by their names in WORKSPACES.
    out_given : bool
        Whether outputs come with the call.
    """

    def __init__(
        self,
        call: Call,
        file: str,
        steps: Sequence[Step],
        roles: Mapping[str, str],
        workspaces: Mapping[str, ArraySpec],
        out_given: bool,
    ) -> None:
        replay_only = [step.for_replay for step in steps]
        given, in_order = _places(call, roles, list(workspaces), any(replay_only))
        wide = dtypes.accumulation(call.x.dtype)
        small = [call.inputs.get(roles.get(name, name)) for name in SMALL]
        out = [call.outputs.get(name) for name in ("grad_weight", "grad_bias")]
        launchers = [
            Launcher(
                Kernel(file, step.expression, step.cluster, step.shared_memory),
                call.device.index,
                step.grid,
                step.block,
                given,
                step.numbers.head(wide, small),
                step.numbers.tail(wide, small, out),
            )
            for step in steps
        ]
        super().__init__(
            call, launchers, list(workspaces.values()), out_given, in_order, replay_only
        )


def _places(
    call: Call, roles: Mapping[str, str], workspaces: Sequence[str], numbered: bool
) -> tuple[list[bool], Callable[[Sequence[int]], Any]]:
    """Which addresses of ChannelArgs are given, and a function that puts them in its order.

    It takes those of a call's arrays and its workspaces, and if it has one, the launch's number.
    """
    read = list(call.inputs)
    number = [NUMBER] if numbered else []
    written = [*call.outputs, *call.statistics, *workspaces, *number]
    inputs = {name: i for i, name in enumerate(read)}
    outputs = {name: len(read) + i for i, name in enumerate(written)}
    places = ("x", "y", *SMALL, "grad_out", "mean_out", "rstd_out", *WORKSPACES, NUMBER)
    taken_from = dict.fromkeys(("y", "mean_out", "rstd_out", *WORKSPACES, *number), outputs)
    slots = [taken_from.get(name, inputs).get(roles.get(name, name)) for name in places]
    # never one alone, which would come without its tuple: x, and what is written
    return [s is not None for s in slots], itemgetter(*[s for s in slots if s is not None])
