"""Batch, group and instance norm on host arrays: layouts, updates in place, what an op tells."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from cases import assert_same_bits
from channel_cases import (
    CLASSES,
    COMPUTING,
    DTYPES,
    MODES,
    RUNNING,
    SHAPES,
    as_tuple,
    call,
    channels_last,
    copied,
    make_inputs,
    make_op,
    refer,
    stats_option,
)

import cunorm
from cunorm import dtypes

pytest.importorskip("ml_dtypes")

every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_axis = pytest.mark.parametrize("axis", [1, -1])
updating = pytest.mark.parametrize("mode", COMPUTING)
SHAPE = (4, 6, 5, 3)


def assert_same(results, expected):
    for got, want in zip(as_tuple(results), as_tuple(expected), strict=True):
        assert_same_bits(got, want)


def strided(array, how):
    """The same values with other strides; updates show in the memory behind them."""
    if how == "gaps":
        wide = np.full(3 * len(array), 77, array.dtype)
        wide[1::3] = array
        return wide[1::3]
    if how == "reversed":
        return array[::-1].copy()[::-1]
    if how == "a column":
        table = np.full((len(array), 4), 77, array.dtype)
        table[:, 2] = array
        return table[:, 2]
    return array.copy()


def relaid(array, how):
    """An array (N, C, ...) with the same values in another memory order."""
    if how == "channels last":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
    if how == "samples last":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 0, -1)), -1, 0)
    if how == "gaps":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    return np.flip(np.flip(array).copy())


LAYOUTS = ("channels last", "samples last", "gaps", "reversed")


# -- results -----------------------------------------------------------------------------------


@every_mode
@every_dtype
@every_axis
def test_functions_give_what_the_definitions_say(mode, dtype, axis):
    inputs = make_inputs(mode, SHAPE, dtype)
    inputs = inputs if axis == 1 else channels_last(inputs)
    mine, theirs = copied(inputs), copied(inputs)
    options = {"channel_axis": axis, **stats_option(mode)}
    assert_same(call(mode, mine, **options), refer(mode, theirs, **options))
    for name in inputs:
        assert_same_bits(mine[name], theirs[name], name)
        if mode not in COMPUTING or name not in RUNNING:
            assert_same_bits(mine[name], inputs[name], name)


@every_mode
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_function_op_and_forward_are_one(mode, shape):
    inputs = make_inputs(mode, shape, "float32")
    one = make_op(mode)
    expected = call(mode, copied(inputs))
    assert_same(one(**copied(inputs)), expected)
    assert_same(one(*copied(inputs).values()), expected)
    assert_same(one.forward(*copied(inputs).values(), channel_axis=1), expected)


@every_mode
@every_axis
@pytest.mark.parametrize("how", LAYOUTS)
def test_outputs_keep_the_memory_order_of_x(mode, axis, how):
    inputs = make_inputs(mode, SHAPE, "float32")
    inputs |= {n: relaid(a, how) for n, a in inputs.items() if a.ndim == 4}
    inputs = inputs if axis == 1 else channels_last(inputs)
    for result in as_tuple(call(mode, inputs, channel_axis=axis, **stats_option(mode))):
        if result.ndim == 4:
            assert result.strides == np.empty_like(inputs["x"], order="K").strides
        else:
            assert result.flags.c_contiguous
        assert result.flags.writeable


@every_mode
@every_dtype
def test_dtypes_of_results(mode, dtype):
    kind = dtypes.numpy_dtype(dtype)
    wide = dtypes.numpy_dtype(dtypes.accumulation(dtype))
    for parameter_dtype in {dtype, dtypes.accumulation(dtype)}:
        inputs = make_inputs(mode, SHAPE, dtype, parameter_dtype=parameter_dtype)
        results = as_tuple(call(mode, inputs, **stats_option(mode)))
        if "backward" in mode:
            stored = dtypes.numpy_dtype(parameter_dtype)
            assert [r.dtype for r in results] == [kind, stored, stored]
        else:
            assert [r.dtype for r in results] == [kind if r.ndim == 4 else wide for r in results]


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        ("batch_norm-training", (6,)),
        ("batch_norm-inference", (6,)),
        ("group_norm", (4, 3)),
        ("instance_norm", (4, 6)),
        ("instance_norm-running", (4, 6)),
    ],
)
@every_axis
def test_shape_of_statistics(mode, shape, axis):
    inputs = make_inputs(mode, SHAPE, "float16")
    inputs = inputs if axis == 1 else channels_last(inputs)
    plain = call(mode, copied(inputs), channel_axis=axis)
    y, mean, rstd = call(mode, copied(inputs), channel_axis=axis, return_stats=True)
    assert_same_bits(y, plain)
    assert mean.shape == rstd.shape == shape
    assert mean.dtype == rstd.dtype == np.float32


def test_statistics_go_back_in():
    """The forward's statistics are what the halves and the backward pass take."""
    inputs = make_inputs("batch_norm-training", SHAPE, "float32")
    y, mean, rstd = call("batch_norm-training", copied(inputs), eps=1e-5, return_stats=True)
    halves = cunorm.batch_norm_stats(inputs["x"])
    assert_same(halves, (mean, rstd))
    again = cunorm.batch_norm_normalize(inputs["x"], mean, rstd, inputs["weight"], inputs["bias"])
    np.testing.assert_allclose(again, y, rtol=4e-7, atol=4e-7)
    grads = cunorm.batch_norm_backward(y, inputs["x"], inputs["weight"], mean, rstd)
    assert [g.shape for g in grads] == [SHAPE, (6,), (6,)]
    for training in (True, False):
        one = cunorm.BatchNormFwdOp(training, target="numpy")
        assert repr(one.backward_op()) == f"BatchNormBwdOp(training={training}, target='numpy')"


