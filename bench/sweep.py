"""Checks and times one workload with every peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.check import check_outputs, check_written
from bench.inputs import CopySets, InputSets, make_noise, rotation_sets
from bench.peers import Peer
from bench.report import FAIL, SKIP, Result
from bench.timing import Call, GpuTime, GpuTimer, Take, time_host
from bench.workloads import Workload


@dataclass(frozen=True)
class Settings:
    """What of each workload to measure."""

    samples: int = 5
    #: One set of inputs, so that what fits stays in the L2 cache.
    warm: bool = False
    host_only: bool = False

    @property
    def mode(self) -> str:
        return "warm" if self.warm else "cold"


class Sweep:
    """Measures workloads on the current CUDA device."""

    def __init__(self, cp: Any, peers: Sequence[Peer], settings: Settings) -> None:
        self._cp = cp
        self._peers = peers
        self._settings = settings
        self._timer = GpuTimer(cp, settings.samples)
        self._noise = make_noise(cp)
        device = cp.cuda.Device().id
        self._l2_bytes = int(cp.cuda.runtime.getDeviceProperties(device)["l2CacheSize"])

    def measure(self, workload: Workload) -> Result:
        """Measure `workload`; device memory is given back before and after."""
        result = Result(workload)
        self._release()
        try:
            if not self._settings.host_only:
                result.copy = self._time_copy(workload)
                self._release()
            self._measure_peers(workload, result)
        except self._cp.cuda.memory.OutOfMemoryError:
            result.status = SKIP
            result.note("does not fit the device memory")
        self._release()
        return result

    def _sets(self, set_bytes: int) -> int:
        one = self._settings.warm or self._settings.host_only
        return 1 if one else rotation_sets(set_bytes, self._l2_bytes)

    def _time_copy(self, workload: Workload) -> GpuTime:
        nbytes = workload.bytes_moved // 2
        copies = CopySets(self._cp, nbytes, self._sets(nbytes), self._noise)
        return self._timer.time_gpu(
            lambda count: [copies.bind(i) for i in copies.rotation.take(count)]
        )

    def _measure_peers(self, workload: Workload, result: Result) -> None:
        sets = InputSets(self._cp, workload, self._sets(workload.input_bytes), self._noise)
        for peer in self._peers:
            try:
                self._measure(workload, peer, sets, result)
            except Exception as error:  # of any kind: the sweep goes on and reports it
                if peer.name == "cunorm":
                    if isinstance(error, self._cp.cuda.memory.OutOfMemoryError):
                        raise
                    result.status = FAIL
                result.note(f"{peer.name}: {type(error).__name__}: {error}".splitlines()[0])
            if workload.op in peer.overwrites:
                sets.fill()
            self._cp.get_default_memory_pool().free_all_blocks()
            peer.release()

    def _measure(self, workload: Workload, peer: Peer, sets: InputSets, result: Result) -> None:
        allocating = peer.bind(workload, sets.inputs(0), None)
        if allocating is None:
            result.note(f"{peer.name} has no {workload.op}")
            return
        wrong = self._check(workload, peer, sets)
        if wrong:
            result.note(f"{peer.name}: {wrong}")
            if peer.name == "cunorm":
                result.status = FAIL
            return
        take = bound_calls(workload, peer, sets)
        if peer.has_out and not self._settings.host_only:
            result.pooled = self._timer.time_gpu(
                bound_calls(workload, peer, sets, False), peer.launches
            )
        if self._settings.host_only:
            gpu_us, _ = self._timer.warm_up(take)
        else:
            result.gpu[peer.name] = time = self._timer.time_gpu(take, peer.launches)
            gpu_us = time.us
            if time.host_bound:
                result.note(f"{peer.name}: the host is slower than the GPU, so this is too high")
        result.host_us[peer.name] = self._time_host(allocating, gpu_us, peer)
        if peer.has_out:
            into = peer.call(workload, sets.inputs(0), sets.outputs(0))
            result.host_out_us = self._time_host(into, gpu_us, peer)

    def _time_host(self, call: Call, gpu_us: float, peer: Peer) -> float:
        call()
        return time_host(call, self._timer.synchronize, gpu_us, peer.launches)

    def _check(self, workload: Workload, peer: Peer, sets: InputSets) -> str:
        """Run one call on set 0 and compare it; what is wrong, or ``""``."""
        inputs, out = sets.inputs(0), sets.outputs(0)
        given = inputs
        if workload.op in peer.overwrites:
            given = {name: array.copy() for name, array in inputs.items()}
        sets.poison_outputs()
        returned = peer.call(workload, given, out)()
        several = returned if isinstance(returned, tuple) else (returned,)
        outputs = tuple(peer.to_cupy(array) for array in several)
        unwritten = check_written(self._cp, outputs) if peer.has_out else ""
        return unwritten or check_outputs(self._cp, workload, inputs, outputs, strict=peer.has_out)

    def _release(self) -> None:
        self._cp.get_default_memory_pool().free_all_blocks()
        for peer in self._peers:
            peer.release()


def bound_calls(workload: Workload, peer: Peer, sets: InputSets, out: bool = True) -> Take:
    """Calls on set after set, each bound once; `out`: into outputs of the set."""
    bound: dict[int, Call] = {}

    def take(count: int) -> list[Call]:
        calls = []
        for i in sets.rotation.take(count):
            if i not in bound:
                into = sets.outputs(i) if out else None
                bound[i] = peer.call(workload, sets.inputs(i), into)
            calls.append(bound[i])
        return calls

    return take
