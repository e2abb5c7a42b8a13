"""Batch, group and instance norm against the reference: every op, dtype, layout and regime."""

from __future__ import annotations

import numpy as np
import pytest
from cases import assert_same_bits, noise
from channel_cases import (
    COMPUTING,
    DTYPES,
    MODES,
    NORMALIZING,
    TABLES,
    assert_within_bounds,
    call,
    make_channels_of_all_kinds,
    make_inputs,
)
from channels_on_gpu import check, on_gpu, run
from on_gpu import cupy, differing_rows, down, needs_memory, tiled, up

import cunorm

pytestmark = pytest.mark.gpu

every_mode = pytest.mark.parametrize("mode", MODES)
LAYOUTS = ("channels first", "channels last")

# Spatial sizes 1, 7, 49, 196 and 147^2; sets in a few lanes, a warp, a CTA, a cluster, segments.
SHAPES = (
    (32, 6),
    (1031, 12),
    (5, 6, 7),
    (65, 6, 7, 7),
    (3, 6, 14, 14),
    (16, 24, 14, 14),
    (2, 3, 147, 147),
    (4, 96, 28, 28),
    (3, 6, 5, 8, 9),
    (2, 3, 128, 640),
    (8, 3, 256, 512),
    *((64, 24, 3, 3), (37, 24, 15, 15), (130, 408, 7, 7), (21, 2016, 7, 7)),  # strips of channels
)
LARGE = ((1, 3, 128, 128, 128), (9, 6, 384, 256))
BEYOND = ((70_000, 3, 2), (3, 70_002, 2), (70_001, 6), (2, 70_005, 1, 3))


def one_value(mode, shape):
    return mode == "instance_norm" and int(np.prod(shape[2:])) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_mode
def test_random_values(mode, shape, layout):
    if one_value(mode, shape):
        pytest.skip("one value has no variance")
    first = SHAPES.index(shape) + LAYOUTS.index(layout)  # two dtypes each, four over both layouts
    for dtype in (DTYPES[first % 4], DTYPES[(first + 2) % 4]):
        check(mode, make_inputs(mode, shape, dtype, centre=0.5), layout)


@pytest.mark.parametrize("shape", [(7, 6), (5, 9, 6), (4, 28, 28, 96), (2, 147, 147, 3)], ids=str)
@every_mode
def test_channel_axis_last(mode, shape):
    if mode == "instance_norm" and len(shape) == 2:
        pytest.skip("one value has no variance")
    check(mode, make_inputs(mode, shape, "float16", axis=-1), channel_axis=-1)


