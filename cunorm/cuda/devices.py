"""What the planners need to know of a GPU, and making one current."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache


@cache
def compute_capability(index: int) -> int:
    """90 for compute capability 9.0. Without a usable GPU: 90, so that plans can be shown."""
    try:
        import cupy

        return int(cupy.cuda.Device(index).compute_capability)
    except Exception:  # CuPy is missing, or the driver, or the device: nothing will be launched
        return 90


@cache
def multiprocessors(index: int) -> int:
    """SMs of a GPU. Without a usable one: those of an H200."""
    try:
        import cupy

        return int(cupy.cuda.Device(index).attributes["MultiProcessorCount"])
    except Exception:  # as above
        return 132


@cache
def driver_version() -> int:
    """12040 for CUDA 12.4; 0 where there is none."""
    try:
        import cupy

        return int(cupy.cuda.runtime.driverGetVersion())
    except Exception:  # as above
        return 0


@contextmanager
def current(index: int) -> Iterator[None]:
    """Make a device current and restore the one before."""
    import cupy

    with cupy.cuda.Device(index):
        yield


def bind_context(index: int, error: Exception) -> bool:
    """Give this thread the device's context if `error` says that it has none.

    A thread gets one with its first call of the CUDA runtime, and may launch without ever making
    such a call when its memory comes from a pool.
    """
    if "INVALID_CONTEXT" not in str(error):
        return False
    import cupy

    cupy.cuda.runtime.setDevice(index)
    cupy.cuda.runtime.free(0)
    return True


def is_capturing(stream: int) -> bool:
    """Whether work queued on a stream goes into a graph, to be replayed later."""
    return _capture_query()(stream)


@cache
def _capture_query() -> Callable[[int], bool]:
    import cupy

    return cupy.cuda.runtime.streamIsCapturing
