"""The definitions of batch, group and instance norm against arithmetic that shares nothing."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from channel_cases import (
    COMPUTING,
    DTYPES,
    MODES,
    NORMALIZING,
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

from cunorm import dtypes, reference

pytest.importorskip("ml_dtypes")

every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
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
            y[n, c, i] = xhat * (1 if weight is None else weight[c]) + (
                0 if bias is None else bias[c]
            )
    return y.reshape(x.shape), stats, variances


def loop_running(inputs, stats, variances, momentum):
    """Running statistics after a call: keys of statistics are a channel, or a sample and one."""
    keys = {
        c: [k for k in stats if k == c or (isinstance(k, tuple) and k[1] == c)] for c in range(6)
    }
    new = {
        "running_mean": [np.mean([stats[k][0] for k in keys[c]]) for c in range(6)],
        "running_var": [np.mean([variances[k] for k in keys[c]]) for c in range(6)],
    }
    return {n: (1 - momentum) * inputs[n] + momentum * np.array(new[n]) for n in RUNNING}


@every_axis
@every_shape
@pytest.mark.parametrize("mode", [m for m in MODES if "backward" not in m])
def test_matches_a_loop(mode, shape, axis):
    if mode == "instance_norm" and len(shape) == 2:
        pytest.skip("one spatial element has no variance")
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
@every_shape
@pytest.mark.parametrize("mode", ["batch_norm-training", "batch_norm-inference", "instance_norm",
                                  "instance_norm-running", "group_norm"])  # fmt: skip
def test_matches_torch(mode, shape, axis):
    torch = pytest.importorskip("torch")
    if mode.startswith("instance_norm") and len(shape) == 2:
        pytest.skip("torch has no instance norm without spatial axes")
    op, parameters = MODES[mode]
    inputs = make_inputs(mode, shape, "float64", centre=2.0, spread=3.0)
    tensors = {n: torch.from_numpy(a.copy()) for n, a in inputs.items()}
    names = {"momentum": "momentum", "training": "training", "use_input_stats": "use_input_stats"}
    options = {names.get(k, k): v for k, v in parameters.items()}
    expected = getattr(torch.nn.functional, op)(
        tensors.pop("x"), **tensors, **{"eps": 0.01, **options}
    )
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


# ---------------------------------------------------------------------------------------------
# constants, range, values that are not finite
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("value", [0.1, -7.3, 65000.0, 1e-7])
@every_dtype
@pytest.mark.parametrize("mode", NORMALIZING)
def test_constant_channels_give_the_bias(mode, dtype, value, eps):
    inputs = make_inputs(mode, (3, 6, 101), dtype)
    inputs["x"][...] = value
    y = refer(mode, inputs, eps=eps)
    np.testing.assert_array_equal(y, np.broadcast_to(inputs["bias"][:, None], y.shape))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@every_dtype
@pytest.mark.parametrize("mode", NORMALIZING)
def test_bad_values_stay_in_their_channel_or_group(mode, dtype, bad):
    before = make_inputs(mode, (4, 6, 5), dtype)
    clean_inputs, inputs = copied(before), copied(before)
    clean = refer(mode, clean_inputs, return_stats=True)
    inputs["x"][2, 3, 1] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dirty = refer(mode, inputs, return_stats=True)
    own = np.zeros((4, 6), bool)
    own[{"batch_norm-training": np.s_[:, 3], "group_norm": np.s_[2, 2:4]}.get(mode, (2, 3))] = True
    assert np.isnan(dirty[0][own]).all()
    np.testing.assert_array_equal(dirty[0][~own], clean[0][~own])
    for got, want in zip(dirty[1:], clean[1:], strict=True):
        assert np.count_nonzero(~np.isfinite(got)) == 1
        same = np.isfinite(got)
        np.testing.assert_array_equal(got[same], want[same])
    for name in [n for n in RUNNING if n in inputs]:
        assert not np.isfinite(inputs[name][3])
        others = np.arange(6) != 3
        np.testing.assert_array_equal(inputs[name][others], clean_inputs[name][others])


@pytest.mark.parametrize("working", [None, np.float64], ids=["own", "float64"])
@every_dtype
@pytest.mark.parametrize("mode", NORMALIZING)
def test_largest_values(monkeypatch, mode, dtype, working):
    """Also where long double is no wider than double, which is what working=float64 stands for."""
    import ml_dtypes

    if working:
        monkeypatch.setattr(reference.common, "working_dtype", lambda dtype: np.dtype(working))
    kind = dtypes.numpy_dtype(dtype)
    largest = ml_dtypes.finfo(kind).max
    x = np.zeros((2, 6, 2), kind)
    x[..., 0], x[..., 1] = largest, -largest
    op, parameters = MODES[mode]
    y = reference.FORWARD[op](x, **parameters)
    expected = np.broadcast_to([1, -1], x.shape)
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=1e-7)


# ---------------------------------------------------------------------------------------------
# arrays: dtypes, layouts, emptiness
# ---------------------------------------------------------------------------------------------


@every_dtype
@every_mode
def test_last_rounding_is_to_nearest(mode, dtype):
    inputs = make_inputs(mode, (5, 6, 9), dtype)
    work = reference.working_dtype(dtypes.numpy_dtype(dtype))
    narrow, precise = copied(inputs), copied(inputs)
    got = as_tuple(refer(mode, narrow, **stats_option(mode)))
    if mode in COMPUTING:
        precise |= {n: precise[n].astype(work) for n in RUNNING}
    want = as_tuple(refer(mode, precise, **stats_option(mode), dtype=work))
    for a, b in zip(got, want, strict=True):
        assert b.dtype == work
        with np.errstate(under="ignore"):
            np.testing.assert_array_equal(a, b.astype(a.dtype))
    if mode in COMPUTING:
        for name in RUNNING:
            np.testing.assert_array_equal(narrow[name], precise[name].astype(narrow[name].dtype))


def test_instance_norm_keeps_running_statistics_as_values_of_x():
    """float32 arrays for float16 input: what is read and written is rounded to float16."""
    inputs = make_inputs("instance_norm", (3, 6, 7), "float16", parameter_dtype="float32")
    narrow = inputs | {n: inputs[n].astype(np.float16) for n in RUNNING}
    for mode in ("instance_norm", "instance_norm-running"):
        a, b = copied(inputs), copied(narrow)
        np.testing.assert_array_equal(refer(mode, a), refer(mode, b))
        if mode in COMPUTING:
            for name in RUNNING:
                np.testing.assert_array_equal(a[name], b[name].astype(np.float32))


def test_batch_norm_keeps_float32_running_statistics_of_float16_data():
    inputs = make_inputs("batch_norm-training", (3, 6, 7), "float16", parameter_dtype="float32")
    wide = copied(inputs) | {"x": inputs["x"].astype(np.float32)}
    refer("batch_norm-training", inputs)
    refer("batch_norm-training", wide)
    for name in RUNNING:
        np.testing.assert_array_equal(inputs[name], wide[name])


def test_the_two_halves_make_the_whole():
    inputs = make_inputs("batch_norm-training", (4, 6, 5), "float64")
    running = {n: inputs[n].copy() for n in RUNNING}
    whole = refer("batch_norm-training", inputs, return_stats=True, dtype=np.longdouble)
    mean, rstd = reference.batch_norm_stats(
        inputs["x"], **running, momentum=0.3, dtype=np.longdouble
    )
    np.testing.assert_array_equal(mean, whole[1])
    np.testing.assert_array_equal(rstd, whole[2])
    for name in RUNNING:
        np.testing.assert_array_equal(running[name], inputs[name])
    affine = {n: inputs[n] for n in ("weight", "bias")}
    y = reference.batch_norm_normalize(inputs["x"], mean, rstd, **affine, dtype=np.longdouble)
    np.testing.assert_allclose(y, whole[0], rtol=4e-16, atol=4e-16)


def test_group_norm_of_one_group_and_of_all():
    x = make_inputs("group_norm", (3, 6, 5), "float32")["x"]
    whole = reference.layer_norm(x, (6, 5))
    np.testing.assert_array_equal(reference.group_norm(x, 1), whole)
    np.testing.assert_array_equal(reference.group_norm(x, 6), reference.instance_norm(x))


@pytest.mark.parametrize("shape", [(0, 6, 9), (4, 6, 0), (0, 6), (3, 0, 5), (0, 0)], ids=str)
@every_mode
def test_no_elements(mode, shape):
    """pytorch#12013: running statistics stay as they are, and sums over nothing are zero."""
    inputs = make_inputs(mode, shape, "float32")
    before = copied(inputs)
    results = as_tuple(refer(mode, inputs, **stats_option(mode)))
    for name in inputs:
        np.testing.assert_array_equal(inputs[name], before[name])
    if mode.startswith("batch_norm_backward"):
        assert results[0].shape == shape
        np.testing.assert_array_equal(results[1], 0)
        np.testing.assert_array_equal(results[2], 0)
        return
    if mode != "batch_norm_stats":
        assert results[0].shape == shape
    if mode in (*NORMALIZING, "batch_norm_stats"):
        assert all(np.isnan(statistic).all() for statistic in results[-2:])


