"""Ops on host arrays: layouts, in-place calls, statistics, parameters."""

from __future__ import annotations

import numpy as np
import pytest
from row_ops import (
    FUSED,
    ROW_OPS,
    STATISTICS,
    TAKES_SHAPE,
    as_tuple,
    draw,
    every_dtype,
    every_op,
    make,
    run,
    same_bits,
)

import cunorm
from cunorm import arrays

ml_dtypes = pytest.importorskip("ml_dtypes")


def relaid(array, how):
    """The same values in another layout."""
    if how == "column-major":
        return np.asfortranarray(array)
    if how == "swapped":  # leading axes in another order
        return np.ascontiguousarray(array.swapaxes(0, -2)).swapaxes(0, -2)
    if how == "gaps":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if how == "row stride":
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + 3), array.dtype)
        wide[..., : array.shape[-1]] = array
        return wide[..., : array.shape[-1]]
    if how == "reversed rows":
        return np.ascontiguousarray(array[::-1])[::-1]
    if how == "reversed":
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    assert how == "big-endian"
    return array.astype(array.dtype.newbyteorder(">"))


LAYOUTS = ("column-major", "swapped", "gaps", "row stride", "reversed rows", "reversed")


# -- layouts -----------------------------------------------------------------------------------


@every_op
@every_dtype
@pytest.mark.parametrize("how", LAYOUTS)
def test_the_layout_of_x_does_not_change_a_bit(op, dtype, how):
    inputs = make(op, dtype=dtype)
    expected = run(op, inputs, return_stats=True)
    relaid_inputs = {**inputs, "x": relaid(inputs["x"], how)}
    if op in FUSED:
        relaid_inputs["residual"] = relaid(inputs["residual"], how)
    same_bits(run(op, relaid_inputs, return_stats=True), expected)


@every_op
@pytest.mark.parametrize("how", LAYOUTS)
def test_outputs_keep_the_memory_order_of_x(op, how):
    inputs = make(op)
    inputs["x"] = relaid(inputs["x"], how)
    outputs = as_tuple(run(op, inputs))
    for output in outputs:
        assert output.strides == np.empty_like(inputs["x"], order="K").strides
        assert output.flags.owndata or output.base.flags.owndata
        assert output.flags.writeable


@every_op
def test_big_endian_files_are_read(op):
    inputs = make(op)
    expected = as_tuple(run(op, inputs))
    got = as_tuple(run(op, {n: relaid(a, "big-endian") for n, a in inputs.items()}))
    same_bits(tuple(a.astype(np.float32) for a in got), expected)


@every_op
def test_expanded_input(op):
    inputs = make(op, (1, 8))
    expected = [np.repeat(a, 4, axis=0) for a in as_tuple(run(op, inputs))]
    inputs["x"] = np.broadcast_to(inputs["x"], (4, 8))
    if op in FUSED:
        inputs["residual"] = np.broadcast_to(inputs["residual"], (4, 8))
    outputs = as_tuple(run(op, inputs))
    same_bits(outputs, tuple(expected))
    for output in outputs:
        assert not arrays.overlaps_itself(output.shape, output.strides)
        assert output.flags.writeable


@pytest.mark.parametrize("shape", [(8,), (1, 8), (5, 8), (3, 1, 8), (1, 5, 8), (3, 5, 8)])
@pytest.mark.parametrize("op", ["ada_layer_norm", "ada_layer_norm_zero"])
def test_parameters_broadcast_along_leading_axes(op, shape):
    inputs = make(op)
    for i, name in enumerate(ROW_OPS[op][1]):
        inputs[name] = draw(shape, "float32", 20 + i)
    whole = {n: np.broadcast_to(a, (3, 5, 8)).copy() for n, a in inputs.items()}
    same_bits(run(op, inputs), run(op, whole))


# -- writing -----------------------------------------------------------------------------------


@every_op
@every_dtype
def test_inputs_are_never_written(op, dtype):
    inputs = make(op, dtype=dtype)
    before = {name: array.tobytes() for name, array in inputs.items()}
    run(op, inputs, return_stats=True)
    assert {name: array.tobytes() for name, array in inputs.items()} == before