# Sets in a few lanes, a warp, a CTA, a cluster, segments, and rows of a matrix.
@pytest.mark.parametrize(
    "shape",
    [(33, 24), (65, 6, 8), (5, 6, 9, 8), (16, 24, 16, 16), (4, 96, 28, 28), (8, 3, 256, 512)],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@every_mode
def test_samples_that_start_anywhere(mode, dtype, shape):
    if one_value(mode, shape):
        pytest.skip("one value has no variance")
    check(mode, make_inputs(mode, shape, dtype, centre=0.5), "anywhere")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("mode", [*NORMALIZING, "batch_norm_backward-training"])
def test_large_sets(mode, shape, layout):
    check(mode, make_inputs(mode, shape, "float32", centre=3), layout)


@pytest.mark.parametrize("mode", ["batch_norm-training", "batch_norm_backward-training"])
def test_sets_of_which_nothing_stays_in_the_cache(mode):
    check(mode, make_inputs(mode, (12, 3, 720, 704), "float32", centre=3))


@pytest.mark.parametrize("shape", BEYOND, ids=str)
@every_mode
def test_many_samples_and_many_channels(mode, shape):
    if one_value(mode, shape):
        pytest.skip("one value has no variance")
    check(mode, make_inputs(mode, shape, "float32"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", NORMALIZING)
def test_a_mean_far_above_the_spread(mode, layout):
    for shape in ((4, 6, 33, 30), (2, 3, 300, 301), (37, 120, 7, 7)):
        check(mode, make_inputs(mode, shape, "float32", centre=1e4, spread=1e-2), layout)


@pytest.mark.parametrize("rows", [3, 8, 13, 32])
@pytest.mark.parametrize("mode", TABLES)
def test_a_short_table_of_columns_of_all_kinds(mode, rows):
    """Some of a warp are taken again, in double, others are not."""
    for dtype in ("float16", "bfloat16", "float32"):
        for columns in (6, 517):
            check(mode, make_channels_of_all_kinds(mode, (rows, columns), dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6, 9, 8), (64, 6, 64, 64), (2, 6, 512, 384)], ids=str)
@pytest.mark.parametrize("mode", ["batch_norm-training", "batch_norm_backward-training"])
def test_channels_of_all_kinds(mode, shape, layout):
    for dtype in DTYPES:
        check(mode, make_channels_of_all_kinds(mode, shape, dtype), layout)


def test_37_million_elements_in_one_group():
    x = up(noise((1, 2, 37, 500, 1000), 3).astype(np.float16) + np.float16(0.5))
    y, mean, rstd = cunorm.group_norm(x, 1, return_stats=True)
    wide = x.astype(np.float64)
    true_mean, true_rstd = wide.mean(), 1 / cupy.sqrt(wide.var() + 1e-5)
    assert abs(float(mean[0, 0]) / float(true_mean) - 1) < 1e-6
    assert abs(float(rstd[0, 0]) / float(true_rstd) - 1) < 1e-6
    worst = float(cupy.abs(y - (wide - true_mean) * true_rstd).max())
    assert worst < 2.0**-8 * 0.51  # half a unit of float16 beside 8, and a little


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", NORMALIZING)
def test_what_has_no_spread_gives_its_bias(mode, layout):
    for shape in ((4, 6, 9, 8), (64, 6, 64, 64), (2, 6, 512, 384), (37, 120, 7, 7)):
        for dtype in DTYPES:
            inputs = make_inputs(mode, shape, dtype)
            inputs["x"][...] = 3.7
            (y, *_), _ = run(mode, on_gpu(inputs, layout))
            bias = inputs["bias"].reshape(-1, 1, 1)
            assert_same_bits(y, np.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(4, 6, 9, 8), (64, 6, 64, 64), (2, 6, 512, 384), (37, 120, 7, 7)], ids=str
)
@every_mode
def test_not_a_number_stays_where_it_is(mode, shape, layout):
    inputs = make_inputs(mode, shape, "float16")
    inputs["x"][1, 2, 3, 4] = np.nan
    check(mode, inputs, layout)


@pytest.mark.parametrize("shape", [(16, 6, 128, 200), (130, 408, 7, 7)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@every_mode
def test_the_same_bits_every_time(mode, layout, shape):
    inputs = make_inputs(mode, shape, "float32")
    first, after = run(mode, on_gpu(inputs, layout))
    for _ in range(3):
        again, left = run(mode, on_gpu(inputs, layout))
        for one, other in zip((*first, *after.values()), (*again, *left.values()), strict=True):
            assert_same_bits(other, one)


@pytest.mark.parametrize("mode", [*NORMALIZING, "batch_norm-inference"])
def test_more_than_two_to_the_31_elements(mode):
    """Samples are those of a block, again and again: so are the results."""
    block = make_inputs(mode, (64, 12, 128, 128), "float16", centre=0.5)
    samples = 64 * -(-(2**31 + 2**20) // block["x"].size)
    needs_memory(2.5 * samples * block["x"].nbytes / 64)
    arrays = {n: up(a) for n, a in block.items() if n != "x"}
    arrays["x"] = tiled(block["x"], samples)
    y = call(mode, arrays)
    got = down(y[:64])
    assert_within_bounds(mode, (got,), block)
    assert differing_rows(y.reshape(samples, -1), up(got).reshape(64, -1)) == 0


@pytest.mark.parametrize("mode", COMPUTING)
def test_empty_batches_leave_running_statistics(mode):
    inputs = on_gpu(make_inputs(mode, (0, 6, 4), "float32"))
    before = down(inputs)
    _, after = run(mode, inputs)
    for name, array in before.items():
        assert_same_bits(after[name], array, name)
