"""Offsets past 2**31 and 2**32 elements, and more rows than a grid's second axis holds."""

from __future__ import annotations

import numpy as np
import pytest
from cases import FUSED, OPS, as_tuple, assert_within_bounds, call, noise, random_inputs
from on_gpu import assert_same, cupy, differing_rows, down, needs_memory, tiled, up

from cunorm import precision

pytestmark = pytest.mark.gpu

COLS = 4096


@pytest.fixture(autouse=True)
def memory_given_back():
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def check_rows(op, dtype, rows, cols, block_rows):
    """All rows bit for bit those of a small call, which is held against the reference."""
    inputs = random_inputs(op, (block_rows, cols), dtype)
    given = up(inputs)
    few = as_tuple(call(op, given))
    edges = sorted({0, 1, block_rows // 2, block_rows - 1})
    edge_inputs = {n: a[edges] if a.ndim > 1 else a for n, a in inputs.items()}
    assert_within_bounds(op, tuple(y[edges] for y in down(few)), edge_inputs)
    for name in ("x", "residual"):
        if name in inputs:
            given[name] = tiled(inputs[name], rows)
    results = as_tuple(call(op, given))
    for mine, block in zip(results, few, strict=True):
        assert differing_rows(mine, block) == 0


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_two_to_the_31_elements(op):
    needs_memory((4 if op in FUSED else 2) * 524_290 * COLS * 2 + 2e9)
    check_rows(op, "float16", 524_290, COLS, 1021)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["layer_norm", "fused_add_rms_norm", "ada_layer_norm_zero"])
def test_two_to_the_32_elements(op):
    needs_memory((4 if op in FUSED else 2) * 1_048_641 * COLS * 2 + 2e9)
    check_rows(op, "float16", 1_048_641, COLS, 1021)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_two_to_the_31_elements_in_rows_of_segments(op):
    needs_memory(2 * 2190 * 1_000_003 * 2 + 2e9)
    check_rows(op, "bfloat16", 2190, 1_000_003, 2)


@pytest.mark.parametrize("rows", [65_535, 65_536, 65_537, 131_073])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("op", OPS)
def test_rows_past_65535(op, dtype, rows):
    check_rows(op, dtype, rows, 64, 1009)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_of_clusters_past_65535(dtype):
    needs_memory(16e9)
    check_rows("layer_norm", dtype, 65_540, 24_576 if dtype == "float32" else 40_960, 11)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_few_rows_far_apart(op):
    """Nine rows whose offsets pass 2**31 elements; the outputs lie among them."""
    step = (1 << 28) + 24
    needs_memory(9 * step * 2 + 2e9)
    wide = cupy.empty((9, step), np.float16)
    given = up(random_inputs(op, (9, COLS), "float16"))
    want = call(op, given)
    places = [slice(i * COLS, (i + 1) * COLS) for i in range(4)]
    names = ["x", *(["residual"] if op in FUSED else [])]
    for name, place in zip(names, places, strict=False):
        wide[:, place] = given[name]
        given[name] = wide[:, place]
    outs = (wide[:, places[2]], wide[:, places[3]])
    assert_same(call(op, given, out=outs if op in FUSED else outs[0]), want)


@pytest.mark.slow
def test_parameters_far_apart():
    """A modulation of full shape with a row step past 2**28."""
    step = (1 << 28) + 24
    needs_memory(9 * step * 2 + 2e9)
    wide = cupy.empty((9, step), np.float16)
    given = up(random_inputs("ada_layer_norm", (9, COLS), "float16", parameter_shape=(9, COLS)))
    want = call("ada_layer_norm", given)
    for name, start in (("scale", 0), ("shift", COLS)):
        wide[:, start : start + COLS] = given[name]
        given[name] = wide[:, start : start + COLS]
    assert_same(call("ada_layer_norm", given), want)


def test_one_long_row():
    x = noise((1, 30_000_001)).astype(np.float16)
    y = down(call("rms_norm", {"x": up(x)}))
    picked = np.r_[0:1000, 15_000_000:15_001_000, 29_999_001:30_000_001]
    wide = x[0].astype(np.float64)
    want = wide[picked] / np.sqrt(np.mean(wide * wide) + 2.0**-23)
    bound = precision.error_bound(want, want, 0.0, "float16")
    assert precision.error_in_bounds(y[0, picked], want, bound, "float16") <= 1
