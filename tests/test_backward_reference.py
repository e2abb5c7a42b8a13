"""The definitions of gradients against finite differences, autograd and plain arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from backward_cases import (
    ADAPTIVE,
    CLASSES,
    FUSED,
    GRADIENTS_OF_X,
    GROUP_OPS,
    GROUPS,
    MODULATION,
    OPS,
    ROW_OPS,
    make_inputs,
    options_of,
    refer,
    sizes_of,
    statistics_of,
    x_name,
)
from cases import noise

from cunorm import reference

pytest.importorskip("ml_dtypes")

every_op = pytest.mark.parametrize("op", OPS)

# Name, op, shape of x, channel axis, shape of scale, shift and gate (or None: one row).
LAYOUTS = [(op, (3, 2, 5), 1, None) for op in ROW_OPS]
LAYOUTS += [
    (op, (3, 2, 5), 1, shape) for op in ADAPTIVE for shape in [(3, 1, 5), (3, 2, 5), (1, 5)]
]
LAYOUTS += [(op, (2, 6, 2, 3), 1, None) for op in GROUP_OPS]
LAYOUTS += [(op, (2, 5, 6), -1, None) for op in GROUP_OPS]
every_layout = pytest.mark.parametrize(("op", "shape", "axis", "parameter"), LAYOUTS, ids=str)


@pytest.fixture(autouse=True)
def _numpy_errors_raise():
    """The definitions silence what they expect; nothing else may warn."""
    with np.errstate(all="raise"):
        yield


def forward_inputs(op, inputs, sizes):
    """Arguments of the forward op by name, a residual and a bias among them, in float64."""
    given = {n: a for n, a in inputs.items() if n in ("weight", "scale", "shift", "gate")}
    given["x"] = inputs[x_name(op)]
    if op in FUSED:
        given["residual"] = noise(sizes.x, 20)
        given["x"] = given["x"] - given["residual"]
    if "weight" in given and "rms" not in op:
        given["bias"] = noise(sizes.parameter, 21)
    if op in ADAPTIVE:
        given.setdefault("shift", noise(sizes.parameter, 22))
    return given


def forward(op, given, sizes, eps=0.01, **options):
    function = reference.FORWARD[op.removesuffix("_backward")]
    return function(**given, **options_of(op, sizes), eps=eps, **options)


def loss(op, given, inputs, sizes):
    """What grad_out and grad_residual_out are the gradients of."""
    results = forward(op, given, sizes)
    results = results if isinstance(results, tuple) else (results,)
    weights = [inputs["grad_out"], inputs.get("grad_residual_out")]
    return sum(np.sum(w * r) for w, r in zip(weights, results, strict=False))


def gradients_by_argument(op, inputs, sizes):
    """What the definition gives for each argument of the forward op."""
    given = forward_inputs(op, inputs, sizes)
    statistics = forward(op, given, sizes, return_stats=True)[-2 + ("rms" in op) :]
    names = ["rstd"] if "rms" in op else ["mean", "rstd"]
    results = refer(op, inputs | dict(zip(names, statistics, strict=True)), sizes)
    found = dict(zip(CLASSES[op].output_names, results, strict=True))
    of_x = next(found[n] for n in GRADIENTS_OF_X if n in found)
    return {n: found.get(f"grad_{n}", of_x) for n in given}, given


# ---------------------------------------------------------------------------------------------
# finite differences, autograd
# ---------------------------------------------------------------------------------------------


@every_layout
def test_every_argument_matches_finite_differences(op, shape, axis, parameter):
    optimize = pytest.importorskip("scipy.optimize")
    sizes = sizes_of(op, shape, axis, parameter)
    inputs = make_inputs(op, sizes, "float64", centre=2.0)
    analytic, given = gradients_by_argument(op, inputs, sizes)
    for name, at in given.items():

        def of(values, name=name, at=at):
            return loss(op, given | {name: values.reshape(at.shape)}, inputs, sizes)

        # Forward differences: wrong by half the step times the second derivative.
        numeric = optimize.approx_fprime(at.ravel(), of, 1e-7)
        assert analytic[name].shape == at.shape
        np.testing.assert_allclose(
            analytic[name].ravel(), numeric, rtol=5e-6, atol=5e-6, err_msg=name
        )


def torch_forward(torch, op, t, sizes):
    """y, and the sum of the fused adds, of tensors by name."""
    functional, last = torch.nn.functional, sizes.x[-1:]
    if op in GROUP_OPS:
        groups = GROUPS if op == "group_norm_backward" else sizes.x[sizes.axis]
        first = t["x"] if sizes.axis == 1 else t["x"].movedim(-1, 1)
        y = functional.group_norm(first, groups, t["weight"], t["bias"], 0.01)
        return (y if sizes.axis == 1 else y.movedim(1, -1),)
    if op in ADAPTIVE:
        y = t["scale"] * functional.layer_norm(t["x"], last, eps=0.01) + t["shift"]
        return (y * t["gate"] if "gate" in t else y,)
    total = t["x"] + t["residual"] if "residual" in t else t["x"]
    if "rms" in op:
        return functional.rms_norm(total, last, t["weight"], 0.01), total
    return functional.layer_norm(total, last, t["weight"], t["bias"], 0.01), total


@pytest.mark.torch
@every_layout
def test_every_argument_matches_autograd(op, shape, axis, parameter):
    torch = pytest.importorskip("torch")
    sizes = sizes_of(op, shape, axis, parameter)
    inputs = make_inputs(op, sizes, "float64", centre=3.0, seed=3)
    analytic, given = gradients_by_argument(op, inputs, sizes)
    tensors = {n: torch.from_numpy(a.copy()).requires_grad_() for n, a in given.items()}
    results = torch_forward(torch, op, tensors, sizes)
    grads = [torch.from_numpy(inputs["grad_out"])]
    if op in FUSED:
        grads.append(torch.from_numpy(inputs["grad_residual_out"]))
    expected = torch.autograd.grad(results[: len(grads)], list(tensors.values()), grads)
    for (name, got), want in zip(analytic.items(), expected, strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-11, atol=1e-12, err_msg=name)


# ---------------------------------------------------------------------------------------------
# plain arithmetic
# ---------------------------------------------------------------------------------------------


@every_op
def test_blocks_do_not_change_the_result(monkeypatch, op):
    sizes = sizes_of(op, (4, 3, 5) if op in ROW_OPS else (4, 6, 5), 1, None)
    inputs = make_inputs(op, sizes, "float64")
    whole = refer(op, inputs, sizes)
    monkeypatch.setattr(reference.common, "BLOCK_ELEMENTS", 7)
    for got, want in zip(refer(op, inputs, sizes), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("op", ADAPTIVE)
@pytest.mark.parametrize(
    "parameter", [(5,), (1, 5), (3, 1, 5), (1, 2, 5), (4, 3, 2, 5), (4, 1, 1, 5)]
)
def test_gradients_of_broadcast_arrays_are_summed(op, parameter):
    shape = (4, 3, 2, 5)
    sizes = sizes_of(op, shape, 1, parameter)
    inputs = make_inputs(op, sizes, "float64")
    full = {n: np.broadcast_to(inputs[n], shape).copy() for n in MODULATION if n in inputs}
    of_x, *summed = refer(op, inputs, sizes)
    full_of_x, *each = refer(op, inputs | full, sizes)
    np.testing.assert_allclose(of_x, full_of_x, rtol=1e-15)
    lead = (1,) * (4 - len(parameter)) + parameter
    over = tuple(i for i, n in enumerate(lead) if n == 1)
    for got, terms in zip(summed, each, strict=True):
        assert got.shape == parameter
        want = terms.sum(axis=over, keepdims=True).reshape(parameter)
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


def test_scale_shift_and_gate_may_be_broadcast_each_in_its_way():
    op, shape = "ada_layer_norm_zero_backward", (4, 3, 5)
    inputs = make_inputs(op, sizes_of(op, shape), "float32")
    given = {"scale": noise((4, 1, 5), 30), "shift": noise((5,), 31), "gate": noise((3, 5), 32)}
    kinds = {"scale": np.float32, "shift": np.float64, "gate": np.float16}
    inputs |= {n: a.astype(kinds[n]) for n, a in given.items()}
    _, *grads = reference.ada_layer_norm_zero_backward(**inputs)
    assert [g.shape for g in grads] == [(4, 1, 5), (5,), (3, 5)]
    assert [g.dtype for g in grads] == list(kinds.values())


def test_several_normalized_axes_are_one_row():
    op = "layer_norm_backward"
    inputs = make_inputs(op, sizes_of(op, (3, 4, 10)), "float64")
    flat = reference.layer_norm_backward(normalized_shape=10, **inputs)
    folded = {n: a.reshape(*a.shape[:-1], 2, 5) for n, a in inputs.items() if a.shape[-1:] == (10,)}
    found = reference.layer_norm_backward(normalized_shape=(2, 5), **inputs | folded)
    for got, want in zip(found, flat, strict=True):
        np.testing.assert_allclose(got.ravel(), want.ravel(), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("axis", [1, -1])
def test_group_norms_of_one_group_and_of_as_many_as_channels(axis):
    shape = (3, 6, 5) if axis == 1 else (3, 5, 6)
    sizes = sizes_of("instance_norm_backward", shape, axis)
    inputs = make_inputs("instance_norm_backward", sizes, "float64")
    each = reference.instance_norm_backward(**inputs, channel_axis=axis)
    for got, want in zip(
        reference.group_norm_backward(num_groups=6, **inputs, channel_axis=axis), each, strict=True
    ):
        np.testing.assert_array_equal(got, want)

    # One group: layer norm of the sample with a weight for each element.
    y, mean, rstd = reference.group_norm(inputs["x"], 1, channel_axis=axis, return_stats=True)
    inputs |= {"mean": mean, "rstd": rstd}
    of_x, of_weight, of_bias = reference.group_norm_backward(
        num_groups=1, **inputs, channel_axis=axis
    )
    spread = inputs["weight"][:, None] if axis == 1 else inputs["weight"]
    weight = np.broadcast_to(spread, shape[1:])
    as_rows = inputs | {"weight": weight, "mean": mean[:, 0], "rstd": rstd[:, 0]}
    rows = reference.layer_norm_backward(normalized_shape=shape[1:], **as_rows)
    np.testing.assert_allclose(of_x, rows[0], rtol=1e-12, atol=1e-14)
    over = 1 if axis == 1 else 0
    np.testing.assert_allclose(of_weight, rows[1].sum(axis=over), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(of_bias, rows[2].sum(axis=over), rtol=1e-12, atol=1e-14)


@every_op
def test_gradients_of_x_are_orthogonal_to_what_the_norm_takes_out(op):
    """A shift of a row, and but for eps a stretch of it, do not change what is normalized."""
    sizes = sizes_of(op, (7, 12) if op in ROW_OPS else (3, 6, 10))
    without = ("grad_residual_out",) if op in FUSED else ()
    inputs = make_inputs(op, sizes, "float64", centre=2.0, without=without)
    x = inputs[x_name(op)]
    mean, rstd = statistics_of(op, sizes, x, eps=0.0)
    inputs |= {"rstd": rstd} if mean is None else {"mean": mean, "rstd": rstd}
    of_x = refer(op, inputs, sizes)[0]
    rows = (sizes.x[0] * sizes.statistic[-1], -1) if op in GROUP_OPS else sizes.x
    np.testing.assert_allclose((of_x * x).reshape(rows).sum(axis=-1), 0, atol=1e-12)
    if mean is not None:
        np.testing.assert_allclose(of_x.reshape(rows).sum(axis=-1), 0, atol=1e-13)


@every_op
def test_rows_without_spread_have_no_gradient_with_eps_zero(op):
    sizes = sizes_of(op, (4, 12) if op in ROW_OPS else (3, 6, 10))
    without = ("grad_residual_out",) if op in FUSED else ()
    x = np.full(sizes.x, 0.0 if "rms" in op else 3.0)
    inputs = make_inputs(op, sizes, "float32", x=x, without=without)
    mean, rstd = statistics_of(op, sizes, inputs[x_name(op)], eps=0.0)
    inputs |= {"rstd": rstd} if mean is None else {"mean": mean, "rstd": rstd}
    of_x, of_weight, *_ = refer(op, inputs, sizes)
    assert (of_x == 0).all()
    assert (of_weight == 0).all()


@every_op
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(op, value):
    sizes = sizes_of(op, (5, 8) if op in ROW_OPS else (3, 6, 4))
    inputs = make_inputs(op, sizes, "float32")
    clean = refer(op, inputs, sizes)[0]
    inputs["grad_out"][1, 2] = value
    of_x = refer(op, inputs, sizes)[0]
    spoilt = [] if op == "instance_norm_backward" else [3] if op == "group_norm_backward" else None
    rest = np.delete(of_x, 1, axis=0), np.delete(clean, 1, axis=0)
    np.testing.assert_array_equal(*rest)
    if spoilt is None:
        assert not np.isfinite(of_x[1]).any()
    else:  # the channel, and the one that shares its group
        assert not np.isfinite(of_x[1, [2, *spoilt]]).any()
        others = [c for c in range(6) if c not in (2, *spoilt)]
        np.testing.assert_array_equal(of_x[1, others], clean[1, others])
