"""Bad input to the backward ops: each raises before anything changes and names the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bad_input import FLOATS, NO_ARRAY, Arrays, Case, check

import cunorm

# (4, 6) rows, (4, 6, 5) samples of six channels in two groups.


def layer(a: Arrays, **changed: Any) -> Any:
    given = {"grad_out": a.x, "x": a.x, "normalized_shape": 6, "weight": a.row}
    given |= {"mean": a.new(4), "rstd": a.new(4)}
    return cunorm.layer_norm_backward(**{**given, **changed})


def rms(a: Arrays, **changed: Any) -> Any:
    given = {"grad_out": a.x, "x": a.x, "normalized_shape": 6, "weight": a.row, "rstd": a.new(4)}
    return cunorm.rms_norm_backward(**{**given, **changed})


def fused_layer(a: Arrays, **changed: Any) -> Any:
    given = {n: a.new(4, 6) for n in ("grad_out", "grad_residual_out", "residual_out")}
    given |= {"weight": a.row, "mean": a.new(4), "rstd": a.new(4)}
    return cunorm.fused_add_layer_norm_backward(**{**given, **changed})


def fused_rms(a: Arrays, **changed: Any) -> Any:
    given = {n: a.new(4, 6) for n in ("grad_out", "grad_residual_out", "residual_out")}
    given |= {"weight": a.row, "rstd": a.new(4)}
    return cunorm.fused_add_rms_norm_backward(**{**given, **changed})


def ada(a: Arrays, **changed: Any) -> Any:
    given = {"grad_out": a.x, "x": a.x, "scale": a.row, "mean": a.new(4), "rstd": a.new(4)}
    return cunorm.ada_layer_norm_backward(**{**given, **changed})


def zero(a: Arrays, **changed: Any) -> Any:
    given = {"grad_out": a.x, "x": a.x, "scale": a.row, "shift": a.row, "gate": a.row}
    given |= {"mean": a.new(4), "rstd": a.new(4)}
    return cunorm.ada_layer_norm_zero_backward(**{**given, **changed})


def group(a: Arrays, **changed: Any) -> Any:
    given = {name: a.new(4, 6, 5) for name in ("grad_out", "x")}
    given |= {"num_groups": 2, "weight": a.row, "mean": a.new(4, 2), "rstd": a.new(4, 2)}
    return cunorm.group_norm_backward(**{**given, **changed})


def instance(a: Arrays, **changed: Any) -> Any:
    given = {name: a.new(4, 6, 5) for name in ("grad_out", "x")}
    given |= {"weight": a.row, "mean": a.new(4, 6), "rstd": a.new(4, 6)}
    return cunorm.instance_norm_backward(**{**given, **changed})


def over(array: Any, shape: tuple[int, ...], start: int = 0) -> Any:
    """A contiguous array of this shape that starts so many elements into another."""
    return array.reshape(-1)[start : start + int(np.prod(shape))].reshape(shape)


def partly(a: Arrays) -> Any:
    """grad_x half over grad_out."""
    memory = a.new(60)
    return layer(a, grad_out=over(memory, (4, 6)), out=(over(memory, (4, 6), 12), a.row, a.row))


def twice(a: Arrays) -> Any:
    """Two gradients in one array."""
    row = a.row
    return layer(a, out=(a.x, row, row))


# fmt: off
NOT_ARRAYS = [
    Case("x-none", lambda a: layer(a, x=None), TypeError,
         f"layer_norm_backward: x {NO_ARRAY}, got NoneType"),
    Case("grad-none", lambda a: rms(a, grad_out=None), TypeError,
         "rms_norm_backward: grad_out must be an array, got NoneType"),
    Case("mean-none", lambda a: layer(a, mean=None), TypeError,
         "layer_norm_backward: mean must be an array, got NoneType"),
    Case("rstd-none", lambda a: group(a, rstd=None), TypeError,
         "group_norm_backward: rstd must be an array, got NoneType"),
    Case("residual-none", lambda a: fused_rms(a, residual_out=None), TypeError,
         f"fused_add_rms_norm_backward: residual_out {NO_ARRAY}, got NoneType"),
    Case("residual-list", lambda a: fused_layer(a, residual_out=[1.0]), TypeError,
         f"fused_add_layer_norm_backward: residual_out {NO_ARRAY}, got list"),
    Case("grad-residual-float", lambda a: fused_rms(a, grad_residual_out=1.0), TypeError,
         f"fused_add_rms_norm_backward: grad_residual_out {NO_ARRAY}, got float"),
    Case("scale-none", lambda a: ada(a, scale=None), TypeError,
         "ada_layer_norm_backward: scale must be an array, got NoneType"),
    Case("gate-none", lambda a: zero(a, gate=None), TypeError,
         "ada_layer_norm_zero_backward: gate must be an array, got NoneType"),
    Case("weight-list", lambda a: instance(a, weight=[1.0] * 6), TypeError,
         f"instance_norm_backward: weight {NO_ARRAY}, got list"),
]

DTYPES = [
    Case("x-int", lambda a: layer(a, x=a.new(4, 6, dtype=np.int32)), TypeError,
         f"layer_norm_backward: x must have dtype {FLOATS}, got int32"),
    Case("residual-int", lambda a: fused_rms(a, residual_out=a.new(4, 6, dtype=np.int64)),
         TypeError, f"fused_add_rms_norm_backward: residual_out must have dtype {FLOATS}, "
         "got int64"),
    Case("grad-dtype", lambda a: rms(a, grad_out=a.new(4, 6, dtype=np.float16)), ValueError,
         "rms_norm_backward: grad_out must have dtype float32, got float16"),
    Case("grad-residual-dtype",
         lambda a: fused_layer(a, grad_residual_out=a.new(4, 6, dtype=np.float64)), ValueError,
         "fused_add_layer_norm_backward: grad_residual_out must have dtype float32, got float64"),
    Case("mean-dtype", lambda a: layer(a, mean=a.new(4, dtype=np.float64)), ValueError,
         "layer_norm_backward: mean must have dtype float32, got float64"),
    Case("rstd-narrow", lambda a: group(a, x=a.new(4, 6, 5, dtype=np.float16),
                                        grad_out=a.new(4, 6, 5, dtype=np.float16),
                                        rstd=a.new(4, 2, dtype=np.float16)), ValueError,
         "group_norm_backward: rstd must have dtype float32, got float16"),
    Case("weight-dtype", lambda a: instance(a, weight=a.new(6, dtype=np.float16)), ValueError,
         "instance_norm_backward: weight must have dtype float32, got float16"),
    Case("shift-dtype", lambda a: zero(a, shift=a.new(6, dtype=np.float64)), ValueError,
         "ada_layer_norm_zero_backward: shift must have dtype float32, got float64"),
]

SHAPES = [
    Case("grad-shape", lambda a: layer(a, grad_out=a.new(4, 5)), ValueError,
         "layer_norm_backward: grad_out must have shape (4, 6), got (4, 5)"),
    Case("grad-row", lambda a: rms(a, grad_out=a.row), ValueError,
         "rms_norm_backward: grad_out must have shape (4, 6), got (6,)"),
    Case("grad-residual-shape", lambda a: fused_rms(a, grad_residual_out=a.new(1, 6)), ValueError,
         "fused_add_rms_norm_backward: grad_residual_out must have shape (4, 6), got (1, 6)"),
    Case("mean-kept-axis", lambda a: layer(a, mean=a.new(4, 1)), ValueError,
         "layer_norm_backward: mean must have shape (4,), got (4, 1)"),
    Case("rstd-row", lambda a: fused_layer(a, rstd=a.row), ValueError,
         "fused_add_layer_norm_backward: rstd must have shape (4,), got (6,)"),
    Case("weight-shape", lambda a: layer(a, weight=a.new(4)), ValueError,
         "layer_norm_backward: weight must have shape (6,), got (4,)"),
    Case("scale-shape", lambda a: ada(a, scale=a.new(3, 6)), ValueError,
         "ada_layer_norm_backward: scale must have shape (4, 6) or one that broadcasts to it "
         "along leading axes, got (3, 6)"),
    Case("gate-column", lambda a: zero(a, gate=a.new(4, 1)), ValueError,
         "ada_layer_norm_zero_backward: gate must have shape (4, 6) or one that broadcasts to it "
         "along leading axes, got (4, 1)"),
    Case("ada-rstd-shape", lambda a: ada(a, rstd=a.new(1)), ValueError,
         "ada_layer_norm_backward: rstd must have shape (4,), got (1,)"),
    Case("group-mean-channels", lambda a: group(a, mean=a.new(4, 6)), ValueError,
         "group_norm_backward: mean must have shape (4, 2), got (4, 6)"),
    Case("group-weight-groups", lambda a: group(a, weight=a.new(2)), ValueError,
         "group_norm_backward: weight must have shape (6,), got (2,)"),
    Case("instance-mean-batch", lambda a: instance(a, mean=a.row), ValueError,
         "instance_norm_backward: mean must have shape (4, 6), got (6,)"),
    Case("instance-last-axis", lambda a: instance(a, channel_axis=-1), ValueError,
         "instance_norm_backward: weight must have shape (5,), got (6,)"),
    Case("x-0d", lambda a: fused_rms(a, residual_out=a.new(), grad_out=a.new()), ValueError,
         "fused_add_rms_norm_backward: residual_out must be an array of one or more axes, got ()"),
    Case("ada-0d", lambda a: ada(a, x=a.new(), grad_out=a.new()), ValueError,
         "ada_layer_norm_backward: x must be an array of one or more axes, got ()"),
    Case("x-1d", lambda a: group(a, x=a.row, grad_out=a.row), ValueError,
         "group_norm_backward: x must be an array of two or more axes, got (6,)"),
]

PARAMETERS = [
    Case("shape-not-trailing", lambda a: layer(a, normalized_shape=5), ValueError,
         "layer_norm_backward: normalized_shape must be the trailing shape of x, which has shape "
         "(4, 6), got (5,)"),
    Case("shape-empty", lambda a: rms(a, normalized_shape=()), ValueError,
         "rms_norm_backward: normalized_shape must be one or more sizes that are not negative, "
         "got ()"),
    Case("shape-float", lambda a: layer(a, normalized_shape=6.0), TypeError,
         "layer_norm_backward: normalized_shape must be an int or a sequence of ints, got float"),
    Case("groups-divide", lambda a: group(a, num_groups=4), ValueError,
         "group_norm_backward: num_groups must be a divisor of the 6 channels of x, got 4"),
    Case("groups-zero", lambda a: group(a, num_groups=0), ValueError,
         "group_norm_backward: num_groups must be at least 1, got 0"),
    Case("groups-float", lambda a: group(a, num_groups=2.0), TypeError,
         "group_norm_backward: num_groups must be an int, got float"),
    Case("axis-two", lambda a: instance(a, channel_axis=2), ValueError,
         "instance_norm_backward: channel_axis must be 1 or -1, got 2"),
    Case("axis-word", lambda a: group(a, channel_axis="last"), TypeError,
         "group_norm_backward: channel_axis must be an int, got str"),
    Case("target", lambda a: layer(a, target="nowhere"), ValueError,
         "unknown target 'nowhere'; known targets: cuda, numpy"),
    Case("target-type", lambda a: rms(a, target=1), TypeError,
         "rms_norm_backward: target must be a target's name or None, got int"),
]

OUT = [
    Case("out-one", lambda a: layer(a, out=a.x), TypeError,
         "layer_norm_backward: out must be a tuple of 3 arrays, got ndarray"),
    Case("out-none", lambda a: rms(a, out=(a.x, None)), TypeError,
         "rms_norm_backward: out must be a tuple of 2 arrays, got tuple"),
    Case("out-for-no-weight", lambda a: layer(a, weight=None, out=(a.x, a.row, a.row)), TypeError,
         "layer_norm_backward: out must be a tuple of 3 arrays (out[1] being None), got tuple"),
    Case("out-alone-for-no-weight", lambda a: rms(a, weight=None, out=a.x), TypeError,
         "rms_norm_backward: out must be a tuple of 2 arrays (out[1] being None), got ndarray"),
    Case("out-too-short", lambda a: zero(a, out=(a.x, a.row, a.row)), TypeError,
         "ada_layer_norm_zero_backward: out must be a tuple of 4 arrays, got tuple"),
    Case("out-shape", lambda a: group(a, out=(a.new(4, 6), a.row, a.row)), ValueError,
         "group_norm_backward: out[0] must have shape (4, 6, 5), got (4, 6)"),
    Case("out-sum-shape", lambda a: ada(a, out=(a.x, a.row, a.x)), ValueError,
         "ada_layer_norm_backward: out[2] must have shape (6,), got (4, 6)"),
    Case("out-bias-shape", lambda a: instance(a, weight=None, out=(a.new(4, 6, 5), None, a.new(5))),
         ValueError, "instance_norm_backward: out[2] must have shape (6,), got (5,)"),
    Case("out-dtype", lambda a: fused_rms(a, out=(a.x, a.new(6, dtype=np.float64))), ValueError,
         "fused_add_rms_norm_backward: out[1] must have dtype float32, got float64"),
    Case("out-read-only", lambda a: rms(a, out=(a.read_only(4, 6), a.row)), ValueError,
         "rms_norm_backward: out[0] must be writable, got a read-only array"),
    Case("out-expanded", lambda a: rms(a, out=(a.zero_stride(4, 6), a.row)), ValueError,
         "rms_norm_backward: out[0] must be an array whose elements do not share memory, "
         "got strides (0, 1)"),
    Case("out-partly", partly, ValueError,
         "layer_norm_backward: out[0] partly overlaps grad_out in memory; pass grad_out itself or "
         "memory of its own"),
    Case("out-twice", twice, ValueError,
         "layer_norm_backward: out[2] partly overlaps out[1] in memory; pass memory of its own"),
]
# fmt: on

CASES = [*NOT_ARRAYS, *DTYPES, *SHAPES, *PARAMETERS, *OUT]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bad_input(case):
    check(case)


def test_ids_are_unique():
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.torch
def test_devices_must_agree():
    torch = pytest.importorskip("torch")
    given = {name: torch.ones(4, 6) for name in ("grad_out", "grad_residual_out", "residual_out")}
    given |= {"weight": torch.ones(6, device="meta"), "rstd": torch.ones(4)}
    with pytest.raises(ValueError, match=r"weight must be on cpu like residual_out, got meta"):
        cunorm.fused_add_rms_norm_backward(**given)


@pytest.mark.parametrize("call", [layer, rms, fused_layer, fused_rms, ada, zero, group, instance])
def test_what_the_cases_change_is_right_as_it_is(call):
    assert all(np.isfinite(result).all() for result in call(Arrays()))
