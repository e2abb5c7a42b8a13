"""The backward ops of the row family, group norm and instance norm: inputs, calls, forward ops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from cases import noise

import cunorm
from cunorm import dtypes, ops, precision, reference

CLASSES = {kind.name: kind for kind in vars(ops).values() if hasattr(kind, "input_names")}
DTYPES = tuple(dtypes.FLOATS)
ROW_OPS = tuple(reference.row_backward.BACKWARD)
GROUP_OPS = tuple(reference.group_backward.BACKWARD)
OPS = ROW_OPS + GROUP_OPS
TAKES_SHAPE = ("layer_norm_backward", "rms_norm_backward")
FUSED = ("fused_add_layer_norm_backward", "fused_add_rms_norm_backward")
ADAPTIVE = ("ada_layer_norm_backward", "ada_layer_norm_zero_backward")
WEIGHTED = tuple(op for op in OPS if op not in ADAPTIVE)
GROUPS = 3
MODULATION = ("scale", "shift", "gate")
GRADIENTS_OF_X = ("grad_x", "grad_sum")


class Sizes(NamedTuple):
    """The shape of x, where its channels are, and the shapes of parameters and statistics."""

    x: tuple[int, ...]
    axis: int | None
    parameter: tuple[int, ...]
    statistic: tuple[int, ...]


def sizes_of(op, shape, axis=1, parameter_shape=None):
    shape = tuple(shape)
    if op in ROW_OPS:
        return Sizes(shape, None, parameter_shape or shape[-1:], shape[:-1])
    groups = GROUPS if op == "group_norm_backward" else shape[axis]
    return Sizes(shape, axis, (shape[axis],), (shape[0], groups))


def options_of(op, sizes):
    """What the function takes besides arrays."""
    options = {} if sizes.axis is None else {"channel_axis": sizes.axis}
    return options | parameters_of(op, sizes)


def parameters_of(op, sizes):
    """What the constructor of the op takes."""
    if op in TAKES_SHAPE:
        return {"normalized_shape": sizes.x[-1]}
    return {"num_groups": GROUPS} if op == "group_norm_backward" else {}


def x_name(op):
    return CLASSES[op].x_name


def make_inputs(
    op,
    sizes,
    dtype,
    *,
    parameter_dtype=None,
    without=(),
    seed=0,
    centre=0.0,
    grad_centre=0.0,
    x=None,
    statistics=True,
):
    """Inputs by name; the statistics are those of x unless they are to be any numbers."""
    kind = dtypes.numpy_dtype(dtype)
    inputs = {}
    for i, name in enumerate(CLASSES[op].input_names):
        like_x = name in CLASSES[op].like_x
        shape = sizes.x if like_x else sizes.parameter
        if name in without:
            inputs[name] = None
        elif name == x_name(op):
            values = centre + noise(shape, seed + i) if x is None else x
            inputs[name] = values.astype(kind)
        elif name not in ("mean", "rstd"):
            values = noise(shape, seed + i) + (grad_centre if like_x else name != "shift")
            stored = kind if like_x or parameter_dtype is None else parameter_dtype
            inputs[name] = values.astype(dtypes.numpy_dtype(np.dtype(stored).name))
    wide = reference.accumulation_dtype(kind)
    if statistics:
        found = dict(
            zip(("mean", "rstd"), statistics_of(op, sizes, inputs[x_name(op)]), strict=True)
        )
    else:
        found = {"mean": centre + noise(sizes.statistic, seed + 7)}
        found["rstd"] = 0.5 + np.abs(noise(sizes.statistic, seed + 8))
    for name in ("mean", "rstd"):
        if name in CLASSES[op].input_names:
            inputs[name] = found[name].astype(wide)
    return {name: inputs[name] for name in CLASSES[op].input_names}


def statistics_of(op, sizes, x, eps=1e-5):
    """Mean (None for RMS norm) and rstd as the forward op gives them."""
    if op in GROUP_OPS:
        options = options_of(op, sizes) if op == "group_norm_backward" else {}
        options["channel_axis"] = sizes.axis
        function = op.removesuffix("_backward")
        return reference.FORWARD[function](x, **options, eps=eps, return_stats=True)[1:]
    if "rms" in op:
        return None, reference.rms_norm(x, x.shape[-1], eps=eps, return_stats=True)[1]
    return reference.layer_norm(x, x.shape[-1], eps=eps, return_stats=True)[1:]


def call(op, inputs, sizes, **options):
    """The function of that name."""
    return getattr(cunorm, op)(**inputs, **options_of(op, sizes), **options)


def refer(op, inputs, sizes, **options):
    """The definition of that name."""
    return reference.BACKWARD[op](**inputs, **options_of(op, sizes), **options)


def make_op(op, sizes, **options):
    return CLASSES[op](**parameters_of(op, sizes), **options)


def run_op(one, inputs, sizes, **options):
    axis = {} if sizes.axis is None else {"channel_axis": sizes.axis}
    return one(*inputs.values(), **axis, **options)


def copied(inputs):
    return {name: None if array is None else array.copy() for name, array in inputs.items()}


def deviations(op, outputs, inputs, sizes):
    return precision.backward_deviation(op, outputs, inputs, **options_of(op, sizes))


def assert_within_bounds(op, outputs, inputs, sizes):
    found = deviations(op, outputs, inputs, sizes)
    assert list(found) == [
        n for n, o in zip(CLASSES[op].output_names, outputs, strict=True) if o is not None
    ]
    beyond = {name: d for name, d in found.items() if not d.ratio <= 1}
    assert not beyond, f"{op} {inputs['grad_out'].dtype} {sizes.x}: {beyond}"
