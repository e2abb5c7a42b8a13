"""Gradients on the GPU against the reference: every op, dtype and regime of sizes."""

from __future__ import annotations

import numpy as np
import pytest
from backward_cases import (
    ADAPTIVE,
    CLASSES,
    DTYPES,
    FUSED,
    GROUP_OPS,
    OPS,
    ROW_OPS,
    WEIGHTED,
    assert_within_bounds,
    call,
    make_inputs,
    make_op,
    options_of,
    run_op,
    sizes_of,
    x_name,
)
from backward_on_gpu import assert_same, check, check_some, run, to_gpu
from cases import assert_same_bits
from on_gpu import cupy, differing_rows, down, needs_memory, tiled, up

from cunorm import dtypes

pytestmark = pytest.mark.gpu

every_op = pytest.mark.parametrize("op", OPS)
every_row_op = pytest.mark.parametrize("op", ROW_OPS)
every_group_op = pytest.mark.parametrize("op", GROUP_OPS)

# Few and many rows; rows of an element, of less than a warp, of a CTA, of a cluster, and beyond.
ROW_SHAPES = (
    (1, 1),
    (5, 3, 7),
    (1, 1000),
    (130, 33),
    (1031, 64),
    (33, 257),
    (300, 1024),
    (131, 2055),
    (70, 4097),
    (6, 12_289),
    (3, 40_000),
    (2, 70_001),
)
GROUP_SHAPES = (
    (32, 6),
    (5, 6, 7),
    (65, 6, 7, 7),
    (3, 6, 14, 14),
    (4, 96, 28, 28),
    (2, 3, 147, 147),
    (3, 6, 5, 8, 9),
    (2, 3, 128, 640),
    (3, 3, 256, 512),
    (1, 6, 20, 36),
    (9, 6, 25, 24),
)


def two_dtypes(number):
    """All four over two numbers that follow each other."""
    return DTYPES[number % 4], DTYPES[(number + 2) % 4]


@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
@every_row_op
def test_random_rows(op, shape):
    number = ROW_SHAPES.index(shape) + ROW_OPS.index(op)
    sizes = sizes_of(op, shape)
    for dtype in two_dtypes(number):
        wide = dtypes.accumulation(dtype) if number % 3 == 0 else None
        inputs = make_inputs(op, sizes, dtype, centre=0.5, parameter_dtype=wide, seed=number)
        check(op, inputs, sizes)


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
@pytest.mark.parametrize("shape", GROUP_SHAPES, ids=str)
@every_group_op
def test_random_groups(op, shape, layout):
    number = GROUP_SHAPES.index(shape) + (layout == "channels last")
    sizes = sizes_of(op, shape)
    for dtype in two_dtypes(number):
        wide = dtypes.accumulation(dtype) if number % 3 == 0 else None
        inputs = make_inputs(op, sizes, dtype, centre=0.5, parameter_dtype=wide, seed=number)
        check(op, inputs, sizes, layout)


@pytest.mark.parametrize("shape", [(7, 5, 6), (4, 28, 28, 96), (2, 147, 147, 3)], ids=str)
@every_group_op
def test_channel_axis_last(op, shape):
    sizes = sizes_of(op, shape, -1)
    check(op, make_inputs(op, sizes, "float16"), sizes)


@pytest.mark.parametrize("shape", [(70_000, 3, 2), (3, 70_002, 2), (2, 70_005, 1, 3)], ids=str)
@every_group_op
def test_many_samples_and_many_channels(op, shape):
    sizes = sizes_of(op, shape)
    check(op, make_inputs(op, sizes, "float32"), sizes)


@every_row_op
def test_rows_of_262144(op):
    sizes = sizes_of(op, (5, 262_144))
    dtype = DTYPES[ROW_OPS.index(op) % 4]
    check(op, make_inputs(op, sizes, dtype, centre=0.5), sizes)


# Op and dtype; scale is one row.
MANY_ROWS = [
    ("layer_norm_backward", "float32"),
    ("rms_norm_backward", "bfloat16"),
    ("fused_add_layer_norm_backward", "float16"),
    ("ada_layer_norm_backward", "float32"),
]


