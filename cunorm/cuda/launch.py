"""Packing a kernel's one parameter and queueing the launch.

A kernel takes one struct, addresses first. `Launcher` keeps it packed but for the addresses:
a call fills those in and goes to the driver, which costs a third of what the same launch costs
through CuPy's kernel objects.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from cunorm.cuda import devices
from cunorm.cuda.compiler import Function, Kernel, load


def _driver_launch() -> Callable[..., None] | None:
    """CuPy's binding of cuLaunchKernel, or None where its internals have moved."""
    try:
        from cupy_backends.cuda.api import driver

        return driver.launchKernel
    except (ImportError, AttributeError):
        return None


class _Stream:
    """A stream by its address, as CuPy takes it from other libraries."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


class Launcher:
    """One kernel with its grid and the fixed part of its parameter."""

    def __init__(self, kernel: Kernel, grid: int, block: int, addresses: int, fixed: bytes) -> None:
        self.kernel = kernel
        self.grid = grid
        self.block = block
        self._fixed = fixed
        self._pack = struct.Struct(f"{addresses}Q").pack_into
        self._size = 8 * addresses + len(fixed)
        self._functions: dict[int, Function] = {}
        # The driver reads the buffer during the call, so a buffer serves one call at a time:
        # threads take one from here and put it back.
        self._buffers: list[tuple[Any, Any, int]] = []
        self._launch = _driver_launch()

    def _new_buffer(self) -> tuple[Any, Any, int]:
        buffer = ctypes.create_string_buffer(self._size)
        buffer[self._size - len(self._fixed) :] = self._fixed
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        return buffer, arguments, ctypes.addressof(arguments)

    def prepare(self, device: int) -> Function:
        """Compile and load for a device, which must be the current one."""
        function = self._functions[device] = load(self.kernel, device)
        return function

    def __call__(self, device: int, stream: int, addresses: tuple[int, ...]) -> None:
        function = self._functions.get(device) or self.prepare(device)
        try:
            held = self._buffers.pop()
        except IndexError:
            held = self._new_buffer()
        self._pack(held[0], 0, *addresses)
        if self._launch is None:
            self._launch_through_cupy(function, stream, held[0])
        else:
            shared = self.kernel.shared_memory
            arguments = (function[0], self.grid, 1, 1, self.block, 1, 1, shared, stream, held[2], 0)
            try:
                self._launch(*arguments)
            except Exception as error:
                if not devices.bind_context(device, error):
                    raise
                self._launch(*arguments)
        self._buffers.append(held)

    def _launch_through_cupy(self, function: Function, stream: int, buffer: Any) -> None:
        import cupy
        import numpy

        parameter = numpy.frombuffer(buffer, dtype=f"V{self._size}")
        with cupy.cuda.Stream.from_external(_Stream(stream)):
            function.raw_kernel(
                (self.grid,), (self.block,), (parameter,), shared_mem=self.kernel.shared_memory
            )
