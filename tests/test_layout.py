"""Where rows lie: pure functions of shapes and strides, and what a kernel is told of them."""

from __future__ import annotations

import ctypes
import re
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cunorm
from cunorm import dtypes
from cunorm.arrays import ArraySpec, Device, dense_strides
from cunorm.call import Call
from cunorm.cuda import layout, plans, row, sources
from cunorm.cuda.layout import access_elements, collapsed, leading_strides, row_is_contiguous

settings.register_profile("layout", deadline=None, max_examples=200)
settings.load_profile("layout")

OPERANDS = ("x", "residual", 0, 1, 2, "y", "residual_out")  # in the order of RowArgs
C_TYPES = {
    "const void*": ctypes.c_uint64,
    "void*": ctypes.c_uint64,
    "long long": ctypes.c_longlong,
    "unsigned": ctypes.c_uint,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
}
NORMS = {
    "layer_norm": ("weight", "bias"),
    "rms_norm": ("weight",),
    "fused_add_layer_norm": ("weight", "bias"),
    "fused_add_rms_norm": ("weight",),
    "ada_layer_norm": ("scale", "shift"),
    "ada_layer_norm_zero": ("scale", "shift", "gate"),
}


def random_strides(draw, shape, row_dims=1):
    """Strides whose last `row_dims` axes are neighbours; the others anything."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(range(len(shape) - row_dims, len(shape))):
        strides[axis] = step
        step *= shape[axis]
    order = draw(st.permutations(range(len(shape) - row_dims)))
    for axis in order:
        kind = draw(st.sampled_from(["dense", "dense", "dense", "gap", "zero", "negative"]))
        strides[axis] = {"dense": step, "gap": step + 4, "zero": 0, "negative": -step}[kind]
        if kind != "zero":
            step = abs(strides[axis]) * shape[axis]
    return tuple(strides)


@st.composite
def calls(draw, max_lead=5):
    """A checked call of one of the norms over arrays of any row layout."""
    op = draw(st.sampled_from(sorted(NORMS)))
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=max_lead)))
    cols = draw(st.integers(1, 6))
    shape = (*lead, cols)
    dtype = draw(st.sampled_from(list(dtypes.FLOATS)))
    alignment = draw(st.sampled_from([2, 4, 8, 16]))
    alignment = max(alignment, dtypes.FLOATS[dtype].itemsize)
    inputs = {"x": ArraySpec(shape, random_strides(draw, shape), dtype, alignment)}
    if op.startswith("fused_add"):
        inputs["residual"] = ArraySpec(shape, random_strides(draw, shape), dtype, alignment)
    for name in NORMS[op]:
        own = (cols,)
        if op.startswith("ada"):
            kept = lead[draw(st.integers(0, len(lead))) :]
            own = (*(draw(st.sampled_from([1, n])) for n in kept), cols)
        elif draw(st.booleans()):
            inputs[name] = None
            continue
        inputs[name] = ArraySpec(own, random_strides(draw, own), dtype, alignment)
    names = ["y", "residual_out"] if op.startswith("fused_add") else ["y"]
    strides = dense_strides(shape, inputs["x"].strides)
    outputs = {name: ArraySpec(shape, strides, dtype) for name in names}
    attributes = {"eps": 0.5}
    if op in ("layer_norm", "rms_norm"):
        attributes["normalized_shape"] = (cols,)
    return Call(op, attributes, inputs, outputs, {}, Device("cuda"))


def row_places(spec, shape, dims):
    """Where each row of an array begins once broadcast to `shape`: by brute force."""
    lead = shape[: len(shape) - dims]
    axes = len(lead) - (len(spec.shape) - dims)
    places = []
    for index in np.ndindex(*lead):
        own = index[axes:]
        steps = zip(own, spec.shape, spec.strides, strict=False)
        places.append(sum(i * s for i, n, s in steps if n > 1))
    return places


@cache
def c_struct(name):
    """A struct of the CUDA sources, as they declare it."""
    text = re.sub(r"//.*", "", sources.source("layer_norm"))
    body = re.search(rf"struct {name} {{(.*?)}};", text, re.S)[1]
    fields = []
    for declaration in body.split(";")[:-1]:
        kind, names = re.fullmatch(
            r"\s*((?:const )?void\*|long long|unsigned|double|float|\w+)\s+([\w\s,\[\]]+)",
            declaration,
        ).groups()
        for declared in names.split(","):
            field, *lengths = re.findall(r"\w+", declared)
            c_type = C_TYPES.get(kind) or c_struct(kind)
            for length in reversed(lengths):
                c_type = c_type * int(length)
            fields.append((field, c_type))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def row_args(plan):
    """What the kernel is given, with every address 0."""
    kind = c_struct("RowArgs")
    addresses = kind.rows.offset - kind.x.offset
    packed = plan._head + bytes(addresses) + plan._tail
    assert len(packed) == ctypes.sizeof(kind)
    return kind.from_buffer_copy(packed)


def offset(args, which, row):
    """RowIndex::offset of row_shape.cuh."""
    if args.inner == 0:
        return row * args.step[which]
    above, inner = divmod(row, args.inner)
    outer, middle = divmod(above, args.middle)
    along = args.more[which]
    return outer * args.step[which] + middle * along[0] + inner * along[1]


def operand(call, which):
    if isinstance(which, str):
        return call.inputs.get(which) or call.outputs.get(which)
    names = NORMS[call.op]
    return call.inputs[names[which]] if which < len(names) else None


# -- rows --------------------------------------------------------------------------------------


@given(calls(max_lead=3))
def test_a_kernel_finds_every_row(call):
    """The address of each row by the arithmetic of the kernel is that of plain indexing."""
    copied, direct = row._readable(call, 1)
    plan = row.RowPlan(row.KERNELS[call.op], direct, 1, True)
    args = row_args(plan)
    shape = direct.x.shape
    assert args.rows == np.prod(shape[:-1], dtype=int)
    for i, which in enumerate(OPERANDS):
        spec = operand(direct, which)
        if spec is not None:
            found = [offset(args, i, r) for r in range(args.rows)]
            assert found == row_places(spec, shape, 1)
        else:
            assert args.step[i] == 0


@given(calls())
def test_only_what_cannot_be_walked_is_copied(call):
    copied, direct = row._readable(call, 1)
    shape = call.x.shape
    specs = [s for s in (*direct.inputs.values(), *direct.outputs.values()) if s]
    walked = collapsed(shape[:-1], [leading_strides(s, shape, 1) for s in specs])
    assert len(walked.shape) <= layout.LEADING
    for name, spec in call.inputs.items():
        if name not in copied:
            assert direct.inputs[name] == spec
        else:
            assert direct.inputs[name].strides != spec.strides or (
                direct.inputs[name].shape != spec.shape
            )
    given_specs = [s for s in (*call.inputs.values(), *call.outputs.values()) if s]
    steps = collapsed(shape[:-1], [leading_strides(s, shape, 1) for s in given_specs])
    rows_outside = [s for s in call.outputs.values() if not row_is_contiguous(s, 1)]
    if len(steps.shape) <= layout.LEADING and not rows_outside:
        assert copied == []
        assert direct.outputs == call.outputs


@pytest.mark.parametrize(
    ("shape", "strides", "copied"),
    [
        ((4, 6), (6, 1), False),
        ((4, 6), (100, 1), False),  # a row stride
        ((4, 6), (-6, 1), False),  # rows from the last to the first
        ((4, 6), (0, 1), False),  # one row for all
        ((3, 4, 6), (6, 18, 1), False),  # leading axes swapped
        ((2, 3, 4, 6), (6, 12, 36, 1), False),  # and reversed
        ((4, 6), (1, 4), True),  # columns
        ((4, 6), (12, 2), True),  # every other element
        ((4, 6), (6, -1), True),  # backwards
        ((2, 2, 2, 2, 6), (6, 12, 24, 48, 1), True),  # four leading axes, none to be merged
        ((2, 3, 2, 3, 6), (108, 36, 18, 6, 1), False),  # merges to one
    ],
)
def test_what_is_copied(shape, strides, copied):
    spec = ArraySpec(shape, strides, "float32")
    outputs = {"y": ArraySpec(shape, dense_strides(shape, strides), "float32")}
    attributes = {"eps": 1e-5, "normalized_shape": shape[-1:]}
    call = Call("layer_norm", attributes, {"x": spec, "weight": None, "bias": None}, outputs)
    assert row._readable(call, 1)[0] == (["x"] if copied else [])
    plan = row.KERNELS["layer_norm"].plan(call, False)
    staged = isinstance(plan, plans.StagedPlan)
    assert staged >= copied


def test_scale_and_shift_are_never_expanded():
    """Broadcast along leading axes: read in place by strides of zero."""
    x = ArraySpec.contiguous((8, 64, 768), "float16")
    for shape in ((768,), (1, 768), (64, 768), (8, 1, 768), (1, 64, 768), (8, 64, 768)):
        parameter = ArraySpec.contiguous(shape, "float16")
        inputs = {"x": x, "scale": parameter, "shift": parameter}
        call = Call("ada_layer_norm", {"eps": 1e-5}, inputs, {"y": x})
        assert row._readable(call, 1)[0] == []
        assert isinstance(row.KERNELS["ada_layer_norm"].plan(call, False), row.RowPlan)


# -- pieces ------------------------------------------------------------------------------------


@st.composite
def leading(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=5)))
    count = draw(st.integers(1, 3))
    steps = st.integers(-20, 20)
    dense = [st.just(s) for s in dense_strides(shape, range(len(shape), 0, -1))]
    strides = [tuple(draw(st.one_of(d, st.just(0), steps)) for d in dense) for _ in range(count)]
    return shape, strides


@given(leading())
def test_collapsing_keeps_the_place_of_every_row(given_leading):
    shape, strides = given_leading
    rows = collapsed(shape, strides)
    assert np.prod(rows.shape, dtype=int) == np.prod(shape, dtype=int)
    assert all(n > 1 for n in rows.shape)
    for mine, theirs in zip(rows.strides, strides, strict=True):
        assert len(mine) == len(rows.shape)
        places = [np.dot(i, theirs) for i in np.ndindex(*shape)] if shape else [0]
        merged = [np.dot(i, mine) for i in np.ndindex(*rows.shape)] if rows.shape else [0]
        assert places == merged


@given(leading())
def test_collapsing_leaves_nothing_to_merge(given_leading):
    shape, strides = given_leading
    rows = collapsed(shape, strides)
    for axis in range(1, len(rows.shape)):
        n = rows.shape[axis]
        assert any(mine[axis - 1] != mine[axis] * n for mine in rows.strides)


def test_contiguous_rows_are_one_axis():
    spec = ArraySpec.contiguous((3, 4, 5, 7), "float32")
    rows = collapsed((3, 4, 5), [spec.strides[:3], (0, 0, 0)])
    assert rows == layout.Rows((60,), ((7,), (0,)))


@pytest.mark.parametrize(
    ("shape", "strides", "dims", "contiguous"),
    [
        ((4, 6), (6, 1), 1, True),
        ((4, 6), (9, 1), 1, True),
        ((4, 6), (9, 1), 2, False),
        ((4, 6), (6, 1), 2, True),
        ((4, 1), (1, 5), 1, True),  # one element has no stride
        ((2, 1, 6), (6, 99, 1), 3, True),
        ((4, 6), (1, 4), 1, False),
        ((4, 6), (6, -1), 1, False),
        ((4, 6), (6, 0), 1, False),
    ],
)
def test_row_is_contiguous(shape, strides, dims, contiguous):
    assert row_is_contiguous(ArraySpec(shape, strides, "float32"), dims) is contiguous


def test_leading_strides_are_zero_where_broadcast():
    spec = ArraySpec((3, 1, 7), (7, 99, 1), "float32")
    assert leading_strides(spec, (2, 3, 4, 7), 1) == (0, 7, 0)
    assert leading_strides(ArraySpec((7,), (1,), "float32"), (2, 3, 7), 1) == (0, 0)
    assert leading_strides(ArraySpec.contiguous((2, 3, 7), "float32"), (2, 3, 7), 2) == (21,)


# -- transactions ------------------------------------------------------------------------------


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.lists(
        st.tuples(st.sampled_from(list(dtypes.FLOATS)), st.lists(st.integers(-64, 64), max_size=3)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([1, 2, 4, 8, 16]),
)
def test_access_is_the_widest_that_every_address_allows(vec, operands, alignment):
    specs = [(ArraySpec((1,), (1,), dtype), steps) for dtype, steps in operands]
    access = access_elements(vec, specs, alignment)

    def fits(candidate):
        for spec, steps in specs:
            itemsize = dtypes.FLOATS[spec.dtype].itemsize
            transaction = min(candidate * itemsize, 16)
            places = [alignment, *(s * itemsize for s in steps)]
            if any(place % transaction for place in places):
                return False
        return True

    assert access in (1, 2, 4, 8)
    assert access <= vec
    assert access == 1 or fits(access)
    assert access == vec or not fits(2 * access)


# Half of a vector at a time where that is aligned; word by word elsewhere, which is "1".
@pytest.mark.parametrize(("alignment", "access"), [(16, 8), (8, 4), (4, 1), (2, 1)])
def test_a_shifted_view_is_read_in_smaller_pieces(alignment, access):
    x = ArraySpec((4, 64), (64, 1), "float16", alignment=alignment)
    call = Call(
        "rms_norm", {"eps": 1e-5, "normalized_shape": (64,)}, {"x": x, "weight": None}, {"y": x}
    )
    plan = row.KERNELS["rms_norm"].plan(call, True)
    assert (plan.tile.vec, plan.tile.access, plan.tile.of_parameters) == (8, access, 8)


# -- what is packed ----------------------------------------------------------------------------


def plan_of(op, dtype="float32", shape=(5, 32), **options):
    call = op._hypothetical_call(dtype, shape, None, (), options.pop("return_stats", False))
    return row.KERNELS[op.name].plan(call, options.pop("out_given", False))


def test_the_numbers_of_a_row():
    args = row_args(plan_of(cunorm.AdaLayerNormZeroFwdOp(eps=0.25), shape=(4, 3, 48)))
    assert (args.rows, args.cols, args.segments) == (12, 48, 1)
    numbers = args.numbers
    assert (numbers.count, numbers.inverse, numbers.eps) == (48, 1 / 48, 0.25)
    assert (numbers.inverse32, numbers.eps32) == (np.float32(1 / 48), 0.25)
    assert list(args.step) == [48, 0, 48, 48, 48, 48, 0]
    assert (args.middle, args.inner) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [
        ("float16", 2.0**-23),
        ("bfloat16", 2.0**-23),
        ("float32", 2.0**-23),
        ("float64", 2.0**-52),
    ],
)
def test_rms_norm_without_eps_takes_the_machine_epsilon(dtype, eps):
    assert row_args(plan_of(cunorm.RMSNormFwdOp(32), dtype)).numbers.eps == eps


def test_eps_is_not_rounded():
    plan = plan_of(cunorm.LayerNormFwdOp(32, eps=1e-12), "float16")
    assert row_args(plan).numbers.eps == 1e-12


def test_eps_beyond_float32_stays_finite():
    numbers = row_args(plan_of(cunorm.LayerNormFwdOp(32, eps=1e300))).numbers
    assert numbers.eps == 1e300
    assert numbers.eps32 == np.finfo(np.float32).max


def test_many_rows_are_counted_in_64_bits():
    plan = plan_of(cunorm.LayerNormFwdOp(4), shape=(1 << 33, 4))
    assert row_args(plan).rows == 1 << 33


def slots(plan, norm, *given):
    """Which of the arrays given in the order of a call each address of RowArgs is."""
    addresses = [name for name, _ in c_struct("RowArgs")._fields_]
    addresses = addresses[addresses.index("x") : addresses.index("rows")]
    where = addresses.index("parameter")
    addresses[where : where + 1] = NORMS[norm] + ("",) * (3 - len(NORMS[norm]))
    parameter = (ctypes.c_uint64 * len(addresses))(*[99] * len(addresses))
    plan._launchers[0].addresses.pack_into(parameter, 0, *range(1, len(given) + 1))
    return {n: given[p - 1] for n, p in zip(addresses, parameter, strict=True) if p}


def test_addresses_go_to_their_slots():
    given = ["x", "residual", "weight", "bias", "y", "residual_out", "mean", "rstd"]
    plan = plan_of(cunorm.FusedAddLayerNormFwdOp(), return_stats=True)
    assert slots(plan, "fused_add_layer_norm", *given) == {name: name for name in given}
    given = ["x", "scale", "shift", "gate", "y"]
    plan = plan_of(cunorm.AdaLayerNormZeroFwdOp())
    assert slots(plan, "ada_layer_norm_zero", *given) == {name: name for name in given}
    given = ["x", "weight", "y", "rstd"]
    plan = plan_of(cunorm.RMSNormFwdOp(32), return_stats=True)
    assert slots(plan, "rms_norm", *given) == {name: name for name in given}


def test_workspaces_come_last():
    plan = plan_of(cunorm.RMSNormFwdOp(1 << 22), shape=(2, 1 << 22), return_stats=True)
    given = ["x", "weight", "y", "rstd", "partial", "summary"]
    assert slots(plan, "rms_norm", *given) == {name: name for name in given}


@pytest.mark.parametrize(
    ("op", "dtype", "summary"),
    [
        (cunorm.LayerNormFwdOp, "float16", "float32"),
        (cunorm.RMSNormFwdOp, "float64", "float64"),
    ],
)
def test_workspaces_hold_a_record_for_every_segment(op, dtype, summary):
    plan = plan_of(op(1 << 22), dtype, (3, 1 << 22))
    segments = plan.tile.segments
    assert segments > 1
    statistics, merge, normalize = plan.launches
    assert statistics.grid == normalize.grid == 3 * segments
    assert merge.grid == 3
    partial, of_rows = plan._workspaces
    assert (partial.shape, partial.dtype) == ((3 * segments * 5,), "float64")
    assert of_rows.dtype == summary
    assert of_rows.size % 3 == 0


def test_workspaces_share_memory_but_not_a_byte():
    specs = [ArraySpec.contiguous((n,), dtype) for n, dtype in ((33, "float64"), (64, "float32"))]
    assert plans.workspace_layout([]) == ([], 0)
    assert plans.workspace_layout(specs) == ([0, 512], 768)
    assert plans.workspace_layout(specs[::-1]) == ([0, 256], 768)


def test_no_elements_no_launch():
    for shape in ((0, 4), (3, 0)):
        plan = plan_of(cunorm.LayerNormFwdOp(shape[-1]), shape=shape)
        assert list(plan.launches) == []
