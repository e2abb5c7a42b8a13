"""Calls that need what the call before wrote, queued without a pause.

A launch may start while the one before it ends (cunorm/cuda/driver.py): the bits must be those of
the same calls one at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
from on_gpu import assert_same, cupy

import cunorm

pytestmark = pytest.mark.gpu

ROWS = [(1, 4096), (3, 64), (8192, 128), (2048, 4096), (64, 65536), (5, 262144), (3, 1000003)]
ROWS += [(4097, 1021), (100003, 64)]
MAPS = [(32, 64), (8, 64, 32, 32), (2, 320, 128, 128), (64, 256, 7, 7), (4097, 36, 3)]
MAPS += [(16, 32, 512, 512), (1, 8, 1024, 1024)]
REPEATS = 3


def noise(shape, seed, dtype="float16"):
    block = np.random.default_rng(seed).standard_normal(min(np.prod(shape), 1 << 20))
    return cupy.resize(cupy.asarray(block.astype(dtype)), shape)


def mild(shape, seed, dtype="float16"):
    """Near 1: many of them after each other leave the range of no type."""
    return (1 + noise(shape, seed, dtype) / 16).astype(dtype)


def compare(step, start, steps):
    """`step` takes arrays and gives those of the next step."""

    def run(wait):
        arrays = tuple(array.copy() for array in start)
        for i in range(steps):
            arrays = step(i, *arrays)
            if wait:
                cupy.cuda.Device().synchronize()
        return arrays

    want = run(wait=True)
    for array, before in zip(want, start, strict=True):  # else nothing would be compared
        assert bool(cupy.isfinite(array).all())
        assert bool((array != before).any())
    for _ in range(REPEATS):
        assert_same(run(wait=False), want)


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rows_in_place(shape):
    cols = shape[-1]
    weight, bias = mild((cols,), 1), noise((cols,), 2)

    def step(i, x, y):
        cunorm.layer_norm(x, cols, weight, bias, out=y)
        cunorm.rms_norm(y, cols, weight, out=x)
        if i % 3 == 0:
            cupy.multiply(x, 1.5, out=x)  # a kernel that is not of this library
        cunorm.layer_norm(x, cols, weight, y[0], out=x)  # a bias that has just been written
        return x, y

    compare(step, (noise(shape, 3), noise(shape, 4)), 10)


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rows_in_memory_that_the_pool_gives_again(shape):
    cols = shape[-1]
    weight = mild((cols,), 1, "float32")

    def step(i, x, residual):
        y, residual = cunorm.fused_add_rms_norm(x, residual, weight)
        z, mean, rstd = cunorm.layer_norm(y, cols, weight, return_stats=True)
        grad_x, grad_weight, _ = cunorm.layer_norm_backward(z, y, cols, weight, mean, rstd)
        return grad_x + grad_weight, residual

    # Gradients of weights are sums over all rows: too large for 16 bits.
    compare(step, (noise(shape, 3, "float32"), noise(shape, 4, "float32")), 8)


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("shape", MAPS, ids=str)
def test_maps_and_running_statistics(shape, channel_axis):
    channels = shape[1]
    start = noise(shape, 5)
    if channel_axis == -1:
        start = cupy.ascontiguousarray(cupy.moveaxis(start, 1, -1))
    running = cupy.zeros(channels, "float32"), cupy.ones(channels, "float32")

    def step(i, x, mean, var):
        y = cunorm.batch_norm(x, mean, var, training=True, channel_axis=channel_axis)
        y, _, rstd = cunorm.batch_norm(
            y, mean, var, training=True, return_stats=True, channel_axis=channel_axis
        )
        y = cunorm.group_norm(y, channels // 4, channel_axis=channel_axis)
        if len(shape) > 2:
            y = cunorm.instance_norm(y, channel_axis=channel_axis)
        y = cunorm.batch_norm(y, mean, var, rstd.astype(x.dtype), channel_axis=channel_axis)
        return y, mean, var

    compare(step, (start, *running), 6)
