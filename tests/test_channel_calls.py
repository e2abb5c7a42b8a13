"""What targets are asked by ops with channels, and what a remembered call still checks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from channel_cases import COMPUTING, MODES, RUNNING, make_inputs, make_op

import cunorm
from cunorm import arrays, reference
from cunorm.arrays import ArraySpec, Device

every_mode = pytest.mark.parametrize("mode", MODES)
SHAPE = (4, 6, 5, 3)


class Planner:
    """A kernel that remembers the calls it was asked to plan, and runs the reference."""

    def __init__(self, op):
        self.op = op
        self.calls = []
        self.runs = 0

    def __call__(self, *args, **options):
        raise AssertionError("it makes plans")

    def plan(self, call, out_given):
        self.calls.append(call)
        return SimpleNamespace(launches=[], compile=lambda: None, run=self.run)

    def run(self, library, inputs, out, pointers):
        self.runs += 1
        return [np.zeros(1)] * len(self.calls[-1].outputs)


class Fake(np.ndarray):
    """An array of a library that, unlike NumPy, remembers plans."""


class FakeLibrary(arrays.NumPy):
    def device(self, array):
        return Device("cuda")

    def fingerprint(self, given):
        key = [None if a is None else (a.shape, a.strides, a.dtype) for a in given]
        return tuple(key), [0 if a is None else self.pointer(a) for a in given]


@pytest.fixture
def planner(monkeypatch):
    """Registers a planner for an op, under the name "planner"; Fake arrays are the library's."""
    monkeypatch.setitem(arrays._LIBRARIES, Fake, FakeLibrary())
    names = []

    def register(op):
        kernel = Planner(op)
        cunorm.register_target("planner", {op: kernel})
        names.append("planner")
        return kernel

    yield register
    for name in names:
        cunorm.unregister_target(name)


def fake(inputs):
    return {n: None if a is None else a.copy().view(Fake) for n, a in inputs.items()}


OUTPUTS = {
    "batch_norm": ["y"],
    "batch_norm_stats": ["mean", "rstd"],
    "batch_norm_normalize": ["y"],
    "batch_norm_backward": ["grad_x", "grad_weight", "grad_bias"],
    "group_norm": ["y"],
    "instance_norm": ["y"],
}
ATTRIBUTES = {
    "batch_norm-training": {"training": True, "momentum": 0.3, "eps": 1e-5},
    "batch_norm-inference": {"training": False, "momentum": 0.1, "eps": 1e-5},
    "batch_norm_stats": {"momentum": 0.3, "eps": 1e-5},
    "batch_norm_normalize": {},
    "batch_norm_backward-training": {"training": True},
    "batch_norm_backward-frozen": {"training": False},
    "group_norm": {"num_groups": 3, "eps": 1e-5},
    "instance_norm": {"use_input_stats": True, "momentum": 0.3, "eps": 1e-5},
    "instance_norm-running": {"use_input_stats": False, "momentum": 0.1, "eps": 1e-5},
}


@every_mode
@pytest.mark.parametrize("axis", [1, -1])
def test_a_call_says_all_a_target_needs(planner, mode, axis):
    op = MODES[mode][0]
    kernel = planner(op)
    shape = SHAPE if axis == 1 else (4, 5, 3, 6)
    one = make_op(mode, target="planner")
    stats = bool(one.statistic_names)
    one.plan("float16", shape, return_stats=stats, channel_axis=axis, parameter_dtype="float32")
    (call,) = kernel.calls
    assert call.op == op
    assert call.attributes == {**ATTRIBUTES[mode], "channel_axis": axis}
    assert list(call.inputs) == list(one.input_names)
    assert call.x == ArraySpec.contiguous(shape, "float16")
    for name, spec in call.inputs.items():
        like_x = name in ("x", "grad_out")
        assert spec == (call.x if like_x else ArraySpec.contiguous((6,), "float32"))
    assert list(call.outputs) == OUTPUTS[op]
    for name, spec in call.outputs.items():
        like_x = name in ("y", "grad_x")
        assert spec == (call.x if like_x else ArraySpec.contiguous((6,), "float32"))
    per = {"group_norm": (4, 3), "instance_norm": (4, 6)}.get(op, (6,))
    expected = dict.fromkeys(["mean", "rstd"] * stats, ArraySpec.contiguous(per, "float32"))
    assert call.statistics == expected
    assert call.mutated == (RUNNING if mode in COMPUTING else ())