RELAID = {
    "channels last": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1),
    "samples last": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0),
    "every other": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: np.flip(np.flip(x).copy()),
}


@pytest.mark.parametrize("how", RELAID)
@every_mode
def test_the_memory_order_changes_no_bit(mode, how):
    inputs = make_inputs(mode, (4, 6, 5, 3), "float32")
    expected = as_tuple(refer(mode, copied(inputs), **stats_option(mode)))
    relaid = copied(inputs)
    relaid |= {n: RELAID[how](a) for n, a in inputs.items() if a.ndim == 4}
    got = as_tuple(refer(mode, relaid, **stats_option(mode)))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@every_mode
def test_the_channel_axis_changes_no_bit(mode):
    inputs = make_inputs(mode, (4, 6, 5, 3), "float32")
    first, last = copied(inputs), channels_last(copied(inputs))
    expected = as_tuple(refer(mode, first, **stats_option(mode)))
    got = as_tuple(refer(mode, last, channel_axis=-1, **stats_option(mode)))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.moveaxis(a, -1, 1) if a.ndim == 4 else a, b)
    for name in [n for n in RUNNING if n in inputs]:
        np.testing.assert_array_equal(last[name], first[name])


@every_mode
def test_blocks_change_no_bit(monkeypatch, mode):
    inputs = make_inputs(mode, (5, 6, 33), "float32")
    whole = as_tuple(refer(mode, copied(inputs), **stats_option(mode)))
    for size in (1, 200, 33 * 6 * 2):
        monkeypatch.setattr(reference.common, "BLOCK_ELEMENTS", size)
        for a, b in zip(
            as_tuple(refer(mode, copied(inputs), **stats_option(mode))), whole, strict=True
        ):
            np.testing.assert_array_equal(a, b)