@every_op
@every_dtype
def test_out_is_written_and_returned(op, dtype):
    inputs = make(op, dtype=dtype)
    expected = as_tuple(run(op, inputs, return_stats=True))
    count = 2 if op in FUSED else 1
    outs = tuple(np.full_like(inputs["x"], np.nan) for _ in range(count))
    got = as_tuple(run(op, inputs, out=outs if count > 1 else outs[0], return_stats=True))
    assert all(a is b for a, b in zip(got, outs, strict=False))
    same_bits(got, expected)


@every_op
@every_dtype
@pytest.mark.parametrize("how", [None, "column-major", "row stride", "reversed rows"])
def test_in_place(op, dtype, how):
    inputs = make(op, dtype=dtype)
    expected = run(op, inputs)
    if how:
        inputs["x"] = relaid(inputs["x"], how)
    out = (inputs["x"], inputs["residual"]) if op in FUSED else inputs["x"]
    got = run(op, inputs, out=out)
    assert all(a is b for a, b in zip(as_tuple(got), as_tuple(out), strict=True))
    same_bits(got, expected)


@pytest.mark.parametrize("op", FUSED)
def test_fused_in_place_the_other_way_round(op):
    inputs = make(op)
    expected = run(op, inputs)
    same_bits(run(op, inputs, out=(inputs["residual"], inputs["x"])), expected)


@pytest.mark.parametrize("op", ["ada_layer_norm", "ada_layer_norm_zero"])
def test_out_may_be_a_parameter_of_the_shape_of_x(op):
    inputs = make(op)
    inputs["scale"] = draw((3, 5, 8), "float32", 9)
    expected = run(op, inputs)
    same_bits(run(op, inputs, out=inputs["scale"]), expected)


@every_op
def test_out_of_another_layout(op):
    inputs = make(op)
    expected = run(op, inputs)
    outs = tuple(relaid(np.zeros((3, 5, 8), np.float32), "gaps") for _ in as_tuple(expected))
    got = run(op, inputs, out=outs if op in FUSED else outs[0])
    same_bits(got, expected)
    assert all((out.base[..., 1::2] == 0).all() for out in outs)


@every_op
def test_out_may_come_as_a_list(op):
    inputs = make(op)
    outs = [np.empty_like(inputs["x"]) for _ in as_tuple(run(op, inputs))]
    same_bits(run(op, inputs, out=outs), run(op, inputs))


# -- statistics --------------------------------------------------------------------------------


@every_op
@every_dtype
def test_statistics_have_one_value_per_row_in_the_accumulation_dtype(op, dtype):
    inputs = make(op, (3, 5, 8), dtype)
    plain = as_tuple(run(op, inputs))
    outputs = as_tuple(run(op, inputs, return_stats=True))
    statistics = outputs[len(plain) :]
    assert len(statistics) == len(STATISTICS[op])
    for statistic in statistics:
        assert statistic.shape == (3, 5)
        assert statistic.dtype.name == ("float64" if dtype == "float64" else "float32")
    x = inputs["x"].astype(np.float64)
    if op in FUSED:
        x = plain[1].astype(np.float64)
    square = (x**2).mean(-1) if "rms" in op else x.var(-1)
    eps = {"rms_norm": 0.0, "fused_add_rms_norm": 1e-6}.get(op, 1e-5)
    rounding = 4 * np.finfo(statistics[0].dtype).eps
    np.testing.assert_allclose(
        statistics[-1], 1 / np.sqrt(square + eps), rtol=rounding + 3e-7 * (op == "rms_norm")
    )
    if len(statistics) == 2:
        np.testing.assert_allclose(statistics[0], x.mean(-1), atol=rounding)


@pytest.mark.parametrize("op", TAKES_SHAPE)
@pytest.mark.parametrize(
    ("normalized_shape", "lead"), [(8, (3, 5)), ((5, 8), (3,)), ([3, 5, 8], ()), ((8,), (3, 5))]
)
def test_normalizing_several_axes(op, normalized_shape, lead):
    x = draw((3, 5, 8), "float32", 0)
    weight = draw(x.shape[len(lead) :], "float32", 1)
    y, *statistics = getattr(cunorm, op)(x, normalized_shape, weight, return_stats=True)
    flat = x.reshape(*lead, -1)
    expected = getattr(cunorm, op)(flat, flat.shape[-1], weight.ravel(), return_stats=True)
    same_bits((y.reshape(flat.shape), *statistics), expected)
    assert all(s.shape == lead for s in statistics)


