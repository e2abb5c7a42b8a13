"""Packing a kernel's one parameter and queueing the launch.

A kernel takes one struct, addresses in the middle. `Launches` keeps those of a plan packed but for
the addresses: a call fills them in and goes to the driver (driver.py), which costs a third of what
the same launch costs through CuPy's kernel objects.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from cunorm.cuda import devices
from cunorm.cuda.compiler import Function, Kernel, load
from cunorm.cuda.driver import Queue, Shape, new_queue


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
        self.head = head
        self.tail = tail
        # A byte of "x" is written as zero: an address that is not given is a null pointer.
        self.addresses = struct.Struct("".join("Q" if g else "8x" for g in given))
        self.size = len(head) + self.addresses.size + len(tail)

    def prepare(self) -> Function:
        """Compile and load; the device must be the current one."""
        return load(self.kernel, self.device)

    def new_queue(self) -> Queue:
        """What queues the kernel, one call at a time."""
        # The address lives as long as the function does, which the cache of kernels keeps.
        shape = Shape(self.grid, self.block, self.kernel.shared_memory, self.size)
        return new_queue(self.prepare(), shape, self.device)


class _Buffer(NamedTuple):
    """Parameters of a plan's launches, one behind the other, as the driver takes them."""

    memory: bytearray
    launches: Sequence[tuple[Queue, int]]  # with the address of its arguments
    kept_alive: Any


class Launches:
    """Kernels that take the same addresses at the same place, queued one after the other.

    `others` are made ready with them: nothing can be compiled while a graph is captured.
    """

    def __init__(self, launchers: Sequence[Launcher], others: Sequence[Launcher] = ()) -> None:
        self._launchers = launchers
        self._others_to_prepare = others
        self._device = launchers[0].device
        self._pack = launchers[0].addresses.pack_into
        self._starts = list(accumulate((of.size for of in launchers[:-1]), initial=0))
        places = [start + len(of.head) for start, of in zip(self._starts, launchers, strict=True)]
        length = launchers[0].addresses.size
        self._place = places[0]
        self._first, *self._others = (slice(place, place + length) for place in places)
        # The driver reads a buffer during the call, so a buffer serves one call at a time:
        # threads take one from here and put it back.
        self._buffers: list[_Buffer] = []

    def prepare(self) -> None:
        """Compile and load; the device must be the current one."""
        for launcher in (*self._others_to_prepare, *self._launchers):
            launcher.prepare()

    def _new_buffer(self) -> _Buffer:
        self.prepare()
        queues = [launcher.new_queue() for launcher in self._launchers]
        blank = bytes(self._launchers[0].addresses.size)
        memory = bytearray(b"".join(of.head + blank + of.tail for of in self._launchers))
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        base = ctypes.addressof(view)
        arguments = (ctypes.c_void_p * len(queues))(*[base + start for start in self._starts])
        step, of_first = ctypes.sizeof(ctypes.c_void_p), ctypes.addressof(arguments)
        launches = [(queue, of_first + i * step) for i, queue in enumerate(queues)]
        return _Buffer(memory, launches, (view, arguments))

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Queue the kernels with these in place of the addresses that are given."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = self._new_buffer()
        memory, launches, _ = buffer
        self._pack(memory, self._place, *addresses)
        for other in self._others:
            memory[other] = memory[self._first]
        for queue, arguments in launches:
            try:
                queue(stream, arguments, 0)
            except Exception as error:
                if not devices.bind_context(self._device, error):
                    raise
                queue(stream, arguments, 0)
        self._buffers.append(buffer)
