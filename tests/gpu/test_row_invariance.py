"""The bits of a row: the same on every run, in any company, from fused and from separate calls."""

from __future__ import annotations

import numpy as np
import pytest
from cases import (
    ADAPTIVE,
    DTYPES,
    FUSED,
    OPS,
    as_tuple,
    assert_same_bits,
    assert_within_bounds,
    call,
    noise,
    random_inputs,
)
from on_gpu import assert_same, cupy, differing_rows, down, tiled, up

import cunorm
from cunorm import dtypes

pytestmark = pytest.mark.gpu

COLS = (33, 96, 768, 4097, 8192, 24_577, 100_003)


def rows_of(inputs, rows):
    """The same inputs with some of the rows of x and residual."""
    whole = ("x", "residual")
    return {n: a[rows] if n in whole else a for n, a in inputs.items()}


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_rows_do_not_depend_on_their_company(op, dtype, cols):
    inputs = random_inputs(op, (13, cols), dtype, centre=3)
    given = up(inputs)
    together = as_tuple(call(op, given, return_stats=True))
    for rows in (slice(0, 1), slice(4, 5), slice(12, 13), slice(1, 8), slice(5, 13)):
        part = call(op, rows_of(given, rows), return_stats=True)
        assert_same(part, tuple(y[rows] for y in together), f"rows {rows}")
    moved = call(op, up(rows_of(inputs, np.arange(13)[::-1])), return_stats=True)
    assert_same(moved, tuple(down(y)[::-1] for y in together), "rows in reverse")


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_twenty_runs_give_the_same_bits(op, dtype, cols):
    given = up(random_inputs(op, (40, cols), dtype))
    first = as_tuple(call(op, given, return_stats=True))
    for _ in range(20):
        again = as_tuple(call(op, given, return_stats=True))
        for mine, theirs in zip(again, first, strict=True):
            kind = f"u{mine.dtype.itemsize}"
            assert (mine.view(kind) == theirs.view(kind)).all()


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", FUSED)
def test_fused_add_is_add_then_norm(op, dtype, cols):
    given = up(random_inputs(op, (5, cols), dtype))
    y, total, *statistics = call(op, given, return_stats=True, eps=1e-6)
    added = given["x"] + given["residual"]
    assert_same(total, added, "residual_out")
    name = op.removeprefix("fused_add_")
    parameters = {n: a for n, a in given.items() if n in ("weight", "bias")}
    separate = call(name, {"x": added, **parameters}, return_stats=True, eps=1e-6)
    assert_same((y, *statistics), separate)


@pytest.mark.parametrize("op", ADAPTIVE)
def test_modulation_of_a_row_is_its_own(op):
    """Rows with parameters of their own: also those, taken alone, give the same bits."""
    given = up(random_inputs(op, (9, 200), "float32", parameter_shape=(9, 200)))
    together = call(op, given)
    for row in range(9):
        alone = call(op, {name: array[row : row + 1] for name, array in given.items()})
        assert_same(alone, together[row : row + 1], f"row {row}")


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        (1_000_003, 64, "float16"),
        (1_000_003, 64, "float32"),
        (200_000, 33, "bfloat16"),
        (200_000, 33, "float64"),
        (200_003, 1000, "float16"),
        (2049, 65, "float32"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_many_rows(op, rows, cols, dtype):
    inputs = random_inputs(op, (997, cols), dtype)
    given = up(inputs)
    few = as_tuple(call(op, given))
    assert_within_bounds(op, down(few), inputs)
    for name in ("x", "residual"):
        if name in inputs:
            given[name] = tiled(inputs[name], rows)
    for mine, block in zip(as_tuple(call(op, given)), few, strict=True):
        assert differing_rows(mine, block) == 0


@pytest.mark.parametrize("cols", [33, 1000, 4097, 24_577, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_stale_memory_does_not_show(op, dtype, cols):
    """Outputs, statistics and workspaces come from memory full of NaN."""
    given = up(random_inputs(op, (7, cols), dtype))
    clean = down(as_tuple(call(op, given, return_stats=True)))
    cupy.get_default_memory_pool().free_all_blocks()
    sizes = (1 << 9, 1 << 12, 1 << 16, 1 << 20, 1 << 24)
    poison = [cupy.full(size, 0xFF, np.uint8) for size in sizes for _ in range(8)]
    del poison
    got = call(op, given, return_stats=True)
    for mine, theirs in zip(down(got), clean, strict=True):
        assert_same_bits(mine, theirs)
        assert np.isfinite(mine.astype(np.float64)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_shapes_of_the_same_rows(dtype):
    """Leading axes and normalized axes may be folded in any way."""
    x = noise((4, 6, 8, 10)).astype(dtypes.numpy_dtype(dtype))
    weight = noise((8, 10), 1).astype(x.dtype)
    want = cunorm.layer_norm(up(x.reshape(24, 80)), 80, up(weight.reshape(80)))
    got = cunorm.layer_norm(up(x), (8, 10), up(weight))
    assert_same(got.reshape(24, 80), want)
    got = cunorm.layer_norm(up(x.reshape(2, 2, 3, 2, 80)), 80, up(weight.reshape(80)))
    assert_same(got.reshape(24, 80), want)
    one = cunorm.layer_norm(up(x.reshape(24, 80)[3]), (80,), up(weight.reshape(80)))
    assert_same(one, want[3])
