"""Definitions of batch, group and instance norm: odd values, dtypes, layouts, emptiness."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
from channel_cases import (
    COMPUTING,
    DTYPES,
    MODES,
    NORMALIZING,
    RUNNING,
    as_tuple,
    channels_last,
    copied,
    make_inputs,
    refer,
    stats_option,
)

from cunorm import dtypes, reference

pytest.importorskip("ml_dtypes")

every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def _numpy_errors_raise():
    """The definitions silence what they expect; nothing else may warn."""
    with np.errstate(all="raise"):
        yield


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
