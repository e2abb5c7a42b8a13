"""Device arrays for a workload: several sets of them, drawn at random, one after another."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.workloads import Workload
from cunorm.dtypes import numpy_dtype

#: Inputs rotate over more bytes than this (or than twice the L2 cache, where that is larger).
ROTATE_BYTES = 220_000_000
_ALIGN = 512  # where the CuPy memory pool would start an array
_CHUNK = 1 << 22
_SPARE = 1 << 18


def rotation_sets(set_bytes: int, l2_bytes: int = 0) -> int:
    """How many sets of `set_bytes` total more than the cache can remember."""
    return max(ROTATE_BYTES, 2 * l2_bytes) // max(set_bytes, 1) + 1


class Rotation:
    """Hands out set numbers round and round, going on where the last call stopped.

    All peers of a workload share one, so that none starts on what another left in the cache.
    """

    def __init__(self, sets: int) -> None:
        self.sets = sets
        self._next = 0

    def take(self, count: int) -> list[int]:
        numbers = [(self._next + i) % self.sets for i in range(count)]
        self._next = (self._next + count) % self.sets
        return numbers


class Arena:
    """`sets` arrays of one shape in one block of device memory, each aligned.

    With `channels_last` the second axis is the last one in memory; `shape` is that of the memory.
    With `start` each begins at that element of an aligned array.
    """

    def __init__(
        self,
        cp: Any,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sets: int,
        channels_last: bool = False,
        start: int = 0,
    ) -> None:
        self._cp = cp
        self._moved = channels_last and len(shape) > 2
        self.shape = (shape[0], *shape[2:], shape[1]) if self._moved else shape
        self.dtype = dtype
        self._start = start * dtype.itemsize
        nbytes = self._start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._pitch = -(-nbytes // _ALIGN) * _ALIGN
        self._block = cp.empty(self._pitch * sets, dtype=cp.uint8)

    def __getitem__(self, index: int) -> Any:
        memory = self._block.data + (index * self._pitch + self._start)
        array = self._cp.ndarray(self.shape, dtype=self.dtype, memptr=memory)
        return self._cp.moveaxis(array, -1, 1) if self._moved else array

    def address(self, index: int) -> int:
        return int(self._block.data.ptr) + index * self._pitch + self._start

    def poison(self) -> None:
        """Set every bit: a NaN that no arithmetic produces, so what stays unwritten shows."""
        self._block.data.memset_async(0xFF, self._block.nbytes)

    def fill(self, noise: Any, mean: float, spread: float, seed: int) -> None:
        """Draw the block from `noise`, tiled at shifting places and scales."""
        cp = self._cp
        size = self._block.size // self.dtype.itemsize
        flat = cp.ndarray((size,), dtype=self.dtype, memptr=self._block.data)
        wide = cp.float64 if self.dtype.itemsize == 8 else cp.float32
        rng = np.random.default_rng(seed)
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            shift = int(rng.integers(_SPARE))
            part = noise[shift : shift + length].astype(wide)
            part *= spread * rng.uniform(0.75, 1.25)
            part += mean
            flat[start : start + length] = part.astype(self.dtype)


def make_noise(cp: Any) -> Any:
    """Normal deviates on the device, from NumPy: cuRAND may not be installed."""
    rng = np.random.default_rng(2026)
    return cp.asarray(rng.standard_normal(_CHUNK + _SPARE, dtype=np.float32))


class InputSets:
    """Every input and output of a workload, `sets` times over.

    Without `noise` the inputs are what the memory holds.
    """

    def __init__(self, cp: Any, workload: Workload, sets: int, noise: Any) -> None:
        dtype = numpy_dtype(workload.dtype)
        last = workload.channels_last
        self.rotation = Rotation(sets)
        self._operands, self._noise = workload.spec.operands, noise
        self._inputs: dict[str, Arena] = {}
        for operand in self._operands:
            kind = numpy_dtype(workload.dtype_of(operand))
            start = workload.start if operand.extent == "full" else 0
            shape = workload.shape_of(operand)
            self._inputs[operand.name] = Arena(cp, shape, kind, sets, last, start)
        if noise is not None:
            self.fill()
        self._outputs = [
            Arena(cp, workload.shape, dtype, sets, last) for _ in workload.spec.outputs
        ]
        self._outputs += [Arena(cp, workload.sum_shape, dtype, sets) for _ in workload.spec.sums]

    def fill(self) -> None:
        """Draw the inputs: the same values each time."""
        for seed, operand in enumerate(self._operands):
            self._inputs[operand.name].fill(self._noise, operand.mean, operand.spread, seed)

    def inputs(self, index: int) -> dict[str, Any]:
        return {name: arena[index] for name, arena in self._inputs.items()}

    def outputs(self, index: int) -> tuple[Any, ...]:
        return tuple(arena[index] for arena in self._outputs)

    def poison_outputs(self) -> None:
        for arena in self._outputs:
            arena.poison()


class CopySets:
    """Sources and destinations of a device-to-device copy of `nbytes` each."""

    def __init__(self, cp: Any, nbytes: int, sets: int, noise: Any) -> None:
        self._runtime = cp.cuda.runtime
        self._stream = cp.cuda.get_current_stream().ptr
        self._nbytes = nbytes
        self.rotation = Rotation(sets)
        words = -(-nbytes // 4)
        self._source = Arena(cp, (words,), np.dtype(np.float32), sets)
        self._source.fill(noise, 0.5, 1.0, 0)
        self._target = Arena(cp, (words,), np.dtype(np.float32), sets)

    def bind(self, index: int) -> Any:
        """A call that copies set `index` with ``cudaMemcpyAsync``."""
        source, target = self._source.address(index), self._target.address(index)
        copy, kind = self._runtime.memcpyAsync, self._runtime.memcpyDeviceToDevice
        nbytes, stream = self._nbytes, self._stream
        return lambda: copy(target, source, nbytes, kind, stream)
