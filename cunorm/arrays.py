"""What differs between CuPy, NumPy, torch and other DLPack producers, in one place.

A `Library` says where an array lies and makes new ones beside it. CuPy, NumPy and torch arrays
are used as they are; anything else with ``__dlpack__`` enters as a CuPy or NumPy array over the
same memory and its results go back the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from cunorm import dtypes, errors


class Device(NamedTuple):
    kind: str  # "cuda" or "cpu"
    index: int = 0

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.kind == "cuda" else self.kind


class ArraySpec(NamedTuple):
    """All that a plan knows of an array: strides are in elements, alignment in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = 16

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: str) -> ArraySpec:
        return cls(tuple(shape), contiguous_strides(shape), dtype)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def extent(self) -> tuple[int, int]:
        """First and one past the last byte touched, relative to the pointer."""
        if self.size == 0:
            return 0, 0
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        itemsize = dtypes.FLOATS[self.dtype].itemsize
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        return low * itemsize, (high + 1) * itemsize


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides without holes that keep the memory order of `strides`: NumPy's ``order='K'``."""
    by_stride = sorted(range(len(shape)), key=lambda axis: (-abs(strides[axis]), axis))
    dense = [0] * len(shape)
    step = 1
    for axis in reversed(by_stride):
        dense[axis] = step
        step *= max(shape[axis], 1)
    return tuple(dense)


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share memory (an expanded array, say): unfit to be written."""
    if 0 in shape:
        return False
    reach = 0
    for stride, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (n - 1)
    return False


class _Addresses:
    """An array's memory as NumPy may reason about it, whatever device it is on."""

    def __init__(self, pointer: int, spec: ArraySpec) -> None:
        itemsize = dtypes.FLOATS[spec.dtype].itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": spec.shape,
            "typestr": f"|V{itemsize}",
            "strides": tuple(s * itemsize for s in spec.strides),
            "data": (pointer, True),
        }


def share_memory(pointer: int, spec: ArraySpec, other_pointer: int, other: ArraySpec) -> bool:
    """Exact answer, also for interleaved views; reads no memory."""
    import numpy

    views = [numpy.asarray(_Addresses(p, s)) for p, s in ((pointer, spec), (other_pointer, other))]
    return numpy.shares_memory(*views)


# Makes something in new memory, and tells its address.
Placer = Callable[[], tuple[Any, int]]


