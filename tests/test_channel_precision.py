"""Tolerances of batch, group and instance norm: what is right passes, what is wrong is seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
from channel_cases import (
    COMPUTING,
    DTYPES,
    MODES,
    RUNNING,
    as_tuple,
    assert_within_bounds,
    call,
    channels_last,
    copied,
    deviations,
    make_inputs,
    refer,
    stats_option,
)

from cunorm import precision, reference

pytest.importorskip("ml_dtypes")

every_mode = pytest.mark.parametrize("mode", MODES)
SHAPE = (5, 6, 7, 3)


# ---------------------------------------------------------------------------------------------
# what is right
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("centre", [0.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
@every_mode
def test_the_rounded_reference_is_within_one_rounding(mode, dtype, centre, axis):
    inputs = make_inputs(mode, SHAPE, dtype, centre=centre)
    inputs = inputs if axis == 1 else channels_last(inputs)
    after = copied(inputs)
    results = as_tuple(call(mode, after, channel_axis=axis, **stats_option(mode)))
    found = deviations(mode, results, inputs, after, channel_axis=axis)
    assert len(found) == len(results) + 2 * (mode in COMPUTING)
    # bfloat16 is rounded by way of float32.
    half = 0.5 + 2.0**-16 if dtype == "bfloat16" else 0.5 + 2.0**-10
    for name, deviation in found.items():
        assert deviation.ratio <= (0.13 if name in ("mean", "rstd") else half), name


def float32_batch_norm(inputs, momentum):
    """Training as a good kernel computes it: float32, a mean of two numbers, centred squares."""
    x = inputs["x"].astype(np.float32)
    axes = (0, *range(2, x.ndim))
    n = x.size // x.shape[1]
    shift = x[:1].mean(axis=axes, keepdims=True, dtype=np.float32)
    d = x - shift
    low = d.mean(axis=axes, keepdims=True, dtype=np.float32)
    d = d - low
    low2 = d.mean(axis=axes, keepdims=True, dtype=np.float32)
    d = d - low2
    var = np.square(d).mean(axis=axes, keepdims=True, dtype=np.float32)
    rstd = 1 / np.sqrt(var + np.float32(1e-5))
    spread = [inputs[p].astype(np.float32).reshape(var.shape) for p in ("weight", "bias")]
    y = (d * rstd * spread[0] + spread[1]).astype(inputs["x"].dtype)
    mean = (shift + (low + low2)).ravel()
    m, one = np.float32(momentum), np.float32(1)
    unbiased = var.ravel() * np.float32(n / (n - 1))
    for name, new in zip(RUNNING, (mean, unbiased), strict=True):
        inputs[name][...] = (one - m) * inputs[name].astype(np.float32) + m * new
    return y, mean, rstd.ravel()


@pytest.mark.parametrize("centre", [0.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_float32_arithmetic_done_well_passes(dtype, centre):
    inputs = make_inputs(
        "batch_norm-training", (32, 6, 50), dtype, centre=centre, parameter_dtype="float32"
    )
    after = copied(inputs)
    results = float32_batch_norm(after, 0.3)
    assert results[0].dtype == inputs["x"].dtype
    assert_within_bounds("batch_norm-training", results, inputs, after)


def float32_backward(inputs, training):
    """The backward pass in float32, sums being NumPy's."""
    x, grad = inputs["x"], inputs["grad_out"]
    axes = (0, *range(2, x.ndim))
    n = np.float32(x.size // x.shape[1])
    shape = tuple(1 if i in axes else s for i, s in enumerate(x.shape))
    weight, mean, rstd = (inputs[p].reshape(shape) for p in ("weight", "mean", "rstd"))
    xhat = (x - mean) * rstd
    of_bias = grad.sum(axis=axes, keepdims=True, dtype=np.float32)
    of_weight = (grad * xhat).sum(axis=axes, keepdims=True, dtype=np.float32)
    inner = grad - of_bias / n - xhat * (of_weight / n) if training else grad
    return weight * rstd * inner, of_weight.ravel(), of_bias.ravel()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("centre", [0.0, 100.0])
def test_a_float32_backward_passes(training, centre):
    mode = "batch_norm_backward-training" if training else "batch_norm_backward-frozen"
    inputs = make_inputs(mode, (16, 6, 33), "float32", centre=centre)
    assert_within_bounds(mode, float32_backward(inputs, training), inputs)


def test_only_what_is_given_is_judged():
    inputs = make_inputs("batch_norm-training", SHAPE, "float32")
    y = refer("batch_norm-training", copied(inputs))
    assert list(deviations("batch_norm-training", y, inputs)) == ["y"]
    backward = make_inputs("batch_norm_backward-frozen", SHAPE, "float32") | {"weight": None}
    results = refer("batch_norm_backward-frozen", backward)
    found = deviations("batch_norm_backward-frozen", results, backward)
    assert list(found) == ["grad_x", "grad_bias"]


def test_inputs_are_left_as_they_are():
    inputs = make_inputs("batch_norm-training", SHAPE, "float32")
    before = copied(inputs)
    precision.forward_bound("batch_norm", inputs, training=True)
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("mode", ["batch_norm-training", "instance_norm", "group_norm",
                                  "batch_norm_backward-training"])  # fmt: skip
@pytest.mark.parametrize("axis", [1, -1])
def test_blocks_do_not_change_the_verdict(monkeypatch, mode, axis):
    inputs = make_inputs(mode, SHAPE, "float32")
    inputs = inputs if axis == 1 else channels_last(inputs)
    after = copied(inputs)
    results = [r.copy() for r in as_tuple(refer(mode, after, channel_axis=axis))]
    results[0][3, 1, 2, 1] += np.float32(1e-3)
    if mode in COMPUTING:
        after["running_var"][4] *= np.float32(1.5)
    whole = deviations(mode, results, inputs, after, channel_axis=axis)
    monkeypatch.setattr(reference.common, "BLOCK_ELEMENTS", 200)
    parts = deviations(mode, results, inputs, after, channel_axis=axis)
    assert list(parts) == list(whole)
    # Wide sums of a channel may be taken in another order.
    np.testing.assert_allclose(list(parts.values()), list(whole.values()), rtol=1e-9)
    assert next(iter(whole.values())).ratio > 1
    if mode in COMPUTING:
        assert whole["running_var"].ratio > 1 > whole["running_mean"].ratio


def test_output_of_another_shape_is_refused():
    inputs = make_inputs("group_norm", SHAPE, "float32")
    y, mean, rstd = refer("group_norm", inputs, return_stats=True)
    with pytest.raises(ValueError, match=r"mean must have shape \(5, 3\), got \(5, 6\)"):
        deviations("group_norm", (y, np.repeat(mean, 2, axis=1), rstd), inputs)
    with pytest.raises(ValueError, match=r"y must have shape \(5, 6, 7, 3\)"):
        deviations("group_norm", y[:4], inputs)


@pytest.mark.parametrize("mode", ["batch_norm_normalize", "batch_norm_backward-training",
                                  "batch_norm_backward-frozen"])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_flushed_subnormals_pass(mode, dtype):
    inputs = make_inputs(mode, (4, 6, 3), dtype)
    inputs["x"] = (inputs["x"].astype(np.float64) * 2.0**-127).astype(inputs["x"].dtype)
    inputs["mean"][...] = 0
    inputs["rstd"][...] = 2.0**40
    if "bias" in inputs:
        inputs["bias"][...] = 0
    kept = as_tuple(refer(mode, inputs))
    small = np.abs(inputs["x"].astype(np.float64)) < 2.0**-126
    assert small.any()
    flushed = inputs | {"x": np.where(small, np.zeros_like(inputs["x"]), inputs["x"])}
    gone = as_tuple(refer(mode, flushed))
    assert any((a != b).any() for a, b in zip(kept, gone, strict=True)) or "frozen" in mode
    assert_within_bounds(mode, gone, inputs)


def test_infinite_means_may_end_as_nan():
    inputs = make_inputs("batch_norm-training", (4, 6, 3), "float32")
    inputs["x"][1, 2, 0] = np.inf
    after = copied(inputs)
    y, mean, rstd = refer("batch_norm-training", after, return_stats=True)
    assert np.isinf(mean[2]) and np.isinf(after["running_mean"][2])
    mean[2] = after["running_mean"][2] = np.nan
    assert_within_bounds("batch_norm-training", (y, mean, rstd), inputs, after)


# ---------------------------------------------------------------------------------------------
# what is wrong
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [m for m in MODES if m != "batch_norm_stats"])
def test_two_units_are_too_many_for_narrow_dtypes(mode, dtype):
    """Results two units off are wrong, unless float roundings cost as much."""
    op, parameters = MODES[mode]
    inputs = make_inputs(mode, SHAPE, dtype)
    bound = precision.backward_bound if "backward" in op else precision.forward_bound
    expected = bound(op, inputs, **parameters)
    results = as_tuple(refer(mode, copied(inputs)))
    name = next(iter(expected))
    units = 2 if dtype in ("float16", "bfloat16") else 24
    off = results[0] + units * precision.ulp(expected[name].value, dtype).astype(results[0].dtype)
    assert precision.error_in_bounds(off, *expected[name], dtype) > 1.05


