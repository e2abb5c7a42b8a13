"""Backward ops on host arrays: results, layouts, what is absent, what an op tells of itself."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from backward_cases import (
    ADAPTIVE,
    CLASSES,
    DTYPES,
    FUSED,
    OPS,
    ROW_OPS,
    TAKES_SHAPE,
    WEIGHTED,
    assert_within_bounds,
    call,
    copied,
    make_inputs,
    make_op,
    options_of,
    refer,
    run_op,
    sizes_of,
    x_name,
)
from cases import assert_same_bits, noise

import cunorm
from cunorm import arrays, dtypes, reference
from cunorm import call as calls

pytest.importorskip("ml_dtypes")

every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_axis = pytest.mark.parametrize("axis", [1, -1])


def default_sizes(op, axis=1):
    if op in ADAPTIVE:
        return sizes_of(op, (4, 3, 10), parameter_shape=(4, 1, 10))
    if op in ROW_OPS:
        return sizes_of(op, (4, 3, 10))
    return sizes_of(op, (4, 6, 5, 3) if axis == 1 else (4, 5, 3, 6), axis)


def assert_same(results, expected):
    for got, want in zip(results, expected, strict=True):
        if want is None:
            assert got is None
        else:
            assert_same_bits(got, want)


def relaid(array, how):
    """The same values in another memory order."""
    if how == "transposed":
        return np.ascontiguousarray(array.T).T
    if how == "gaps":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    return np.flip(np.flip(array).copy())


LAYOUTS = ("transposed", "gaps", "reversed")


# -- results -----------------------------------------------------------------------------------


@every_op
@every_dtype
@every_axis
def test_functions_give_what_the_definitions_say(op, dtype, axis):
    sizes = default_sizes(op, axis)
    inputs = make_inputs(op, sizes, dtype)
    given = copied(inputs)
    for array in given.values():
        array.flags.writeable = False
    assert_same(call(op, given, sizes), refer(op, inputs, sizes))


@every_op
def test_function_op_and_forward_are_one(op):
    sizes = default_sizes(op)
    inputs = make_inputs(op, sizes, "float32")
    one = make_op(op, sizes)
    expected = call(op, inputs, sizes)
    assert_same(one(**inputs), expected)
    assert_same(one(*inputs.values()), expected)
    assert_same(one.forward(*inputs.values()), expected)


@every_op
@every_dtype
def test_dtypes_and_shapes_of_results(op, dtype):
    sizes = default_sizes(op)
    for parameter_dtype in {dtype, dtypes.accumulation(dtype)}:
        inputs = make_inputs(op, sizes, dtype, parameter_dtype=parameter_dtype)
        of_x, *of_parameters = call(op, inputs, sizes)
        assert (of_x.shape, of_x.dtype) == (sizes.x, dtypes.numpy_dtype(dtype))
        for gradient in of_parameters:
            assert gradient.shape == sizes.parameter
            assert gradient.dtype == dtypes.numpy_dtype(parameter_dtype)


@every_op
@every_axis
@pytest.mark.parametrize("how", LAYOUTS)
def test_gradients_of_x_keep_its_memory_order(op, axis, how):
    sizes = default_sizes(op, axis)
    inputs = make_inputs(op, sizes, "float32")
    expected = call(op, inputs, sizes)
    given = inputs | {x_name(op): relaid(inputs[x_name(op)], how)}
    results = call(op, given, sizes)
    assert_same([r.copy() for r in results], expected)
    assert results[0].strides == np.empty_like(given[x_name(op)], order="K").strides
    assert all(r.flags.c_contiguous for r in results[1:])


@every_op
@every_axis
@pytest.mark.parametrize("how", [*LAYOUTS, "expanded", "one number"])
def test_grad_out_of_any_strides(op, axis, how):
    sizes = default_sizes(op, axis)
    inputs = make_inputs(op, sizes, "float32")
    grad = inputs["grad_out"]
    if how == "expanded":
        grad = np.broadcast_to(grad[:1], sizes.x)
    elif how == "one number":
        grad = np.broadcast_to(grad.ravel()[0], sizes.x)
    else:
        grad = relaid(grad, how)
    expected = call(op, inputs | {"grad_out": np.ascontiguousarray(grad)}, sizes)
    assert_same(call(op, inputs | {"grad_out": grad}, sizes), expected)


FORWARD = {op: op.removesuffix("_backward") for op in OPS}


@every_op
@every_dtype
@every_axis
def test_round_trip_with_the_statistics_of_the_forward(op, dtype, axis):
    sizes = default_sizes(op, axis)
    inputs = make_inputs(op, sizes, dtype, centre=2.0)
    kind = next(k for k in CLASSES.values() if k.name == FORWARD[op])
    parameters = {n: v for n, v in options_of(op, sizes).items() if n != "channel_axis"}
    forward = kind(**parameters, target="numpy")
    given = {n: inputs[n] for n in kind.input_names if n in inputs}
    if op in FUSED:
        given |= {"x": inputs["residual_out"], "residual": np.zeros_like(inputs["residual_out"])}
    given |= {n: given["scale"] for n in ("shift",) if n in kind.input_names and n not in given}
    given |= {n: None for n in ("bias",) if n in kind.input_names and op in FUSED}
    channel = {} if sizes.axis is None else {"channel_axis": sizes.axis}
    results = forward(**given, **channel, return_stats=True)
    statistics = dict(zip(kind.statistic_names, results[-len(kind.statistic_names) :], strict=True))

    backward = forward.backward_op()
    assert type(backward) is CLASSES[op]
    assert repr(backward) == repr(make_op(op, sizes, target="numpy"))
    if op in FUSED:
        inputs["residual_out"] = results[1]
    inputs |= statistics
    assert_within_bounds(op, run_op(backward, inputs, sizes), inputs, sizes)


def test_backward_ops_have_none_and_constants_have_none():
    for op in OPS:
        assert make_op(op, default_sizes(op)).backward_op() is None
    assert cunorm.InstanceNormFwdOp(use_input_stats=False).backward_op() is None


# -- what is absent ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", WEIGHTED)
@every_dtype
def test_there_is_no_gradient_of_an_absent_weight(op, dtype):
    sizes = default_sizes(op)
    inputs = make_inputs(op, sizes, dtype, without=("weight",))
    results = call(op, inputs, sizes)
    ones = inputs | {
        "weight": np.ones(sizes.parameter, reference.accumulation_dtype(dtypes.numpy_dtype(dtype)))
    }
    expected = call(op, ones, sizes)
    assert results[1] is None
    assert_same((results[0], *results[2:]), (expected[0], *expected[2:]))

    out = tuple(None if e is None else np.full_like(e, np.nan) for e in results)
    got = call(op, inputs, sizes, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(got, results)
    assert_same(run_op(make_op(op, sizes), inputs, sizes, out=list(out)), results)


@pytest.mark.parametrize("op", FUSED)
def test_no_gradient_of_the_sum_is_one_of_zeros(op):
    sizes = default_sizes(op)
    inputs = make_inputs(op, sizes, "float32", without=("grad_residual_out",))
    expected = inputs | {"grad_residual_out": np.zeros(sizes.x, np.float32)}
    assert_same(call(op, inputs, sizes), call(op, expected, sizes))


@pytest.mark.parametrize("op", FUSED)
@every_dtype
def test_fused_adds_round_once(op, dtype):
    sizes = default_sizes(op)
    inputs = make_inputs(op, sizes, dtype)
    plain = {n: a for n, a in inputs.items() if n not in ("residual_out", "grad_residual_out")}
    norm = "layer_norm_backward" if "layer" in op else "rms_norm_backward"
    function = reference.BACKWARD[norm]
    x, work = inputs["residual_out"], reference.working_dtype(inputs["residual_out"].dtype)
    unrounded, *_ = function(**plain, x=x, normalized_shape=10, dtype=work)
    _, *of_parameters = function(**plain, x=x, normalized_shape=10)
    expected = (unrounded + inputs["grad_residual_out"].astype(work)).astype(x.dtype)
    assert_same(call(op, inputs, sizes), (expected, *of_parameters))


@every_op
@every_axis
@pytest.mark.parametrize("weight", [True, False])
def test_sums_over_nothing_are_zero(op, axis, weight):
    sizes = default_sizes(op, axis)
    x = (0, *sizes.x[1:])
    sizes = sizes_of(op, x, axis, sizes.parameter[-1:] if op in ROW_OPS else None)
    without = () if weight or op in ADAPTIVE else ("weight",)
    inputs = make_inputs(op, sizes, "float16", without=without, statistics=False)
    of_x, *of_parameters = call(op, inputs, sizes)
    assert of_x.shape == x
    for gradient in of_parameters:
        assert gradient is None or (gradient.shape == sizes.parameter and (gradient == 0).all())


@every_op
def test_one_row(op):
    shape = (1, 10) if op in ROW_OPS else (1, 6, 5)
    sizes = sizes_of(op, shape)
    inputs = make_inputs(op, sizes, "float32")
    results = call(op, inputs, sizes)
    assert_within_bounds(op, results, inputs, sizes)
    if op in ("layer_norm_backward", "ada_layer_norm_backward"):
        np.testing.assert_array_equal(results[2], inputs["grad_out"][0])


# -- writing -----------------------------------------------------------------------------------


@every_op
@every_dtype
def test_out_is_written_and_returned(op, dtype):
    sizes = default_sizes(op)
    inputs = make_inputs(op, sizes, dtype)
    expected = call(op, inputs, sizes)
    out = tuple(np.full_like(e, np.nan) for e in expected)
    got = call(op, inputs, sizes, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert_same(got, expected)


IN_PLACE = [
    (op, name) for op in OPS for name in CLASSES[op].input_names if name in CLASSES[op].like_x
]


@pytest.mark.parametrize(("op", "name"), IN_PLACE)
@pytest.mark.parametrize("how", ["as it is", *LAYOUTS])
def test_in_place(op, name, how):
    sizes = default_sizes(op)
    inputs = make_inputs(op, sizes, "float32")
    expected = call(op, inputs, sizes)
    given = copied(inputs)
    if how != "as it is":
        given[name] = relaid(inputs[name], how)
    parameters = [n.removeprefix("grad_") for n in CLASSES[op].output_names[1:]]
    # A gradient may be written over its own parameter as well.
    out = [
        given[n] if n in given else np.empty_like(e)
        for n, e in zip(parameters, expected[1:], strict=True)
    ]
    results = call(op, given, sizes, out=(given[name], *out))
    assert results[0] is given[name]
    assert_same([r.copy() for r in results], expected)


# -- other libraries and targets ----------------------------------------------------------------


@pytest.mark.torch
@every_op
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torch_tensors_on_the_host(op, dtype):
    torch = pytest.importorskip("torch")
    sizes = default_sizes(op)
    inputs = make_inputs(op, sizes, dtype, without=() if op in ADAPTIVE else ("weight",))
    given = {
        name: None
        if array is None
        else torch.from_numpy(array.astype(np.float32)).to(getattr(torch, array.dtype.name))
        for name, array in inputs.items()
    }
    for got, want in zip(call(op, given, sizes), call(op, inputs, sizes), strict=True):
        if want is None:
            assert got is None
            continue
        assert isinstance(got, torch.Tensor)
        assert got.dtype == getattr(torch, want.dtype.name)
        np.testing.assert_array_equal(got.float().numpy(), want.astype(np.float32))


@pytest.mark.torch
@every_op
def test_a_tensor_that_requires_grad_is_refused(op):
    torch = pytest.importorskip("torch")
    sizes = default_sizes(op)
    given = {n: torch.from_numpy(a) for n, a in make_inputs(op, sizes, "float32").items()}
    given["grad_out"].requires_grad_()
    with pytest.raises(ValueError, match=f"{op}: grad_out requires grad"):
        call(op, given, sizes)
    with torch.no_grad():
        assert call(op, given, sizes)[0] is not None


@pytest.mark.parametrize("op", WEIGHTED)
@pytest.mark.parametrize("gap", [True, False])
def test_targets_may_leave_the_gap_out_or_in(op, gap):
    """A kernel returns None for the absent gradient, or nothing at all."""
    sizes = default_sizes(op)
    seen = []

    def kernel(one, *inputs, out, return_stats, **channel_axis):
        seen.append(channel_axis)
        named = dict(zip(one.input_names, inputs, strict=True))
        results = reference.BACKWARD[op](**named, **one.attributes, **channel_axis)
        return results if gap else tuple(r for r in results if r is not None)

    cunorm.register_target("mine", {op: kernel})
    try:
        inputs = make_inputs(op, sizes, "float32", without=("weight",))
        assert_same(call(op, inputs, sizes, target="mine"), call(op, inputs, sizes))
    finally:
        cunorm.unregister_target("mine")
    assert seen == [{} if op in ROW_OPS else {"channel_axis": 1}]


# -- op objects --------------------------------------------------------------------------------


@every_op
def test_repr_makes_the_op_again(op):
    for options in ({}, {"target": "numpy"}):
        one = make_op(op, default_sizes(op), **options)
        again = eval(repr(one), vars(cunorm))
        assert type(again) is type(one)
        assert again.attributes == one.attributes
        assert again.target == one.target


@every_op
def test_ops_can_be_pickled_and_copied(op):
    sizes = default_sizes(op)
    one, inputs = make_op(op, sizes), make_inputs(op, sizes, "float32")
    expected = run_op(one, inputs, sizes)
    for again in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert_same(run_op(again, inputs, sizes), expected)


@every_op
def test_out_and_the_like_are_keyword_only(op):
    sizes = default_sizes(op)
    with pytest.raises(TypeError, match="positional"):
        make_op(op, sizes)(*make_inputs(op, sizes, "float32").values(), None)


@every_op
@every_axis
def test_parameter_shapes(op, axis):
    sizes = default_sizes(op, axis)
    names = [n for n in CLASSES[op].input_names if n not in CLASSES[op].like_x]
    expected = {n: sizes.statistic if n in ("mean", "rstd") else sizes.parameter for n in names}
    if op in ADAPTIVE:  # any shape that broadcasts to it will do
        expected |= {n: sizes.x for n in ("scale", "shift", "gate") if n in names}
    channel = {} if sizes.axis is None else {"channel_axis": axis}
    got = make_op(op, sizes).parameter_shapes(sizes.x, **channel)
    assert got == expected
    assert list(got) == names


# Arrays of the size of x, and of one parameter.
MOVED = {
    "layer_norm_backward": (3, 3),
    "rms_norm_backward": (3, 2),
    "fused_add_layer_norm_backward": (4, 3),
    "fused_add_rms_norm_backward": (4, 2),
    "ada_layer_norm_backward": (3 + 3, 0),
    "ada_layer_norm_zero_backward": (3 + 6, 0),
    "group_norm_backward": (3, 3),
    "instance_norm_backward": (3, 3),
}


@every_op
def test_roofline(op):
    sizes = default_sizes(op)
    one = make_op(op, sizes)
    size, statistics = np.prod(sizes.x), np.prod(sizes.statistic)
    of_x, of_parameter = MOVED[op]
    wide = 4 * statistics * (1 if "rms" in op else 2)
    got = one.roofline("float16", sizes.x)
    parameter = 0 if op in ADAPTIVE else np.prod(sizes.parameter)
    assert got["bytes"] == 2 * (of_x * size + of_parameter * parameter) + wide
    assert got["flops"] % size == 0
    assert 9 <= got["flops"] // size <= 18
    if op in FUSED:
        without = one.roofline("float16", sizes.x, without=("grad_residual_out",))
        assert without["bytes"] == got["bytes"] - 2 * size
    if op in WEIGHTED:  # no weight, no gradient of it; that of the bias is float32
        without = one.roofline("float16", sizes.x, without=("weight",))
        assert without["bytes"] == got["bytes"] - 2 * (2 - 1 * ("rms" not in op)) * parameter


def test_calls_know_which_input_is_normalized():
    spec = arrays.ArraySpec.contiguous((2, 4), "float32")
    inputs = {"grad_out": None, "residual_out": spec}
    one = calls.Call("fused_add_rms_norm_backward", {}, inputs, {}, x_name="residual_out")
    assert one.x is spec
    with pytest.raises(ValueError, match="mine: residual_out is missing"):
        _ = calls.Call("mine", {}, {"residual_out": None}, {}, x_name="residual_out").x


@pytest.mark.parametrize("op", TAKES_SHAPE)
def test_several_normalized_axes(op):
    sizes = sizes_of(op, (4, 30))
    inputs = make_inputs(op, sizes, "float32")
    folded = {
        n: a.reshape(*a.shape[:-1], 5, 6) if a.shape[-1:] == (30,) else a for n, a in inputs.items()
    }
    got = getattr(cunorm, op)(**folded, normalized_shape=(5, 6))
    assert_same(
        [g.reshape(w.shape) for g, w in zip(got, call(op, inputs, sizes), strict=True)],
        call(op, inputs, sizes),
    )
    assert got[1].shape == (5, 6)


@pytest.mark.parametrize("op", ADAPTIVE)
def test_statistics_and_modulation_of_any_strides(op):
    sizes = default_sizes(op)
    inputs = make_inputs(op, sizes, "float32")
    expected = call(op, inputs, sizes)
    given = {n: relaid(a, "reversed") for n, a in inputs.items()}
    assert_same([r.copy() for r in call(op, given, sizes)], expected)
    scale = np.broadcast_to(noise((10,)).astype(np.float32), sizes.x)  # expanded: a full shape
    assert call(op, inputs | {"scale": scale}, sizes)[1].shape == sizes.x
