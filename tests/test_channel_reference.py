"""The definitions of batch, group and instance norm against arithmetic that shares nothing."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from channel_cases import (
    COMPUTING,
    MODES,
    RUNNING,
    SHAPES,
    as_tuple,
    channels_last,
    copied,
    make_inputs,
    refer,
    stats_option,
    to_channel_axis,
)

from cunorm import reference

pytest.importorskip("ml_dtypes")

every_axis = pytest.mark.parametrize("axis", [1, -1])
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def _numpy_errors_raise():
    """The definitions silence what they expect; nothing else may warn."""
    with np.errstate(all="raise"):
        yield


# ---------------------------------------------------------------------------------------------
# loops, element by element
# ---------------------------------------------------------------------------------------------


def moments(values):
    """Mean and sum of squared deviations, with exactly rounded sums."""
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values)


def loop_forward(op, inputs, parameters, eps):
    """y, mean, rstd and running statistics of (N, C, ...) arrays by plain loops."""
    x = inputs["x"].astype(float)
    samples, channels = x.shape[:2]
    flat = x.reshape(samples, channels, -1)
    groups = {"group_norm": parameters.get("num_groups"), "instance_norm": channels}.get(op, 1)
    size = channels // groups
    weight, bias = inputs.get("weight"), inputs.get("bias")
    y, stats, variances = np.empty_like(flat), {}, {}
    frozen = not parameters.get("training", parameters.get("use_input_stats", op != "batch_norm"))
    for n, c in np.ndindex(samples, channels):
        if op.startswith("batch_norm"):
            key, values = c, flat[:, c].ravel()
        else:
            key, values = (n, c // size), flat[n, c // size * size : (c // size + 1) * size].ravel()
        if "rstd" in inputs:
            stats[key] = inputs["mean"][c], inputs["rstd"][c]
        elif frozen:
            stats[key] = inputs["running_mean"][c], 1 / math.sqrt(inputs["running_var"][c] + eps)
        else:
            mean, square = moments(values.tolist())
            stats[key] = mean, 1 / math.sqrt(square / len(values) + eps)
            variances[key] = square / (len(values) - 1)
        mean, rstd = stats[key]
        for i, value in enumerate(flat[n, c]):
            xhat = (value - mean) * rstd
            y[n, c, i] = xhat if weight is None else xhat * weight[c] + bias[c]
    return y.reshape(x.shape), stats, variances


def loop_running(inputs, stats, variances, momentum):
    """Running statistics after a call: keys of statistics are a channel, or a sample and one."""
    new = {name: [] for name in RUNNING}
    for c in range(6):
        keys = [k for k in stats if k == c or (isinstance(k, tuple) and k[1] == c)]
        new["running_mean"].append(np.mean([stats[k][0] for k in keys]))
        new["running_var"].append(np.mean([variances[k] for k in keys]))
    return {n: (1 - momentum) * inputs[n] + momentum * np.array(new[n]) for n in RUNNING}


@every_axis
@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        (mode, shape)
        for mode, shape in itertools.product(MODES, SHAPES)
        # One spatial element has no variance.
        if "backward" not in mode and (mode != "instance_norm" or len(shape) > 2)
    ],
    ids=str,
)
def test_matches_a_loop(mode, shape, axis):
    op, parameters = MODES[mode]
    inputs = make_inputs(mode, shape, "float64", centre=3.0, spread=2.0)
    y, stats, variances = loop_forward(op, inputs, parameters, 1e-5)
    given = copied(inputs) if axis == 1 else channels_last(copied(inputs))
    results = as_tuple(refer(mode, given, channel_axis=axis, **stats_option(mode)))
    if op != "batch_norm_stats":
        np.testing.assert_allclose(results[0], to_channel_axis(y, axis), rtol=1e-12, atol=1e-14)
    if op != "batch_norm_normalize":
        for got, want in zip(results[-2:], zip(*stats.values(), strict=True), strict=True):
            np.testing.assert_allclose(got, np.reshape(want, got.shape), rtol=1e-12)
    if mode in COMPUTING:
        for name, want in loop_running(inputs, stats, variances, 0.3).items():
            np.testing.assert_allclose(given[name], want, rtol=1e-12)


def loop_backward(inputs, training):
    """Gradients of (N, C, ...) arrays from the chain rule, channel by channel."""
    x, grad = inputs["x"], inputs["grad_out"]
    grad_x, grad_weight, grad_bias = np.empty_like(x), [], []
    for c in range(x.shape[1]):
        xhat = ((x[:, c] - inputs["mean"][c]) * inputs["rstd"][c]).ravel()
        g = grad[:, c].ravel()
        n = len(g)
        # d y_i / d x_j = w * rstd * (delta_ij - 1/n - xhat_i * xhat_j / n), or its first term.
        jacobian = np.eye(n)
        if training:
            jacobian -= 1 / n + np.outer(xhat, xhat) / n
        factor = inputs["weight"][c] * inputs["rstd"][c]
        grad_x[:, c] = (factor * (g @ jacobian)).reshape(x[:, c].shape)
        grad_weight.append(math.fsum(g * xhat))
        grad_bias.append(math.fsum(g))
    return grad_x, np.array(grad_weight), np.array(grad_bias)


@every_axis
@every_shape
@pytest.mark.parametrize("training", [True, False])
def test_backward_matches_the_jacobian(shape, axis, training):
    inputs = make_inputs("batch_norm_backward-training", shape, "float64", centre=1.0)
    expected = loop_backward(inputs, training)
    given = inputs if axis == 1 else channels_last(inputs)
    got = reference.batch_norm_backward(**given, training=training, channel_axis=axis)
    for a, b in zip(got, (to_channel_axis(expected[0], axis), *expected[1:]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


# ---------------------------------------------------------------------------------------------
# finite differences, scipy, torch
# ---------------------------------------------------------------------------------------------


@every_axis
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("argument", ["x", "weight", "bias"])
def test_backward_matches_finite_differences(training, argument, axis):
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(4)
    shape = (3, 2, 4) if axis == 1 else (3, 4, 2)
    x, grad_out = 2 + rng.standard_normal((2, *shape))
    weight, bias, running_mean = rng.standard_normal((3, 2))
    running_var = 0.5 + rng.random(2)

    def forward(**changed):
        given = {"x": x, "weight": weight, "bias": bias} | changed
        running = () if training else (running_mean, running_var)
        return reference.batch_norm(
            **given,
            **dict(zip(RUNNING, running, strict=False)),
            training=training,
            eps=0.01,
            channel_axis=axis,
            return_stats=True,
        )

    _, mean, rstd = forward()
    grads = reference.batch_norm_backward(
        grad_out, x, weight, mean, rstd, training, channel_axis=axis
    )
    at = {"x": x, "weight": weight, "bias": bias}[argument]
    analytic = grads[("x", "weight", "bias").index(argument)]

    def loss(values):
        return np.sum(grad_out * forward(**{argument: values.reshape(at.shape)})[0])

    # Forward differences: wrong by half the step times the second derivative, at most 2e-6 here.
    numeric = optimize.approx_fprime(at.ravel(), loss, 1e-7)
    np.testing.assert_allclose(analytic.ravel(), numeric, rtol=2e-6, atol=2e-6)


@every_shape
def test_batch_norm_is_the_z_score_of_the_channel(shape):
    stats = pytest.importorskip("scipy.stats")
    x = make_inputs("batch_norm-training", shape, "float64", centre=-4.0)["x"]
    rows = np.moveaxis(x, 1, 0).reshape(6, -1)
    expected = np.moveaxis(stats.zscore(rows, axis=1).reshape(6, shape[0], *shape[2:]), 0, 1)
    got = reference.batch_norm(x, training=True, eps=0.0)
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.torch
@every_axis
@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        (mode, shape)
        for mode, shape in itertools.product(MODES, SHAPES)
        # torch has no instance norm without spatial axes.
        if mode.startswith(("batch_norm-", "group_norm", "instance_norm"))
        and (len(shape) > 2 or not mode.startswith("instance_norm"))
    ],
    ids=str,
)
def test_matches_torch(mode, shape, axis):
    torch = pytest.importorskip("torch")
    op, parameters = MODES[mode]
    inputs = make_inputs(mode, shape, "float64", centre=2.0, spread=3.0)
    tensors = {n: torch.from_numpy(a.copy()) for n, a in inputs.items()}
    expected = getattr(torch.nn.functional, op)(tensors.pop("x"), **tensors, **parameters, eps=0.01)
    given = copied(inputs) if axis == 1 else channels_last(copied(inputs))
    got = refer(mode, given, eps=0.01, channel_axis=axis)
    expected = to_channel_axis(expected.numpy(), axis)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
    for name in [n for n in RUNNING if n in given]:
        np.testing.assert_allclose(given[name], tensors[name].numpy(), rtol=1e-13)


@pytest.mark.torch
def test_statistics_match_native_batch_norm():
    torch = pytest.importorskip("torch")
    inputs = make_inputs("batch_norm-training", (4, 6, 7), "float64", centre=5.0)
    tensors = {n: torch.from_numpy(a.copy()) for n, a in inputs.items()}
    order = ("x", "weight", "bias", "running_mean", "running_var")
    expected = torch.native_batch_norm(*(tensors[n] for n in order), True, 0.3, 0.01)
    got = reference.batch_norm(**inputs, training=True, momentum=0.3, eps=0.01, return_stats=True)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.torch
@every_axis
@every_shape
@pytest.mark.parametrize("training", [True, False])
def test_backward_matches_autograd(shape, axis, training):
    torch = pytest.importorskip("torch")
    inputs = make_inputs("batch_norm-training", shape, "float64", centre=2.0, spread=3.0)
    grad_out = make_inputs("batch_norm_backward-frozen", shape, "float64", seed=9)["grad_out"]
    tensors = {n: torch.from_numpy(a.copy()) for n, a in inputs.items()}
    wanted = [tensors[n].requires_grad_() for n in ("x", "weight", "bias")]
    y = torch.nn.functional.batch_norm(
        tensors.pop("x"), **tensors, training=training, momentum=0.0, eps=0.01
    )
    expected = torch.autograd.grad(y, wanted, torch.from_numpy(grad_out))

    given = inputs if axis == 1 else channels_last(inputs)
    options = {"training": training, "channel_axis": axis}
    _, mean, rstd = reference.batch_norm(
        **given, **options, momentum=0.0, eps=0.01, return_stats=True
    )
    grad_out = to_channel_axis(grad_out, axis)
    got = reference.batch_norm_backward(
        grad_out, given["x"], given["weight"], mean, rstd, **options
    )
    for a, b in zip(got, (t.numpy() for t in expected), strict=True):
        b = to_channel_axis(b, axis) if b.ndim > 1 else b
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


# ---------------------------------------------------------------------------------------------
# known failures of other implementations
# ---------------------------------------------------------------------------------------------


def test_the_running_variance_is_unbiased_and_the_other_is_not():
    """pytorch#7028."""
    x = np.array([[2.0, 15, 2, 1], [2, 17, 2, 1], [-4, -2, -2, -1]])
    mean, var = np.zeros(4), np.ones(4)
    y = reference.batch_norm(x, mean, var, training=True, momentum=1.0, eps=0.0)
    np.testing.assert_allclose(mean, [0, 10, 2 / 3, 1 / 3], rtol=1e-15)
    np.testing.assert_allclose(var, [12, 109, 16 / 3, 4 / 3], rtol=1e-15)
    biased = np.array([8, 218 / 3, 32 / 9, 8 / 9])
    np.testing.assert_allclose(y, (x - [0, 10, 2 / 3, 1 / 3]) / np.sqrt(biased), rtol=1e-14)


