"""The row ops against the reference: every op, dtype and row length that takes another path."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from cases import DTYPES, OPS, PARAMETERS, TAKES_SHAPE, assert_same_bits, random_inputs
from on_gpu import check

import cunorm
from cunorm import dtypes
from cunorm.cuda import choices

pytestmark = pytest.mark.gpu

COLS = (
    *(1, 2, 3, 4, 7, 8, 10, 16, 17, 31, 32, 33, 63, 64, 65, 111, 127, 128, 255, 256, 257, 760),
    *(768, 1000, 1024, 1152, 1536, 2048, 3584, 4095, 4096, 4097, 4544, 5120, 8191, 8192, 8193),
    *(12_288, 16_384, 24_577, 32_768, 65_536, 65_537, 100_003, 131_072, 262_144, 1_000_003),
)
ABSENT_COLS = (7, 111, 768, 4097, 24_576, 100_003)
WIDE_COLS = (3, 8, 33, 111, 768, 1024, 4096, 8192, 12_288, 65_536, 100_003, 300_032)
HALVES = ("float16", "bfloat16")
ABSENT = [
    ("layer_norm", ("weight",)),
    ("layer_norm", ("bias",)),
    ("layer_norm", ("weight", "bias")),
    ("rms_norm", ("weight",)),
    ("fused_add_layer_norm", ("weight",)),
    ("fused_add_layer_norm", ("bias",)),
    ("fused_add_layer_norm", ("weight", "bias")),
    ("fused_add_rms_norm", ("weight",)),
]
CLASSES = {
    "layer_norm": cunorm.LayerNormFwdOp,
    "rms_norm": cunorm.RMSNormFwdOp,
    "fused_add_layer_norm": cunorm.FusedAddLayerNormFwdOp,
    "fused_add_rms_norm": cunorm.FusedAddRMSNormFwdOp,
    "ada_layer_norm": cunorm.AdaLayerNormFwdOp,
    "ada_layer_norm_zero": cunorm.AdaLayerNormZeroFwdOp,
}


def ragged_rows(cols, dtype):
    """Rows for one full CTA and part of another, where CTAs take several; else two or three."""
    itemsize = dtypes.FLOATS[dtype].itemsize
    in_cta = choices.row_tile(cols, itemsize, 1, 90).rows
    if in_cta > 1:
        return 2 * in_cta - 1
    return 3 if cols <= 8192 else 2


def build(op, dtype, cols, parameter_dtype, without):
    kind = CLASSES[op]
    made = kind(cols) if op in TAKES_SHAPE else kind()
    made.compile(dtype, (2, cols), parameter_dtype=parameter_dtype, without=without)


@pytest.fixture(scope="module", autouse=True)
def compiled(request):
    """Fill CuPy's disk cache with many processes at once: compiling is most of the time here."""
    wanted = [
        tuple(
            item.callspec.params[n] for n in ("op", "dtype", "cols", "parameter_dtype", "without")
        )
        for item in request.session.items
        if item.path == request.node.path
    ]
    workers = min(12, os.cpu_count() or 1)
    if len(wanted) < 8 * workers:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        for parameters in dict.fromkeys(wanted):
            pool.submit(build, *parameters)  # what does not compile, its own test will tell


@pytest.mark.parametrize("parameter_dtype", [None])
@pytest.mark.parametrize("without", [()])
@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_values_and_statistics(op, dtype, cols, parameter_dtype, without):
    inputs = random_inputs(op, (ragged_rows(cols, dtype), cols), dtype, centre=0.5, seed=cols)
    check(op, inputs, return_stats=True)


@pytest.mark.parametrize("parameter_dtype", [None])
@pytest.mark.parametrize("cols", ABSENT_COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "without"), ABSENT)
def test_parameters_left_out(op, dtype, cols, parameter_dtype, without):
    inputs = random_inputs(op, (3, cols), dtype, centre=-2, seed=cols + 1, without=without)
    results = check(op, inputs)
    neutral = {name: np.full_like(inputs["x"][0], name == "weight") for name in without}
    same = check(op, inputs | neutral)
    for mine, theirs in zip(results, same, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("parameter_dtype", ["float32"])
@pytest.mark.parametrize("without", [()])
@pytest.mark.parametrize("cols", WIDE_COLS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", OPS)
def test_float32_parameters_with_16_bit_x(op, dtype, cols, parameter_dtype, without):
    """Thirds and tenths are in no 16-bit dtype: a parameter cut to one would show."""
    inputs = random_inputs(op, (2, cols), dtype, seed=cols + 2, parameter_dtype=parameter_dtype)
    check(op, inputs, return_stats=True)


@pytest.mark.parametrize("parameter_dtype", ["float32"])
@pytest.mark.parametrize("without", [()])
@pytest.mark.parametrize("cols", [768])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["layer_norm", "ada_layer_norm_zero"])
def test_parameters_of_both_dtypes_at_once(op, dtype, cols, parameter_dtype, without):
    inputs = random_inputs(op, (5, cols), dtype, seed=3)
    last = PARAMETERS[op][-1]
    inputs[last] = random_inputs(op, (5, cols), dtype, parameter_dtype="float32", seed=4)[last]
    check(op, inputs, return_stats=True)
