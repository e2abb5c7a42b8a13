"""The NumPy definitions at the edges: of range, of shape, of layout."""

from __future__ import annotations

import sys
import warnings
from fractions import Fraction

import numpy as np
import pytest
from reference_cases import (
    CENTRED,
    DTYPES,
    _numpy_errors_raise,  # noqa: F401 (a fixture)
    call,
    make_inputs,
)

from cunorm import reference

ml_dtypes = pytest.importorskip("ml_dtypes")

# ---------------------------------------------------------------------------------------------
# range, constant rows, values that are not finite
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("value", [0.1, -7.3, 65000.0, 1e-7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", CENTRED)
def test_constant_row_gives_the_bias(op, dtype, value, eps):
    inputs = make_inputs(op, (2, 1003), DTYPES[dtype])
    inputs["x"][...] = value
    if "residual" in inputs:
        inputs["residual"][...] = 0
    y = np.asarray(call(op, inputs, eps, return_stats=True)[0])
    bias = inputs["bias"] if "bias" in inputs else inputs["shift"]
    if "gate" in inputs:
        work = reference.working_dtype(DTYPES[dtype])
        bias = (inputs["gate"].astype(work) * bias.astype(work)).astype(DTYPES[dtype])
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))


LARGEST = {
    "float16": 65504.0,
    "bfloat16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max),
    "float32": float(np.finfo(np.float32).max),
    "float64": sys.float_info.max,
}


@pytest.mark.parametrize("working", [None, np.float64], ids=["own", "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_values(monkeypatch, dtype, working):
    """Also where long double is no wider than double, which is what working=float64 stands for."""
    if working:
        monkeypatch.setattr(reference.common, "working_dtype", lambda dtype: np.dtype(working))
    largest = LARGEST[dtype]
    x = np.array([[largest, -largest, 0, 0], [largest] * 4, [4, -4, 0, 0]]).astype(DTYPES[dtype])
    y, mean, rstd = reference.layer_norm(x, 4, return_stats=True)
    root_two = np.array([2**0.5, -(2**0.5), 0, 0]).astype(DTYPES[dtype])
    np.testing.assert_allclose(
        y.astype(np.float64)[[0, 1]], [root_two.astype(np.float64), [0] * 4], rtol=1e-6
    )
    np.testing.assert_array_equal(mean, np.array([0, largest, 0], mean.dtype))
    np.testing.assert_allclose(rstd[1:], 1 / np.sqrt(np.array([1e-5, 8 + 1e-5])), rtol=1e-6)
    y = reference.rms_norm(x, 4)
    np.testing.assert_allclose(
        y.astype(np.float64)[[0, 1]], [root_two.astype(np.float64), [1] * 4], rtol=1e-6
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_bad_values_stay_in_their_row(op, dtype, bad):
    inputs = make_inputs(op, (6, 17), DTYPES[dtype])
    clean = call(op, inputs, 1e-5, return_stats=True)
    inputs["x"][3, 5] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dirty = call(op, inputs, 1e-5, return_stats=True)
    others = [0, 1, 2, 4, 5]
    for got, want in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(got[others], want[others])
    row = dirty[0][3].astype(np.float64)
    if op in CENTRED or np.isnan(bad):
        assert np.isnan(row).all()
    else:
        assert np.isnan(row[5])
        np.testing.assert_array_equal(np.delete(row, 5), 0)
    if op in CENTRED:
        np.testing.assert_equal(float(dirty[-2][3]), bad)


# ---------------------------------------------------------------------------------------------
# arrays: shapes, layouts, dtypes of parameters
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 7), (4, 0), (0,)], ids=str)
@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_no_elements(op, shape):
    inputs = {
        name: np.zeros(shape if name in ("x", "residual") else shape[-1:], np.float32)
        for name in make_inputs(op, (2, 3), np.float32)
    }
    y, *_, rstd = call(op, inputs, 1e-5, return_stats=True)
    assert y.shape == shape
    assert y.dtype == np.float32
    assert rstd.shape == shape[:-1]
    assert np.isnan(rstd).all()