@pytest.mark.parametrize("mode", COMPUTING)
@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_momentum_at_its_ends(mode, momentum):
    inputs = make_inputs(mode, (3, 6, 5), "float32")
    given = copied(inputs)
    op, parameters = MODES[mode]
    reference.FORWARD[op](**given, **{**parameters, "momentum": momentum})
    fresh = {**copied(inputs), **{n: np.full(6, 7, np.float32) for n in RUNNING}}
    reference.FORWARD[op](**fresh, **{**parameters, "momentum": momentum})
    for name in RUNNING:
        if momentum == 0:
            np.testing.assert_array_equal(given[name], inputs[name])
        else:  # nothing is left of what was there
            np.testing.assert_array_equal(given[name], fresh[name])


def test_cumulative_average_over_batches():
    """pytorch#31498: momentum 1, 1/2, 1/3 gives the plain mean."""
    batches = [make_inputs("batch_norm-training", (8, 6), "float64", seed=s)["x"] for s in range(3)]
    mean, var = np.full(6, 100.0), np.full(6, 100.0)
    for k, x in enumerate(batches):
        reference.batch_norm(x, mean, var, training=True, momentum=1 / (k + 1))
    np.testing.assert_allclose(mean, np.mean([x.mean(axis=0) for x in batches], axis=0))
    np.testing.assert_allclose(var, np.mean([x.var(axis=0, ddof=1) for x in batches], axis=0))


