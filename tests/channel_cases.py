"""What the tests of batch, group and instance norm share: inputs, layouts, modes."""

from __future__ import annotations

import numpy as np
from cases import noise

import cunorm
from cunorm import dtypes, ops, precision, reference

CLASSES = {kind.name: kind for kind in vars(ops).values() if hasattr(kind, "input_names")}
DTYPES = tuple(dtypes.FLOATS)

# Every op in every mode: what the constructor takes.
MODES = {
    "batch_norm-training": ("batch_norm", {"training": True, "momentum": 0.3}),
    "batch_norm-inference": ("batch_norm", {}),
    "batch_norm_stats": ("batch_norm_stats", {"momentum": 0.3}),
    "batch_norm_normalize": ("batch_norm_normalize", {}),
    "batch_norm_backward-training": ("batch_norm_backward", {}),
    "batch_norm_backward-frozen": ("batch_norm_backward", {"training": False}),
    "group_norm": ("group_norm", {"num_groups": 3}),
    "instance_norm": ("instance_norm", {"momentum": 0.3}),
    "instance_norm-running": ("instance_norm", {"use_input_stats": False}),
}
COMPUTING = ("batch_norm-training", "batch_norm_stats", "instance_norm")  # update running ones
NORMALIZING = ("batch_norm-training", "group_norm", "instance_norm")  # with statistics of x
# What has kernels for tables of few rows.
TABLES = ("batch_norm-training", "batch_norm_backward-training", "batch_norm_backward-frozen")
RUNNING = ("running_mean", "running_var")

# Ranks from (N, C) on; 6 channels, so that 3 groups have two each.
SHAPES = ((10, 6), (4, 6, 7), (3, 6, 5, 4), (2, 6, 3, 4, 5))


def make_inputs(mode, shape, dtype, axis=1, *, parameter_dtype=None, seed=0, centre=0, spread=1):
    """Inputs by name for an x of this shape; running statistics are not what they start from."""
    op = MODES[mode][0]
    kind = dtypes.numpy_dtype(dtype)
    wide = reference.accumulation_dtype(kind)
    inputs = {}
    for i, name in enumerate(CLASSES[op].input_names):
        like_x = name in CLASSES[op].like_x
        values = noise(shape if like_x else (shape[axis],), seed + i)
        if name == "x":
            values = centre + spread * values
        if name in ("running_var", "rstd"):
            values = 0.5 + np.abs(values)
        if name in ("mean", "running_mean"):
            values = values + centre
        stored = wide if name in ("mean", "rstd") else kind
        if parameter_dtype and name in ("weight", "bias", *RUNNING):
            stored = dtypes.numpy_dtype(parameter_dtype)
        inputs[name] = values.astype(stored)
    return inputs


def make_channels_of_all_kinds(mode, shape, dtype):
    """Inputs whose channels are, in turns: ordinary, far from zero, as large as their squares leave
    the range of float32, tiny, alike, and with first rows far outside; statistics are those of x.
    """
    inputs = make_inputs(mode, shape, dtype)
    small = dtype == "float16"  # whose squares no float32 is too small for
    x = inputs["x"].astype(np.float64)
    spread = np.resize([1, 1, 1e4 if small else 1e30, 1e-6 if small else 1e-30, 0, 1], shape[1])
    centre = np.resize([0.5, 1e3, 0, 0, 3.7, 0], shape[1])
    each = (-1, *[1] * (len(shape) - 2))
    x = centre.reshape(each) + spread.reshape(each) * x
    x[:2, 5::6] += 300
    inputs["x"] = x.astype(inputs["x"].dtype)
    if "rstd" in inputs:
        axes = (0, *range(2, len(shape)))
        x = inputs["x"].astype(np.float64)
        inputs["mean"] = x.mean(axes).astype(inputs["mean"].dtype)
        inputs["rstd"] = (1 / np.sqrt(x.var(axes) + 1e-5)).astype(inputs["rstd"].dtype)
    return inputs


def copied(inputs):
    return {name: None if array is None else array.copy() for name, array in inputs.items()}


def call(mode, inputs, **options):
    """The function of an op in this mode."""
    op, parameters = MODES[mode]
    return getattr(cunorm, op)(**inputs, **parameters, **options)


def refer(mode, inputs, **options):
    """The definition of an op in this mode."""
    op, parameters = MODES[mode]
    return {**reference.FORWARD, **reference.BACKWARD}[op](**inputs, **parameters, **options)


def make_op(mode, **options):
    op, parameters = MODES[mode]
    return CLASSES[op](**parameters, **options)


def as_tuple(results):
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def stats_option(mode):
    return {"return_stats": True} if CLASSES[MODES[mode][0]].statistic_names else {}


def deviations(mode, outputs, before, after=None, **options):
    """Errors of outputs and running statistics by `cunorm.precision`."""
    op, parameters = MODES[mode]
    if op in reference.BACKWARD:
        return precision.backward_deviation(op, outputs, before, **parameters, **options)
    updated = {n: after[n] for n in RUNNING if mode in COMPUTING and after and n in after}
    return precision.forward_deviation(
        op, as_tuple(outputs), before, updated=updated, **parameters, **options
    )


def assert_within_bounds(mode, outputs, before, after=None, **options):
    found = deviations(mode, outputs, before, after, **options)
    beyond = {name: d for name, d in found.items() if not d.ratio <= 1}
    assert not beyond, f"{mode} {before['x'].dtype} {before['x'].shape}: {beyond}"


def channels_last(inputs):
    """The same arrays with their channels in the last axis, for ``channel_axis=-1``."""
    return {
        name: array if array is None or array.ndim == 1 else np.moveaxis(array, 1, -1)
        for name, array in inputs.items()
    }


def to_channel_axis(array, axis):
    """An array (N, C, ...) with its channels where they are asked for, contiguous."""
    return array if axis == 1 else np.ascontiguousarray(np.moveaxis(array, 1, -1))
