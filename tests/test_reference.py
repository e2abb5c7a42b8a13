"""The NumPy definitions against arithmetic that shares nothing with them."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from reference_cases import (
    CENTRED,
    DIGITS,
    DTYPES,
    _numpy_errors_raise,  # noqa: F401 (a fixture)
    call,
    make_inputs,
)

from cunorm import reference

stats = pytest.importorskip("scipy.stats")


# ---------------------------------------------------------------------------------------------
# exact arithmetic, element by element
# ---------------------------------------------------------------------------------------------


def exact_row(row, eps, centred):
    """Mean, 1 / root and normalized values of one row, in rationals and then 60 digits."""
    values = [Fraction(float(value)) for value in row]
    mean = sum(values) / len(values) if centred else Fraction(0)
    square = sum((value - mean) ** 2 for value in values) / len(values) + Fraction(eps)
    with decimal.localcontext(DIGITS):
        rstd = 1 / (Decimal(square.numerator) / square.denominator).sqrt()
        xhat = [Decimal(d.numerator) / d.denominator * rstd for d in (v - mean for v in values)]
        return Decimal(mean.numerator) / mean.denominator, rstd, xhat


def exact(op, inputs, eps):
    """y, size of its terms, mean and rstd for 2-D input, as arrays of Decimal."""
    x = inputs["x"]
    if "residual" in inputs:
        total = x.astype(np.float64) + inputs["residual"].astype(np.float64)
        x = total.astype(x.dtype)
    row_stats = [exact_row(row, eps, op in CENTRED) for row in x]

    def wide(name, default):
        values = np.broadcast_to(np.asarray(inputs.get(name, default)), x.shape)
        return np.vectorize(lambda v: Decimal(float(v)), otypes=[object])(values)

    xhat = np.array([r[2] for r in row_stats], dtype=object)
    gate = wide("gate", 1.0)
    with decimal.localcontext(DIGITS):
        product = gate * xhat * wide("weight", 1.0) * wide("scale", 1.0)
        offset = gate * (wide("bias", 0.0) + wide("shift", 0.0))
        return (
            product + offset,
            abs(product) + abs(offset),
            np.array([r[0] for r in row_stats], dtype=object),
            np.array([r[1] for r in row_stats], dtype=object),
        )


def relative_error(actual, expected, size):
    """Largest ``|actual - expected| / size``, in Decimal: long double goes in without loss."""
    worst = Decimal(0)
    with decimal.localcontext(DIGITS):
        for got, want, scale in zip(actual.ravel(), expected.ravel(), size.ravel(), strict=True):
            ratio = Fraction(*np.longdouble(got).as_integer_ratio())
            error = abs(Decimal(ratio.numerator) / ratio.denominator - want)
            worst = max(worst, error / scale if scale else error * Decimal("inf"))
    return float(worst)


@pytest.mark.parametrize("centre", [0.0, 1000.0], ids=["centred", "offset"])
@pytest.mark.parametrize("cols", [1, 2, 7, 64, 111])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_matches_exact_arithmetic(op, dtype, cols, centre):
    inputs = make_inputs(op, (3, cols), DTYPES[dtype], seed=cols, centre=centre)
    eps = 0.0123
    work = reference.working_dtype(DTYPES[dtype])
    results = call(op, inputs, eps, return_stats=True, dtype=work)
    y, rstd = results[0], results[-1]
    expected, size, mean, exact_rstd = exact(op, inputs, eps)
    # Relative to the size of the terms even where x is next to the mean.
    tolerance = 16 * float(np.finfo(work).eps)
    assert y.dtype == rstd.dtype == work
    assert relative_error(y, expected, size + (size == 0)) <= tolerance
    assert relative_error(rstd, exact_rstd, exact_rstd) <= tolerance
    if op in CENTRED:
        assert relative_error(results[-2], mean, abs(mean)) <= 2 * tolerance


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e6, 1e12], ids=str)
@pytest.mark.parametrize("cols", [1000, 4099])
def test_next_to_the_mean(cols, offset):
    """Elements close to the mean keep their relative accuracy: no float mean could do that."""
    x = offset + np.random.default_rng(cols).standard_normal((1, cols))
    y = reference.layer_norm(x, cols, dtype=np.longdouble)
    expected, size, _, _ = exact("layer_norm", {"x": x}, 1e-5)
    assert relative_error(y, expected, size) <= 16 * float(np.finfo(np.longdouble).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_last_rounding_is_to_nearest(op, dtype):
    inputs = make_inputs(op, (5, 97), DTYPES[dtype])
    work = reference.working_dtype(DTYPES[dtype])
    y = call(op, inputs, 1e-5, return_stats=True)
    precise = call(op, inputs, 1e-5, return_stats=True, dtype=work)
    assert y[0].dtype == DTYPES[dtype]
    with np.errstate(under="ignore"):
        np.testing.assert_array_equal(y[0], precise[0].astype(DTYPES[dtype]))
    accumulation = np.float64 if dtype == "float64" else np.float32
    for got, want in zip(y[-1:], precise[-1:], strict=True):
        assert got.dtype == accumulation
        np.testing.assert_array_equal(got, want.astype(accumulation))


def loop_layer_norm(row, eps):
    """The textbook loop, with exactly rounded sums."""
    mean = math.fsum(row) / len(row)
    variance = math.fsum((value - mean) ** 2 for value in row) / len(row)
    return [(value - mean) / math.sqrt(variance + eps) for value in row]


@pytest.mark.parametrize("shape", [(1, 1), (4, 3), (2, 3, 5), (1, 1000)], ids=str)
def test_layer_norm_matches_a_loop(shape):
    x = np.random.default_rng(1).normal(3.0, 2.0, shape)
    expected = [loop_layer_norm(row.tolist(), 0.1) for row in x.reshape(-1, shape[-1])]
    y = reference.layer_norm(x, shape[-1], eps=0.1)
    np.testing.assert_allclose(y.reshape(-1, shape[-1]), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_layer_norm_is_the_z_score(axes):
    x = np.random.default_rng(2).normal(-4.0, 0.7, (6, 5, 4, 3))
    rows = x.reshape(*x.shape[:-axes], -1)
    expected = stats.zscore(rows, axis=-1).reshape(x.shape)
    y = reference.layer_norm(x, x.shape[-axes:], eps=0.0)
    np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.torch
@pytest.mark.parametrize("normalized_shape", [(12,), (7, 12), (3, 7, 12)], ids=str)
def test_matches_torch(normalized_shape):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    x = rng.normal(2.0, 3.0, (5, 3, 7, 12))
    weight, bias = rng.standard_normal((2, *normalized_shape))
    arrays = [torch.from_numpy(array) for array in (x, weight, bias)]
    functional = torch.nn.functional

    y, mean, rstd = torch.native_layer_norm(arrays[0], normalized_shape, *arrays[1:], 0.01)
    got = reference.layer_norm(x, normalized_shape, weight, bias, 0.01, return_stats=True)
    np.testing.assert_allclose(got[0], y.numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(got[1], mean.numpy().reshape(got[1].shape), rtol=1e-13)
    np.testing.assert_allclose(got[2], rstd.numpy().reshape(got[2].shape), rtol=1e-13)

    for eps in (None, 0.01):
        expected = functional.rms_norm(arrays[0], normalized_shape, arrays[1], eps)
        np.testing.assert_allclose(
            reference.rms_norm(x, normalized_shape, weight, eps),
            expected.numpy(),
            rtol=1e-12,
            atol=1e-14,
        )


# ---------------------------------------------------------------------------------------------
# known failures of other implementations
# ---------------------------------------------------------------------------------------------

RAMP = np.array([-1.341635, -0.447212, 0.447212, 1.341635])


def alternating(value, shape=(4, 2048)):
    return np.where(np.arange(shape[-1]) % 2, -value, value) * np.ones(shape)


def small_bf16():
    return (np.random.default_rng(5).standard_normal((8, 32)) * 0.058).astype(DTYPES["bfloat16"])


def plain(x, eps, centred):
    """The formula in float64, for values where nothing can go wrong in it."""
    x = np.asarray(x, np.float64)
    if centred:
        x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)


def spike():
    x = np.zeros((1, 4096))
    x[0, 0] = 1000
    return x


HALF = np.random.default_rng(6).normal(0.0, 0.3, (4, 33))
# id, op, x, dtype, eps, parameters, expected, absolute tolerance
CASES = [
    ("onnxruntime#28463-4e4", "layer_norm", 4e4 + np.arange(4.0), "float32", 1e-5, {}, RAMP, 1e-6),
    ("onnxruntime#28463-8e4", "layer_norm", 8e4 + np.arange(4.0), "float32", 1e-5, {}, RAMP, 1e-6),
    ("pytorch#98075-1e10", "layer_norm", [[-3.0]], "float64", 0.1, {"w": 1e10, "b": -1}, -1, 0),
    ("pytorch#98075-1e20", "layer_norm", [[-3.0]], "float32", 0.1, {"w": 1e20, "b": -1}, -1, 0),
    ("pytorch#188375-f32", "layer_norm", [[1e6]], "float32", 1e-5, {"w": 123, "b": 3}, 3, 0),
    ("pytorch#188375-bf16", "layer_norm", [[1e6]], "bfloat16", 1e-5, {"w": 123, "b": 3}, 3, 0),
    ("one-element-rms", "rms_norm", [[-3.0]], "float64", 0.1, {"w": 2}, -6 / 9.1**0.5, 1e-15),
    *(
        (f"onnxruntime#29034-{op}-{value}", op, alternating(value), "float16", 1e-6, {},
         alternating(1), 0)
        for op in ("rms_norm", "layer_norm")
        for value in (200, 30000)
    ),
    *(
        (f"pytorch#41527-{op}-{dtype}", op, np.zeros((1, 10)), dtype, 1e-12, {"w": 1}, 0, 0)
        for op in ("layer_norm", "rms_norm")
        for dtype in ("float16", "bfloat16")
    ),
    ("pytorch#189581-default", "rms_norm", small_bf16(), "bfloat16", None, {},
     plain(small_bf16(), 2.0**-23, False), 2e-2),
    ("pytorch#142848-1e-5", "rms_norm", small_bf16() / 64, "bfloat16", 1e-5, {},
     plain(small_bf16() / 64, 1e-5, False), 2.0**-8),
    ("pyg#2917-layer", "layer_norm", HALF, "float64", 0.5, {}, plain(HALF, 0.5, True), 1e-14),
    ("LeetCUDA#309-rms", "rms_norm", HALF, "float64", 0.5, {}, plain(HALF, 0.5, False), 1e-14),
    ("flash-attention#781", "rms_norm", np.zeros((1, 4)), "float32", 1e-6, {}, 0, 0),
    ("coremltools#2822-f16", "rms_norm", spike(), "float16", 1e-5, {},
     plain(spike(), 1e-5, False), 2.0**-6),
    ("coremltools#2822-f32", "rms_norm", spike(), "float32", 1e-5, {},
     plain(spike(), 1e-5, False), 4e-6),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "x", "dtype", "eps", "parameters", "expected", "tolerance"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_known_failures(op, x, dtype, eps, parameters, expected, tolerance):
    x = np.asarray(x).astype(DTYPES[dtype])
    accumulation = reference.accumulation_dtype(x.dtype)
    names = {"w": "weight", "b": "bias"}
    arrays = {names[k]: np.full(x.shape[-1], v, accumulation) for k, v in parameters.items()}
    y = reference.FORWARD[op](x, x.shape[-1], **arrays, eps=eps)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(
        y.astype(np.float64), np.broadcast_to(expected, x.shape), rtol=0, atol=tolerance
    )


def test_small_deviations_on_a_hundred():
    """pytorch#40308: variance 1e-4 on a mean of 100."""
    noise = np.random.default_rng(7).standard_normal((8, 32768))
    x = (0.01 * noise + 100).astype(np.float32)
    y, mean, rstd = reference.layer_norm(x, 32768, eps=0.0, return_stats=True)
    exact_mean = np.array([math.fsum(row) / 32768 for row in x.astype(np.float64)])
    np.testing.assert_array_equal(mean, exact_mean.astype(np.float32))
    np.testing.assert_allclose(rstd, 100, rtol=0.02)
    np.testing.assert_allclose(y.std(axis=-1, dtype=np.float64), 1, atol=1e-7)


