"""Batch, group and instance norm between host and GPU: inputs in any layout up, results down."""

from __future__ import annotations

import numpy as np
from channel_cases import assert_within_bounds, call, copied, stats_option
from on_gpu import cupy, down, up


def laid(array, layout):
    """A host array (N, C, ...) on the GPU in another memory order."""
    if array is None or array.ndim == 1 or layout == "channels first":
        return up(array)
    if layout == "channels last":
        return cupy.moveaxis(up(np.ascontiguousarray(np.moveaxis(array, 1, -1))), -1, 1)
    if layout == "samples last":
        return cupy.moveaxis(up(np.ascontiguousarray(np.moveaxis(array, 0, -1))), -1, 0)
    if layout == "every other sample":
        return up(np.repeat(array, 2, axis=0))[::2]
    if layout == "some channels":
        padding = [(0, 0)] * array.ndim
        padding[1] = (2, 1)
        return up(np.pad(array, padding))[:, 2:-1]
    if layout == "anywhere":
        return up_to_anywhere(array)
    if layout == "reversed":
        return cupy.flip(up(np.flip(array).copy()))
    raise ValueError(layout)


def up_to_anywhere(array):
    """Samples at addresses that nothing divides: an odd number of elements lies between them."""
    samples = array.reshape(len(array), -1)
    room = cupy.zeros((len(array), samples.shape[1] // 2 * 2 + 3), array.dtype)
    room[:, 1 : 1 + samples.shape[1]] = up(samples)
    strides = (room.strides[0], *array.strides[1:])
    return cupy.lib.stride_tricks.as_strided(room.ravel()[1:], array.shape, strides)


def on_gpu(inputs, layout="channels first"):
    return {name: laid(array, layout) for name, array in inputs.items()}


def backwards(inputs, layout="channels first"):
    """Host inputs on the GPU; those that have samples have them from the last to the first."""
    return {
        name: laid(array, layout)
        if array is None or array.ndim < 3
        else laid(array[::-1].copy(), layout)[::-1]
        for name, array in inputs.items()
    }


def run(mode, arrays, **options):
    """Results and what the call left in its inputs, on the host."""
    results = call(mode, arrays, **stats_option(mode), **options)
    results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
    return tuple(down(r) for r in results), down(arrays)


def check(mode, inputs, layout="channels first", **options):
    """Run a mode of an op on host inputs; results and updates within bounds."""
    before = copied(inputs)
    results, after = run(mode, on_gpu(inputs, layout), **options)
    assert_within_bounds(mode, results, before, after, **options)
    return results, after
