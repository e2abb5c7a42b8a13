"""The row ops by name, inputs for them, and calls: for tests on host arrays."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import dtypes

ROW_OPS = {
    "layer_norm": (cunorm.LayerNormFwdOp, ("weight", "bias")),
    "rms_norm": (cunorm.RMSNormFwdOp, ("weight",)),
    "fused_add_layer_norm": (cunorm.FusedAddLayerNormFwdOp, ("weight", "bias")),
    "fused_add_rms_norm": (cunorm.FusedAddRMSNormFwdOp, ("weight",)),
    "ada_layer_norm": (cunorm.AdaLayerNormFwdOp, ("scale", "shift")),
    "ada_layer_norm_zero": (cunorm.AdaLayerNormZeroFwdOp, ("scale", "shift", "gate")),
}
TAKES_SHAPE = ("layer_norm", "rms_norm")
FUSED = ("fused_add_layer_norm", "fused_add_rms_norm")
STATISTICS = {op: ("rstd",) if "rms" in op else ("mean", "rstd") for op in ROW_OPS}

every_op = pytest.mark.parametrize("op", ROW_OPS)
every_dtype = pytest.mark.parametrize("dtype", dtypes.FLOATS)


def draw(shape, dtype, seed):
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(dtypes.numpy_dtype(dtype))


def make(op, shape=(3, 5, 8), dtype="float32"):
    inputs = {"x": draw(shape, dtype, 0)}
    if op in FUSED:
        inputs["residual"] = draw(shape, dtype, 1)
    for i, name in enumerate(ROW_OPS[op][1]):
        inputs[name] = draw(shape[-1:], dtype, 2 + i)
    return inputs


def op_object(op, cols=8, **options):
    kind = ROW_OPS[op][0]
    return kind(cols, **options) if op in TAKES_SHAPE else kind(**options)


def run(op, inputs, **options):
    if op in TAKES_SHAPE:
        options.setdefault("normalized_shape", inputs["x"].shape[-1])
    return getattr(cunorm, op)(**inputs, **options)


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def same_bits(results, expected):
    results, expected = as_tuple(results), as_tuple(expected)
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.tobytes() == want.tobytes()
