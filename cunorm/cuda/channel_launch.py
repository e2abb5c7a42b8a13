"""Launches of batch, group and instance norm: what is packed, and how a call runs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from cunorm import dtypes
from cunorm.arrays import ArraySpec, Library
from cunorm.call import Call, Launch
from cunorm.cuda import devices
from cunorm.cuda.compiler import Kernel
from cunorm.cuda.launch import Launcher
from cunorm.cuda.row import keep_for_replay
from cunorm.cuda.sources import source

ARRAYS = ("x", "grad_out", "y")  # ChannelArray in channel_args.cuh
SMALL = ("weight", "bias", "mean", "rstd", "running_mean", "running_var")  # Small, there
WORKSPACES = ("partial", "coefficients", "moments", "progress")

_LARGEST_FLOAT = 3.4028234663852886e38  # an eps beyond it is one in float32
_CYCLE_SHIFT = 37  # Cycle::kShift
_CYCLE_REACH = 1 << 18  # Cycle::kReach


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
    lag: int = 0
    frozen: bool = False
    running_as_x: bool = False

    def packed(
        self, wide: str, small: Sequence[ArraySpec | None], out: Sequence[ArraySpec | None]
    ) -> bytes:
        """ChannelArgs from `sets` on; `small` as in SMALL, `out`: grad_weight and grad_bias."""
        inverse = 1.0 / self.count
        unbiased = 1.0 / (self.count - 1) if self.count > 1 else float("nan")
        return struct.pack(
            "3q6qqqQqQ4q3q3d2f2d6q6i2iq2i",
            *(self.sets, self.inner_sets, self.channels),
            *self.outer_step,
            *self.run_step,
            self.inner_step,
            *_cycle(self.length),
            *_cycle(self.channel),
            *(self.runs, self.vectors, self.segments, self.segment_rows),
            *(self.set_columns, self.set_channels, self.coefficient_step),
            *(self.count, inverse, self.eps, inverse, min(self.eps, _LARGEST_FLOAT)),
            *(self.momentum, unbiased),
            *[0 if s is None else s.strides[0] for s in small],
            *[s is not None and s.dtype == wide for s in (*small, *out)],
            *(self.lag, self.frozen, self.running_as_x),
        )


def _cycle(size: int) -> tuple[int, int]:
    """A Cycle: a size, and what to multiply by instead of dividing by it."""
    return size, -(-(1 << _CYCLE_SHIFT) // size) if size <= _CYCLE_REACH else 0


class Step(NamedTuple):
    """One launch: the kernel as a C++ expression, its grid and block, and its numbers."""

    expression: str
    grid: int
    block: int
    numbers: Numbers
    shared_memory: int = 0
    cluster: int = 1


class ChannelPlan:
    """Launches over arrays that the kernels can walk in place.

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
        self.call = call
        self.device = call.device
        self.out_given = out_given
        self._index = call.device.index
        self._workspaces = list(workspaces.values())
        given, self._in_order = _places(call, roles, list(workspaces))
        self._allocators: dict[Library, list[Callable[[], Any]]] = {}
        self._captured: list[Any] = []
        wide = dtypes.accumulation(call.x.dtype)
        small = [call.inputs.get(roles.get(name, name)) for name in SMALL]
        out = [call.outputs.get(name) for name in ("grad_weight", "grad_bias")]
        self._launchers = [
            Launcher(
                Kernel(file, step.expression, step.cluster, step.shared_memory),
                self._index,
                step.grid,
                step.block,
                given,
                b"",
                step.numbers.packed(wide, small, out),
            )
            for step in steps
        ]
        self.launches = [
            Launch(s.expression, s.grid, s.block, s.shared_memory, source(file)) for s in steps
        ]

    def compile(self) -> None:
        with devices.current(self._index):
            for launcher in self._launchers:
                launcher.prepare()

    def run(
        self, library: Library, inputs: Sequence[Any], out: Sequence[Any], pointers: Sequence[int]
    ) -> Sequence[Any]:
        if library.current_device() == self._index:
            return self._run_here(library, out, pointers)
        with devices.current(self._index):
            return self._run_here(library, out, pointers)

    def _run_here(
        self, library: Library, out: Sequence[Any], pointers: Sequence[int]
    ) -> Sequence[Any]:
        allocators = self._allocators.get(library)
        if allocators is None:
            allocators = self._make_allocators(library)
        made = [allocate() for allocate in allocators]
        addresses = self._in_order([*pointers, *map(library.pointer, made)])
        stream = library.stream(self.device)
        for launcher in self._launchers:
            launcher(stream, addresses)
        if self._workspaces:
            kept = len(made) - len(self._workspaces)
            keep_for_replay(self._captured, made[kept:], stream)
            del made[kept:]
        return [*out, *made] if out else made

    def _make_allocators(self, library: Library) -> list[Callable[[], Any]]:
        specs = [*self.call.statistics.values(), *self._workspaces]
        if not self.out_given:
            specs = [*self.call.outputs.values(), *specs]
        made = self._allocators[library] = [library.allocator(self.device, s) for s in specs]
        return made


def _places(
    call: Call, roles: Mapping[str, str], workspaces: Sequence[str]
) -> tuple[list[bool], Callable[[Sequence[int]], Any]]:
    """Which addresses of ChannelArgs are given, and a function that puts them in its order.

    It takes those of a call's arrays and its workspaces.
    """
    read = list(call.inputs)
    written = [*call.outputs, *call.statistics, *workspaces]
    inputs = {name: i for i, name in enumerate(read)}
    outputs = {name: len(read) + i for i, name in enumerate(written)}
    slots = [inputs.get(roles.get(name, name)) for name in ("x", "grad_out", *SMALL)]
    places = ("y", "mean_out", "rstd_out", *WORKSPACES)
    slots += [outputs.get(roles.get(name, name)) for name in places]
    # never one alone, which would come without its tuple: x, and what is written
    return [s is not None for s in slots], itemgetter(*[s for s in slots if s is not None])


class EmptyPlan:
    """No elements: nothing is launched but for statistics that are given, nothing is updated.

    Parameters
    ----------
    call : Call
        What is asked for.
    inner : ChannelPlan, optional
        What gives the statistics; without it there are none to be had: NaN.
    """

    def __init__(self, call: Call, inner: ChannelPlan | None = None) -> None:
        self.call = call
        self.launches: Sequence[Launch] = inner.launches if inner else ()
        self._inner = inner

    def compile(self) -> None:
        if self._inner is not None:
            self._inner.compile()

    def run(
        self, library: Library, inputs: Sequence[Any], out: Sequence[Any], pointers: Sequence[int]
    ) -> Sequence[Any]:
        if self._inner is not None:
            return self._inner.run(library, inputs, out, pointers)
        with devices.current(self.call.device.index):
            given = iter(out)
            results = []
            for name, spec in (*self.call.outputs.items(), *self.call.statistics.items()):
                array = next(given, None)
                if array is None:
                    array = library.allocator(self.call.device, spec)()
                if spec.size:  # sums over nothing are zero, means are not known
                    library.assign(array, 0.0 if name.startswith("grad_") else float("nan"))
                results.append(array)
            return results