@every_op
def test_one_axis(op):
    inputs = make(op, (8,))
    rows = {n: a[None] if n in ("x", "residual") else a for n, a in inputs.items()}
    expected = [a[0] for a in as_tuple(run(op, rows, return_stats=True))]
    got = as_tuple(run(op, inputs, return_stats=True))
    for a, b in zip(got, expected, strict=True):
        assert isinstance(a, np.ndarray)
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


@every_op
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0,), (3, 0), (0, 0)])
def test_no_elements(op, shape):
    inputs = make(op, shape)
    got = as_tuple(run(op, inputs, return_stats=True))
    outputs = 2 if op in FUSED else 1
    assert len(got) == outputs + len(STATISTICS[op])
    assert all(a.shape == shape for a in got[:outputs])
    assert all(a.shape == shape[:-1] for a in got[outputs:])
    out = tuple(np.empty(shape, np.float32) for _ in range(outputs))
    assert as_tuple(run(op, inputs, out=out))[0] is out[0]


# -- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [np.float32(0.25), np.float64(0.25), np.array(0.25), 0.25])
def test_eps_may_be_any_number(eps):
    x = draw((3, 8), "float32", 0)
    same_bits(cunorm.layer_norm(x, 8, eps=eps), cunorm.layer_norm(x, 8, eps=0.25))
    assert cunorm.LayerNormFwdOp(8, eps).eps == 0.25
    assert type(cunorm.LayerNormFwdOp(8, eps).eps) is float
    same_bits(cunorm.rms_norm(x, 8, eps=1), cunorm.rms_norm(x, 8, eps=1.0))


@pytest.mark.parametrize("shape", [8, np.int64(8), (8,), [8], np.array([8]), (np.int32(8),)])
def test_normalized_shape_may_be_any_int_or_sequence(shape):
    x = draw((3, 8), "float32", 0)
    same_bits(cunorm.layer_norm(x, shape), cunorm.LayerNormFwdOp(8)(x))
    assert cunorm.LayerNormFwdOp(shape).normalized_shape == (8,)
    assert type(cunorm.LayerNormFwdOp(shape).normalized_shape[0]) is int


def test_rms_norm_takes_the_machine_epsilon_unless_told():
    x = np.full((1, 4), 1e-3, np.float32)
    same_bits(cunorm.rms_norm(x, 4), cunorm.rms_norm(x, 4, eps=2.0**-23))
    x = x.astype(np.float64)
    same_bits(cunorm.rms_norm(x, 4), cunorm.rms_norm(x, 4, eps=2.0**-52))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_op
def test_wide_parameters_are_used_as_they_are(op, dtype):
    inputs = make(op, dtype=dtype)
    narrow = {n: a.astype(np.float32) if n in ROW_OPS[op][1] else a for n, a in inputs.items()}
    same_bits(run(op, narrow), run(op, inputs))
    fine = dict(narrow)
    for name in ROW_OPS[op][1][:1]:
        fine[name] = narrow[name] * np.float32(1 + 2**-7)
        rounded = {**fine, name: fine[name].astype(inputs["x"].dtype)}
        assert as_tuple(run(op, fine))[0].tobytes() != as_tuple(run(op, rounded))[0].tobytes()


@pytest.mark.parametrize("op", [op for op in ROW_OPS if not op.startswith("ada")])
def test_absent_parameters_are_ones_and_zeros(op):
    inputs = make(op)
    shape = inputs["x"].shape[-1:]
    plain = {"weight": np.ones(shape, np.float32), "bias": np.zeros(shape, np.float32)}
    absent = {n: None if n in plain else a for n, a in inputs.items()}
    present = {n: plain.get(n, a) for n, a in inputs.items()}
    same_bits(run(op, absent), run(op, present))
