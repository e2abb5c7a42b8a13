"""The CUDA kernels without a GPU: their sources on host threads, through the package's plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import (
    CENTRED,
    DTYPES,
    FUSED,
    OPS,
    assert_same_bits,
    assert_within_bounds,
    make_inputs,
    noise,
    random_inputs,
)
from host_kernels import make_plan, missing_compiler

from cunorm import dtypes
from cunorm.cuda.choices import (
    RowTile,
    power_of_two_up,
    row_access,
    row_vector,
    vector_length,
)

pytest.importorskip("ml_dtypes")
if reason := missing_compiler():
    pytest.skip(reason, allow_module_level=True)


def chosen(x):
    """The package's own choice."""
    return None


def vectors_of(x):
    """Columns, and elements of a vector and of a transaction."""
    cols, itemsize = x.shape[1], x.itemsize
    vec = row_vector(cols, itemsize)
    return cols, vec, row_access(cols, vec, vec, itemsize)


def staged(x):
    """Parameters read to shared memory before the reduction."""
    cols, vec = x.shape[1], vector_length(x.shape[1], x.itemsize)
    return RowTile(vec, vec, -(-cols // (vec * 128)), 128, reading="staged")


def brief(x):
    """The kernel for short rows: two packs a thread."""
    cols, vec = x.shape[1], vector_length(x.shape[1], x.itemsize)
    threads = power_of_two_up(-(-cols // (2 * vec)))
    return RowTile(vec, vec, 2, threads, 32 // threads, reading="early", brief=True)


def cluster(x):
    """Four CTAs with a pack a thread in shared memory, as the longest rows have."""
    cols, vec, access = vectors_of(x)
    return RowTile(vec, access, -(-cols // (vec * 64 * 4)), 64, cluster=4, shared=1)


def segments(x):
    """Segments of 64 threads with two packs each, as rows that no cluster holds have."""
    cols, vec, access = vectors_of(x)
    return RowTile(vec, access, 2, 64, segments=-(-cols // (vec * 64 * 2)))


# Rows, columns, how they are laid out. Last packs, last segments and last CTAs are held in part.
LAYOUTS = {
    "odd": (3, 33, chosen),
    "odd and short": (3, 13, chosen),
    "odd and of several packs": (5, 1021, chosen),
    "rows of one warp": (9, 24, chosen),
    "short rows": (9, 40, brief),
    "short rows, all packs full": (19, 64, brief),
    "one CTA": (2, 4088, chosen),
    "parameters in shared memory": (2, 3080, staged),
    "cluster": (2, 4392, cluster),
    "odd, cluster": (2, 4391, cluster),
    "segments": (2, 2608, segments),
    "one element in the last segment": (2, 2049, segments),
}
# What the package itself lays out so takes longer: once each.
LONG_ROWS = {
    "cluster": ("fused_add_layer_norm", "bfloat16", 65544),
    "two vectors a thread": ("rms_norm", "float16", 32768),
    "segments": ("layer_norm", "float32", 262148),
    "the last parameters of a row in part": ("layer_norm", "float32", 4095),
    "odd, in a cluster": ("rms_norm", "bfloat16", 100003),
}
LARGEST = {
    "float16": 65504.0,
    "bfloat16": 2.0**127 * (2 - 2.0**-7),
    "float32": 2.0**127 * (2 - 2.0**-23),
    "float64": np.finfo(np.float64).max,
}
TINY = {"float16": 6e-7, "bfloat16": 1e-30, "float32": 1e-30, "float64": 1e-290}

every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def row_inputs(op, dtype, layout, **options):
    rows, cols, tile = LAYOUTS[layout]
    inputs = random_inputs(op, (rows, cols), dtype, **options)
    return inputs, tile(inputs["x"])


def check_both_orders(kernels, op, inputs, tile=None):
    results = kernels.run(op, inputs, tile=tile)
    assert_within_bounds(op, results, inputs)
    # Where a barrier is missing, it matters which warp runs ahead.
    again = kernels.run(op, inputs, tile=tile, backwards=True)
    for one, other in zip(results, again, strict=True):
        assert_same_bits(other, one)


@every_layout
@every_dtype
@every_op
def test_random_rows(kernels, op, dtype, layout):
    inputs, tile = row_inputs(op, dtype, layout, centre=0.5)
    check_both_orders(kernels, op, inputs, tile)


@pytest.mark.parametrize("spike", [None, 0, 70])  # none, in the element that stands for the row
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "cols"),
    [("rms_norm", 72), ("rms_norm", 256), ("fused_add_rms_norm", 264), ("layer_norm", 1152)],
)
def test_short_rows_have_the_bits_of_other_rows(kernels, op, cols, dtype, spike):
    """The kernel for short rows, where it is chosen, and the one for all rows."""
    inputs = random_inputs(op, (11, cols), dtype, centre=0.5)
    if spike is not None:
        inputs["x"][3, spike] = 200.0
        inputs["x"][7, spike] = LARGEST[dtype]
        inputs["x"][8, spike] = np.nan
    tile = make_plan(op, inputs).tile
    assert tile.brief
    results = kernels.run(op, inputs)
    others = kernels.run(op, inputs, tile=replace(tile, brief=False))
    for one, other in zip(results, others, strict=True):
        assert_same_bits(one, other)
    check_both_orders(kernels, op, inputs)


@pytest.mark.parametrize("cols", [40, 1021, 4096])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@every_op
def test_rows_have_the_same_bits_wherever_they_start(kernels, op, dtype, cols):
    inputs = random_inputs(op, (3, cols), dtype, centre=0.5)
    results = kernels.run(op, inputs)
    for offset in (1, 2, 3):
        moved = kernels.run(op, inputs, offset=offset)
        for one, other in zip(moved, results, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("layout", LONG_ROWS)
def test_long_rows(kernels, layout):
    op, dtype, cols = LONG_ROWS[layout]
    inputs = random_inputs(op, (1, cols), dtype, centre=0.5)
    tile = make_plan(op, inputs).tile
    staged, odd = tile.reading == "staged", cols % tile.vec
    assert {
        "cluster": tile.cluster > 1 and staged and tile.packs > 2,
        "two vectors a thread": tile.cluster > 1 and staged and tile.packs == 2,
        "segments": tile.segments > 1,
        "the last parameters of a row in part": staged and odd and tile.cluster == 1,
        "odd, in a cluster": tile.cluster > 1 and tile.reading == "early" and odd,
    }[layout]
    check_both_orders(kernels, op, inputs)


@every_layout
@every_dtype
@pytest.mark.parametrize("op", CENTRED)
def test_rows_without_spread_give_their_bias(kernels, op, dtype, layout):
    _, cols, tile = LAYOUTS[layout]
    values = [3.7, LARGEST[dtype], -LARGEST[dtype], TINY[dtype], 0.0]
    x = np.repeat(np.array(values).astype(dtypes.numpy_dtype(dtype))[:, None], cols, axis=1)
    inputs = make_inputs(op, x)
    if op in FUSED:
        inputs["residual"][...] = 0
    wide = np.dtype(dtypes.accumulation(dtype))
    bias = inputs["bias"] if "bias" in inputs else inputs["shift"]
    if "gate" in inputs:
        bias = (inputs["gate"].astype(wide) * bias.astype(wide)).astype(x.dtype)
    for eps in (1e-5, 0.0):
        y, *_, mean, rstd = kernels.run(op, inputs, eps=eps, tile=tile(x))
        assert_same_bits(y, np.broadcast_to(bias, x.shape), f"y, eps {eps}")
        assert_same_bits(mean, x[:, 0].astype(wide), f"mean, eps {eps}")
        expected = wide.type(1 / np.sqrt(float(wide.type(eps)))) if eps else wide.type(0)
        np.testing.assert_array_max_ulp(rstd, np.full_like(rstd, expected), 1, wide)


@pytest.mark.parametrize("centre", [0.5, 300.0])
@every_layout
@every_dtype
@pytest.mark.parametrize("fused", FUSED)
def test_fused_add_is_add_then_norm(kernels, fused, dtype, layout, centre):
    inputs, tile = row_inputs(fused, dtype, layout, centre=centre)
    inputs["x"][-1, 0] = 1000  # the element that stands for the row is far from it
    wide = dtypes.accumulation(dtype)
    added = (inputs["x"].astype(wide) + inputs["residual"].astype(wide)).astype(inputs["x"].dtype)
    y, residual_out, *statistics = kernels.run(fused, inputs, eps=1e-5, tile=tile)
    assert_same_bits(residual_out, added, "residual_out")
    two = {name: array for name, array in inputs.items() if name != "residual"} | {"x": added}
    expected = kernels.run(fused.removeprefix("fused_add_"), two, eps=1e-5, tile=tile)
    for got, want in zip((y, *statistics), expected, strict=True):
        assert_same_bits(got, want)


@every_layout
@pytest.mark.parametrize("centre", [1.0, -300.0, 3e30])
def test_elements_next_to_the_mean(kernels, centre, layout):
    """Most of a row is one value and the mean lies just below it: what is left is a difference."""
    inputs, tile = row_inputs("layer_norm", "float32", layout)
    x = inputs["x"]
    x[...] = centre
    x[:, np.arange(x.shape[1]) % 32 != 5] = np.nextafter(x[0, 0], np.float32(np.inf))
    inputs["bias"][...] = 0
    for eps in (1e-5, 0.0):
        assert_within_bounds(
            "layer_norm", kernels.run("layer_norm", inputs, eps, tile), inputs, eps=eps
        )


@every_dtype
@every_op
def test_rows_of_one_warp_do_not_see_each_other(kernels, op, dtype):
    inputs, tile = row_inputs(op, dtype, "rows of one warp")
    clean = kernels.run(op, inputs, tile=tile)
    marked = {2: np.nan, 4: np.inf, 5: -np.inf, 7: 6e4, 8: LARGEST[dtype]}
    spoiled = {name: array.copy() for name, array in inputs.items()}
    for row, value in marked.items():
        spoiled["x"][row, (7 * row) % 24] = value
    results = kernels.run(op, spoiled, tile=tile)
    kept = [row for row in range(len(inputs["x"])) if row not in marked]
    for got, want in zip(results, clean, strict=True):
        assert_same_bits(got[kept], want[kept])
    assert np.isnan(results[0][2].astype(np.float64)).all()
    assert_within_bounds(op, results, spoiled)


# In float64 1e300: beside a larger one the others' xhat are subnormal and have few digits.
@every_layout
@pytest.mark.parametrize(
    ("dtype", "spike"), [("bfloat16", 3.3e38), ("float32", 3.4e38), ("float64", 1e300)]
)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_one_element_near_the_largest(kernels, op, dtype, spike, layout):
    inputs, tile = row_inputs(op, dtype, layout)
    x = inputs["x"]
    x[...] = noise(x.shape, 9).astype(x.dtype)
    x[0, 0] = x[-1, -1] = spike
    for eps in (1e-5, 0.0):
        results = kernels.run(op, inputs, eps=eps, tile=tile)
        assert_within_bounds(op, results, inputs, eps=eps)
