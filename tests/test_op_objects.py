"""What an op object is and tells of itself: names, copies, shapes, costs, plans."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
from row_ops import (
    ROW_OPS,
    STATISTICS,
    draw,
    every_dtype,
    every_op,
    make,
    op_object,
    run,
    same_bits,
)

import cunorm
from cunorm import arrays, dtypes
from cunorm.functional.cache import op_of

ml_dtypes = pytest.importorskip("ml_dtypes")


# -- op objects --------------------------------------------------------------------------------


@every_op
def test_function_op_and_forward_are_one(op):
    inputs = make(op)
    expected = run(op, inputs, return_stats=True)
    one = op_object(op)
    same_bits(one(**inputs, return_stats=True), expected)
    same_bits(one(*inputs.values(), return_stats=True), expected)
    same_bits(one.forward(*inputs.values(), return_stats=True), expected)
    same_bits(one.forward(**inputs, return_stats=True), expected)


@every_op
def test_out_and_the_like_are_keyword_only(op):
    inputs = make(op)
    with pytest.raises(TypeError, match="positional"):
        op_object(op)(*inputs.values(), inputs["x"])


@every_op
def test_repr_makes_the_op_again(op):
    for options in ({}, {"eps": 0.125}, {"target": "numpy"}):
        one = op_object(op, **options)
        again = eval(repr(one), vars(cunorm))
        assert type(again) is type(one)
        assert again.attributes == one.attributes
        assert again.target == one.target
        assert repr(again) == repr(one)


@every_op
def test_ops_can_be_pickled_and_copied(op):
    one = op_object(op, eps=0.125)
    inputs = make(op)
    expected = one(**inputs)
    for again in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert type(again) is type(one)
        assert repr(again) == repr(one)
        same_bits(again(**inputs), expected)
    assert copy.copy(one)._plans is not one._plans


def op_made_for(*parameters):
    return op_of(cunorm.RMSNormFwdOp, None, *parameters, *map(type, parameters))


def test_functions_make_an_op_once():
    for shape in (8, (8,), [8], (4, 2), [4, 2]):
        one = op_made_for(shape, 1e-6)
        assert op_made_for(shape, 1e-6) is one
        assert one.attributes == cunorm.RMSNormFwdOp(shape, 1e-6).attributes
        assert op_made_for(shape, 0.5) is not one
    assert op_of(cunorm.BatchNormNormalizeOp, None) is op_of(cunorm.BatchNormNormalizeOp, None)
    assert op_of(cunorm.BatchNormNormalizeOp, "numpy").target == "numpy"


def test_what_equals_good_parameters_is_refused_all_the_same():
    for good, bad in ((6, 6.0), ((4, 6), (4, 6.0)), ([4, 6], [4, 6.0]), ([4, 6], [4, [6]])):
        op_made_for(good, 1e-6)
        for _ in range(2):
            with pytest.raises(TypeError, match="normalized_shape must be an int or a sequence"):
                op_made_for(bad, 1e-6)


@every_op
def test_threads_share_an_op(op):
    one = op_object(op)
    sets = [make(op, (rows, 8)) for rows in range(1, 9)]
    expected = [one(**inputs, return_stats=True) for inputs in sets]
    wrong = []

    def work(which):
        for _ in range(20):
            try:
                same_bits(one(**sets[which], return_stats=True), expected[which])
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@every_op
def test_parameter_shapes(op):
    names = ROW_OPS[op][1]
    one = op_object(op)
    expected = (3, 5, 8) if op.startswith("ada") else (8,)
    assert one.parameter_shapes((3, 5, 8)) == dict.fromkeys(names, expected)
    assert list(one.parameter_shapes([3, 5, 8])) == list(names)


def test_parameter_shapes_of_several_axes():
    assert cunorm.LayerNormFwdOp((5, 8)).parameter_shapes((3, 5, 8)) == {
        "weight": (5, 8),
        "bias": (5, 8),
    }


@pytest.mark.parametrize(
    ("op", "arrays_of_x", "parameters"),
    [
        ("layer_norm", 2, 2),
        ("rms_norm", 2, 1),
        ("fused_add_layer_norm", 4, 2),
        ("fused_add_rms_norm", 4, 1),
        ("ada_layer_norm", 4, 0),
        ("ada_layer_norm_zero", 5, 0),
    ],
)
def test_roofline(op, arrays_of_x, parameters):
    one = op_object(op)
    got = one.roofline("float16", (6, 8))
    assert got["bytes"] == 2 * (48 * arrays_of_x + 8 * parameters)
    assert got["flops"] % 48 == 0
    assert 4 <= got["flops"] // 48 <= 9
    statistics = len(STATISTICS[op]) * 6 * 4
    assert one.roofline("float16", (6, 8), return_stats=True)["bytes"] == got["bytes"] + statistics
    wide = one.roofline("float16", (6, 8), parameter_dtype="float32")["bytes"]
    in_x = {"ada_layer_norm": 2, "ada_layer_norm_zero": 3}.get(op, 0)
    assert wide == got["bytes"] + 2 * (48 * in_x + 8 * parameters)
    if parameters:
        less = one.roofline("float16", (6, 8), without=["weight"])["bytes"]
        assert less == got["bytes"] - 16


# -- plans, which need no GPU ------------------------------------------------------------------


@every_op
@every_dtype
def test_a_plan_shows_its_launches(op, dtype):
    one = op_object(op, 4096)
    (launch,) = one.plan(dtype, (1000, 4096))
    norm = "".join({"rms": "RMS"}.get(word, word.capitalize()) for word in op.split("_"))
    assert launch.kernel.startswith(f"row_norm<{norm}, Types<{dtypes.FLOATS[dtype].c_name}, ")
    assert f"struct {norm} {{" in launch.source
    assert f'#line 1 "cuda_src/{op}.cu"' in launch.source
    assert "#include <cuda_fp16.h>" in launch.source
    assert '#include "' not in launch.source
    assert launch.grid >= 1
    assert 32 <= launch.block <= 1024
    assert launch.shared_memory >= 0
    assert launch.source not in repr(launch)


def test_a_plan_names_the_types_of_parameters():
    (launch,) = cunorm.LayerNormFwdOp(512).plan(
        np.float16, (7, 512), parameter_dtype=np.float32, without=["bias"]
    )
    assert "Types<__half, float, Zero, One>" in launch.kernel


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16")])
def test_a_dtype_may_be_given_in_any_way(dtype):
    one = cunorm.RMSNormFwdOp(64)
    assert one.plan(dtype, (3, 64)) == one.plan("float16", (3, 64))
    assert one.roofline(dtype, [3, 64]) == one.roofline("float16", (3, 64))


@pytest.mark.torch
def test_a_torch_dtype_will_do():
    torch = pytest.importorskip("torch")
    one = cunorm.RMSNormFwdOp(64)
    assert one.plan(torch.bfloat16, (3, 64)) == one.plan(ml_dtypes.bfloat16, (3, 64))


@every_op
def test_the_grid_follows_the_number_of_rows(op):
    one = op_object(op, 4096)
    grids = [one.plan("float32", (rows, 4096))[0].grid for rows in (1, 1000, 2000)]
    assert grids[0] < grids[1] < grids[2]
    assert one.plan("float32", (0, 4096)) == []


def test_very_long_rows_take_three_launches():
    launches = cunorm.LayerNormFwdOp(1 << 24).plan("float32", (2, 1 << 24))
    assert [launch.kernel.partition("<")[0] for launch in launches] == [
        "row_segment_statistics",
        "row_segment_merge",
        "row_segment_normalize",
    ]


def test_a_call_that_cannot_be_made_cannot_be_planned():
    with pytest.raises(ValueError, match="normalized_shape must be the trailing shape"):
        cunorm.LayerNormFwdOp(8).plan("float32", (3, 9))


def test_the_cuda_target_is_never_tried_on_host_arrays(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("asked CuPy")

    monkeypatch.setattr(arrays.CuPy, "__init__", refuse)
    x = draw((3, 8), "float32", 0)
    assert cunorm.layer_norm(x, 8).shape == (3, 8)
