"""Packing a kernel's one parameter and queueing the launch.

A kernel takes one struct, addresses in the middle. `Launcher` keeps it packed but for the
addresses: a call fills those in and goes to the driver, which costs a third of what the same
launch costs through CuPy's kernel objects.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
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

    def __init__(
        self,
        kernel: Kernel,
        device: int,
        grid: int,
        block: int,
        given: Sequence[bool],
        head: bytes,
        tail: bytes,
    ) -> None:
        self.kernel = kernel
        self.device = device
        self.grid = grid
        self.block = block
        self._head = head
        self._tail = tail
        # A byte of "x" is written as zero: an address that is not given is a null pointer.
        self._pack = struct.Struct("".join("Q" if g else "8x" for g in given)).pack_into
        self._start = len(head)
        self._size = len(head) + 8 * len(given) + len(tail)
        # The driver reads the buffer during the call, so a buffer serves one call at a time:
        # threads take one from here and put it back.
        self._buffers: list[tuple[Any, int, Any]] = []
        self._queue: Callable[[int, int, int], None] | None = None  # stream, arguments, nothing

    def _new_buffer(self) -> tuple[Any, int, Any]:
        buffer = ctypes.create_string_buffer(self._size)
        buffer[: len(self._head)] = self._head
        buffer[self._size - len(self._tail) :] = self._tail
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        return buffer, ctypes.addressof(arguments), arguments

    def prepare(self) -> Callable[[int, int, int], None]:
        """Compile and load; the device must be the current one."""
        function = load(self.kernel, self.device)
        launch = _driver_launch()
        if launch is None:
            queue = partial(self._launch_through_cupy, function)
        else:
            shape = (self.grid, 1, 1, self.block, 1, 1, self.kernel.shared_memory)
            queue = partial(launch, function.address, *shape)
        self._function = function  # the address lives as long as it does
        self._queue = queue
        return queue

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Queue the kernel with these in place of the addresses that are given."""
        queue = self._queue or self.prepare()
        try:
            held = self._buffers.pop()
        except IndexError:
            held = self._new_buffer()
        buffer, arguments, _ = held
        self._pack(buffer, self._start, *addresses)
        try:
            queue(stream, arguments, 0)
        except Exception as error:
            if not devices.bind_context(self.device, error):
                raise
            queue(stream, arguments, 0)
        self._buffers.append(held)

    def _launch_through_cupy(
        self, function: Function, stream: int, arguments: int, _extra: int
    ) -> None:
        import cupy
        import numpy

        buffer = ctypes.c_void_p.from_address(arguments).value
        parameter = numpy.frombuffer(ctypes.string_at(buffer, self._size), dtype=f"V{self._size}")
        with cupy.cuda.Stream.from_external(_Stream(stream)):
            function.raw_kernel(
                (self.grid,), (self.block,), (parameter,), shared_mem=self.kernel.shared_memory
            )
