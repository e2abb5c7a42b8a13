"""Compiled kernels, one variant at a time, cached per device."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, NamedTuple

from cunorm.cuda.sources import source

OPTIONS = ("-std=c++17",)

_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # CU_FUNC_ATTRIBUTE_...
_PORTABLE_CLUSTER = 8


class Kernel(NamedTuple):
    """A kernel variant: the file it is in, its name as a C++ expression, and what it needs."""

    file: str
    expression: str
    cluster: int = 1
    shared_memory: int = 0


class Function(NamedTuple):
    """A loaded kernel: what the driver launches, and CuPy's object that keeps it alive."""

    address: int
    raw_kernel: Any


_functions: dict[tuple[int, Kernel], Function] = {}
_locks: defaultdict[tuple[int, Kernel], threading.Lock] = defaultdict(threading.Lock)
_locks_lock = threading.Lock()
_count = 0


def compilations() -> int:
    """How many variants this process has asked CuPy for; a new row count adds none."""
    return _count


def loaded(device: int) -> dict[Kernel, Function]:
    """What a device has."""
    return {kernel: function for (where, kernel), function in _functions.items() if where == device}


def load(kernel: Kernel, device: int) -> Function:
    """The kernel on a device, which must be the current one."""
    function = _functions.get((device, kernel))
    if function is not None:
        return function
    with _locks_lock:
        lock = _locks[device, kernel]
    with lock:  # threads that want the same variant compile it once
        function = _functions.get((device, kernel))
        if function is None:
            function = _functions[device, kernel] = _compile(kernel)
    return function


def _compile(kernel: Kernel) -> Function:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "cunorm's CUDA kernels are compiled and launched by CuPy, which could not be imported; "
            "install it with cunorm[cuda12x] or cunorm[cuda13x]"
        ) from error

    global _count
    module = cupy.RawModule(
        code=source(kernel.file), options=OPTIONS, name_expressions=[kernel.expression]
    )
    raw_kernel = module.get_function(kernel.expression)
    address = raw_kernel.kernel.ptr
    _allow_shared_memory(raw_kernel, kernel.shared_memory)
    if kernel.cluster > _PORTABLE_CLUSTER:
        from cupy_backends.cuda.api import driver

        driver.funcSetAttribute(address, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    with _locks_lock:
        _count += 1
    return Function(address, raw_kernel)


def _allow_shared_memory(raw_kernel: Any, nbytes: int) -> None:
    """Leave for so much, which beyond 48 KiB, static shared memory included, a launch needs.

    Never for less than before: CuPy has one function for all that share an expression, and some of
    these may need more than the last one that was loaded.
    """
    with _locks_lock:
        if nbytes > raw_kernel.max_dynamic_shared_size_bytes:
            raw_kernel.max_dynamic_shared_size_bytes = nbytes
