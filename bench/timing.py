"""How a call is timed: on the GPU behind a spinning kernel, on the host by enqueueing.

GPU time. A kernel that spins keeps the stream busy while the host queues an event, `count`
calls and another event. When the spinning ends, the calls run back to back, so that the time
between the events over `count` is what the GPU needs for one call, however slow the host is.
A sample whose first event had passed before the last call was queued is thrown away and taken
again with a longer spin.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

Call = Callable[[], Any]
Take = Callable[[int], list[Call]]

MAX_CALLS = 150
MIN_CALLS = 3
#: A launch queue holds about 1024 launches; beyond that the host waits for the GPU.
MAX_LAUNCHES = 900
SAMPLE_US = 30_000.0
MAX_SPIN_US = 100_000.0
SPIN_MARGIN_US = 200.0
SPIN_FACTOR = 1.5
HOST_CALLS = 200
HOST_CHUNK = 20
HOST_MIN_CHUNKS = 5
HOST_TOTAL_US = 200_000.0
_ATTEMPTS = 4

_SPIN_SOURCE = r"""
extern "C" __global__ void bench_spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""


@dataclass(frozen=True)
class GpuTime:
    """Microseconds of one call: median and extremes of the samples."""

    us: float
    low: float
    high: float
    calls: int
    #: The host could not keep ahead of the GPU even so: `us` is an upper bound.
    host_bound: bool = False


def spin_us(host_us: float, calls: int) -> float:
    """How long to spin while `calls` of `host_us` each are queued."""
    return min(SPIN_FACTOR * host_us * calls + SPIN_MARGIN_US, MAX_SPIN_US)


def calls_per_sample(gpu_us: float, host_us: float, launches: int = 1) -> int:
    """How many calls a sample queues.

    Few enough for the sample, the launch queue and the longest spin; never under `MIN_CALLS`.
    """
    by_time = int(SAMPLE_US / max(gpu_us, 1e-3))
    by_queue = MAX_LAUNCHES // launches
    by_spin = int((MAX_SPIN_US - SPIN_MARGIN_US) / (SPIN_FACTOR * max(host_us, 1e-3)))
    return max(min(MAX_CALLS, by_time, by_queue, by_spin), MIN_CALLS)


def host_chunks(gpu_us: float, launches: int = 1) -> tuple[int, int]:
    """How many calls to enqueue between two synchronizations, and how often.

    Few enough calls for the GPU not to back up, and not so many that it works for long.
    """
    gpu_us = max(gpu_us, 1e-3)
    calls = max(min(HOST_CHUNK, int(SAMPLE_US / gpu_us), MAX_LAUNCHES // launches), MIN_CALLS)
    by_time = int(HOST_TOTAL_US / (calls * gpu_us))
    return calls, max(min(math.ceil(HOST_CALLS / calls), by_time), HOST_MIN_CHUNKS)


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def time_host(
    call: Call,
    synchronize: Callable[[], None],
    gpu_us: float,
    launches: int = 1,
) -> float:
    """Microseconds the host needs to enqueue one `call`: the median over chunks of calls."""
    count, repeats = host_chunks(gpu_us, launches)
    chunks = []
    with _no_collection():
        for _ in range(repeats):
            synchronize()
            start = perf_counter()
            for _ in range(count):
                call()
            chunks.append((perf_counter() - start) / count * 1e6)
        synchronize()
    return statistics.median(chunks)


class GpuTimer:
    """Times calls on the current stream of the current device."""

    def __init__(self, cp: Any, samples: int = 5) -> None:
        self._cp = cp
        self._samples = samples
        self._stream = cp.cuda.get_current_stream()
        self._spin = cp.RawKernel(_SPIN_SOURCE, "bench_spin")
        self._spin((1,), (1,), (np.int64(1000),))

    def synchronize(self) -> None:
        self._stream.synchronize()

    def warm_up(self, take: Take) -> tuple[float, float]:
        """Run a few calls; rough (GPU, host) microseconds of one."""
        for call in take(MIN_CALLS):
            call()
        self.synchronize()
        calls = take(MIN_CALLS)
        start = perf_counter()
        for call in calls:
            call()
        host_us = (perf_counter() - start) / len(calls) * 1e6
        self.synchronize()
        gpu_us, _ = self._sample(take, MIN_CALLS, host_us)
        return gpu_us, host_us

    def time_gpu(self, take: Take, launches: int = 1) -> GpuTime:
        """Time the calls that `take(count)` hands out, each of at most `launches` launches."""
        with _no_collection():
            gpu_us, host_us = self.warm_up(take)
            count = calls_per_sample(gpu_us, host_us, launches)
            self._sample(take, count, host_us)  # clocks and caches settle
            samples = [self._sample(take, count, host_us) for _ in range(self._samples)]
        values = [us for us, _ in samples]
        late = not all(in_time for _, in_time in samples)
        return GpuTime(statistics.median(values), min(values), max(values), count, late)

    def _sample(self, take: Take, count: int, host_us: float) -> tuple[float, bool]:
        """Microseconds of one of `count` calls, and whether the host kept ahead."""
        spin = spin_us(host_us, count)
        for _ in range(_ATTEMPTS):
            us, in_time = self._queue(take(count), spin)
            if in_time:
                break
            spin = min(2 * spin, MAX_SPIN_US)
        return us, in_time

    def _queue(self, calls: list[Call], spin: float) -> tuple[float, bool]:
        event = self._cp.cuda.Event
        begin, end = event(), event()
        self.synchronize()
        self._spin((1,), (1,), (np.int64(spin * 1000),))
        begin.record(self._stream)
        for call in calls:
            call()
        end.record(self._stream)
        in_time = not begin.done
        end.synchronize()
        elapsed_ms = self._cp.cuda.get_elapsed_time(begin, end)
        return elapsed_ms * 1000 / len(calls), in_time
