"""Plans: how a call that was made ready allocates, launches, and gives back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from itertools import compress, count
from typing import Any

from cunorm import dtypes
from cunorm.arrays import ArraySpec, Library, Placer
from cunorm.call import Call, Launch
from cunorm.cuda import devices
from cunorm.cuda.launch import Launcher, Launches
from cunorm.cuda.sources import source

_WORKSPACE_ALIGNMENT = 256  # bytes

# By its number a launch knows what its own CTAs have written from whatever was there before. They
# start anywhere, so that no data that a program keeps in memory are likely to look like one.
_NUMBERS = count(secrets.randbits(62))

_Placers = tuple[list[Placer], Placer | None]  # of outputs and statistics; of the workspace


class LaunchPlan:
    """Launches over arrays that the kernels can walk in place.

    Parameters
    ----------
    call : Call
        What is asked for.
    launchers : sequence of Launcher
        The launches, in order. All take the same addresses.
    workspaces : sequence of ArraySpec
        What they need beside the arrays of the call.
    out_given : bool
        Whether outputs come with the call.
    in_order : callable, optional
        From the addresses of inputs, outputs, statistics and workspaces, and the number of the
        launch, to those that a launcher takes, where their order is another.
    for_replay : sequence of bool, optional
        Of each launch, whether it is there for graphs alone: what is replayed has the same number
        again. Without any launches have no numbers.
    """

    def __init__(
        self,
        call: Call,
        launchers: Sequence[Launcher],
        workspaces: Sequence[ArraySpec],
        out_given: bool,
        in_order: Callable[[Sequence[int]], Any] | None = None,
        for_replay: Sequence[bool] = (),
    ) -> None:
        self.call = call
        self.device = call.device
        self.out_given = out_given
        self._index = call.device.index
        self._launchers = launchers
        self._replayed = Launches(launchers) if any(for_replay) else None
        extra = list(compress(launchers, for_replay))
        launchers = [of for of in launchers if of not in extra]
        self._launch = Launches(launchers, extra)
        self.launches = [
            Launch(
                of.kernel.expression,
                of.grid,
                of.block,
                of.kernel.shared_memory,
                source(of.kernel.file),
            )
            for of in launchers
        ]
        self._workspaces = workspaces
        self._offsets, self._workspace_bytes = workspace_layout(workspaces)
        self._in_order = in_order
        self._allocates = bool(not out_given or call.statistics or workspaces)
        self._placers: dict[Library, _Placers] = {}
        self._captured: list[Any] = []

    def compile(self) -> None:
        with devices.current(self._index):
            self._launch.prepare()

    def run(
        self, library: Library, inputs: Sequence[Any], out: Sequence[Any], pointers: Sequence[int]
    ) -> Sequence[Any]:
        if library.current_device() != self._index:
            with devices.current(self._index):
                return self.run(library, inputs, out, pointers)
        made: list[Any] = []
        workspace = None
        if self._allocates:
            placers, workspace = self._placers.get(library) or self._make_placers(library)
            pointers = [*pointers]
            for place in placers:
                array, address = place()
                made.append(array)
                pointers.append(address)
            if workspace is not None:
                held, start = workspace()
                pointers += [start + offset for offset in self._offsets]
                if self._replayed is not None:
                    pointers.append(next(_NUMBERS))
        if self._in_order is not None:
            pointers = self._in_order(pointers)
        stream = library.stream(self.device)
        captured = workspace is not None and devices.is_capturing(stream)
        launch = self._replayed if captured and self._replayed is not None else self._launch
        launch(stream, pointers)
        if captured:
            self._captured.append(held)  # a graph writes to it at each replay
        return [*out, *made] if made else out

    def _make_placers(self, library: Library) -> _Placers:
        specs = [*self.call.statistics.values()]
        if not self.out_given:
            specs = [*self.call.outputs.values(), *specs]
        placers = [library.placer(self.device, spec) for spec in specs]
        workspace = None
        if self._workspaces:
            workspace = library.workspace(self.device, self._workspace_bytes)
        made = self._placers[library] = placers, workspace
        return made


def workspace_layout(workspaces: Sequence[ArraySpec]) -> tuple[list[int], int]:
    """Where each begins in one piece of memory, and the bytes of all: one allocation a call."""
    offsets, end = [], 0
    for spec in workspaces:
        offsets.append(end)
        nbytes = spec.size * dtypes.FLOATS[spec.dtype].itemsize
        end += -(-nbytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
    return offsets, end


def keep_for_replay(captured: list[Any], temporaries: Sequence[Any], stream: int) -> None:
    """A graph being captured will write to these arrays at each replay: they must not be freed."""
    if devices.is_capturing(stream):
        captured.extend(temporaries)


class EmptyPlan:
    """No elements: nothing is launched but for statistics that are given, nothing is updated.

    Parameters
    ----------
    call : Call
        What is asked for.
    inner : Plan, optional
        What gives the statistics; without it there are none to be had: NaN.
    """

    def __init__(self, call: Call, inner: LaunchPlan | None = None) -> None:
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


class StagedPlan:
    """Arrays that no kernel walks in place: copy them, run, copy the outputs to where they go."""

    def __init__(self, call: Call, inner: LaunchPlan, copied: Sequence[str]) -> None:
        self.call = call
        self.inner = inner
        self.launches = inner.launches
        self._copied = [name in copied for name in call.inputs]
        self._captured: list[Any] = []

    def compile(self) -> None:
        self.inner.compile()

    def run(
        self, library: Library, inputs: Sequence[Any], out: Sequence[Any], pointers: Sequence[int]
    ) -> Sequence[Any]:
        device = self.call.device
        with devices.current(device.index):
            read = []
            for array, copy, spec in zip(
                inputs, self._copied, self.inner.call.inputs.values(), strict=True
            ):
                if copy:
                    fresh = library.allocator(device, spec)()
                    library.assign(fresh, array)
                    array = fresh
                read.append(array)
            specs = self.call.outputs.values()
            outputs = list(out) or [library.allocator(device, spec)() for spec in specs]
            staged = [
                array if inner == spec else library.allocator(device, inner)()
                for array, spec, inner in zip(
                    outputs, specs, self.inner.call.outputs.values(), strict=True
                )
            ]
            addresses = [0 if a is None else library.pointer(a) for a in (*read, *staged)]
            results = list(self.inner.run(library, read, staged, addresses))
            temporaries = [a for a, copy in zip(read, self._copied, strict=True) if copy]
            temporaries += [s for a, s in zip(outputs, staged, strict=True) if a is not s]
            keep_for_replay(self._captured, temporaries, library.stream(device))
            for i, (array, stage) in enumerate(zip(outputs, staged, strict=True)):
                if array is not stage:
                    library.assign(array, stage)
                results[i] = array
            return results