class Library:
    """Base of the libraries; `array` is always one of the library's own."""

    types: set[type]  # exact types met so far: the library's own and subclasses of it

    def spec(self, array: Any, alignment: int = 16) -> ArraySpec:
        """Shape, strides and dtype name."""
        raise NotImplementedError

    def device(self, array: Any) -> Device:
        raise NotImplementedError

    def pointer(self, array: Any) -> int:
        raise NotImplementedError

    def writable(self, array: Any) -> bool:
        return True

    def fingerprint(self, arrays: Sequence[Any]) -> tuple[Any, list[int]] | None:
        """A hashable key of all that a plan depends on, and the addresses; the hot path.

        None where an array is not one of this library's exact type.
        """
        key: list[Any] = []
        pointers = []
        low_bits = 0
        for array in arrays:
            pointer = 0
            if type(array) in self.types:
                pointer = self.pointer(array)
                key += self.spec(array), self.device(array)
            elif array is None:
                key.append(None)
            else:
                return None
            pointers.append(pointer)
            low_bits |= pointer
        key.append(low_bits & 15)
        return tuple(key), pointers

    def allocator(self, device: Device, spec: ArraySpec) -> Callable[[], Any]:
        """A function that makes arrays of this kind; the device must be the current one then."""
        raise NotImplementedError

    def placer(self, device: Device, spec: ArraySpec) -> Placer:
        """As `allocator`, of arrays with their addresses; the hot path."""
        allocate, pointer = self.allocator(device, spec), self.pointer

        def place() -> tuple[Any, int]:
            array = allocate()
            return array, pointer(array)

        return place

    def workspace(self, device: Device, nbytes: int) -> Placer:
        """As `placer`, of memory for a call's own use: what holds it, and its address."""
        return self.placer(device, ArraySpec.contiguous((-(-nbytes // 8),), "float64"))

    def current_device(self) -> int:
        """Index of the current CUDA device."""
        raise NotImplementedError

    def assign(self, to: Any, value: Any) -> None:
        """``to[...] = value`` on the library's current stream."""
        to[...] = value

    def stream(self, device: Device) -> int:
        """Address of the stream that the library's work on `device` is queued on."""
        raise NotImplementedError

    def adopt(self, array: Any) -> Any:
        """Another library's array as one of this library, over the same memory."""
        raise NotImplementedError

    def lost_gradient(self, arrays: Sequence[Any]) -> int | None:
        """Index of an array whose gradient a call would lose, or None."""
        return None


class CuPy(Library):
    def __init__(self) -> None:
        import cupy

        self._ndarray = cupy.ndarray
        self.types = {cupy.ndarray}
        self.cupy = cupy
        self._current_stream = cupy.cuda.get_current_stream
        self.current_device = cupy.cuda.runtime.getDevice
        if not hasattr(cupy.ndarray, "_c_contiguous"):
            self.fingerprint = super().fingerprint  # type: ignore[method-assign]

    def spec(self, array: Any, alignment: int = 16) -> ArraySpec:
        itemsize = array.dtype.itemsize
        if array.flags.c_contiguous:  # all that `fingerprint` says of one: an axis of 1 may have
            strides = contiguous_strides(array.shape)  # any stride
        else:
            strides = tuple(s // itemsize for s in array.strides)
        return ArraySpec(array.shape, strides, array.dtype.name, alignment)

    def device(self, array: Any) -> Device:
        return Device("cuda", array.data.device_id)

    pointer = staticmethod(attrgetter("data.ptr"))

    def fingerprint(self, arrays: Sequence[Any]) -> tuple[Any, list[int]] | None:
        key: list[Any] = []
        pointers = []
        low_bits = 0
        ndarray = self._ndarray
        for array in arrays:
            if type(array) is ndarray:
                data = array.data
                pointer = data.ptr
                key.append(array.shape)
                key.append(array._c_contiguous or array.strides)  # strides cost a tuple
                key.append(array.dtype)
                key.append(data.device_id)
                pointers.append(pointer)
                low_bits |= pointer
            elif array is None:
                key.append(None)
                pointers.append(0)
            else:
                return None
        key.append(low_bits & 15)
        return tuple(key), pointers

    def allocator(self, device: Device, spec: ArraySpec) -> Callable[[], Any]:
        place = self.placer(device, spec)
        return lambda: place()[0]

    def placer(self, device: Device, spec: ArraySpec) -> Placer:
        dtype = dtypes.numpy_dtype(spec.dtype)
        strides = None
        if spec.strides != contiguous_strides(spec.shape):
            strides = tuple(s * dtype.itemsize for s in spec.strides)
        return _cupy_placer(self.cupy, spec.shape, dtype, strides)

    def workspace(self, device: Device, nbytes: int) -> Placer:
        alloc = self.cupy.cuda.alloc

        def place() -> tuple[Any, int]:  # without an array around it: 0.5 us less
            memory = alloc(nbytes)
            return memory, memory.ptr

        return place

    def stream(self, device: Device) -> int:
        return self._current_stream(device.index).ptr

    def adopt(self, array: Any) -> Any:
        if isinstance(library_of(array), Torch):  # else refused where it requires grad
            array = array.detach()
        return self.cupy.from_dlpack(array)


def _cupy_placer(cupy: Any, shape: tuple[int, ...], dtype: Any, strides: Any) -> Placer:
    """``ndarray(shape, dtype)`` of CuPy without its Python layer for subclasses: 0.4 us less."""
    ndarray, alloc = cupy.ndarray, cupy.cuda.alloc
    nbytes = prod(shape) * dtype.itemsize
    new = ndarray.__base__.__new__
    internals = hasattr(ndarray, "_init")  # else CuPy's internals have moved

    def place() -> tuple[Any, int]:
        memory = alloc(nbytes)
        if internals:
            array = new(ndarray)
            array._init(shape, dtype, memory, strides, None)  # None: order C
        else:
            array = ndarray(shape, dtype, memory, strides)
        return array, memory.ptr

    return place


class NumPy(Library):
    def __init__(self) -> None:
        import numpy

        self.types = {numpy.ndarray}
        self.numpy = numpy

    def spec(self, array: Any, alignment: int = 16) -> ArraySpec:
        itemsize = array.dtype.itemsize
        strides = tuple(s // itemsize for s in array.strides)
        return ArraySpec(array.shape, strides, array.dtype.name, alignment)

    def device(self, array: Any) -> Device:
        return Device("cpu")

    def pointer(self, array: Any) -> int:
        return array.ctypes.data

    def writable(self, array: Any) -> bool:
        return array.flags.writeable

    def fingerprint(self, arrays: Sequence[Any]) -> None:
        return None  # host arrays are slow enough to be looked at anew each time

    def adopt(self, array: Any) -> Any:
        library = library_of(array)
        if isinstance(library, Torch):
            return library.to_numpy(array)
        return self.numpy.from_dlpack(array)


class Torch(Library):
    def __init__(self) -> None:
        self.torch = sys.modules["torch"]
        self.types = {self.torch.Tensor}
        self._names = {getattr(self.torch, name): name for name in dtypes.FLOATS}

    def spec(self, array: Any, alignment: int = 16) -> ArraySpec:
        name = self._names.get(array.dtype) or dtypes.name_of(array.dtype)
        return ArraySpec(tuple(array.shape), tuple(array.stride()), name, alignment)

    def device(self, array: Any) -> Device:
        return Device(array.device.type, array.device.index or 0)

    def pointer(self, array: Any) -> int:
        return array.data_ptr()

    def fingerprint(self, arrays: Sequence[Any]) -> tuple[Any, list[int]] | None:
        key: list[Any] = []
        pointers = []
        low_bits = 0
        types = self.types
        grad = self.torch.is_grad_enabled()
        for array in arrays:
            if array is None:
                key.append(None)
                pointers.append(0)
                continue
            if type(array) not in types or not array.is_cuda:
                return None
            if grad and array.requires_grad:
                return None
            pointer = array.data_ptr()
            key.append((array.shape, array.stride(), array.dtype, array.get_device()))
            pointers.append(pointer)
            low_bits |= pointer
        key.append(low_bits & 15)
        return tuple(key), pointers

    def allocator(self, device: Device, spec: ArraySpec) -> Callable[[], Any]:
        return partial(
            self.torch.empty_strided,
            spec.shape,
            spec.strides,
            dtype=getattr(self.torch, spec.dtype),
            device=str(device),
        )

    def current_device(self) -> int:
        return self.torch.cuda.current_device()

    def assign(self, to: Any, value: Any) -> None:
        to.copy_(value) if isinstance(value, self.torch.Tensor) else to.fill_(value)

    def stream(self, device: Device) -> int:
        return self.torch.cuda.current_stream(device.index).cuda_stream

    def adopt(self, array: Any) -> Any:
        if isinstance(library_of(array), NumPy):
            return self.from_numpy(array)
        return self.torch.from_dlpack(array)

    def lost_gradient(self, arrays: Sequence[Any]) -> int | None:
        if not self.torch.is_grad_enabled():
            return None
        wanting = (i for i, a in enumerate(arrays) if getattr(a, "requires_grad", False))
        return next(wanting, None)

    def to_numpy(self, array: Any) -> Any:
        """A host tensor as a NumPy array over the same memory; bfloat16 included."""
        array = array.detach()
        if array.dtype == self.torch.bfloat16:
            return array.view(self.torch.int16).numpy().view(dtypes.numpy_dtype("bfloat16"))
        return array.numpy()

    def from_numpy(self, array: Any) -> Any:
        if not array.flags.writeable or min(array.strides, default=0) < 0:
            array = array.copy()  # torch knows neither read-only memory nor negative strides
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view("int16")).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)


_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
_LIBRARIES: dict[type, Library] = {}
exact_library = _LIBRARIES.get  # by the exact type of an array; the hot path


def library_of(array: Any) -> Library | None:
    """The library whose arrays these are; None for anything else."""
    array_type = type(array)
    library = _LIBRARIES.get(array_type)
    if library is None:
        for base in array_type.__mro__:
            kind = _NATIVE.get((base.__module__.partition(".")[0], base.__name__))
            if kind is not None:
                library = _LIBRARIES[array_type] = _the(kind)
                library.types.add(array_type)
                break
    return library


_NATIVE: dict[tuple[str, str], type[Library]] = {
    ("cupy", "ndarray"): CuPy,
    ("numpy", "ndarray"): NumPy,
    ("torch", "Tensor"): Torch,
}


@cache
def _the(kind: type[Library]) -> Library:
    return kind()


def native(device: Device) -> Library:
    """The library that another producer's arrays on `device` enter."""
    return _the(CuPy if device.kind == "cuda" else NumPy)


def device_of(op: str, argument: str, array: Any) -> Device:
    """Where an array lies; TypeError for what is no array."""
    if type(array).__module__.startswith("numpy.ma"):  # an ndarray whose mask would be lost
        raise errors.wrong_type(op, argument, "an array without a mask", array)
    library = library_of(array)
    if library is not None:
        return library.device(array)
    if not hasattr(array, "__dlpack_device__"):
        raise errors.wrong_type(op, argument, "an array (CuPy, NumPy, torch or DLPack)", array)
    kind, index = array.__dlpack_device__()
    return Device("cuda", index) if kind in _DLPACK_CUDA else Device("cpu")


def give_back(result: Any, like: Any) -> Any:
    """`result` as an array of the library of `like`, where that library can take it."""
    namespace = getattr(like, "__array_namespace__", None)
    take = getattr(namespace(), "from_dlpack", None) if namespace else None
    return take(result) if take else result
