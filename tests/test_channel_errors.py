"""Bad input to batch, group and instance norm: each call with the error it must raise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bad_input import FLOATS, NO_ARRAY, Arrays, Case, check

import cunorm

PER_CHANNEL = "x must have more than one value per channel in training"
SPATIAL = "x must have more than one spatial element"
IN_PLACE = "it is updated in place and needs memory of its own"


def x4(a: Arrays) -> Any:
    return a.new(4, 6, 5)


def row(a: Arrays, dtype: Any = np.float32) -> Any:
    return a.new(6, dtype=dtype)


def train(a: Arrays, mean: Any = None, var: Any = None, **options: Any) -> Any:
    x = options.pop("x") if "x" in options else x4(a)
    return cunorm.batch_norm(x, mean, var, training=True, **options)


def back(a: Arrays, **changed: Any) -> Any:
    given = {name: row(a) for name in ("weight", "mean", "rstd")}
    given |= {name: x4(a) for name in ("grad_out", "x")}
    return cunorm.batch_norm_backward(**{**given, **changed})


def read_only(a: Arrays) -> Any:
    return a.read_only(6)


# fmt: off
NOT_ARRAYS = [
    Case("x-list", lambda a: cunorm.batch_norm([1.0], training=True), TypeError,
         f"batch_norm: x {NO_ARRAY}, got list"),
    Case("x-none", lambda a: cunorm.group_norm(None, 2), TypeError,
         f"group_norm: x {NO_ARRAY}, got NoneType"),
    Case("running-list", lambda a: train(a, [0.0] * 6, row(a)), TypeError,
         f"batch_norm: running_mean {NO_ARRAY}, got list"),
    Case("running-float", lambda a: cunorm.instance_norm(x4(a), row(a), 1.0), TypeError,
         f"instance_norm: running_var {NO_ARRAY}, got float"),
    Case("weight-list", lambda a: cunorm.group_norm(x4(a), 2, [1.0] * 6), TypeError,
         f"group_norm: weight {NO_ARRAY}, got list"),
    Case("mean-none", lambda a: cunorm.batch_norm_normalize(x4(a), None, row(a)), TypeError,
         "batch_norm_normalize: mean must be an array, got NoneType"),
    Case("rstd-none", lambda a: cunorm.batch_norm_normalize(x4(a), row(a), None), TypeError,
         "batch_norm_normalize: rstd must be an array, got NoneType"),
    Case("grad-none", lambda a: back(a, grad_out=None), TypeError,
         "batch_norm_backward: grad_out must be an array, got NoneType"),
    Case("grad-x-none", lambda a: back(a, x=None), TypeError,
         f"batch_norm_backward: x {NO_ARRAY}, got NoneType"),
    Case("stats-x-str", lambda a: cunorm.batch_norm_stats("x"), TypeError,
         f"batch_norm_stats: x {NO_ARRAY}, got str"),
]

DTYPES = [
    Case("x-int", lambda a: cunorm.instance_norm(a.new(4, 6, 5, dtype=np.int32)), TypeError,
         f"instance_norm: x must have dtype {FLOATS}, got int32"),
    Case("running-int", lambda a: train(a, row(a, np.int32), row(a)), TypeError,
         f"batch_norm: running_mean must have dtype {FLOATS}, got int32"),
    Case("running-wide", lambda a: train(a, row(a), row(a, np.float64)), ValueError,
         "batch_norm: running_var must have dtype float32, got float64"),
    Case("running-narrow", lambda a: train(a, row(a, np.float16), row(a)), ValueError,
         "batch_norm: running_mean must have dtype float32, got float16"),
    Case("running-float32-x-float64",
         lambda a: cunorm.batch_norm(a.new(4, 6, dtype=np.float64), row(a), row(a)), ValueError,
         "batch_norm: running_mean must have dtype float64, got float32"),
    Case("weight-wide", lambda a: cunorm.group_norm(x4(a), 3, row(a, np.float64)), ValueError,
         "group_norm: weight must have dtype float32, got float64"),
    Case("mean-narrow",
         lambda a: cunorm.batch_norm_normalize(
             a.new(4, 6, dtype=np.float16), row(a, np.float16), row(a)),
         ValueError, "batch_norm_normalize: mean must have dtype float32, got float16"),
    Case("rstd-narrow",
         lambda a: back(a, x=a.new(4, 6, 5, dtype=np.float16),
                        grad_out=a.new(4, 6, 5, dtype=np.float16), rstd=row(a, np.float16)),
         ValueError, "batch_norm_backward: rstd must have dtype float32, got float16"),
    Case("grad-wide", lambda a: back(a, grad_out=a.new(4, 6, 5, dtype=np.float64)), ValueError,
         "batch_norm_backward: grad_out must have dtype float32, got float64"),
]

SHAPES = [
    Case("x-0d", lambda a: train(a, x=a.new()), ValueError,
         "batch_norm: x must be an array of two or more axes, got ()"),
    Case("x-1d", lambda a: cunorm.group_norm(a.new(6), 2), ValueError,
         "group_norm: x must be an array of two or more axes, got (6,)"),
    Case("x-1d-backward", lambda a: back(a, x=a.new(6), grad_out=a.new(6)), ValueError,
         "batch_norm_backward: x must be an array of two or more axes, got (6,)"),
    Case("weight-short", lambda a: train(a, weight=a.new(5)), ValueError,
         "batch_norm: weight must have shape (6,), got (5,)"),
    Case("weight-last-axis", lambda a: train(a, weight=row(a), channel_axis=-1), ValueError,
         "batch_norm: weight must have shape (5,), got (6,)"),
    Case("bias-2d", lambda a: cunorm.instance_norm(x4(a), bias=a.new(6, 1)), ValueError,
         "instance_norm: bias must have shape (6,), got (6, 1)"),
    Case("running-per-instance", lambda a: cunorm.instance_norm(x4(a), a.new(4, 6), a.new(4, 6)),
         ValueError, "instance_norm: running_mean must have shape (6,), got (4, 6)"),
    Case("weight-per-group", lambda a: cunorm.group_norm(x4(a), 3, a.new(3)), ValueError,
         "group_norm: weight must have shape (6,), got (3,)"),
    Case("stats-running", lambda a: cunorm.batch_norm_stats(x4(a), row(a), a.new(4)), ValueError,
         "batch_norm_stats: running_var must have shape (6,), got (4,)"),
    Case("grad-shape", lambda a: back(a, grad_out=a.new(4, 6)), ValueError,
         "batch_norm_backward: grad_out must have shape (4, 6, 5), got (4, 6)"),
    Case("rstd-shape", lambda a: back(a, rstd=a.new(4, 6)), ValueError,
         "batch_norm_backward: rstd must have shape (6,), got (4, 6)"),
]

TOO_FEW = [
    Case("one-value", lambda a: train(a, row(a), row(a), x=a.new(1, 6)), ValueError,
         f"batch_norm: {PER_CHANNEL}, got shape (1, 6)"),
    Case("one-pixel", lambda a: train(a, x=a.new(1, 6, 1, 1)), ValueError,
         f"batch_norm: {PER_CHANNEL}, got shape (1, 6, 1, 1)"),
    Case("one-value-last", lambda a: train(a, x=a.new(1, 1, 6), channel_axis=-1), ValueError,
         f"batch_norm: {PER_CHANNEL}, got shape (1, 1, 6)"),
    Case("one-value-stats", lambda a: cunorm.batch_norm_stats(a.new(1, 6)), ValueError,
         f"batch_norm_stats: {PER_CHANNEL}, got shape (1, 6)"),
    Case("one-value-group", lambda a: cunorm.group_norm(a.new(1, 6), 6), ValueError,
         "group_norm: x must have more than one value per group, got shape (1, 6)"),
    Case("one-value-group-of-many-samples", lambda a: cunorm.group_norm(a.new(3, 6, 1), 6),
         ValueError, "group_norm: x must have more than one value per group, got shape (3, 6, 1)"),
    Case("no-spatial-axes", lambda a: cunorm.instance_norm(a.new(4, 6)), ValueError,
         f"instance_norm: {SPATIAL}, got shape (4, 6)"),
    Case("one-spatial-element", lambda a: cunorm.instance_norm(a.new(4, 6, 1, 1), row(a), row(a)),
         ValueError, f"instance_norm: {SPATIAL}, got shape (4, 6, 1, 1)"),
    Case("one-spatial-element-last",
         lambda a: cunorm.instance_norm(a.new(4, 1, 6), channel_axis=-1), ValueError,
         f"instance_norm: {SPATIAL}, got shape (4, 1, 6)"),
]

PARAMETERS = [
    Case("training-str", lambda a: cunorm.batch_norm(x4(a), training="no"), TypeError,
         "batch_norm: training must be a bool, got str"),
    Case("training-int", lambda a: cunorm.BatchNormBwdOp(1), TypeError,
         "batch_norm_backward: training must be a bool, got int"),
    Case("use-input-stats-none", lambda a: cunorm.InstanceNormFwdOp(None), TypeError,
         "instance_norm: use_input_stats must be a bool, got NoneType"),
    Case("momentum-none", lambda a: train(a, row(a), row(a), momentum=None), TypeError,
         "batch_norm: momentum must be a number, got NoneType"),
    Case("momentum-str", lambda a: cunorm.InstanceNormFwdOp(momentum="0.1"), TypeError,
         "instance_norm: momentum must be a number, got str"),
    Case("momentum-nan", lambda a: train(a, momentum=float("nan")), ValueError,
         "batch_norm: momentum must be from 0 to 1, got nan"),
    Case("momentum-negative", lambda a: cunorm.batch_norm_stats(x4(a), momentum=-0.1), ValueError,
         "batch_norm_stats: momentum must be from 0 to 1, got -0.1"),
    Case("momentum-above-one", lambda a: cunorm.instance_norm(x4(a), momentum=2), ValueError,
         "instance_norm: momentum must be from 0 to 1, got 2"),
    Case("eps-negative", lambda a: train(a, eps=-1e-5), ValueError,
         "batch_norm: eps must be finite and not negative, got -1e-05"),
    Case("eps-inf", lambda a: cunorm.group_norm(x4(a), 2, eps=float("inf")), ValueError,
         "group_norm: eps must be finite and not negative, got inf"),
    Case("eps-none", lambda a: cunorm.InstanceNormFwdOp(eps=None), TypeError,
         "instance_norm: eps must be a number, got NoneType"),
    Case("groups-divide", lambda a: cunorm.group_norm(x4(a), 4), ValueError,
         "group_norm: num_groups must be a divisor of the 6 channels of x, got 4"),
    Case("groups-many", lambda a: cunorm.group_norm(x4(a), 12), ValueError,
         "group_norm: num_groups must be a divisor of the 6 channels of x, got 12"),
    Case("groups-zero", lambda a: cunorm.group_norm(x4(a), 0), ValueError,
         "group_norm: num_groups must be at least 1, got 0"),
    Case("groups-negative", lambda a: cunorm.GroupNormFwdOp(-2), ValueError,
         "group_norm: num_groups must be at least 1, got -2"),
    Case("groups-float", lambda a: cunorm.group_norm(x4(a), 2.0), TypeError,
         "group_norm: num_groups must be an int, got float"),
    Case("axis-zero", lambda a: train(a, channel_axis=0), ValueError,
         "batch_norm: channel_axis must be 1 or -1, got 0"),
    Case("axis-two", lambda a: cunorm.group_norm(x4(a), 5, channel_axis=2), ValueError,
         "group_norm: channel_axis must be 1 or -1, got 2"),
    Case("axis-none", lambda a: cunorm.instance_norm(x4(a), channel_axis=None), TypeError,
         "instance_norm: channel_axis must be an int, got NoneType"),
    Case("axis-str", lambda a: back(a, channel_axis="last"), TypeError,
         "batch_norm_backward: channel_axis must be an int, got str"),
    Case("axis-list", lambda a: cunorm.BatchNormStatsOp()(x4(a), channel_axis=[1]), TypeError,
         "batch_norm_stats: channel_axis must be an int, got list"),
    Case("axis-question", lambda a: cunorm.BatchNormFwdOp().roofline(
        "float32", (4, 6), channel_axis=3), ValueError,
        "batch_norm: channel_axis must be 1 or -1, got 3"),
]

RUNNING = [
    Case("mean-alone", lambda a: train(a, row(a), None), ValueError,
         "batch_norm: running_var must be an array like running_mean, got None"),
    Case("var-alone", lambda a: cunorm.instance_norm(x4(a), None, row(a)), ValueError,
         "instance_norm: running_mean must be an array like running_var, got None"),
    Case("stats-mean-alone", lambda a: cunorm.batch_norm_stats(x4(a), row(a)), ValueError,
         "batch_norm_stats: running_var must be an array like running_mean, got None"),
    Case("inference-without", lambda a: cunorm.batch_norm(x4(a)), ValueError,
         "batch_norm: running_mean must be an array with training=False, got None"),
    Case("inference-without-var", lambda a: cunorm.batch_norm(x4(a), row(a)), ValueError,
         "batch_norm: running_var must be an array with training=False, got None"),
    Case("running-without", lambda a: cunorm.instance_norm(x4(a), use_input_stats=False),
         ValueError,
         "instance_norm: running_mean must be an array with use_input_stats=False, got None"),
    Case("plan-without-running",
         lambda a: cunorm.BatchNormFwdOp().plan("float32", (4, 6), without=["running_var"]),
         ValueError, "batch_norm: running_var must be an array with training=False, got None"),
    Case("read-only-mean", lambda a: train(a, read_only(a), row(a)), ValueError,
         "batch_norm: running_mean must be writable, got a read-only array"),
    Case("read-only-var", lambda a: cunorm.instance_norm(x4(a), row(a), read_only(a)), ValueError,
         "instance_norm: running_var must be writable, got a read-only array"),
    Case("read-only-stats", lambda a: cunorm.batch_norm_stats(x4(a), read_only(a), row(a)),
         ValueError, "batch_norm_stats: running_mean must be writable, got a read-only array"),
    Case("expanded", lambda a: train(a, np.lib.stride_tricks.as_strided(a.new(1), (6,), (0,)),
                                     row(a)),
         ValueError, "batch_norm: running_mean must be an array whose elements do not share "
         "memory, got strides (0,)"),
]
# fmt: on


def same_twice(a: Arrays) -> Any:
    running = row(a)
    return train(a, running, running)


def shifted(a: Arrays) -> Any:
    table = a.new(7)
    return train(a, table[:6], table[1:])


def is_the_weight(a: Arrays) -> Any:
    running = row(a)
    return cunorm.instance_norm(x4(a), row(a), running, running)


def inside_x(a: Arrays) -> Any:
    x = a.new(6, 6)
    return train(a, row(a), x[:, 2], x=x)


def is_the_bias(a: Arrays) -> Any:
    running = row(a)
    return train(a, running, row(a), bias=running[::-1])


def in_out(a: Arrays) -> Any:
    out = x4(a)
    return train(a, out[0, :, 0], row(a), out=out)


def is_out(a: Arrays) -> Any:
    running = row(a)
    return cunorm.batch_norm_stats(x4(a), running, row(a), out=(running, row(a)))


def out_over_mean(a: Arrays) -> Any:
    table = a.new(4, 6, 5)
    return cunorm.batch_norm_normalize(x4(a), table[0, :, 0], row(a), out=table)


def same_out_twice(a: Arrays) -> Any:
    out = row(a)
    return cunorm.batch_norm_stats(x4(a), out=(out, out))


# fmt: off
MEMORY = [
    Case("same-twice", same_twice, ValueError,
         f"batch_norm: running_var shares memory with running_mean; {IN_PLACE}"),
    Case("shifted", shifted, ValueError,
         f"batch_norm: running_var shares memory with running_mean; {IN_PLACE}"),
    Case("is-the-weight", is_the_weight, ValueError,
         f"instance_norm: running_var shares memory with weight; {IN_PLACE}"),
    Case("inside-x", inside_x, ValueError,
         f"batch_norm: running_var shares memory with x; {IN_PLACE}"),
    Case("is-the-bias", is_the_bias, ValueError,
         f"batch_norm: running_mean shares memory with bias; {IN_PLACE}"),
    Case("in-out", in_out, ValueError,
         f"batch_norm: running_mean shares memory with out; {IN_PLACE}"),
    Case("is-out", is_out, ValueError,
         f"batch_norm_stats: running_mean shares memory with out[0]; {IN_PLACE}"),
    Case("out-over-mean", out_over_mean, ValueError,
         "batch_norm_normalize: out partly overlaps mean in memory; "
         "pass mean itself or memory of its own"),
    Case("same-out-twice", same_out_twice, ValueError,
         "batch_norm_stats: out[1] partly overlaps out[0] in memory; pass memory of its own"),
]

OUT = [
    Case("out-shape", lambda a: train(a, out=a.new(4, 6)), ValueError,
         "batch_norm: out must have shape (4, 6, 5), got (4, 6)"),
    Case("out-dtype", lambda a: cunorm.group_norm(x4(a), 2, out=a.new(4, 6, 5, dtype=np.float64)),
         ValueError, "group_norm: out must have dtype float32, got float64"),
    Case("out-read-only", lambda a: cunorm.instance_norm(x4(a), out=a.read_only(4, 6, 5)),
         ValueError, "instance_norm: out must be writable, got a read-only array"),
    Case("stats-out-one", lambda a: cunorm.batch_norm_stats(x4(a), out=row(a)), TypeError,
         "batch_norm_stats: out must be a tuple of 2 arrays, got ndarray"),
    Case("stats-out-narrow",
         lambda a: cunorm.batch_norm_stats(a.new(4, 6, dtype=np.float16),
                                           out=(row(a), row(a, np.float16))),
         ValueError, "batch_norm_stats: out[1] must have dtype float32, got float16"),
    Case("backward-out-two", lambda a: back(a, out=(x4(a), row(a))), TypeError,
         "batch_norm_backward: out must be a tuple of 3 arrays, got tuple"),
    Case("backward-out-none", lambda a: back(a, out=(x4(a), None, row(a))), TypeError,
         "batch_norm_backward: out must be a tuple of 3 arrays, got tuple"),
    Case("backward-out-for-no-weight",
         lambda a: back(a, weight=None, out=(x4(a), row(a), row(a))), TypeError,
         "batch_norm_backward: out must be a tuple of 3 arrays (out[1] being None), got tuple"),
    Case("backward-out-bias-shape",
         lambda a: back(a, weight=None, out=(x4(a), None, a.new(5))), ValueError,
         "batch_norm_backward: out[2] must have shape (6,), got (5,)"),
    Case("backward-out-dtype", lambda a: back(a, out=(x4(a), row(a, np.float64), row(a))),
         ValueError, "batch_norm_backward: out[1] must have dtype float32, got float64"),
]
# fmt: on

CASES = [*NOT_ARRAYS, *DTYPES, *SHAPES, *TOO_FEW, *PARAMETERS, *RUNNING, *MEMORY, *OUT]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bad_input(case):
    check(case)


def test_ids_are_unique():
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.torch
@pytest.mark.parametrize("argument", ["x", "running_mean", "weight"])
def test_gradients_are_not_lost(argument):
    torch = pytest.importorskip("torch")
    given = {"x": torch.randn(4, 6), "weight": torch.ones(6)}
    given |= {"running_mean": torch.zeros(6), "running_var": torch.ones(6)}
    given[argument].requires_grad_()
    with pytest.raises(ValueError, match=f"batch_norm: {argument} requires grad"):
        cunorm.batch_norm(**given, training=True)
    assert torch.equal(given["running_var"], torch.ones(6))


def test_two_values_are_enough():
    x = np.array([[[1.0, 3.0]]])
    np.testing.assert_array_equal(cunorm.batch_norm(x, training=True, eps=0.0), [[[-1, 1]]])
    np.testing.assert_array_equal(cunorm.instance_norm(x, eps=0.0), [[[-1, 1]]])
    np.testing.assert_array_equal(cunorm.group_norm(x, 1, eps=0.0), [[[-1, 1]]])


def test_flags_and_numbers_of_numpy_will_do():
    x = np.array([[1.0], [3.0]])
    got = cunorm.batch_norm(x, training=np.True_, momentum=np.float32(0.5), eps=0)
    np.testing.assert_array_equal(got, [[-1], [1]])
    assert cunorm.GroupNormFwdOp(np.int64(2)).num_groups == 2
