"""Gradients of arrays in any layout on the GPU, written where they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from backward_cases import (
    ADAPTIVE,
    CLASSES,
    GROUP_OPS,
    OPS,
    ROW_OPS,
    assert_within_bounds,
    call,
    make_inputs,
    sizes_of,
    x_name,
)
from backward_on_gpu import assert_same, check, same_bits, to_gpu
from channels_on_gpu import backwards, laid
from on_gpu import cupy, down, up

pytestmark = pytest.mark.gpu

every_op = pytest.mark.parametrize("op", OPS)
IN_PLACE = [
    (op, name) for op in OPS for name in CLASSES[op].like_x if name in CLASSES[op].input_names
]


def sizes_here(op):
    return sizes_of(op, (7, 5, 258) if op in ROW_OPS else (4, 6, 9, 11))


def relaid(array, how):
    """The same values with other strides."""
    if how == "row stride":
        wide = cupy.zeros((*array.shape[:-1], array.shape[-1] + 5), array.dtype)
        wide[..., 2:-3] = array
        return wide[..., 2:-3]
    if how in ("every other", "reversed"):
        wide = cupy.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        part = wide[..., ::2] if how == "every other" else cupy.flip(wide[..., ::2])
        part[...] = array
        return part
    if how == "transposed":
        return cupy.ascontiguousarray(array.T).T
    if how == "expanded":
        return cupy.broadcast_to(array[:1], array.shape)
    if how == "expanded rows":
        return cupy.broadcast_to(array[..., :1], array.shape)
    return cupy.broadcast_to(array.ravel()[:1], array.shape)


LAYOUTS = ("row stride", "every other", "reversed", "transposed")
EXPANDED = ("expanded", "expanded rows", "one number")


@pytest.mark.parametrize("how", [*LAYOUTS, *EXPANDED])
@every_op
def test_grad_out_of_any_strides(op, how):
    sizes = sizes_here(op)
    for dtype in ("bfloat16", "float32"):
        arrays = to_gpu(op, make_inputs(op, sizes, dtype))
        grad = relaid(arrays["grad_out"], how)
        plain = arrays | {"grad_out": cupy.ascontiguousarray(grad)}
        assert_same(op, call(op, arrays | {"grad_out": grad}, sizes), call(op, plain, sizes))


@pytest.mark.parametrize("how", LAYOUTS)
@every_op
def test_all_inputs_of_any_strides(op, how):
    """The gradient of x has its memory order."""
    sizes = sizes_here(op)
    inputs = make_inputs(op, sizes, "float32")
    arrays = {
        n: relaid(a, how if n in CLASSES[op].like_x else "every other")
        for n, a in up(inputs).items()
    }
    results = call(op, arrays, sizes)
    host = np.empty(sizes.x, np.float32)
    if how == "transposed":
        host = host.T.copy().T
    assert results[0].strides == np.empty_like(host).strides
    assert_within_bounds(op, down(tuple(results)), inputs, sizes)


@pytest.mark.parametrize(
    "layout", ["channels last", "samples last", "every other sample", "some channels", "reversed"]
)
@pytest.mark.parametrize("op", GROUP_OPS)
def test_groups_in_any_memory_order(op, layout):
    for shape in ((4, 6, 9, 11), (6, 6, 64, 65)):
        sizes = sizes_of(op, shape)
        inputs = make_inputs(op, sizes, "float16", centre=0.5)
        check(op, inputs, sizes, layout)
        mixed = to_gpu(op, inputs) | {"grad_out": laid(inputs["grad_out"], layout)}
        assert_same(op, call(op, mixed, sizes), call(op, to_gpu(op, inputs), sizes))


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
@pytest.mark.parametrize(
    "shape", [(5, 6, 3, 3), (4, 6, 20, 36), (3, 6, 160, 256), (4, 6, 640, 512)], ids=str
)
@pytest.mark.parametrize("op", GROUP_OPS)
def test_samples_of_all_arrays_run_backwards(op, shape, layout):
    sizes = sizes_of(op, shape)
    for dtype in ("float16", "float32"):
        inputs = make_inputs(op, sizes, dtype, centre=0.5)
        arrays = backwards(inputs, layout)
        sums = (cupy.empty_like(arrays["weight"]), cupy.empty_like(arrays["weight"]))
        out = (cupy.empty_like(laid(inputs["x"], layout))[::-1], *sums)
        results = call(op, arrays, sizes, out=out)
        assert results[0] is out[0]
        assert out[0].strides[0] < 0
        assert_within_bounds(op, down(tuple(results)), inputs, sizes)


@pytest.mark.parametrize("op", ADAPTIVE)
def test_modulation_that_is_expanded_has_gradients_of_its_full_shape(op):
    sizes = sizes_of(op, (7, 5, 258))
    arrays = up(make_inputs(op, sizes, "float32"))
    names = [n for n in ("scale", "shift", "gate") if n in arrays]
    expanded = arrays | {n: cupy.broadcast_to(arrays[n], sizes.x) for n in names}
    full = arrays | {n: cupy.ascontiguousarray(a) for n, a in expanded.items() if n in names}
    results = call(op, expanded, sizes)
    assert all(r.shape == sizes.x for r in results)
    assert_same(op, results, call(op, full, sizes))


# ---------------------------------------------------------------------------------------------
# out=
# ---------------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_out_is_written_and_nothing_beside_it(op, dtype):
    sizes = sizes_here(op)
    arrays = to_gpu(op, make_inputs(op, sizes, dtype))
    before = {n: a.copy() for n, a in arrays.items()}
    expected = call(op, arrays, sizes)
    wide = [cupy.full((*e.shape[:-1], e.shape[-1] + 8), 77, e.dtype) for e in expected]
    out = tuple(w[..., 3:-5] for w in wide)
    results = call(op, arrays, sizes, out=out)
    assert all(a is b for a, b in zip(results, out, strict=True))
    assert_same(op, results, expected)
    for whole in wide:
        assert (whole[..., :3] == 77).all() and (whole[..., -5:] == 77).all()
    for name, array in arrays.items():
        assert same_bits(array, before[name]), name


@pytest.mark.parametrize(("op", "name"), IN_PLACE)
def test_in_place(op, name):
    """Rows and groups that are held on the chip, and some that are read twice."""
    shapes = [(70, 5, 258), (3, 70_001)] if op in ROW_OPS else [(4, 6, 9, 11), (2, 6, 300, 301)]
    for shape in shapes:
        sizes = sizes_of(op, shape)
        for dtype in ("bfloat16", "float32"):
            arrays = to_gpu(op, make_inputs(op, sizes, dtype))
            expected = call(op, arrays, sizes)
            given = {n: a.copy() for n, a in arrays.items()}
            # A gradient may be written over its own parameter as well.
            names = [n.removeprefix("grad_") for n in CLASSES[op].output_names[1:]]
            out = [
                given[n] if n in given else cupy.empty_like(e)
                for n, e in zip(names, expected[1:], strict=True)
            ]
            results = call(op, given, sizes, out=(given[name], *out))
            assert results[0] is given[name]
            assert_same(op, results, expected)


@pytest.mark.parametrize("how", LAYOUTS)
@every_op
def test_in_place_in_any_layout(op, how):
    sizes = sizes_here(op)
    arrays = to_gpu(op, make_inputs(op, sizes, "float32"))
    expected = call(op, arrays, sizes)
    for name in ("grad_out", x_name(op)):
        given = arrays | {name: relaid(arrays[name].copy(), how)}
        plain = call(op, given, sizes)
        out = (given[name], *(cupy.empty_like(e) for e in expected[1:]))
        results = call(op, given, sizes, out=out)
        assert results[0] is given[name]
        assert_same(op, results, plain)


@pytest.mark.parametrize("op", ADAPTIVE)
def test_gradients_may_be_written_over_one_anothers_arrays(op):
    """As if every input had been read before anything is written."""
    for shape in ((70, 258), (3, 70_001)):
        sizes = sizes_of(op, shape, parameter_shape=shape)
        arrays = up(make_inputs(op, sizes, "float32"))
        expected = call(op, arrays, sizes)
        names = [n for n in arrays if n not in ("mean", "rstd")]
        for turn in range(len(names)):
            given = {n: a.copy() for n, a in arrays.items()}
            turned = [given[n] for n in (*names[turn:], *names[:turn])]
            out = tuple(turned[: len(expected)])
            assert_same(op, call(op, given, sizes, out=out), expected)
