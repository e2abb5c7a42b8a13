"""The kernels of the row norms' backward passes without a GPU: on host threads, by their plans."""

from __future__ import annotations

import numpy as np
import pytest
from backward_cases import (
    ADAPTIVE,
    CLASSES,
    DTYPES,
    FUSED,
    ROW_OPS,
    assert_within_bounds,
    make_inputs,
    sizes_of,
)
from cases import assert_same_bits
from host_gradients import Path, run
from host_kernels import missing_compiler

from cunorm import dtypes

pytest.importorskip("ml_dtypes")
if reason := missing_compiler():
    pytest.skip(reason, allow_module_level=True)

# Last packs, last segments, last rows of a block and last blocks are there in part.
PATHS = {
    "lanes of a warp": Path((70, 33), threads=8, packs=5, rows=16, block_rows=21),
    "rows of one thread": Path((1100, 3), block_rows=550, turns=True),
    "a warp a row": Path((11, 320), block_rows=4),
    "several warps a row": Path((7, 1000), block_rows=5),
    "three warps a row": Path((11, 1152), block_rows=9),
    "ten warps a row": Path((3, 4992), block_rows=3),
    "one row a CTA": Path((3, 4092), block_rows=2),
    "one block": Path((9, 264)),
    "long blocks": Path((333, 40), threads=8, packs=5, rows=4, block_rows=167, turns=True),
    "in order of rows": Path(
        (75, 1000), block_rows=37, turns=True, threads=128, rows=1, combine=False
    ),
    "values made twice": Path((37, 520), threads=64, rows=1, combine=False, hold=False),
    "single elements": Path((9, 264), block_rows=4, access=1),
    "two elements": Path((9, 264), block_rows=4, access=2),
    "parameters late": Path((6, 264), block_rows=4, early=False),
    "segments": Path((5, 1000), segmented=2, block_rows=3, turns=True),
    "segments in order of rows": Path((40, 264), segmented=1, combine=False),
}
SHAPES = ("full", "one row", "per sample", "per position", "mixed")
every_op = pytest.mark.parametrize("op", ROW_OPS)


