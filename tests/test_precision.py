"""The tolerances: right where rounding is right, and tight enough to see what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cunorm import precision, reference

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
TAKES_SHAPE = ("layer_norm", "rms_norm")


def make_inputs(op, shape, dtype, seed=0, centre=0.0, spread=1.0):
    rng = np.random.default_rng(seed)
    inputs = {"x": (centre + spread * rng.standard_normal(shape)).astype(dtype)}
    cols = shape[-1]
    sizes = {"weight": (cols,), "bias": (cols,)}
    if op.endswith("rms_norm"):
        del sizes["bias"]
    if op.startswith("fused_add"):
        sizes["residual"] = shape
    if op.startswith("ada"):
        sizes = {"scale": shape, "shift": (cols,)}
    if op.endswith("zero"):
        sizes["gate"] = (*shape[:-2], 1, cols)
    inputs |= {name: rng.standard_normal(size).astype(dtype) for name, size in sizes.items()}
    return inputs


def shape_option(op, cols):
    return {"normalized_shape": cols} if op in TAKES_SHAPE else {}


# ---------------------------------------------------------------------------------------------
# units in the last place
# ---------------------------------------------------------------------------------------------


def neighbour_distance(value, dtype):
    """What the dtype itself says: from a value away from zero to the next one."""
    value = np.abs(np.asarray(value, dtype))
    with np.errstate(all="ignore"):
        above = np.nextafter(value, np.asarray(np.inf, dtype))
    return above.astype(np.float64) - value.astype(np.float64)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("float16", [1, -1.5, 2047, 65000, 2**-14, 2**-14 * 1.5, 2**-20, 2**-24, 0]),
        ("bfloat16", [1, -1.5, 255, 3e38, 2.0**-125, 1e-30]),
        ("float32", [1, -1.5, 2**24 - 1, 3e38, 2.0**-125, 1e-30]),
        ("float64", [1, -1.5, 2**53 - 1, 1e308, 2.0**-1022, 2.0**-1060, 5e-324, 0]),
    ],
)
def test_ulp_is_the_distance_to_the_neighbour(dtype, values):
    values = np.array(values).astype(DTYPES[dtype])
    expected = neighbour_distance(values, DTYPES[dtype])
    np.testing.assert_array_equal(precision.ulp(values, dtype), expected)
    np.testing.assert_array_equal(precision.ulp(values, DTYPES[dtype]), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ulp_of_flushed_values(dtype):
    """There is nothing between zero and the smallest normal float32."""
    smallest = 2.0**-126
    got = precision.ulp([0.0, 1e-45, smallest / 2, smallest], dtype)
    np.testing.assert_array_equal(got, smallest)
    just_above = smallest * (1 + 2.0**-7)
    assert precision.ulp(just_above, dtype) == smallest * precision.machine_eps(dtype)


@given(st.floats(-65000, 65000))
def test_ulp_between_values_is_that_of_the_value_below(value):
    with np.errstate(all="ignore"):
        below = np.float16(abs(value))
        if float(below) > abs(value):
            below = np.nextafter(below, np.float16(0))
    assert precision.ulp(value, "float16") == neighbour_distance(below, np.float16)


def test_ulp_past_the_range():
    assert precision.ulp(70000.0, "float16") == 64
    assert np.isnan(precision.ulp([np.inf, -np.inf, np.nan], "float32")).all()


@pytest.mark.skipif(
    np.finfo(np.longdouble).nmant <= 52, reason="long double is no wider than double here"
)
def test_ulp_of_long_double_values():
    below_one = np.nextafter(np.longdouble(1), np.longdouble(0))
    assert precision.ulp(below_one, "float64") == 2.0**-53
    assert precision.ulp(np.longdouble(1), "float64") == 2.0**-52


@pytest.mark.parametrize("dtype", DTYPES)
def test_machine_eps(dtype):
    expected = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    assert precision.machine_eps(dtype) == precision.machine_eps(DTYPES[dtype]) == expected


def test_accumulation():
    names = {name: precision.accumulation(dtype) for name, dtype in DTYPES.items()}
    assert names == {
        "float16": "float32",
        "bfloat16": "float32",
        "float32": "float32",
        "float64": "float64",
    }
    with pytest.raises(TypeError, match="got int32"):
        precision.accumulation(np.int32)


def test_error_bound_is_the_rule():
    got = precision.error_bound([3.0, 0.0], [2.0, -1.0], [1.0, 1.0], "float16")
    eps = 2.0**-23
    np.testing.assert_array_equal(got, [2.0**-9 + 12 * eps, 2.0**-24 + 8 * eps])


# ---------------------------------------------------------------------------------------------
# errors against bounds
# ---------------------------------------------------------------------------------------------

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("actual", "expected", "bound", "ratio"),
    [
        ([1.5, 2.0], [1.0, 2.0], [1.0, 1.0], 0.5),
        ([1.0, 5.0], [1.0, 2.0], 1.5, 2.0),
        ([1.0], [1.0], 0.0, 0.0),
        ([0.0], [-0.0], 0.0, 0.0),
        ([1.0], [1.0000001], 0.0, INF),
        ([], [], 1.0, 0.0),
        ([NAN, INF, -INF], [NAN, INF, -INF], [NAN, NAN, NAN], 0.0),
        ([NAN], [1.0], 1.0, INF),
        ([1.0], [NAN], NAN, INF),
        ([INF], [NAN], NAN, INF),
        ([NAN], [INF], NAN, INF),
        ([1.0], [INF], NAN, INF),
        ([INF], [-INF], NAN, INF),
        ([INF], [1.0], 1.0, INF),
        # float16: 65519 rounds to 65504, 65520 to infinity.
        ([INF], [65520.0], 0.0, 0.0),
        ([INF], [65519.0], 0.0, INF),
        ([INF], [65519.0], 1.0, 0.0),
        ([-INF], [65520.0], 1.0, INF),
        ([-INF], [-70000.0], 1.0, 0.0),
        ([65504.0], [70000.0], 32.0, 4496 / 32),
    ],
)
def test_error_in_bounds(actual, expected, bound, ratio):
    actual = np.array(actual, np.float64)
    assert precision.error_in_bounds(actual, expected, bound, "float16") == ratio


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_infinity_for_what_the_dtype_cannot_hold(dtype):
    largest = np.longdouble(float(ml_dtypes.finfo(DTYPES[dtype]).max))
    half = np.longdouble(precision.ulp(float(largest), dtype)) / 2
    infinite = np.array([INF]).astype(DTYPES[dtype])
    below = np.array([largest + half / 2])
    assert precision.error_in_bounds(infinite, below, 0.0, dtype) == INF
    assert precision.error_in_bounds(infinite, below, half, dtype) == 0
    with np.errstate(over="ignore"):
        halfway = np.array([largest + half])
    assert precision.error_in_bounds(infinite, halfway, 0.0, dtype) == 0


def test_error_in_bounds_needs_equal_shapes():
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(1,\)"):
        precision.error_in_bounds([1.0], [1.0, 1.0], 1.0, "float32")


# ---------------------------------------------------------------------------------------------
# operators: what is right passes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("centre", [0.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_rounded_reference_is_within_one_rounding(op, dtype, centre):
    inputs = make_inputs(op, (5, 131), DTYPES[dtype], centre=centre)
    options = {"eps": 1e-5, **shape_option(op, 131)}
    outputs = reference.FORWARD[op](**inputs, **options, return_stats=True)
    found = precision.forward_deviation(op, outputs, inputs, **options)
    names = ["y"] + ["residual_out"] * op.startswith("fused")
    names += ["rstd"] if op.endswith("rms_norm") else ["mean", "rstd"]
    assert list(found) == names
    # bfloat16 is rounded by way of float32.
    half = 0.5 + 2.0**-16 if dtype == "bfloat16" else 0.5 + 2.0**-10
    assert max(found["y"]) <= half
    assert found.get("residual_out", (0, 0)) == (0, 0)
    assert all(found[name].ratio <= 0.13 for name in ("mean", "rstd") if name in found)


@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_default_eps_is_the_operators_own(op):
    inputs = make_inputs(op, (3, 16), np.float32, spread=1e-3)
    options = shape_option(op, 16)
    outputs = reference.FORWARD[op](**inputs, **options, return_stats=True)
    found = precision.forward_deviation(op, outputs, inputs, **options)
    assert all(deviation.ratio <= 1 for deviation in found.values())


@pytest.mark.parametrize("op", reference.row.FORWARD)
def test_only_the_outputs_given_are_judged(op):
    inputs = make_inputs(op, (3, 16), np.float32)
    y = reference.FORWARD[op](**inputs, **shape_option(op, 16))
    found = precision.forward_deviation(op, y, inputs, **shape_option(op, 16))
    assert list(found) == (["y", "residual_out"] if op.startswith("fused") else ["y"])


def test_blocks_do_not_change_the_verdict(monkeypatch):
    inputs = make_inputs("ada_layer_norm_zero", (3, 4, 50), np.float32)
    outputs = list(reference.ada_layer_norm_zero(**inputs, return_stats=True))
    outputs[0][2, 1, 7] += np.float32(1e-3)
    outputs[2][0, 3] *= np.float32(1.5)
    whole = precision.forward_deviation("ada_layer_norm_zero", outputs, inputs)
    monkeypatch.setattr(reference.common, "BLOCK_ELEMENTS", 100)
    assert precision.forward_deviation("ada_layer_norm_zero", outputs, inputs) == whole
    assert whole["y"].ratio > 1
    assert whole["rstd"].ratio > 1


def test_output_of_another_shape_is_refused():
    inputs = make_inputs("layer_norm", (3, 4), np.float32)
    with pytest.raises(ValueError, match=r"y must have shape \(3, 4\), got \(4, 3\)"):
        precision.forward_deviation(
            "layer_norm", np.zeros((4, 3), np.float32), inputs, normalized_shape=4
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_flushed_subnormals_pass(dtype):
    x = np.array([[1, -1, 2, -2], [1, 0, 0, 0]]) * 2.0**-127
    inputs = {
        "x": x.astype(DTYPES[dtype]),
        "residual": np.zeros((2, 4), DTYPES[dtype]),
        "weight": np.full(4, 2.0**20).astype(DTYPES[dtype]),
    }
    options = {"eps": 1e-6}
    kept = reference.fused_add_rms_norm(**inputs, **options)
    flushed = np.where(np.abs(x) < 2.0**-126, 0, x).astype(DTYPES[dtype])
    gone = reference.fused_add_rms_norm(**inputs | {"x": flushed}, **options)
    assert (gone[0] != kept[0]).any()
    for outputs in (kept, gone):
        found = precision.forward_deviation("fused_add_rms_norm", outputs, inputs, **options)
        assert found["y"].ratio <= 1
        assert found["residual_out"].ratio <= 1
    wrong = (gone[0] * np.asarray(0, DTYPES[dtype]) - np.asarray(1e-20, DTYPES[dtype]), gone[1])
    found = precision.forward_deviation("fused_add_rms_norm", wrong, inputs, **options)
    assert found["y"].ratio > 1


# ---------------------------------------------------------------------------------------------
# operators: what is wrong is seen
# ---------------------------------------------------------------------------------------------


def naive_variance(x, eps):
    """E[x**2] - E[x]**2 in float32."""
    mean = x.mean(axis=-1, keepdims=True, dtype=np.float32)
    variance = np.square(x).mean(axis=-1, keepdims=True, dtype=np.float32) - np.square(mean)
    with np.errstate(invalid="ignore"):
        return (x - mean) / np.sqrt(variance + np.float32(eps))


def uncorrected_mean(x, eps):
    """Two passes, with a float32 mean that is as wrong as its rounding."""
    mean = x.mean(axis=-1, keepdims=True, dtype=np.float32)
    deviation = (x - mean).astype(np.float64)
    return deviation / np.sqrt(np.square(deviation).mean(axis=-1, keepdims=True) + eps)


def eps_outside_the_root(x, eps):
    deviation = x - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    return deviation / (deviation.std(axis=-1, keepdims=True) + eps)


def eps_over_the_count(x, eps):
    return reference.layer_norm(x, x.shape[-1], eps=eps / x.shape[-1], dtype=np.float64)


def unbiased_variance(x, eps):
    deviation = x - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    return deviation / np.sqrt(deviation.var(axis=-1, ddof=1, keepdims=True) + eps)


def rounded_eps(x, eps):
    rounded = float(np.asarray(eps, ml_dtypes.bfloat16))
    return reference.layer_norm(x, x.shape[-1], eps=rounded, dtype=np.float64)


@pytest.mark.parametrize(
    ("wrong", "centre", "spread", "eps"),
    [
        (naive_variance, 1e4, 1.0, 1e-5),
        (naive_variance, 30.0, 1.0, 1e-5),
        (uncorrected_mean, 1e4, 1.0, 1e-5),
        (uncorrected_mean, 1.0, 1.0, 1e-5),
        (eps_outside_the_root, 0.0, 1.0, 1e-5),
        (eps_over_the_count, 0.0, 1.0, 1e-5),
        (unbiased_variance, 0.0, 1.0, 1e-5),
        (rounded_eps, 0.0, 1e-3, 1e-5),
    ],
)
def test_wrong_float32_layer_norms_are_seen(wrong, centre, spread, eps):
    inputs = {"x": make_inputs("layer_norm", (8, 1000), np.float32, 3, centre, spread)["x"]}
    options = {"normalized_shape": 1000, "eps": eps}
    y = wrong(inputs["x"], eps).astype(np.float32)
    assert precision.forward_deviation("layer_norm", y, inputs, **options)["y"].ratio > 1
    y = reference.layer_norm(inputs["x"], **options)
    assert precision.forward_deviation("layer_norm", y, inputs, **options)["y"].ratio < 0.2


@pytest.mark.parametrize("op", reference.row.FORWARD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_units_are_too_many_for_narrow_dtypes(op, dtype):
    """Results two units off are wrong, unless four float roundings cost as much."""
    inputs = make_inputs(op, (4, 64), DTYPES[dtype])
    options = shape_option(op, 64)
    outputs = reference.FORWARD[op](**inputs, **options)
    y = outputs[0] if isinstance(outputs, tuple) else outputs
    expected = precision.forward_bound(op, inputs, **options)["y"]
    units = 2 if dtype in ("float16", "bfloat16") else 12
    off = y + (units * precision.ulp(expected.value, dtype)).astype(DTYPES[dtype])
    ratios = precision.error_in_bounds(off, *expected, dtype)
    assert ratios > 1.05


def test_stored_sum_must_be_exact():
    inputs = make_inputs("fused_add_rms_norm", (4, 64), np.float16)
    y, residual_out = reference.fused_add_rms_norm(**inputs)
    residual_out[2, 3] = np.nextafter(residual_out[2, 3], np.float16(np.inf))
    found = precision.forward_deviation("fused_add_rms_norm", (y, residual_out), inputs)
    assert found["residual_out"].ratio == np.inf


@pytest.mark.parametrize(("stat", "factor"), [("mean", 2.0**-19), ("rstd", 2.0**-19)])
def test_wrong_statistics_are_seen(stat, factor):
    inputs = make_inputs("layer_norm", (4, 64), np.float32, centre=5.0)
    options = {"normalized_shape": 64}
    y, mean, rstd = reference.layer_norm(**inputs, **options, return_stats=True)
    stats = {"mean": mean, "rstd": rstd}
    stats[stat] = stats[stat] * np.float32(1 + factor)
    found = precision.forward_deviation("layer_norm", (y, *stats.values()), inputs, **options)
    assert {name for name, deviation in found.items() if deviation.ratio > 1} == {stat}


def test_one_row_without_leading_axes():
    x = np.array([1.0, 2.0, np.nan], np.float32)
    for bad, ratio in ((np.nan, 0.0), (1.0, np.inf)):
        stat = np.full((), bad, np.float32)
        outputs = (np.full(3, np.nan, np.float32), stat, stat)
        found = precision.forward_deviation("layer_norm", outputs, {"x": x}, normalized_shape=3)
        assert [found[name].ratio for name in ("y", "mean", "rstd")] == [0.0, ratio, ratio]


def test_nan_outside_its_row_is_seen():
    inputs = make_inputs("rms_norm", (4, 64), np.float32)
    inputs["x"][1, 2] = np.nan
    options = {"normalized_shape": 64}
    y = reference.rms_norm(**inputs, **options)
    assert precision.forward_deviation("rms_norm", y, inputs, **options)["y"].ratio < 0.2
    y[2, 0] = np.nan
    assert precision.forward_deviation("rms_norm", y, inputs, **options)["y"].ratio == np.inf
