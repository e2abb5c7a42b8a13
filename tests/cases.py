"""What the tests of the operators share: inputs from host generators, and how to judge results."""

from __future__ import annotations

import inspect
import math
from functools import cache

import numpy as np

import cunorm
from cunorm import dtypes, precision, reference

OPS = tuple(reference.row.FORWARD)
DTYPES = tuple(dtypes.FLOATS)
CENTRED = tuple(op for op in OPS if not op.endswith("rms_norm"))
TAKES_SHAPE = ("layer_norm", "rms_norm")
FUSED = ("fused_add_layer_norm", "fused_add_rms_norm")
ADAPTIVE = ("ada_layer_norm", "ada_layer_norm_zero")
PARAMETERS = {
    op: tuple(
        name
        for name in inspect.signature(reference.FORWARD[op]).parameters
        if name in ("weight", "bias", "scale", "shift", "gate")
    )
    for op in OPS
}


@cache
def _pool():
    return np.random.default_rng(20250611).standard_normal((1 << 21) + 7)


def noise(shape, seed=0):
    """Standard normal float64 values; those of another seed are elsewhere in one long sequence."""
    size = math.prod(shape)
    start = seed * 104_729 % _pool().size
    if start + size > _pool().size:
        rolled = np.roll(_pool(), -start)
        return np.resize(rolled, size).reshape(shape)
    return _pool()[start : start + size].reshape(shape).copy()


def make_inputs(op, x, parameter_dtype=None, without=(), parameter_shape=None, seed=1):
    """Inputs of an op around a given x; parameters are one row unless a shape is given."""
    inputs = {"x": x}
    if op in FUSED:
        inputs["residual"] = noise(x.shape, seed + 5).astype(x.dtype)
    wanted = dtypes.numpy_dtype(parameter_dtype) if parameter_dtype else x.dtype
    for i, name in enumerate(PARAMETERS[op]):
        values = noise(parameter_shape or x.shape[-1:], seed + i) + (name in ("weight", "scale"))
        inputs[name] = None if name in without else values.astype(wanted)
    return inputs


def random_inputs(op, shape, dtype, centre=0.0, spread=1.0, seed=1, **options):
    x = (centre + spread * noise(shape, seed + 11)).astype(dtypes.numpy_dtype(dtype))
    return make_inputs(op, x, seed=seed, **options)


def shape_option(op, x):
    return {"normalized_shape": x.shape[-1]} if op in TAKES_SHAPE else {}


def call(op, inputs, **options):
    """The function of that name on inputs by name, rows being the last axis."""
    return getattr(cunorm, op)(**inputs, **shape_option(op, inputs["x"]), **options)


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def bits(array):
    """A host array's elements as unsigned integers: equal ones are the same bit for bit."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(got, want, what=""):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    differing = np.argwhere(bits(got) != bits(want))
    assert not len(differing), f"{what}: {len(differing)} differ, first at {differing[0]}"


def assert_within_bounds(op, outputs, inputs, **options):
    """Every output of an op, host arrays all, within what `cunorm.precision` allows."""
    found = precision.forward_deviation(
        op, as_tuple(outputs), inputs, **shape_option(op, inputs["x"]), **options
    )
    beyond = {name: d for name, d in found.items() if not d.ratio <= 1}
    assert not beyond, f"{op} {inputs['x'].dtype} {inputs['x'].shape}: {beyond}"