def wrong_momentum(inputs, mean, var):
    return {n: 0.3 * inputs[n] + 0.7 * v for n, v in zip(RUNNING, (mean, var), strict=True)}


def biased_variance(inputs, mean, var):
    biased = var * 104 / 105
    return {"running_mean": None, "running_var": 0.7 * inputs["running_var"] + 0.3 * biased}


def old_value_lost(inputs, mean, var):
    return {"running_mean": 0.3 * mean, "running_var": 0.3 * var}


def updated_twice(inputs, mean, var):
    return {"running_mean": 0.49 * inputs["running_mean"] + 0.51 * mean, "running_var": None}


@pytest.mark.parametrize("wrong", [wrong_momentum, biased_variance, old_value_lost, updated_twice])
@pytest.mark.parametrize("mode", ["batch_norm-training", "batch_norm_stats"])
def test_wrong_updates_are_seen(mode, wrong):
    inputs = make_inputs(mode, SHAPE, "float32", centre=2.0)
    after = copied(inputs)
    results = as_tuple(refer(mode, after, **stats_option(mode)))
    wide = inputs["x"].astype(np.float64)
    changed = wrong(inputs, wide.mean(axis=(0, 2, 3)), wide.var(axis=(0, 2, 3), ddof=1))
    after |= {n: v.astype(np.float32) for n, v in changed.items() if v is not None}
    found = deviations(mode, results, inputs, after)
    seen = {name for name, deviation in found.items() if deviation.ratio > 1}
    assert seen == {name for name, values in changed.items() if values is not None}