@pytest.mark.parametrize(("op", "dtype"), MANY_ROWS)
def test_1000003_rows_of_64(op, dtype):
    """Rows are those of a block, again and again: so is the gradient of x."""
    rows, block_rows = 1_000_003, 4099
    needs_memory(8 * rows * 64 * 4)
    sizes = sizes_of(op, (block_rows, 64))
    block = make_inputs(op, sizes, dtype, centre=3.0, grad_centre=1.0)
    per_row = (*CLASSES[op].like_x, "mean", "rstd")
    flat = {n: a if a.ndim > 1 else a[:, None] for n, a in block.items() if n in per_row}
    given = {n: tiled(a, rows) for n, a in flat.items()}
    given |= {n: a[:, 0] for n, a in given.items() if block[n].ndim == 1}
    arrays = {n: given.get(n, None if a is None else up(a)) for n, a in block.items()}
    of_x, *sums = call(op, arrays, sizes)

    few = down(of_x[:block_rows])
    check_some(op, (few, *[None] * len(sums)), block, sizes)
    assert differing_rows(of_x, up(few)) == 0

    columns = [0, 1, 31, 63]  # of all rows
    host = {n: down(a[:, columns] if a.ndim > 1 else a) for n, a in given.items()}
    host |= {n: a[columns] for n, a in block.items() if n not in host}
    judged = sizes_of(op, (rows, len(columns)))
    in_order = {n: host[n] for n in block}
    check_some(op, (None, *(down(total)[columns] for total in sums)), in_order, judged)


# ---------------------------------------------------------------------------------------------
# numbers
# ---------------------------------------------------------------------------------------------


def numbers_sizes(op):
    return sizes_of(op, (3000, 515) if op in ROW_OPS else (40, 24, 30, 31))


@every_op
@pytest.mark.parametrize(("centre", "grad_centre"), [(1e4, 0.0), (0.0, 1e4), (1e3, 1e3)])
def test_large_offsets(op, centre, grad_centre):
    sizes = numbers_sizes(op)
    inputs = make_inputs(op, sizes, "float32", centre=centre, grad_centre=grad_centre)
    check(op, inputs, sizes)


@every_op
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_one_huge_row_among_small_ones(op, dtype):
    sizes = sizes_of(op, (600, 257) if op in ROW_OPS else (9, 6, 257))
    inputs = make_inputs(op, sizes, dtype)
    inputs["grad_out"][3] *= 1e15
    x = inputs[x_name(op)]
    x[3] *= 1e12
    again = make_inputs(op, sizes, dtype, x=x)
    inputs |= {name: again[name] for name in ("mean", "rstd") if name in inputs}
    check(op, inputs, sizes)


@every_op
def test_not_a_number_stays_in_its_row(op):
    sizes = sizes_of(op, (70, 300) if op in ROW_OPS else (3, 6, 300))
    inputs = make_inputs(op, sizes, "float16")
    inputs["grad_out"][1, 2] = np.nan
    check(op, inputs, sizes)


@every_op
def test_what_has_no_spread_has_no_gradient_with_eps_zero(op):
    sizes = sizes_of(op, (9, 129) if op in ROW_OPS else (3, 6, 20))
    without = ("grad_residual_out",) if op in FUSED else ()
    inputs = make_inputs(op, sizes, "float32", without=without)
    inputs["rstd"][...] = 0
    of_x, *_ = check(op, inputs, sizes)
    assert (of_x == 0).all()


@every_op
def test_the_same_bits_in_20_runs(op):
    sizes = sizes_of(op, (4099, 1000) if op in ROW_OPS else (12, 24, 64, 65))
    arrays = to_gpu(op, make_inputs(op, sizes, "float32", grad_centre=1.0))
    first = call(op, arrays, sizes)
    for _ in range(19):
        assert_same(op, call(op, arrays, sizes), first)


@every_row_op
@pytest.mark.parametrize("shape", [(4099, 64), (517, 1000), (37, 20_000)], ids=str)
def test_bits_of_a_row_do_not_depend_on_the_others(op, shape):
    sizes = sizes_of(op, shape)
    arrays = to_gpu(op, make_inputs(op, sizes, "bfloat16"))
    of_x, *_ = call(op, arrays, sizes)
    for part in (slice(0, 1), slice(5, 12), slice(-3, None)):
        some = {
            n: a[part] if n in (*CLASSES[op].like_x, "mean", "rstd") else a
            for n, a in arrays.items()
        }
        again, *_ = call(op, some, sizes)
        assert_same_bits(down(again), down(of_x[part]))