# -- running statistics ------------------------------------------------------------------------


@updating
@every_dtype
@pytest.mark.parametrize("how", ["gaps", "reversed", "a column"])
def test_running_statistics_are_updated_whatever_their_strides(mode, dtype, how):
    inputs = make_inputs(mode, SHAPE, dtype)
    given = copied(inputs) | {n: strided(inputs[n], how) for n in RUNNING}
    expected = copied(inputs)
    call(mode, expected)
    call(mode, given)
    for name in RUNNING:
        assert_same_bits(given[name].copy(), expected[name], name)
        assert (given[name] != inputs[name]).any()
    if how != "reversed":
        base = given["running_mean"].base
        assert np.count_nonzero(base == 77) == base.size - 6  # nothing beside them


@updating
def test_running_statistics_may_be_left_out(mode):
    inputs = make_inputs(mode, SHAPE, "float32")
    expected = call(mode, copied(inputs))
    bare = {n: a for n, a in copied(inputs).items() if n not in RUNNING}
    assert_same(call(mode, bare), expected)


@updating
def test_two_rows_of_one_table_are_not_the_same_memory(mode):
    inputs = make_inputs(mode, SHAPE, "float32")
    expected = copied(inputs)
    call(mode, expected)
    table = np.stack([inputs[n] for n in RUNNING], axis=1)  # interleaved: their extents overlap
    call(mode, copied(inputs) | {n: table[:, i] for i, n in enumerate(RUNNING)})
    for i, name in enumerate(RUNNING):
        assert_same_bits(table[:, i].copy(), expected[name])


@updating
def test_nothing_is_updated_without_elements(mode):
    inputs = make_inputs(mode, (0, 6, 5), "float32")
    given = copied(inputs)
    results = as_tuple(call(mode, given, **stats_option(mode)))
    for name in RUNNING:
        assert_same_bits(given[name], inputs[name])
    assert all(np.isnan(statistic).all() for statistic in results[-2:])