def test_inference_looks_at_the_running_statistics_alone():
    x = (100 + make_inputs("group_norm", (8, 6, 4), "float64")["x"]).astype(np.float32)
    mean, var = np.full(6, 3, np.float32), np.full(6, 4, np.float32)
    for norm, options in (
        (reference.batch_norm, {}),
        (reference.instance_norm, {"use_input_stats": False}),
    ):
        y = norm(x, mean, var, eps=0.0, **options)
        np.testing.assert_array_equal(y, (x - 3) / 2)
        np.testing.assert_array_equal(norm(x[:1], mean, var, eps=0.0, **options), y[:1])


def test_a_negative_running_variance_spoils_its_channel_alone():
    """pytorch#106605."""
    inputs = make_inputs("batch_norm-inference", (4, 6, 3), "float32")
    clean = reference.batch_norm(**inputs)
    inputs["running_var"][1] = -1
    y = reference.batch_norm(**inputs)
    assert np.isnan(y[:, 1]).all()
    np.testing.assert_array_equal(np.delete(y, 1, axis=1), np.delete(clean, 1, axis=1))


@pytest.mark.parametrize("eps", [0.0, 1e-10, 1e-8])
def test_small_eps_is_not_clamped(eps):
    """chainer#5232, tensorflow#37768."""
    x = 1e-4 * make_inputs("batch_norm-training", (32, 6), "float64")["x"]
    y = reference.batch_norm(x, training=True, eps=eps)
    expected = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + eps)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-14)
    y = reference.batch_norm(x, x.mean(axis=0), x.var(axis=0), eps=eps)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-14)


def test_mean_of_ten_thousand_with_deviations_of_a_hundredth():
    """What float32 stores of 1e4 +- 1e-2 is far from the normal distribution, and all exact."""
    noise = make_inputs("group_norm", (64, 6, 32), "float64")["x"]
    x = (1e4 + 1e-2 * noise).astype(np.float32)
    exact = x.astype(np.float64)
    deviation = exact - exact.mean(axis=(0, 2), keepdims=True)
    expected = deviation / np.sqrt(np.square(deviation).mean(axis=(0, 2), keepdims=True) + 1e-5)
    y = reference.batch_norm(x, training=True)
    np.testing.assert_allclose(y, expected, rtol=2e-7, atol=1e-9)
