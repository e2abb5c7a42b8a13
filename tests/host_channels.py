"""Batch, group and instance norm on the host: calls of their op objects, run by HostKernels."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import numpy as np
from cases import noise
from host_kernels import Guarded

import cunorm
from cunorm import dtypes
from cunorm.arrays import ArraySpec, Device
from cunorm.cuda import channel, channel_choices, devices

PARAMETERS = {"weight": 1.0, "bias": 0.0, "running_mean": 0.5, "running_var": 3.0}


def spec_of(array):
    dtype = dtypes.name_of(array.dtype)
    strides = tuple(s // array.itemsize for s in array.strides)
    address = array.ctypes.data | 16
    return ArraySpec(array.shape, strides, dtype, address & -address)


def placed(values, dtype, axes=None):
    """A copy at a multiple of 16 bytes, its axes in this order in memory."""
    values = np.asarray(values)
    axes = list(range(values.ndim)) if axes is None else axes
    shape = tuple(values.shape[a] for a in axes)
    stored = Guarded(ArraySpec.contiguous(shape, dtype)).array
    array = stored.transpose(np.argsort(axes))
    array[...] = values
    return array


def last(ndim):
    """The memory order of torch's channels_last under channel_axis=1."""
    return [0, *range(2, ndim), 1]


def inputs_of(op, x, seed=1, without=(), dtype=None, channel_axis=1):
    """The op's arguments around an x: parameters with one value per channel."""
    channels = x.shape[channel_axis]
    wide = dtypes.accumulation(dtypes.name_of(x.dtype))
    inputs = {}
    for i, name in enumerate(op.input_names):
        if name == "x":
            inputs[name] = x
        elif name in without:
            inputs[name] = None
        elif name == "grad_out":
            axes = np.argsort([-s for s in x.strides], kind="stable")
            values = noise(x.shape, seed + 20) + 0.25
            inputs[name] = placed(values, dtypes.name_of(x.dtype), list(axes))
        elif name in ("mean", "rstd"):
            other = tuple(a for a in range(x.ndim) if a != channel_axis % x.ndim)
            values = x.astype(np.float64).mean(other)
            if name == "rstd":
                values = 1 / np.sqrt(x.astype(np.float64).var(other) + 1e-5)
            inputs[name] = placed(values, wide)
        else:
            values = PARAMETERS[name] + 0.25 * noise((channels,), seed + i)
            inputs[name] = placed(values, dtype or dtypes.name_of(x.dtype))
    return inputs


def plan_of(op, inputs, channel_axis=1, return_stats=True, arch=90, tiles=None, out=None):
    """The plan of a call; `tiles` replaces launch choices by name."""
    specs = {name: None if a is None else spec_of(a) for name, a in inputs.items()}
    return_stats = return_stats and bool(op.statistic_names)
    call = op._call(specs, return_stats, channel_axis, Device("cuda"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "compute_capability", lambda index: arch))
        for name, choice in (tiles or {}).items():
            stack.enter_context(mock.patch.object(channel_choices, name, choice))
        return channel.KERNELS[op.name].plan(call, out is not None)


def run(kernels, op, inputs, backwards=False, **options):
    return kernels.execute(
        lambda: plan_of(op, inputs, **options), list(inputs.values()), backwards
    )


OPS = {
    "batch_norm": cunorm.BatchNormFwdOp(True, 0.25),
    "inference": cunorm.BatchNormFwdOp(False),
    "stats": cunorm.BatchNormStatsOp(0.25),
    "normalize": cunorm.BatchNormNormalizeOp(),
    "backward": cunorm.BatchNormBwdOp(True),
    "frozen": cunorm.BatchNormBwdOp(False),
    "group_norm": cunorm.GroupNormFwdOp(3),
    "instance_norm": cunorm.InstanceNormFwdOp(True, 0.25),
    "instance_inference": cunorm.InstanceNormFwdOp(False),
}