def test_row_ops_have_no_channel_axis(planner):
    kernel = planner("rms_norm")
    one = cunorm.RMSNormFwdOp(8, target="planner")
    one.plan("float32", (3, 8))
    assert kernel.calls[0].attributes == {"normalized_shape": (8,), "eps": None}
    assert kernel.calls[0].mutated == ()
    for question in (one.plan, one.compile, one.roofline):
        with pytest.raises(TypeError, match="rms_norm: there is no channel_axis, got 1"):
            question("float32", (3, 8), channel_axis=1)
    with pytest.raises(TypeError, match="rms_norm: there is no channel_axis, got -1"):
        one.parameter_shapes((3, 8), channel_axis=-1)


def test_without_a_weight_its_gradient_is_no_output(planner):
    kernel = planner("batch_norm_backward")
    one = cunorm.BatchNormBwdOp(target="planner")
    with pytest.raises(ValueError, match="without must be optional parameters, got 'rstd'"):
        one.plan("float16", SHAPE, without=["weight", "rstd"])
    one.plan("float16", SHAPE, without=["weight"])
    (call,) = kernel.calls
    assert call.inputs["weight"] is None
    assert list(call.outputs) == ["grad_x", "grad_bias"]
    assert call.outputs["grad_bias"].dtype == "float32"


def test_the_channel_axis_is_part_of_what_is_remembered(planner):
    kernel = planner("group_norm")
    one = cunorm.GroupNormFwdOp(3, target="planner")
    x = np.ones((6, 6, 6), np.float32).view(Fake)
    for axis in (1, -1, 1, -1, -1):
        one(x, channel_axis=axis)
    assert [call.attributes["channel_axis"] for call in kernel.calls] == [1, -1]
    assert kernel.runs == 5


@pytest.mark.parametrize("mode", COMPUTING)
def test_a_remembered_call_still_looks_for_shared_memory(planner, mode):
    op = MODES[mode][0]
    kernel = planner(op)
    one = make_op(mode, target="planner")
    inputs = fake(make_inputs(mode, SHAPE, "float32"))
    for _ in range(2):
        one(**inputs)
    assert (len(kernel.calls), kernel.runs) == (1, 2)
    again = inputs | {"running_var": inputs["running_mean"]}
    with pytest.raises(ValueError, match="running_var shares memory with running_mean"):
        one(**again)
    assert (len(kernel.calls), kernel.runs) == (1, 2)


def test_a_call_that_writes_only_new_memory_checks_nothing(planner):
    planner("batch_norm")
    one = cunorm.BatchNormFwdOp(target="planner")
    one(**fake(make_inputs("batch_norm-inference", SHAPE, "float32")))
    assert [guard for _, guard in one._plans.values()] == [None]


def test_kernels_that_are_functions_get_the_channel_axis():
    """Registered targets as documented: arrays, `out`, `return_stats`, `channel_axis`."""
    seen = []

    def kernel(op, *inputs, out, return_stats, channel_axis):
        seen.append((op.training, len(inputs), out, return_stats, channel_axis))
        results = reference.batch_norm_backward(*inputs, op.training, channel_axis=channel_axis)
        return results

    cunorm.register_target("mine", {"batch_norm_backward": kernel})
    try:
        inputs = make_inputs("batch_norm_backward-frozen", SHAPE, "float32") | {"weight": None}
        got = cunorm.batch_norm_backward(**inputs, training=False, target="mine")
    finally:
        cunorm.unregister_target("mine")
    assert seen == [(False, 5, (), False, 1)]
    assert got[1] is None
    assert len(got) == 3
