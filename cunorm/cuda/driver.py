"""Ways to queue a kernel that is loaded, the fastest first.

Each makes a callable of a stream, the address of the kernel's arguments and 0, which serves one
call at a time.

Where cuda.bindings is installed and the GPU has programmatic dependent launch (compute capability
9.0), CTAs may be there before the kernel ahead of theirs on the stream has ended. Every kernel
begins with `ptx::take_turn` (cuda_src/ptx.cuh), which waits for that end. A call takes 0.9 to 1.6
us less so, and as much for each further launch of its own (bench/NOTES.md, "dependent launches").
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from cunorm.cuda import devices
from cunorm.cuda.compiler import Function

Queue = Callable[[int, int, int], None]

_DEPENDENT_CAPABILITY = 90
_DEPENDENT_DRIVER = 12040  # graphs of such launches came with CUDA 12.3


class Shape(NamedTuple):
    """Of a launch."""

    grid: int
    block: int
    shared_memory: int
    parameter_bytes: int


def new_queue(function: Function, shape: Shape, device: int) -> Queue:
    """The fastest way there is."""
    bindings = _dependent_bindings(device)
    if bindings is not None:
        return _queue_dependent(bindings, function, shape)
    launch = _cupy_launch()
    if launch is not None:
        numbers = (shape.grid, 1, 1, shape.block, 1, 1, shape.shared_memory)
        return partial(launch, function.address, *numbers)
    return partial(_launch_through_cupy, function, shape)


class _Bindings(NamedTuple):
    driver: Any  # cuda.bindings.driver
    error: type[Exception]  # what CuPy raises where the driver gives an error


@cache
def _dependent_bindings(device: int) -> _Bindings | None:
    """What a dependent launch takes; None where it is not to be had."""
    if devices.compute_capability(device) < _DEPENDENT_CAPABILITY:
        return None
    if devices.driver_version() < _DEPENDENT_DRIVER:
        return None
    try:
        from cuda.bindings import driver
        from cupy_backends.cuda.api.driver import CUDADriverError
    except ImportError:
        return None
    return _Bindings(driver, CUDADriverError)


def _cupy_launch() -> Callable[..., None] | None:
    """CuPy's binding of cuLaunchKernel, or None where its internals have moved."""
    try:
        from cupy_backends.cuda.api import driver

        return driver.launchKernel
    except (ImportError, AttributeError):
        return None


def _queue_dependent(bindings: _Bindings, function: Function, shape: Shape) -> Queue:
    driver, error_of = bindings
    ids = driver.CUlaunchAttributeID
    may_start_early = driver.CUlaunchAttribute()
    may_start_early.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    may_start_early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block, 1, 1
    config.sharedMemBytes = shape.shared_memory
    config.attrs = [may_start_early]
    config.numAttrs = 1
    config.hStream = configured = 0
    launch = driver.cuLaunchKernelEx
    handle = driver.CUfunction(function.address)

    def queue(stream: int, arguments: int, extra: int) -> None:
        nonlocal configured
        if stream != configured:
            config.hStream = configured = stream
        (status,) = launch(config, handle, arguments, extra)
        if status:
            raise error_of(int(status))

    return queue


class _Stream:
    """A stream by its address, as CuPy takes it from other libraries."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _launch_through_cupy(
    function: Function, shape: Shape, stream: int, arguments: int, _extra: int
) -> None:
    import cupy
    import numpy

    buffer = ctypes.c_void_p.from_address(arguments).value
    size = shape.parameter_bytes
    parameter = numpy.frombuffer(ctypes.string_at(buffer, size), dtype=f"V{size}")
    with cupy.cuda.Stream.from_external(_Stream(stream)):
        function.raw_kernel(
            (shape.grid,), (shape.block,), (parameter,), shared_mem=shape.shared_memory
        )