def test_inference_leaves_running_statistics_alone():
    for mode in ("batch_norm-inference", "instance_norm-running"):
        inputs = make_inputs(mode, SHAPE, "float32")
        for array in inputs.values():
            array.flags.writeable = False
        shared = inputs | {"running_mean": inputs["running_var"]}
        assert np.isfinite(call(mode, shared)).all()


# -- writing -----------------------------------------------------------------------------------


@every_mode
@every_dtype
def test_out_is_written_and_returned(mode, dtype):
    inputs = make_inputs(mode, SHAPE, dtype)
    expected = as_tuple(call(mode, copied(inputs), **stats_option(mode)))
    count = len(CLASSES[MODES[mode][0]].output_names)
    outs = tuple(np.full_like(e, np.nan) for e in expected[:count])
    got = as_tuple(
        call(mode, copied(inputs), out=outs if count > 1 else outs[0], **stats_option(mode))
    )
    assert all(a is b for a, b in zip(got, outs, strict=False))
    assert_same(got, expected)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "batch_norm_stats"])
@pytest.mark.parametrize("how", ["channels last", "gaps", "reversed"])
def test_in_place(mode, how):
    inputs = make_inputs(mode, SHAPE, "float32")
    expected = as_tuple(call(mode, copied(inputs)))
    given = copied(inputs) | {"x": relaid(inputs["x"], how)}
    out = given["x"]
    if "backward" in mode:
        out = (given["grad_out"], np.empty(6, np.float32), given["weight"])
    results = as_tuple(call(mode, given, out=out))
    assert_same([r.copy() for r in results], expected)
    assert results[0] is as_tuple(out)[0]


