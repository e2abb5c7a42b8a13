"""How records of blocks of rows become gradients of parameters, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from backward_cases import assert_within_bounds, make_inputs, sizes_of
from cases import assert_same_bits
from host_gradients import Path, run
from host_kernels import missing_compiler

pytest.importorskip("ml_dtypes")
if reason := missing_compiler():
    pytest.skip(reason, allow_module_level=True)

OP = "layer_norm_backward"


def check(kernels, op, sizes, inputs, path):
    results = run(kernels, op, sizes, inputs, path)
    assert_within_bounds(op, results, inputs, sizes)
    again = run(kernels, op, sizes, inputs, path, backwards=True)
    for one, other in zip(results, again, strict=True):
        assert_same_bits(other, one)


# Columns one, two and four at a time, the last CTA in part; records for some of the threads, for
# one each, for several rounds.
@pytest.mark.parametrize("cols", [7, 42, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("warps", [1, 3, 16])
def test_any_number_of_records(kernels, cols, dtype, warps):
    for rows in (3, 8, 133):
        sizes = sizes_of(OP, (rows, cols))
        inputs = make_inputs(OP, sizes, dtype, centre=0.5, grad_centre=0.3)
        check(kernels, OP, sizes, inputs, Path((rows, cols), 1, merge_warps=warps))


@pytest.mark.parametrize("warps", [1, 5])
@pytest.mark.parametrize("cols", [7, 100])
def test_what_records_round_off_comes_with_them(kernels, cols, warps):
    sizes = sizes_of(OP, (97, cols))
    inputs = make_inputs(OP, sizes, "float32", grad_centre=0.3)
    check(kernels, OP, sizes, inputs, Path((97, cols), 5, merge_warps=warps))


@pytest.mark.parametrize("warps", [1, 2])
@pytest.mark.parametrize("combine", [True, False])
def test_records_of_long_blocks(kernels, combine, warps):
    """Kept in shared memory, or in the record itself, where every block reads back its own."""
    for block_rows in (32, 33, 64, 150):
        sizes = sizes_of(OP, (300, 264))
        inputs = make_inputs(OP, sizes, "bfloat16", centre=0.5, grad_centre=0.3)
        inputs["grad_out"][:, ::2] = 0.1
        path = Path(
            (300, 264),
            block_rows,
            merge_warps=warps,
            threads=64,
            rows=1,
            packs=1,
            full=False,
            combine=combine,
        )
        check(kernels, OP, sizes, inputs, path)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize(
    "own", [(3, 1, 1, 40), (1, 4, 1, 40), (3, 1, 5, 40), (1, 4, 5, 40), (3, 4, 1, 40)]
)
def test_groups_that_one_gradient_joins_and_another_keeps(kernels, own, warps):
    op = "ada_layer_norm_zero_backward"
    shape = (3, 4, 5, 40)
    sizes = sizes_of(op, shape)
    inputs = make_inputs(op, sizes, "float16")
    for name, part in (("scale", own), ("shift", (4, 1, 40)), ("gate", (40,))):
        whole = (1,) * (4 - len(part)) + part
        at = tuple(slice(0, n) for n in whole)
        inputs[name] = np.broadcast_to(inputs[name], shape)[at].reshape(part).copy()
    check(kernels, op, sizes, inputs, Path((60, 40), 2, merge_warps=warps))
