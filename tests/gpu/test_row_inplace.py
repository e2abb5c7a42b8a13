"""`out=`: one of the inputs exactly, or memory of its own; and inputs that nothing writes."""

from __future__ import annotations

import numpy as np
import pytest
from cases import (
    ADAPTIVE,
    DTYPES,
    FUSED,
    OPS,
    PARAMETERS,
    as_tuple,
    assert_same_bits,
    call,
    noise,
    random_inputs,
)
from on_gpu import assert_same, cupy, down, up

pytestmark = pytest.mark.gpu

COLS = (33, 1024, 4097, 24_577, 100_003)


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_out_is_x(op, dtype, cols):
    inputs = random_inputs(op, (3, cols), dtype)
    want = call(op, up(inputs))
    given = up(inputs)
    out = (given["x"], given["residual"]) if op in FUSED else given["x"]
    got = call(op, given, out=out)
    assert_same(got, want)
    assert all(mine is there for mine, there in zip(as_tuple(got), as_tuple(out), strict=True))


@pytest.mark.parametrize(
    "places", [("residual", "x"), ("x", None), (None, "x"), ("residual", None)]
)
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("op", FUSED)
def test_fused_outputs_in_either_addend(op, cols, places):
    inputs = random_inputs(op, (3, cols), "bfloat16")
    want = call(op, up(inputs))
    given = up(inputs)
    out = tuple(given[p] if p else cupy.empty_like(given["x"]) for p in places)
    assert_same(call(op, given, out=out), want)
    for name in {"x", "residual"} - set(places):
        assert_same_bits(down(given[name]), inputs[name], name)


@pytest.mark.parametrize("op", ADAPTIVE)
@pytest.mark.parametrize("cols", COLS)
def test_out_is_a_parameter_of_full_shape(op, cols):
    inputs = random_inputs(op, (3, cols), "float32", parameter_shape=(3, cols))
    want = call(op, up(inputs))
    for name in PARAMETERS[op]:
        given = up(inputs)
        assert_same(call(op, given, out=given[name]), want, name)


@pytest.mark.parametrize("cols", [64, 4097])
@pytest.mark.parametrize("op", FUSED)
def test_residual_may_be_x(op, cols):
    inputs = random_inputs(op, (4, cols), "float16")
    want = call(op, up(inputs | {"residual": inputs["x"]}))
    given = up(inputs)
    given["residual"] = given["x"]
    assert_same(call(op, given), want)
    out = (given["x"], cupy.empty_like(given["x"]))
    assert_same(call(op, given, out=out), want)


@pytest.mark.parametrize("op", OPS)
def test_interleaved_views_share_no_memory(op):
    inputs = random_inputs(op, (6, 48), "float32")
    want = call(op, up(inputs))
    given = up(inputs)
    wide = cupy.empty((6, 3 * 48), np.float32)
    wide[:, :48] = given["x"]
    given["x"] = wide[:, :48]
    outs = (wide[:, 48:96], wide[:, 96:])
    assert_same(call(op, given, out=outs if op in FUSED else outs[0]), want)


def overlapping(name):
    """x, and an out that shares part of its memory."""
    flat = up(noise((9 * 32,)).astype(np.float32))
    rows = flat.reshape(9, 32)
    return {
        "a row later": (rows[:-1], rows[1:]),
        "a row earlier": (rows[1:], rows[:-1]),
        "an element later": (flat[:256].reshape(8, 32), flat[1:257].reshape(8, 32)),
        "rows reversed": (rows[:8], rows[7::-1]),
        "one common element": (flat[:129].reshape(3, 43), flat[128:257].reshape(3, 43)),
    }[name], flat


@pytest.mark.parametrize(
    "name",
    ["a row later", "a row earlier", "an element later", "rows reversed", "one common element"],
)
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_partial_overlap_is_refused_and_changes_nothing(op, name, planned):
    (x, out), flat = overlapping(name)
    before = down(flat)
    given = up(random_inputs(op, x.shape, "float32"))
    given["x"] = x
    if planned:  # the same signature with memory of its own: the plan is there when x comes
        spare = cupy.empty_like(flat)
        start = (out.data.ptr - flat.data.ptr) // 4
        elsewhere = cupy.lib.stride_tricks.as_strided(spare[start:], out.shape, out.strides)
        call(op, given, out=(elsewhere, cupy.empty_like(x)) if op in FUSED else elsewhere)
    with pytest.raises(ValueError, match=r"out.* partly overlaps x"):
        call(op, given, out=(out, cupy.empty_like(x)) if op in FUSED else out)
    assert_same_bits(down(flat), before)


@pytest.mark.parametrize("op", FUSED)
def test_one_array_for_both_outputs_is_refused(op):
    given = up(random_inputs(op, (4, 32), "float32"))
    out = cupy.zeros((4, 32), np.float32)
    with pytest.raises(ValueError, match="overlaps"):
        call(op, given, out=(out, out))
    assert not out.any()


@pytest.mark.parametrize("op", OPS)
def test_out_over_a_parameter_of_one_row_is_refused(op):
    given = up(random_inputs(op, (4, 32), "float32"))
    out = cupy.zeros((4, 32), np.float32)
    name = PARAMETERS[op][-1]
    given[name] = out[2]
    with pytest.raises(ValueError, match=f"overlaps {name}"):
        call(op, given, out=(out, cupy.empty_like(out)) if op in FUSED else out)
    assert not out.any()


@pytest.mark.parametrize("op", OPS)
def test_an_expanded_out_is_refused(op):
    given = up(random_inputs(op, (4, 32), "float32"))
    row = cupy.zeros((1, 32), np.float32)
    out = cupy.broadcast_to(row, (4, 32))
    with pytest.raises(ValueError, match="do not share memory"):
        call(op, given, out=(out, cupy.empty((4, 32), np.float32)) if op in FUSED else out)
    assert not row.any()


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_inputs_are_not_written(op, dtype, cols):
    inputs = random_inputs(op, (3, cols), dtype)
    given = up(inputs)
    call(op, given, return_stats=True)
    for name, array in given.items():
        assert_same_bits(down(array), inputs[name], name)
