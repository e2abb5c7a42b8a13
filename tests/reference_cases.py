"""Inputs for the definitions of the row norms, and calls of them."""

from __future__ import annotations

import decimal

import numpy as np
import pytest

from cunorm import reference

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
CENTRED = ("layer_norm", "fused_add_layer_norm", "ada_layer_norm", "ada_layer_norm_zero")
TAKES_SHAPE = ("layer_norm", "rms_norm")
DIGITS = decimal.Context(prec=60)


@pytest.fixture(autouse=True)
def _numpy_errors_raise():
    """The definitions silence what they expect; nothing else may warn."""
    with np.errstate(all="raise"):
        yield


def make_inputs(op, shape, dtype, seed=0, centre=0.0, spread=1.0):
    rng = np.random.default_rng(seed)

    def draw(*size):
        return rng.standard_normal(size).astype(dtype)

    cols = shape[-1]
    inputs = {"x": (centre + spread * rng.standard_normal(shape)).astype(dtype)}
    if op.startswith("fused_add"):
        inputs["residual"] = draw(*shape)
    if op.startswith("ada"):
        inputs |= {"scale": draw(*shape[:-2], 1, cols), "shift": draw(*shape)}
        if op.endswith("zero"):
            inputs["gate"] = draw(cols)
    else:
        inputs["weight"] = draw(cols)
        if not op.endswith("rms_norm"):
            inputs["bias"] = draw(cols)
    return inputs


def call(op, inputs, eps, **options):
    if op in TAKES_SHAPE:
        options["normalized_shape"] = inputs["x"].shape[-1]
    return reference.FORWARD[op](**inputs, eps=eps, **options)
