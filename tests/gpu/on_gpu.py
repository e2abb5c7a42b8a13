"""Between host and GPU, for the tests here: arrays up and down, and kernels that take time."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import pytest
from cases import as_tuple, assert_same_bits, assert_within_bounds, call

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what CuPy says of its surroundings is not under test
    cupy = pytest.importorskip("cupy")


def up(values):
    """Host arrays on the GPU; None, tuples and dicts are walked."""
    if isinstance(values, dict):
        return {name: up(value) for name, value in values.items()}
    return None if values is None else cupy.asarray(values)


def down(values):
    if isinstance(values, dict):
        return {name: down(value) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(down(value) for value in values)
    return None if values is None else cupy.asnumpy(values)


def check(op, inputs, **options):
    """Run an op on host inputs that go up first; its results within bounds, back on the host."""
    results = down(as_tuple(call(op, up(inputs), **options)))
    judged = {name: value for name, value in options.items() if name == "eps"}
    assert_within_bounds(op, results, inputs, **judged)
    return results


def assert_same(got, want, what=""):
    """The same bits in two results of an op on the GPU."""
    got, want = as_tuple(got), as_tuple(want)
    assert len(got) == len(want)
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(down(mine), down(theirs), f"{what} output {i}")


def tiled(block, rows):
    """So many rows on the GPU: those of a host block, again and again."""
    block = up(block)
    array = cupy.empty((rows, *block.shape[1:]), block.dtype)
    for start in range(0, rows, len(block)):
        part = array[start : start + len(block)]
        cupy.copyto(part, block[: len(part)])
    return array


def differing_rows(array, block):
    """How many rows of `array` are not bit for bit those of `block`, again and again."""
    kind = f"u{array.dtype.itemsize}"
    array, block = array.view(kind), block.view(kind)
    count = cupy.zeros((), np.int64)
    for start in range(0, len(array), len(block)):
        part = array[start : start + len(block)]
        count += (part != block[: len(part)]).any(axis=1).sum()
    return int(count)


def needs_memory(nbytes):
    cupy.get_default_memory_pool().free_all_blocks()
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < nbytes:
        pytest.skip(f"needs {nbytes / 1e9:.0f} GB of free GPU memory, there are {free / 1e9:.0f}")


_SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""


@cache
def _spinning():
    return cupy.RawKernel(_SPIN, "spin")


def spin(milliseconds, blocks=1, threads=1):
    """Keep CuPy's current stream busy, and so many threads of the GPU."""
    _spinning()((blocks,), (threads,), (np.uint64(milliseconds * 1_000_000),))


class Allocations(cupy.cuda.MemoryHook):
    """Collects the sizes asked of CuPy's memory pool while it is entered."""

    name = "allocations"

    def __init__(self):
        self.sizes = []

    def malloc_preprocess(self, **asked):
        self.sizes.append(asked["size"])
