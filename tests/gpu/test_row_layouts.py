"""Strides, alignment and broadcasting: bit for bit what contiguous copies give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import (
    ADAPTIVE,
    DTYPES,
    FUSED,
    OPS,
    PARAMETERS,
    as_tuple,
    call,
    noise,
    random_inputs,
)
from on_gpu import Allocations, assert_same, cupy, down, up

import cunorm
from cunorm import dtypes

pytestmark = pytest.mark.gpu

ROWS = 10


def buffer(shape, dtype, seed=0):
    return noise(shape, seed).astype(dtypes.numpy_dtype(dtype))


# name: shape of a buffer and the view of it that an op gets, always ROWS rows of `cols`
LAYOUTS = {
    "third of a wider row": lambda cols: ((ROWS, 3 * cols), lambda b: b[:, cols : 2 * cols]),
    "odd row step": lambda cols: ((ROWS, cols + 3), lambda b: b[:, 1 : cols + 1]),
    "even row step": lambda cols: ((ROWS, cols + 2), lambda b: b[:, 2:]),
    "every third row": lambda cols: ((3 * ROWS, cols), lambda b: b[::3]),
    "rows reversed": lambda cols: ((ROWS, cols), lambda b: b[::-1]),
    "columns reversed": lambda cols: ((ROWS, cols), lambda b: b[:, ::-1]),
    "both reversed": lambda cols: ((ROWS, cols), lambda b: b[::-1, ::-1]),
    "every other column": lambda cols: ((ROWS, 2 * cols), lambda b: b[:, ::2]),
    "transposed": lambda cols: ((cols, ROWS), lambda b: b.T),
    "one row for all": lambda cols: ((1, cols), lambda b: np.broadcast_to(b, (ROWS, cols))),
    "one column for all": lambda cols: ((ROWS, 1), lambda b: np.broadcast_to(b, (ROWS, cols))),
}
KEPT = [name for name in LAYOUTS if "for all" not in name]  # elements that share no memory


def laid_out(name, cols, dtype, seed=0):
    """A view of a buffer on the GPU, and its values as a contiguous array on the host."""
    shape, view = LAYOUTS[name](cols)
    on_host = buffer(shape, dtype, seed)
    wide = up(on_host)
    if "for all" in name:
        return cupy.broadcast_to(wide, (ROWS, cols)), np.ascontiguousarray(view(on_host))
    return view(wide), np.ascontiguousarray(view(on_host))


@pytest.mark.parametrize("cols", [33, 768, 4097])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_x_of_any_strides(op, layout, dtype, cols):
    x, values = laid_out(layout, cols, dtype)
    inputs = random_inputs(op, values.shape, dtype)
    want = call(op, up(inputs | {"x": values}), return_stats=True)
    got = call(op, up(inputs) | {"x": x}, return_stats=True)
    assert_same(got, want)
    if layout == "transposed":
        assert got[0].strides == (x.dtype.itemsize, ROWS * x.dtype.itemsize)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", FUSED)
@pytest.mark.parametrize("x_layout", ["third of a wider row", "transposed"])
def test_residual_of_other_strides_than_x(op, layout, x_layout):
    x, x_values = laid_out(x_layout, 768, "float16")
    residual, residual_values = laid_out(layout, 768, "float16", seed=1)
    inputs = random_inputs(op, x_values.shape, "float16")
    want = call(op, up(inputs | {"x": x_values, "residual": residual_values}))
    assert_same(call(op, up(inputs) | {"x": x, "residual": residual}), want)


# Bytes of 0xFF are NaN in every dtype: what is read beyond a slice would show as well.
def sentinels(shape, dtype):
    dtype = dtypes.numpy_dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return cupy.full(nbytes, 0xFF, np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("cols", [33, 769, 1537, 4096, 24_577, 100_003])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_slices_of_wider_buffers(op, dtype, cols):
    """x, residual and the outputs each with a row step of their own; nothing else is touched."""
    rows = 7 if cols < 5000 else 2
    inputs = random_inputs(op, (rows, cols), dtype)
    on_gpu = up(inputs)
    want = call(op, on_gpu)
    for step, name in enumerate(("x", *(["residual"] if op in FUSED else []))):
        wide = sentinels((rows + 2, cols + 5 + step), dtype)
        part = wide[1:-1, 3 : 3 + cols]
        part[...] = on_gpu[name]
        on_gpu[name] = part
    buffers = [sentinels((rows + 2, cols + 9 + i), dtype) for i in range(len(as_tuple(want)))]
    outs = tuple(b[1:-1, 5 : 5 + cols] for b in buffers)
    got = call(op, on_gpu, out=outs if op in FUSED else outs[0])
    assert_same(got, want)
    for wide in buffers:
        after = down(wide).view(f"u{wide.dtype.itemsize}").copy()
        after[1:-1, 5 : 5 + cols] = np.iinfo(after.dtype).max
        assert (after == np.iinfo(after.dtype).max).all()


@pytest.mark.parametrize("layout", KEPT)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("op", OPS)
def test_out_of_any_strides(op, layout, dtype):
    inputs = up(random_inputs(op, (ROWS, 96), dtype))
    want = call(op, inputs)
    outs = tuple(laid_out(layout, 96, dtype, seed)[0] for seed in range(len(as_tuple(want))))
    got = call(op, inputs, out=outs if op in FUSED else outs[0])
    assert all(mine is given for mine, given in zip(as_tuple(got), outs, strict=True))
    assert_same(got, want)


@pytest.mark.parametrize(("cols", "offset"), [(768, 1), (768, 2), (768, 4), (8192, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_one_array_off_alignment(op, dtype, cols, offset):
    """Each array alone starts a few elements into its memory."""
    inputs = random_inputs(op, (3, cols), dtype)
    aligned = up(inputs)
    want = call(op, aligned)

    def moved(array):
        flat = cupy.empty(array.size + offset, array.dtype)
        place = flat[offset:].reshape(array.shape)
        place[...] = array
        return place

    for name in inputs:
        assert_same(call(op, aligned | {name: moved(aligned[name])}), want, name)
    for i in range(len(as_tuple(want))):
        outs = [cupy.empty_like(y) for y in as_tuple(want)]
        outs[i] = moved(outs[i])
        assert_same(
            call(op, aligned, out=tuple(outs) if op in FUSED else outs[0]), want, f"out {i}"
        )


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("op", ["layer_norm", "fused_add_rms_norm", "ada_layer_norm_zero"])
def test_leading_axes_in_any_order(op, axes):
    on_host = buffer((5, 2, 4, 3, 40), "float16")
    view = on_host.transpose(*axes, 4)
    x = up(on_host).transpose(*axes, 4)
    inputs = random_inputs(op, view.shape, "float16")
    want = call(op, up(inputs | {"x": np.ascontiguousarray(view)}))
    got = call(op, up(inputs) | {"x": x})
    assert_same(got, want)
    for y in as_tuple(got):
        assert y.strides == np.empty_like(view).strides


@pytest.mark.parametrize("axes", [(3, 0, 1, 2), (0, 3, 1, 2), (2, 1, 0, 3), (1, 2, 3, 0)])
def test_normalized_axes_that_are_not_neighbours_in_memory(axes):
    on_host = buffer((4, 6, 8, 10), "float32")
    view = on_host.transpose(axes)
    shape = view.shape[-2:]
    weight, bias = buffer(shape, "float32", 1), buffer(shape, "float32", 2)
    want = cunorm.layer_norm(up(np.ascontiguousarray(view)), shape, up(weight), up(bias))
    got = cunorm.layer_norm(
        up(on_host).transpose(axes), shape, up(weight.T.copy()).T, up(np.asfortranarray(bias))
    )
    assert_same(got, want)
    assert got.strides == np.empty_like(view).strides


SHAPE = (4, 6, 72)
BROADCAST = [(72,), (1, 72), (1, 1, 72), (6, 72), (1, 6, 72), (4, 1, 72), (4, 6, 72)]


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shapes", [(b, c) for b in BROADCAST for c in BROADCAST])
@pytest.mark.parametrize("op", ADAPTIVE)
def test_modulation_broadcasts(op, shapes, dtype, expand):
    inputs = random_inputs(op, SHAPE, dtype)
    for i, name in enumerate(PARAMETERS[op]):
        inputs[name] = buffer((*shapes, shapes[0])[i], dtype, i)
    full = {
        name: np.ascontiguousarray(np.broadcast_to(array, SHAPE)) for name, array in inputs.items()
    }
    want = call(op, up(full))
    given = up(inputs)
    if expand:
        given = {name: cupy.broadcast_to(array, SHAPE) for name, array in given.items()}
    hook = Allocations()
    with hook:
        got = call(op, given)
    assert_same(got, want)
    assert hook.sizes == [got.nbytes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ADAPTIVE)
@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 1, 4, 1, 48), (1, 3, 1, 5, 48), (2, 1, 1, 5, 48)],
        [(2, 1, 4, 1, 48), (48,), (4, 5, 48)],
        [(1, 3, 1, 5, 48), (2, 3, 4, 5, 48), (4, 1, 48)],
        [(2, 1, 1, 1, 48), (2, 3, 1, 1, 48), (2, 3, 4, 1, 48)],
    ],
)
def test_modulation_over_alternating_axes(op, shapes, dtype):
    inputs = random_inputs(op, (2, 3, 4, 5, 48), dtype)
    for i, name in enumerate(PARAMETERS[op]):
        inputs[name] = buffer(shapes[i], dtype, i)
    full = {
        name: np.ascontiguousarray(np.broadcast_to(array, inputs["x"].shape))
        for name, array in inputs.items()
    }
    assert_same(call(op, up(inputs)), call(op, up(full)))


@pytest.mark.parametrize("cols", [33, 768])
@pytest.mark.parametrize("op", OPS)
def test_parameters_of_any_strides(op, cols):
    inputs = random_inputs(op, (5, cols), "float32")
    given = up(inputs)
    want = call(op, given)
    for name in PARAMETERS[op]:
        spread_out = cupy.empty(2 * cols, np.float32)[::2]
        spread_out[...] = given[name]
        backwards = up(np.ascontiguousarray(inputs[name][::-1]))[::-1]
        assert_same(call(op, given | {name: spread_out}), want, name)
        assert_same(call(op, given | {name: backwards}), want, name)
        same = inputs | {name: np.full(cols, 0.7, np.float32)}
        expanded = cupy.broadcast_to(up(np.float32(0.7).reshape(1)), (cols,))
        assert_same(call(op, given | {name: expanded}), call(op, up(same)), name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_row_strided_input_is_not_copied(op, dtype):
    rows, cols = 64, 512
    given = up(random_inputs(op, (rows, cols), dtype))
    for name in ("x", *(["residual"] if op in FUSED else [])):
        wide = sentinels((rows, 3 * cols), dtype)
        wide[:, cols : 2 * cols] = given[name]
        given[name] = wide[:, cols : 2 * cols]
    call(op, given)  # whatever is allocated once
    hook = Allocations()
    with hook:
        results = as_tuple(call(op, given))
    assert hook.sizes == [y.nbytes for y in results]
    with hook:
        call(op, given, out=results if op in FUSED else results[0])
    assert len(hook.sizes) == len(results)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, 7168), (3, 0, 2520), (0, 5, 64), (4, 0)])
def test_arrays_without_elements(op, shape):
    inputs = random_inputs(op, shape, "float16")
    results = as_tuple(call(op, up(inputs), return_stats=True))
    count = 2 if op in FUSED else 1
    for y in results[:count]:
        assert y.shape == shape
        assert y.dtype == np.float16
    for statistic in results[count:]:
        assert statistic.shape == shape[:-1]
        assert statistic.dtype == np.float32
        assert np.isnan(down(statistic)).all()
    cupy.cuda.Device().synchronize()  # no launch error is left for the next call
    assert int(cupy.arange(10).sum()) == 45
