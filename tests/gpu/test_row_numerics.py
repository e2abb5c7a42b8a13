"""Rows that break careless arithmetic: far from zero, constant, huge, tiny, not finite."""

from __future__ import annotations

import numpy as np
import pytest
from cases import (
    ADAPTIVE,
    CENTRED,
    DTYPES,
    FUSED,
    OPS,
    assert_same_bits,
    assert_within_bounds,
    call,
    make_inputs,
    noise,
    random_inputs,
)
from on_gpu import check, down, up

from cunorm import dtypes, precision

pytestmark = pytest.mark.gpu

COLS = (7, 64, 1000, 8192, 32_768, 262_144)  # up to a row that is cut into segments
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.797e308}
TINY = {"float16": 6e-7, "bfloat16": 1e-30, "float32": 1e-30, "float64": 1e-290}


def host(values, dtype):
    return np.asarray(values).astype(dtypes.numpy_dtype(dtype))


def plain(op, x):
    """Inputs that leave the normalized values as they are: residual 0, parameters 1 and 0."""
    inputs = make_inputs(op, x)
    for name, array in inputs.items():
        if name != "x":
            array[...] = name in ("weight", "scale", "gate")
    return inputs


# -- a common offset ------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [8, 111, 1000, 4096, 32_768, 100_003])
@pytest.mark.parametrize(
    ("dtype", "centre", "spread"),
    [
        ("float32", 1e4, 1),
        ("float32", -1e6, 1),
        ("float32", 300, 1e-3),
        ("float32", 100, 0.01),
        ("float32", 3e30, 3e24),
        ("float64", 1e12, 1),
        ("float64", 300, 1e-9),
        ("float16", 940, 1),
        ("bfloat16", 8, 0.5),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_common_offset(op, dtype, centre, spread, cols):
    x = host(centre + spread * noise((3, cols), cols), dtype)
    check(op, make_inputs(op, x), return_stats=True)
    check(op, plain(op, x), return_stats=True)


@pytest.mark.parametrize("op", CENTRED)
@pytest.mark.parametrize("offset", [4e4, 8e4])
def test_four_values_far_from_zero(op, offset):
    x = host([[offset, offset + 1, offset + 2, offset + 3]], "float32")
    y = check(op, plain(op, x), eps=1e-5)[0]
    np.testing.assert_allclose(y[0], [-1.341635, -0.447212, 0.447212, 1.341635], rtol=2e-6)


@pytest.mark.parametrize("op", CENTRED)
def test_rows_that_differ_by_an_offset_alone(op):
    x = np.arange(6_400_000, dtype=np.float32).reshape(-1, 32)  # each value is exact
    y = down(call(op, up(plain(op, x)), eps=1e-5))
    y = y[0] if op in FUSED else y
    want = np.broadcast_to((np.arange(32) - 15.5) / np.sqrt(85.25 + 1e-5), x.shape)
    bound = precision.error_bound(want, want, 0.0, "float32")
    assert precision.error_in_bounds(y, want, bound, "float32") <= 1


@pytest.mark.parametrize("cols", [3, 17, 127, 255, 1536, 4544])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", CENTRED)
def test_lanes_without_elements_add_nothing(op, dtype, cols):
    x = host(10 + noise((5, cols), cols), dtype)
    check(op, plain(op, x), return_stats=True)


def test_more_elements_than_float32_counts():
    x = host(2 + noise((1, (1 << 24) + 43)), "float32")
    check("layer_norm", {"x": x}, return_stats=True)


# -- constant rows, zero rows, rows of one --------------------------------------------------------


@pytest.mark.parametrize("cols", [1, 2, 3, 33, 111, 1000, 4097, 24_577, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", CENTRED)
@pytest.mark.parametrize("eps", [1e-5, 0.0])
def test_a_constant_row_gives_the_bias(op, dtype, cols, eps):
    values = [0.0, 0.1, -300.3, 3e4, LARGEST[dtype], -LARGEST[dtype], TINY[dtype]]
    x = np.repeat(host(values, dtype)[:, None], cols, axis=1)
    inputs = make_inputs(op, x)
    if op in FUSED:
        inputs["residual"] = np.zeros_like(x)
    results = down(call(op, up(inputs), eps=eps))
    y = results[0] if op in FUSED else results
    want = inputs.get("bias", inputs.get("shift"))
    if op == "ada_layer_norm_zero":
        wide = dtypes.accumulation(dtype)
        want = (inputs["gate"].astype(wide) * want.astype(wide)).astype(x.dtype)
    assert_same_bits(y, np.ascontiguousarray(np.broadcast_to(want, x.shape)))


@pytest.mark.parametrize("cols", [10, 4096, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.0])
def test_zero_rows_stay_finite(op, dtype, cols, eps):
    x = np.zeros((2, cols), dtypes.numpy_dtype(dtype))
    inputs = make_inputs(op, x)
    if op in FUSED:
        inputs["residual"] = x.copy()
    results = check(op, inputs, eps=eps)
    assert np.isfinite(results[0].astype(np.float64)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("value", "scale", "shift"),
    [(-3, 1e10, -1), (-3, 1e15, -1), (-3, 1e20, -1), (1e6, 123, 3)],
)
def test_rows_of_one_element(op, dtype, value, scale, shift):
    inputs = make_inputs(op, host([[value]], dtype))
    for name in inputs.keys() - {"x"}:
        number = {"residual": 0, "gate": 1}.get(name, shift if name in ("bias", "shift") else scale)
        inputs[name][...] = number
    y = check(op, inputs, eps=0.1)[0]
    if op in CENTRED:
        assert float(y[0, 0]) == shift


# -- the ends of the range ------------------------------------------------------------------------


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("eps", [1e-5, 0.0])
def test_the_largest_values_do_not_overflow(op, dtype, cols, eps):
    """Beside ordinary rows, so that one row's rescue cannot help another."""
    signs = np.where(noise((2, cols), 3) < 0, -1.0, 1.0)
    x = noise((6, cols), cols)
    x[1:3] = LARGEST[dtype] * signs
    x[4] = LARGEST[dtype] * np.clip(x[4] / 8, -1, 1)
    x[5] = LARGEST[dtype] * (0.75 + np.clip(x[5] / 64, -0.25, 0.25))
    inputs = make_inputs(op, host(x, dtype))
    if op in FUSED:
        inputs["residual"][...] = 0
    y = check(op, inputs, eps=eps, return_stats=dtype == "float16")[0]
    assert np.isfinite(y.astype(np.float64)).all()


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_the_smallest_values_without_eps(op, dtype, cols):
    x = noise((5, cols), cols)
    x = np.copysign(np.maximum(np.abs(x), 0.01), x)  # no float32 subnormals: they are flushed
    x[1:4] *= TINY[dtype]
    inputs = make_inputs(op, host(x, dtype))
    if op in FUSED:
        inputs["residual"][...] = 0
    y = check(op, inputs, eps=0.0)[0]
    assert (np.abs(y.astype(np.float64)[1:4]).max(axis=1) > 0.5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("value", [200.0, 30_000.0])
def test_squares_past_the_range_of_float16(op, dtype, value):
    x = host(np.where(noise((4, 2048)) < 0, -value, value), dtype)
    inputs = plain(op, x)
    if op in FUSED:
        inputs["residual"] = x // 2
    check(op, inputs, return_stats=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm"])
@pytest.mark.parametrize("eps", [1e-5, 0.0])
def test_one_spike_among_zeros(op, dtype, eps):
    x = np.zeros((2, 4096), dtypes.numpy_dtype(dtype))
    x[0, 0], x[1, 4095] = 1000, -60_000
    check(op, plain(op, x), eps=eps, return_stats=True)


# -- eps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("eps", [0.5, 1e-3, 1e-5, 1e-6, 1e-12])
def test_eps_is_inside_the_root_and_not_rounded(op, dtype, eps):
    x = host(noise((4, 96)) * [[0.3], [1e-3], [1e-4], [1e-6]], dtype)
    inputs = plain(op, x)
    check(op, inputs, eps=eps, return_stats=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_eps_of_rms_norm(dtype):
    x = host(noise((8, 32)) * 0.058, dtype)
    x[4:] = host(noise((4, 32)) * 1e-4, dtype)
    check("rms_norm", {"x": x}, return_stats=True)


# -- what is not finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("cols", [7, 33, 1000, 24_577, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_nan_and_infinity_stay_in_their_row(op, dtype, cols):
    inputs = random_inputs(op, (9, cols), dtype)
    clean = down(call(op, up(inputs), return_stats=True))
    places = {2: np.nan, 4: np.inf, 5: -np.inf}
    others = [row for row in range(9) if row not in places]
    for where in ("x", "residual") if op in FUSED else ("x",):
        spoilt = dict(inputs)
        spoilt[where] = inputs[where].copy()
        for row, value in places.items():
            spoilt[where][row, (row * 31) % cols] = value
        got = down(call(op, up(spoilt), return_stats=True))
        for mine, theirs in zip(got, clean, strict=True):
            assert_same_bits(mine[others], theirs[others], where)
        judged = got if op not in ADAPTIVE else got[:1]
        assert_within_bounds(op, judged, spoilt)
        assert np.isnan(got[0].astype(np.float64)[2]).all()


@pytest.mark.parametrize("op", FUSED)
def test_a_float16_sum_that_overflows_is_infinite(op):
    inputs = plain(op, host(noise((3, 128)), "float16"))
    inputs["x"][0, 5] = inputs["residual"][0, 5] = 40_000
    inputs["x"][1] = inputs["residual"][1] = 40_000
    y, total = check(op, inputs)
    assert total[0, 5] == np.inf
    assert (total[1] == np.inf).all()
    assert not (y[1] == 0).any()