def test_instance_norm_takes_the_mean_of_the_variances_and_not_that_of_the_batch():
    inputs = make_inputs("instance_norm", SHAPE, "float32")
    after = copied(inputs)
    results = as_tuple(refer("instance_norm", after))
    whole = inputs["x"].astype(np.float64).var(axis=(0, 2, 3), ddof=1)
    after["running_var"] = (0.7 * inputs["running_var"] + 0.3 * whole).astype(np.float32)
    found = deviations("instance_norm", results, inputs, after)
    assert found["running_var"].ratio > 1 >= found["running_mean"].ratio


def naive_variance(x):
    mean = x.mean(axis=(0, 2), keepdims=True, dtype=np.float32)
    var = np.square(x).mean(axis=(0, 2), keepdims=True, dtype=np.float32) - np.square(mean)
    with np.errstate(invalid="ignore"):
        return (x - mean) / np.sqrt(var + np.float32(1e-5))


def uncorrected_mean(x):
    d = (x - x.mean(axis=(0, 2), keepdims=True, dtype=np.float32)).astype(np.float64)
    return d / np.sqrt(np.square(d).mean(axis=(0, 2), keepdims=True) + 1e-5)


def unbiased_variance(x):
    x = x.astype(np.float64)
    d = x - x.mean(axis=(0, 2), keepdims=True)
    return d / np.sqrt(d.var(axis=(0, 2), ddof=1, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    ("wrong", "centre"),
    [
        (naive_variance, 1e4),
        (naive_variance, 30.0),
        (uncorrected_mean, 1e4),
        (unbiased_variance, 0.0),
    ],
)
def test_wrong_batch_norms_are_seen(wrong, centre):
    inputs = make_inputs("batch_norm-training", (40, 6, 25), "float32", centre=centre)
    inputs = {"x": inputs["x"]}
    y = wrong(inputs["x"]).astype(np.float32)
    found = precision.forward_deviation("batch_norm", y, inputs, training=True)
    assert found["y"].ratio > 1
    y = reference.batch_norm(**inputs, training=True)
    assert precision.forward_deviation("batch_norm", y, inputs, training=True)["y"].ratio < 0.2


def grad_parts(inputs):
    x, grad = inputs["x"].astype(np.float64), inputs["grad_out"].astype(np.float64)
    weight, mean, rstd = (inputs[p].reshape(1, 6, 1).astype(np.float64) for p in
                          ("weight", "mean", "rstd"))  # fmt: skip
    xhat = (x - mean) * rstd
    return grad, xhat, weight * rstd, weight * rstd**3


def no_mean_term(inputs):
    grad, xhat, factor, _ = grad_parts(inputs)
    return factor * (grad - xhat * (grad * xhat).mean(axis=(0, 2), keepdims=True))


def no_variance_term(inputs):
    grad, _, factor, _ = grad_parts(inputs)
    return factor * (grad - grad.mean(axis=(0, 2), keepdims=True))


def frozen_formula(inputs):
    grad, _, factor, _ = grad_parts(inputs)
    return factor * grad


def cubed_rstd(inputs):
    """FlagGems#5222: the saved reciprocal deviation taken for something else."""
    grad, xhat, _, cubed = grad_parts(inputs)
    terms = (grad.mean(axis=(0, 2), keepdims=True), (grad * xhat).mean(axis=(0, 2), keepdims=True))
    return cubed * (grad - terms[0] - xhat * terms[1])


@pytest.mark.parametrize("wrong", [no_mean_term, no_variance_term, frozen_formula, cubed_rstd])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_wrong_gradients_of_x_are_seen(wrong, dtype):
    mode = "batch_norm_backward-training"
    inputs = make_inputs(mode, (9, 6, 11), dtype)
    grads = list(refer(mode, inputs))
    grads[0] = wrong(inputs).astype(grads[0].dtype)
    found = deviations(mode, grads, inputs)
    assert {name for name, deviation in found.items() if deviation.ratio > 1} == {"grad_x"}


@pytest.mark.parametrize(("index", "name"), [(1, "grad_weight"), (2, "grad_bias")])
def test_a_term_left_out_of_a_sum_is_seen(index, name):
    """MIOpen#2024: a tail that is never read is some percent of the sum, and in no tolerance."""
    mode = "batch_norm_backward-training"
    inputs = make_inputs(mode, (64, 6, 49), "float32")
    grads = list(refer(mode, inputs))
    short = {n: a[..., :-1] if a.ndim == 3 else a for n, a in inputs.items()}
    grads[index] = refer(mode, short)[index]
    found = deviations(mode, grads, inputs)
    assert {n for n, deviation in found.items() if deviation.ratio > 1} == {name}


def test_a_sum_may_be_wrong_by_the_rule():
    """8 * eps * sqrt(count) * rms(term), beyond one unit in the last place."""
    inputs = make_inputs("batch_norm_backward-frozen", (7, 6, 11), "float32")
    expected = precision.backward_bound("batch_norm_backward", inputs, training=False)
    terms = inputs["grad_out"].astype(np.float64)
    rms = np.sqrt(np.square(terms).mean(axis=(0, 2)))
    rule = 8 * 2.0**-23 * math.sqrt(77) * rms
    value, bound = expected["grad_bias"]
    np.testing.assert_allclose(value, terms.sum(axis=(0, 2)), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(bound, rule + precision.ulp(value, "float32"), rtol=1e-6)