# ---------------------------------------------------------------------------------------------
# the forward, what is absent, what is broadcast, what is empty
# ---------------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_round_trip_with_the_statistics_of_the_forward(op, dtype):
    sizes = sizes_of(op, (70, 515) if op in ROW_OPS else (5, 6, 33, 9))
    inputs = make_inputs(op, sizes, dtype, centre=2.0)
    kind = next(k for k in CLASSES.values() if k.name == op.removesuffix("_backward"))
    parameters = {n: v for n, v in options_of(op, sizes).items() if n != "channel_axis"}
    forward = kind(**parameters)
    given = {n: up(inputs[n]) for n in kind.input_names if n in inputs}
    if op in FUSED:
        given |= {"x": up(inputs["residual_out"]), "residual": up(inputs["grad_out"])}
        given |= {"bias": None} if "bias" in kind.input_names else {}
    if op == "ada_layer_norm_backward":
        given["shift"] = given["scale"]
    results = forward(**given, return_stats=True)
    count = len(kind.statistic_names)
    statistics = dict(zip(kind.statistic_names, results[-count:], strict=True))
    arrays = up(inputs) | statistics
    if op in FUSED:
        arrays["residual_out"] = results[1]
    grads = run_op(forward.backward_op(), arrays, sizes)
    assert_within_bounds(op, down(tuple(grads)), down(arrays), sizes)


@pytest.mark.parametrize("op", WEIGHTED)
def test_absent_parameters(op):
    for shape in [(9, 129), (70, 4096)] if op in ROW_OPS else [(3, 6, 20), (4, 24, 28, 28)]:
        sizes = sizes_of(op, shape)
        for dtype in ("float16", "float32"):
            inputs = make_inputs(op, sizes, dtype, without=("weight",))
            results = check(op, inputs, sizes)
            assert results[1] is None
            assert all(r.dtype == np.float32 for r in results[2:])
    if op in FUSED:
        for without in (("grad_residual_out",), ("grad_residual_out", "weight")):
            check(op, make_inputs(op, sizes, "bfloat16", without=without), sizes)


BROADCAST = ((515,), (1, 515), (7, 1, 1, 515), (5, 1, 515), (3, 515), (1, 5, 1, 515))


@pytest.mark.parametrize("op", ADAPTIVE)
@pytest.mark.parametrize("parameter", [*BROADCAST, (7, 5, 3, 515)], ids=str)
def test_gradients_of_broadcast_arrays(op, parameter):
    sizes = sizes_of(op, (7, 5, 3, 515), parameter_shape=parameter)
    dtype = DTYPES[len(parameter) % 4]
    check(op, make_inputs(op, sizes, dtype, centre=1.0, grad_centre=1.0), sizes)


def test_each_array_is_broadcast_in_its_way():
    op, shape = "ada_layer_norm_zero_backward", (7, 5, 129)
    inputs = make_inputs(op, sizes_of(op, shape), "float32")
    for name, own in (("scale", (7, 1, 129)), ("shift", (129,)), ("gate", (5, 129))):
        inputs[name] = make_inputs(op, sizes_of(op, shape, 1, own), "float32")[name]
    results = down(tuple(call(op, up(inputs), sizes_of(op, shape))))
    assert [r.shape for r in results] == [shape, (7, 1, 129), (129,), (5, 129)]
    check_some(op, results, inputs, sizes_of(op, shape))


@pytest.mark.parametrize("op", ADAPTIVE)
def test_a_sum_over_many_rows_for_each_of_some(op):
    """Two samples of 4000 rows each, and 4000 samples of two."""
    for shape in ((2, 4000, 130), (4000, 2, 130)):
        sizes = sizes_of(op, shape, parameter_shape=(shape[0], 1, 130))
        check(op, make_inputs(op, sizes, "float32", grad_centre=3.0), sizes)


@every_op
@pytest.mark.parametrize("weight", [True, False])
def test_sums_over_nothing_are_zero(op, weight):
    sizes = sizes_of(op, (0, 33) if op in ROW_OPS else (0, 6, 5))
    without = () if weight or op in ADAPTIVE else ("weight",)
    inputs = make_inputs(op, sizes, "float16", without=without, statistics=False)
    of_x, *sums = run(op, inputs, sizes)
    assert of_x.shape == sizes.x
    for total in sums:
        assert total is None or (total.shape == sizes.parameter and (total == 0).all())
    out = tuple(None if s is None else cupy.full_like(up(s), 7) for s in (of_x, *sums))
    call(op, to_gpu(op, inputs), sizes, out=out)
    assert all(o is None or (down(o) == 0).all() for o in out[1:])


@every_op
def test_ops_can_be_compiled_ahead_and_asked_for_their_plans(op):
    sizes = sizes_of(op, (64, 1000) if op in ROW_OPS else (8, 24, 14, 14))
    one = make_op(op, sizes)
    one.compile("float32", sizes.x)
    launches = one.plan("float32", sizes.x)
    assert 1 <= len(launches) <= 4
    assert all(launch.grid > 0 and launch.block > 0 for launch in launches)
