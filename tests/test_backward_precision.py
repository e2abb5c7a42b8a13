"""Tolerances of gradients: what is right passes, what is wrong is seen."""

from __future__ import annotations

import numpy as np
import pytest
from backward_cases import (
    ADAPTIVE,
    CLASSES,
    DTYPES,
    FUSED,
    GROUP_OPS,
    OPS,
    ROW_OPS,
    assert_within_bounds,
    call,
    deviations,
    make_inputs,
    options_of,
    sizes_of,
    x_name,
)

from cunorm import precision, reference

pytest.importorskip("ml_dtypes")

every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def shape_of(op, rows=37, cols=29):
    return (rows, cols) if op in ROW_OPS else (5, 6, rows)


# ---------------------------------------------------------------------------------------------
# what is right
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("centre", [0.0, 30.0])
@every_dtype
@every_op
def test_the_rounded_reference_is_within_one_rounding(op, dtype, centre, axis):
    if op in ROW_OPS and axis == -1:
        sizes = sizes_of(op, (4, 5, 11), 1, (4, 1, 11) if op in ADAPTIVE else None)
    else:
        sizes = sizes_of(op, (5, 6, 7, 3) if axis == 1 else (5, 7, 3, 6), axis)
    inputs = make_inputs(op, sizes, dtype, centre=centre, grad_centre=centre)
    found = deviations(op, call(op, inputs, sizes), inputs, sizes)
    assert list(found) == list(CLASSES[op].output_names)
    # bfloat16 is rounded by way of float32.
    half = 0.5 + 2.0**-16 if dtype == "bfloat16" else 0.5 + 2.0**-10
    for name, deviation in found.items():
        assert deviation.ratio <= half, name


def pairwise(terms):
    """Sums over the first axis in float32; NumPy's are pairwise along the last axis alone."""
    return np.ascontiguousarray(terms.T).sum(axis=-1, dtype=np.float32)


def one_by_one(terms):
    return np.cumsum(terms, axis=0, dtype=np.float32)[-1]