def test_out_of_a_backward_without_weight_has_a_gap():
    inputs = make_inputs("batch_norm_backward-training", SHAPE, "float16") | {"weight": None}
    expected = call("batch_norm_backward-training", inputs)
    assert expected[1] is None
    assert expected[2].dtype == np.float32
    out = (np.empty(SHAPE, np.float16), None, np.empty(6, np.float32))
    got = call("batch_norm_backward-training", inputs, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same((got[0], got[2]), (expected[0], expected[2]))


# -- torch -------------------------------------------------------------------------------------


@pytest.mark.torch
@every_mode
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torch_tensors_on_the_host(mode, dtype):
    torch = pytest.importorskip("torch")
    inputs = make_inputs(mode, SHAPE, dtype)
    given = {}
    for name, array in inputs.items():
        wide = torch.from_numpy(array.astype(np.float32))
        given[name] = wide.to(getattr(torch, array.dtype.name))
        if array.ndim == 4:
            given[name] = given[name].to(memory_format=torch.channels_last)
    results = as_tuple(call(mode, given, **stats_option(mode)))
    expected = as_tuple(call(mode, inputs, **stats_option(mode)))
    for got, want in zip(results, expected, strict=True):
        assert isinstance(got, torch.Tensor)
        assert got.dtype == getattr(torch, want.dtype.name)
        np.testing.assert_array_equal(got.float().numpy(), want.astype(np.float32))
        if got.ndim == 4:
            assert got.is_contiguous(memory_format=torch.channels_last)
    for name in [n for n in RUNNING if n in inputs]:
        np.testing.assert_array_equal(given[name].float().numpy(), inputs[name].astype(np.float32))


@pytest.mark.torch
def test_running_statistics_of_another_library_are_updated_or_refused():
    torch = pytest.importorskip("torch")
    inputs = make_inputs("batch_norm-training", SHAPE, "float32")
    expected = copied(inputs)
    call("batch_norm-training", expected)
    given = copied(inputs)
    call("batch_norm-training", given | {"x": torch.from_numpy(inputs["x"])})
    for name in RUNNING:
        assert_same_bits(given[name], expected[name])
    tensors = {n: torch.from_numpy(inputs[n].copy()) for n in RUNNING}
    call("batch_norm-training", copied(inputs) | tensors)
    for name in RUNNING:
        assert_same_bits(tensors[name].numpy(), expected[name])

    given = copied(inputs) | {"running_var": strided(inputs["running_var"], "reversed")}
    with pytest.raises(ValueError, match="running_var must be an array that Torch can write to"):
        call("batch_norm-training", given | {"x": torch.from_numpy(inputs["x"])})
    assert_same_bits(given["running_mean"], inputs["running_mean"])


@pytest.mark.torch
def test_an_output_that_another_library_would_copy_is_refused():
    torch = pytest.importorskip("torch")
    x = torch.ones(3, 8)
    out = np.full((3, 8), 7, np.float32)
    assert cunorm.layer_norm(x, 8, out=out) is not None
    assert (out == 0).all()
    backwards = np.full((3, 8), 7, np.float32)[::-1]
    with pytest.raises(ValueError, match="layer_norm: out must be an array that Torch can write"):
        cunorm.layer_norm(x, 8, out=backwards)
    assert (backwards == 7).all()


# -- op objects --------------------------------------------------------------------------------


@every_mode
def test_repr_makes_the_op_again(mode):
    for options in ({}, {"target": "numpy"}):
        one = make_op(mode, **options)
        again = eval(repr(one), vars(cunorm))
        assert type(again) is type(one)
        assert again.attributes == one.attributes
        assert again.target == one.target
        assert repr(again) == repr(one)


@every_mode
def test_ops_can_be_pickled_and_copied(mode):
    one = make_op(mode)
    inputs = make_inputs(mode, SHAPE, "float32")
    expected = one(**copied(inputs))
    for again in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert repr(again) == repr(one)
        assert_same(again(**copied(inputs)), expected)


@every_mode
def test_out_and_the_like_are_keyword_only(mode):
    inputs = make_inputs(mode, SHAPE, "float32")
    with pytest.raises(TypeError, match="positional"):
        make_op(mode)(*inputs.values(), None)


@every_mode
@every_axis
def test_parameter_shapes(mode, axis):
    shape = SHAPE if axis == 1 else (4, 5, 3, 6)
    kind = CLASSES[MODES[mode][0]]
    names = [n for n in kind.input_names if n not in ("x", "grad_out")]
    got = make_op(mode).parameter_shapes(list(shape), channel_axis=axis)
    assert got == dict.fromkeys(names, (6,))
    assert list(got) == names
    assert make_op(mode).parameter_shapes(SHAPE) == got


# Elements of the size of x, of the size of C in the dtype of x, and in the accumulation dtype.
MOVED = {
    "batch_norm-training": (2, 2 + 2 + 2, 0),  # running statistics are read and written
    "batch_norm-inference": (2, 4, 0),
    "batch_norm_stats": (1, 2 + 2, 2),
    "batch_norm_normalize": (2, 2, 2),
    "batch_norm_backward-training": (3, 1 + 2, 2),
    "batch_norm_backward-frozen": (3, 1 + 2, 2),
    "group_norm": (2, 2, 0),
    "instance_norm": (2, 2 + 2 + 2, 0),
    "instance_norm-running": (2, 4, 0),
}


@every_mode
def test_roofline(mode):
    one = make_op(mode)
    of_x, narrow, wide = MOVED[mode]
    got = one.roofline("float16", SHAPE)
    assert got["bytes"] == 2 * (360 * of_x + 6 * narrow) + 4 * 6 * wide
    assert got["flops"] % 360 == 0
    assert 4 <= got["flops"] // 360 <= 9
    assert one.roofline("float16", (4, 5, 3, 6), channel_axis=-1) == got
    full = one.roofline("float16", SHAPE, parameter_dtype="float32")["bytes"]
    assert full == got["bytes"] + 2 * 6 * narrow
    if stats_option(mode):
        statistics = {"group_norm": 12, "instance_norm": 24}.get(MODES[mode][0], 6)
        more = one.roofline("float16", SHAPE, return_stats=True)["bytes"]
        assert more == got["bytes"] + 2 * 4 * statistics