@every_mode
def test_only_running_statistics_are_written(mode):
    inputs = make_inputs(mode, (3, 6, 5), "float64")
    for name, array in inputs.items():
        array.flags.writeable = mode in COMPUTING and name in RUNNING
    refer(mode, inputs)


@pytest.mark.parametrize("absent", list(itertools.product([True, False], repeat=2)), ids=str)
@pytest.mark.parametrize("mode", [*NORMALIZING, "batch_norm-inference", "batch_norm_normalize"])
def test_absent_parameters_are_ones_and_zeros(mode, absent):
    inputs = make_inputs(mode, (3, 6, 5), "float32")
    plain = {"weight": np.ones(6, np.float32), "bias": np.zeros(6, np.float32)}
    left_out = [name for name, gone in zip(plain, absent, strict=True) if gone]
    got = refer(mode, copied(inputs) | dict.fromkeys(left_out))
    want = refer(mode, copied(inputs) | {n: plain[n] for n in left_out})
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_backward_without_a_weight(dtype):
    inputs = make_inputs("batch_norm_backward-training", (4, 6, 5), dtype)
    ones = inputs | {"weight": np.ones(6, inputs["rstd"].dtype)}
    expected = reference.batch_norm_backward(**ones)
    grad_x, grad_weight, grad_bias = reference.batch_norm_backward(**inputs | {"weight": None})
    assert grad_weight is None
    np.testing.assert_array_equal(grad_x, expected[0])
    np.testing.assert_array_equal(grad_bias, expected[2])
    assert grad_bias.dtype == inputs["rstd"].dtype