def in_float32(op, inputs, sizes, total_of=pairwise, without=""):
    """A backward pass in float32."""
    f = {n: None if a is None else a.astype(np.float32) for n, a in inputs.items()}
    x, over = f[x_name(op)], -1
    if op in GROUP_OPS:
        groups = sizes.statistic[1]
        view = (sizes.x[0], groups, sizes.x[1] // groups, *sizes.x[2:])
        over = tuple(range(2, len(view)))
        f["weight"] = f["weight"].reshape(groups, -1, *(1,) * (len(view) - 3))
        x, f["grad_out"] = x.reshape(view), f["grad_out"].reshape(view)
    grown = (slice(None),) * len(sizes.statistic) + (None,) * (x.ndim - len(sizes.statistic))
    mean, rstd = f.get("mean", np.zeros(sizes.statistic, np.float32))[grown], f["rstd"][grown]
    grad, xhat = f["grad_out"], (x - mean) * rstd
    gate, scale = f.get("gate", np.float32(1)), f.get("scale", f.get("weight"))
    g = grad * gate * scale
    inner = g
    if without != "g * xhat":
        inner = inner - xhat * (g * xhat).mean(axis=over, keepdims=True)
    if "rms" not in op and without != "g":
        inner = inner - g.mean(axis=over, keepdims=True)
    of_x = rstd * inner
    if f.get("grad_residual_out") is not None and without != "added":
        of_x = of_x + f["grad_residual_out"]
    terms = {"weight": grad * xhat, "bias": grad, "scale": grad * gate * xhat}
    terms |= {"shift": grad * gate, "gate": grad * (scale * xhat + f.get("shift", np.float32(0)))}
    results = [of_x.reshape(sizes.x).astype(inputs["grad_out"].dtype)]
    for name in CLASSES[op].output_names[1:]:
        name = name.removeprefix("grad_")
        of = inputs.get(name, inputs.get("weight", inputs.get("scale")))
        columns = terms[name]
        if op in GROUP_OPS:
            columns = np.moveaxis(columns.reshape(sizes.x), 1, -1)
        one_row = of.size == of.shape[-1]
        total = total_of(columns.reshape(-1, of.shape[-1])) if one_row else columns
        results.append(total.reshape(of.shape).astype(of.dtype))
    return results


@pytest.mark.parametrize("centre", [0.0, 100.0])
@pytest.mark.parametrize("grad_centre", [0.0, 100.0])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@every_op
def test_float32_arithmetic_passes(op, dtype, centre, grad_centre):
    sizes = sizes_of(op, (200, 333) if op in ROW_OPS else (8, 6, 333))
    inputs = make_inputs(
        op, sizes, dtype, centre=centre, grad_centre=grad_centre, parameter_dtype="float32"
    )
    assert_within_bounds(op, in_float32(op, inputs, sizes), inputs, sizes)


def flushed(array):
    """Subnormals of float32 as zero, as kernels read and write them."""
    return np.where(np.abs(array) < 2.0**-126, 0, array).astype(array.dtype)


@every_op
def test_flushed_subnormals_pass(op):
    sizes = sizes_of(op, shape_of(op))
    inputs = make_inputs(op, sizes, "float32")
    x = inputs[x_name(op)]
    for name in ("grad_out", "grad_residual_out"):
        if name in inputs:
            inputs[name] *= np.float32(2.0**-126)
    x[::2] *= np.float32(2.0**-127)
    given = {name: flushed(array) for name, array in inputs.items()}
    results = [flushed(array) for array in in_float32(op, given, sizes)]
    assert_within_bounds(op, results, inputs, sizes)


@every_op
def test_one_huge_row_among_small_ones_passes(op):
    sizes = sizes_of(op, (64, 96) if op in ROW_OPS else (8, 6, 96))
    inputs = make_inputs(op, sizes, "float32")
    inputs["grad_out"][3] *= 1e20
    inputs[x_name(op)][3] *= 1e15
    refreshed = make_inputs(op, sizes, "float32", x=inputs[x_name(op)])
    inputs |= {name: refreshed[name] for name in ("mean", "rstd") if name in inputs}
    assert_within_bounds(op, in_float32(op, inputs, sizes), inputs, sizes)


@every_op
def test_bound_and_deviation_are_of_one_mind(op):
    sizes = sizes_of(op, shape_of(op))
    inputs = make_inputs(op, sizes, "float32", parameter_dtype="float32")
    expected = precision.backward_bound(op, inputs, **options_of(op, sizes))
    assert tuple(expected) == CLASSES[op].output_names
    results = in_float32(op, inputs, sizes)
    found = deviations(op, results, inputs, sizes)
    for (name, one), result in zip(expected.items(), results, strict=True):
        assert one.value.shape == one.bound.shape == result.shape
        ratio = precision.error_in_bounds(result, *one, result.dtype)
        assert ratio == pytest.approx(found[name].ratio)


@every_op
@pytest.mark.parametrize("axis", [1, -1])
def test_blocks_do_not_change_the_verdict(monkeypatch, op, axis):
    shape = (6, 4, 5) if op in ROW_OPS else (5, 6, 4, 3) if axis == 1 else (5, 4, 3, 6)
    sizes = sizes_of(op, shape, axis, (6, 1, 5) if op in ADAPTIVE else None)
    inputs = make_inputs(op, sizes, "float32")
    results = [r.copy() for r in call(op, inputs, sizes)]
    results[0][3, 1, 2] += np.float32(1e-3)
    results[1].ravel()[4] *= np.float32(1.01)
    whole = deviations(op, results, inputs, sizes)
    monkeypatch.setattr(reference.common, "BLOCK_ELEMENTS", 10)
    for name, deviation in deviations(op, results, inputs, sizes).items():
        assert deviation.ratio == pytest.approx(whole[name].ratio, rel=1e-6)
    assert whole[CLASSES[op].output_names[0]].ratio > 1
    assert whole[CLASSES[op].output_names[1]].ratio > 1


@every_op
def test_only_what_is_given_is_judged(op):
    sizes = sizes_of(op, shape_of(op))
    inputs = make_inputs(op, sizes, "float32")
    results = list(call(op, inputs, sizes))
    for i, name in enumerate(CLASSES[op].output_names):
        some = [None if i == j else result for j, result in enumerate(results)]
        assert name not in deviations(op, some, inputs, sizes)
        assert len(deviations(op, some, inputs, sizes)) == len(results) - 1


# ---------------------------------------------------------------------------------------------
# what is wrong
# ---------------------------------------------------------------------------------------------


@every_op
@every_dtype
def test_two_units_off_are_seen_in_every_gradient(op, dtype):
    sizes = sizes_of(op, shape_of(op, 3) if op in ROW_OPS else (1, 6, 3))
    inputs = make_inputs(op, sizes, dtype)
    for i, name in enumerate(CLASSES[op].output_names):
        results = [r.copy() for r in call(op, inputs, sizes)]
        bound = precision.backward_bound(op, inputs, **options_of(op, sizes))[name].bound
        at = np.unravel_index(np.argmax(np.abs(results[i]).astype(float)), results[i].shape)
        wrong = results[i].astype(bound.dtype)
        wrong[at] += 2 * bound[at]
        results[i] = wrong.astype(results[i].dtype)
        found = deviations(op, results, inputs, sizes)
        assert [n for n, d in found.items() if d.ratio > 1] == [name]


@every_op
def test_sums_taken_one_by_one_are_seen(op):
    """Thousands of terms of one sign, each rounded into a sum that has grown large."""
    sizes = sizes_of(op, (20_000, 7) if op in ROW_OPS else (500, 6, 40))
    inputs = make_inputs(op, sizes, "float32", grad_centre=100.0)
    inputs |= {n: np.ones_like(inputs[n]) for n in ("gate", "shift") if n in inputs}
    if "mean" not in inputs:
        inputs[x_name(op)][...] = np.abs(inputs[x_name(op)])
    found = deviations(op, in_float32(op, inputs, sizes, one_by_one), inputs, sizes)
    assert found[CLASSES[op].output_names[-1]].ratio > 1
    assert_within_bounds(op, in_float32(op, inputs, sizes), inputs, sizes)


@pytest.mark.parametrize("op", [op for op in OPS if "rms" not in op])
def test_a_mean_taken_off_after_the_product_is_seen(op):
    """``x * rstd - mean * rstd`` cancels where x has an offset."""
    sizes = sizes_of(op, shape_of(op))
    inputs = make_inputs(op, sizes, "float32", centre=1e4)
    x = inputs[x_name(op)]
    mean, rstd = (inputs[name][..., None] for name in ("mean", "rstd"))
    if op == "group_norm_backward":
        mean, rstd = (np.repeat(statistic, 2, axis=1) for statistic in (mean, rstd))
    cancelled = x * rstd - mean * rstd
    # The same pass over what it takes to be x: its statistics are 0 and 1, its grad_x in units.
    like = {"mean": np.zeros_like(inputs["mean"]), "rstd": np.ones_like(inputs["rstd"])}
    if "grad_residual_out" in inputs:
        inputs["grad_residual_out"] = None
    results = list(in_float32(op, inputs | like | {x_name(op): cancelled}, sizes))
    results[0] = results[0] * rstd
    found = deviations(op, results, inputs, sizes)
    assert found[CLASSES[op].output_names[0]].ratio > 1
    assert found[CLASSES[op].output_names[1]].ratio > 1


FORGOTTEN = [(op, "g * xhat") for op in OPS] + [(op, "g") for op in OPS if "rms" not in op]
FORGOTTEN += [(op, "added") for op in FUSED]


@pytest.mark.parametrize(("op", "term"), FORGOTTEN)
def test_a_forgotten_term_is_seen(op, term):
    sizes = sizes_of(op, shape_of(op))
    inputs = make_inputs(op, sizes, "bfloat16", centre=1.0, grad_centre=1.0)
    results = in_float32(op, inputs, sizes, without=term)
    first, *others = CLASSES[op].output_names
    found = deviations(op, results, inputs, sizes)
    assert found[first].ratio > 1
    assert all(found[name].ratio <= 1 for name in others)


@every_op
def test_a_nan_must_stand_where_it_belongs(op):
    sizes = sizes_of(op, shape_of(op))
    inputs = make_inputs(op, sizes, "float32")
    results = [r.copy() for r in call(op, inputs, sizes)]
    for i, name in enumerate(CLASSES[op].output_names):
        wrong = [r.copy() for r in results]
        wrong[i].ravel()[0] = np.nan
        assert deviations(op, wrong, inputs, sizes)[name].ratio == np.inf


@every_op
def test_shapes_must_agree(op):
    sizes = sizes_of(op, shape_of(op))
    inputs = make_inputs(op, sizes, "float32")
    for i, name in enumerate(CLASSES[op].output_names):
        wrong = list(call(op, inputs, sizes))
        wrong[i] = wrong[i][..., :-1]
        with pytest.raises(ValueError, match=f"{op}: {name} must have shape"):
            deviations(op, wrong, inputs, sizes)


def test_a_gate_whose_parts_cancel_has_an_allowance_for_them():
    """scale * xhat + shift near zero is as wrong as its parts."""
    op = "ada_layer_norm_zero_backward"
    sizes = sizes_of(op, (50, 31), parameter_shape=(50, 31))
    inputs = make_inputs(op, sizes, "float32")
    xhat = (inputs["x"] - inputs["mean"][:, None]) * inputs["rstd"][:, None]
    inputs["shift"] = -inputs["scale"] * xhat
    found = deviations(op, in_float32(op, inputs, sizes), inputs, sizes)
    assert found["grad_gate"].ratio <= 1
    assert np.abs(call(op, inputs, sizes)[3]).max() < 1e-5