def dtypes_of(op, name):
    """Two of four; all of them, over two ops or paths that follow each other."""
    number = ROW_OPS.index(op) + list(PATHS).index(name)
    return DTYPES[number % 2], DTYPES[2 + number // 2 % 2]


def case(op, dtype, name, **options):
    path = PATHS[name]
    rows, cols = path.shape
    itemsize = dtypes.FLOATS[dtype].itemsize
    if itemsize == 8 and cols >= 4000:
        cols = 2044  # which as many threads share
    sizes = sizes_of(op, (rows, cols), parameter_shape=(cols,))
    return sizes, make_inputs(op, sizes, dtype, **options), fitted(path, cols, itemsize)


def fitted(path, cols, itemsize):
    """The path with as many packs as its threads need for these columns."""
    if "threads" not in path.changes:
        return path
    vec, threads = 16 // itemsize, path.changes["threads"]
    while cols % vec:
        vec //= 2
    packs = -(-cols // (vec * threads))
    changes = path.changes | {"packs": packs, "full": packs * threads * vec == cols}
    return Path(path.shape, path.block_rows, path.segmented, path.turns, **changes)


def check_both_orders(kernels, op, sizes, inputs, path=None):
    results = run(kernels, op, sizes, inputs, path)
    assert_within_bounds(op, results, inputs, sizes)
    # Where a barrier is missing, it matters which warp runs ahead.
    again = run(kernels, op, sizes, inputs, path, backwards=True)
    for one, other in zip(results, again, strict=True):
        if one is not None:
            assert_same_bits(other, one)
    return results


@pytest.mark.parametrize("name", PATHS)
@every_op
def test_random_rows(kernels, op, name):
    for dtype in dtypes_of(op, name):
        sizes, inputs, path = case(op, dtype, name, centre=0.5, grad_centre=0.3)
        check_both_orders(kernels, op, sizes, inputs, path)


def modulation_shapes(kind, shape):
    b, t, n = shape
    return {
        "full": (shape,) * 3,
        "one row": ((n,), (1, 1, n), (1, n)),
        "per sample": ((b, 1, n),) * 3,
        "per position": ((t, n), (1, t, n), (t, n)),
        "mixed": ((b, 1, n), (n,), (b, t, n)),
    }[kind]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("op", ADAPTIVE)
def test_modulation_of_any_shape(kernels, op, kind):
    shape = (3, 5, 264)
    for block_rows in (None, 2):
        wide = kind in ("full", "mixed")
        check_modulation(kernels, op, shape, modulation_shapes(kind, shape), block_rows, wide)


def check_modulation(kernels, op, shape, shapes, block_rows=None, wide=False):
    sizes = sizes_of(op, shape)
    inputs = make_inputs(op, sizes, "float16", parameter_dtype="float32" if wide else None)
    for name, own in zip(("scale", "shift", "gate"), shapes, strict=True):
        if name in inputs:
            whole = np.broadcast_to(inputs[name], shape)
            index = tuple(slice(0, n) for n in (1,) * (len(shape) - len(own)) + tuple(own))
            inputs[name] = whole[index].reshape(own).copy()
    path = Path(shape[-2:], block_rows)
    results = check_both_orders(kernels, op, sizes, inputs, path)
    for name, result in zip(CLASSES[op].output_names[1:], results[1:], strict=True):
        of = name.removeprefix("grad_")
        assert result.shape == inputs[of if of in inputs else "scale"].shape


@pytest.mark.parametrize("op", ADAPTIVE)
def test_modulation_over_alternating_axes(kernels, op):
    shape = (2, 3, 2, 3, 16)
    check_modulation(kernels, op, shape, ((2, 1, 2, 1, 16),) * 3)


def test_modulation_over_three_sets_of_axes(kernels):
    op = "ada_layer_norm_zero_backward"
    shape = (2, 3, 2, 16)
    check_modulation(kernels, op, shape, ((2, 1, 1, 16), (1, 3, 1, 16), (2, 3, 1, 16)), 1)


@pytest.mark.parametrize("op", FUSED)
def test_nothing_to_add(kernels, op):
    sizes = sizes_of(op, (9, 264))
    inputs = make_inputs(op, sizes, "bfloat16", without=("grad_residual_out",))
    check_both_orders(kernels, op, sizes, inputs, Path((9, 264), 4))


@pytest.mark.parametrize("op", [op for op in ROW_OPS if op not in ADAPTIVE])
def test_no_weight_and_a_wide_one(kernels, op):
    sizes = sizes_of(op, (9, 264))
    for options in ({"without": ("weight",)}, {"parameter_dtype": "float32"}):
        inputs = make_inputs(op, sizes, "float16", **options)
        check_both_orders(kernels, op, sizes, inputs, Path((9, 264), 4))


@pytest.mark.parametrize("op", ["fused_add_layer_norm_backward", "ada_layer_norm_backward"])
def test_layouts(kernels, op):
    """Rows with gaps, rows in another order, a gradient that is the same for all rows."""
    sizes = sizes_of(op, (4, 6, 72))
    inputs = make_inputs(op, sizes, "float32")
    x = CLASSES[op].x_name

    def with_gaps(array):
        wide = np.zeros((4, 6, 80), array.dtype)
        wide[..., :72] = array
        return wide[..., :72]

    def turned(array):
        return np.ascontiguousarray(array.transpose(1, 0, 2)).transpose(1, 0, 2)

    def reversed_memory(array):
        return np.ascontiguousarray(array[::-1])[::-1]

    def columns_first(array):
        return np.asfortranarray(array)

    for change in (with_gaps, turned, reversed_memory, columns_first):
        for name in (x, "grad_out"):
            changed = inputs | {name: change(inputs[name])}
            check_both_orders(kernels, op, sizes, changed, Path((24, 72), 7))
    statistics = inputs | {"rstd": np.asfortranarray(inputs["rstd"])}
    check_both_orders(kernels, op, sizes, statistics, Path((24, 72), 7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm_backward"])
def test_large_offsets(kernels, op, dtype):
    """A common offset of x and of grad_out costs nothing beyond what they have lost already."""
    offset = {"float16": 500.0, "bfloat16": 50.0, "float32": 1e5, "float64": 1e9}[dtype]
    sizes = sizes_of(op, (300, 40))
    inputs = make_inputs(op, sizes, dtype, centre=offset, grad_centre=-offset)
    check_both_orders(kernels, op, sizes, inputs, Path((300, 40), 150))


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_rows_among_small_ones(kernels, dtype):
    """Two that cancel: what the small ones add to between them is not lost."""
    op = "layer_norm_backward"
    sizes = sizes_of(op, (700, 40))
    inputs = make_inputs(op, sizes, dtype)
    grad_out = inputs["grad_out"]
    grad_out[3] *= np.asarray(2000, grad_out.dtype)
    grad_out[690] = -grad_out[3]
    inputs["x"][690], inputs["mean"][690], inputs["rstd"][690] = (
        inputs[name][3] for name in ("x", "mean", "rstd")
    )
    check_both_orders(kernels, op, sizes, inputs, Path((700, 40)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_gradient_for_all_rows(kernels, dtype):
    """As a mean over all rows has it: what one sum rounds off, all of them do."""
    op = "layer_norm_backward"
    sizes = sizes_of(op, (9000, 40))
    inputs = make_inputs(op, sizes, dtype)
    inputs["grad_out"][...] = 0.1
    check_both_orders(kernels, op, sizes, inputs)


@every_op
def test_rows_keep_their_bits_in_any_company(kernels, op):
    sizes = sizes_of(op, (40, 264), parameter_shape=(264,))
    inputs = make_inputs(op, sizes, "bfloat16")
    whole = run(kernels, op, sizes, inputs)[0]
    few = {n: a[5:8] if a.shape[0] == 40 else a for n, a in inputs.items()}  # of every array
    part = run(kernels, op, sizes_of(op, (3, 264), parameter_shape=(264,)), few)[0]
    assert_same_bits(part, whole[5:8])