LAYOUTS = {
    "rows of a wider array": lambda x: np.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
    "every other element": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: np.flip(x).copy()[::-1, ::-1, ::-1],
    "transposed": lambda x: x.transpose(2, 0, 1).copy().transpose(1, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_layouts(op, layout):
    inputs = make_inputs(op, (4, 6, 10), np.float32)
    expected = call(op, inputs, 1e-5, return_stats=True)
    strided = LAYOUTS[layout](inputs["x"])
    np.testing.assert_array_equal(strided, inputs["x"])
    got = call(op, inputs | {"x": strided}, 1e-5, return_stats=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert got[0].strides == np.empty_like(strided).strides


@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_inputs_are_only_read(op):
    inputs = make_inputs(op, (3, 4, 5), np.float64)
    before = {name: array.copy() for name, array in inputs.items()}
    for array in inputs.values():
        array.flags.writeable = False
    call(op, inputs, 1e-5)
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, before[name])


def test_multi_axis_rows_are_flattened_rows():
    rng = np.random.default_rng(9)
    x = rng.standard_normal((3, 4, 5, 6))
    weight, bias = rng.standard_normal((2, 5, 6))
    y, mean, _ = reference.layer_norm(x, (5, 6), weight, bias, return_stats=True)
    flat = reference.layer_norm(x.reshape(3, 4, 30), 30, weight.ravel(), bias.ravel())
    np.testing.assert_array_equal(y, flat.reshape(x.shape))
    assert mean.shape == (3, 4)
    one_row = reference.layer_norm(x[0, 0], (5, 6), weight, bias, return_stats=True)
    np.testing.assert_array_equal(one_row[0], y[0, 0])
    assert one_row[1].shape == ()


def test_wide_parameters_keep_their_precision():
    """TensorRT-LLM#17987: float32 modulation of bfloat16 data is not rounded to bfloat16."""
    x = np.random.default_rng(10).standard_normal((4, 64)).astype(DTYPES["bfloat16"])
    scale, shift = np.full(64, 1 / 3, np.float32), np.full(64, 0.1, np.float32)
    y = reference.ada_layer_norm(x, scale, shift, dtype=np.float64)
    xhat = reference.layer_norm(x, 64, dtype=np.float64)
    np.testing.assert_array_equal(y, scale.astype(np.float64) * xhat + shift.astype(np.float64))


@pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 1, 6), (1, 4, 6), (3, 4, 6)], ids=str)
def test_modulation_broadcasts_along_leading_axes(shape):
    rng = np.random.default_rng(11)
    x = rng.standard_normal((3, 4, 6))
    scale, shift, gate = rng.standard_normal((3, *shape))
    full = [np.broadcast_to(array, x.shape).copy() for array in (scale, shift, gate)]
    np.testing.assert_array_equal(
        reference.ada_layer_norm_zero(x, scale, shift, gate),
        reference.ada_layer_norm_zero(x, *full),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["fused_add_layer_norm", "fused_add_rms_norm"])
def test_fused_add_is_add_then_norm(op, dtype):
    inputs = make_inputs(op, (5, 64), DTYPES[dtype])
    y, residual_out = call(op, inputs, 1e-6)
    x, residual = inputs.pop("x"), inputs.pop("residual")
    exact_sum = np.vectorize(lambda a, b: float(Fraction(float(a)) + Fraction(float(b))))
    np.testing.assert_array_equal(
        residual_out, exact_sum(x, residual).astype(np.float64).astype(DTYPES[dtype])
    )
    separate = reference.FORWARD[op.removeprefix("fused_add_")]
    np.testing.assert_array_equal(y, separate(residual_out, 64, **inputs, eps=1e-6))


@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_blocks_do_not_change_the_bits(monkeypatch, op):
    inputs = make_inputs(op, (5, 7, 33), np.float32)
    whole = call(op, inputs, 1e-5, return_stats=True)
    for size in (1, 70, 33 * 7 * 2):
        monkeypatch.setattr(reference.common, "BLOCK_ELEMENTS", size)
        for a, b in zip(call(op, inputs, 1e-5, return_stats=True), whole, strict=True):
            np.testing.assert_array_equal(a, b)