def test_rows_that_differ_by_an_offset():
    """pytorch#81090: every value is exact in float32, so every row gives the same bits."""
    x = np.arange(6_400_000, dtype=np.float32).reshape(-1, 32)
    y = reference.layer_norm(x, 32)
    expected = (np.arange(32) - 15.5) / np.sqrt(85.25 + 1e-5)
    np.testing.assert_array_equal(y, np.broadcast_to(expected.astype(np.float32), x.shape))


def test_sum_that_overflows_when_stored():
    """onnxruntime#29034: the stored sum is infinite, so the row is not a number; never zero."""
    x = np.full((2, 8), 40000, np.float16)
    x[1] = 200
    weight = np.ones(8, np.float16)
    y, residual_out = reference.fused_add_rms_norm(x, x, weight)
    assert np.isposinf(residual_out[0]).all()
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1], weight)


def test_eps_enters_unrounded_and_inside_the_root():
    x = (1e-3 * np.random.default_rng(8).standard_normal((4, 64))).astype(DTYPES["bfloat16"])
    _, rstd = reference.rms_norm(x, 64, eps=1e-5, return_stats=True, dtype=np.float64)
    square = np.square(x.astype(np.float64)).mean(axis=-1)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(square + 1e-5), rtol=1e-14)


@pytest.mark.parametrize(("dtype", "eps"), [("bfloat16", 2.0**-23), ("float64", 2.0**-52)])
def test_default_eps_of_rms_norm(dtype, eps):
    x = np.full((1, 4), 2.0**-30).astype(DTYPES[dtype])
    _, rstd = reference.rms_norm(x, 4, return_stats=True)
    np.testing.assert_allclose(rstd, 1 / math.sqrt(2.0**-60 + eps), rtol=1e-7)
