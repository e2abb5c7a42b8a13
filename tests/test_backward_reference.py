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
    OPS,
    ROW_OPS,
    make_inputs,
    options_of,
    refer,
    sizes_of,
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
