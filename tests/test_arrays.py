"""What is known of arrays: layouts, overlaps, libraries; torch and DLPack arrays in and out."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cunorm
from cunorm import arrays
from cunorm.arrays import ArraySpec

settings.register_profile("arrays", deadline=None, max_examples=200)
settings.load_profile("arrays")


@st.composite
def views(draw, max_dims=5, positive=False):
    """A view into one buffer: sliced, permuted, reversed, expanded."""
    dims = draw(st.integers(0, max_dims))
    sizes = [draw(st.integers(0 if not positive else 1, 4)) for _ in range(dims)]
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in range(dims)]
    base = np.zeros([max(n, 1) * abs(s) for n, s in zip(sizes, steps, strict=True)], np.float32)
    view = base[(..., *(slice(None, None, s) for s in steps))]
    view = view[(..., *(slice(0, n) for n in sizes))]  # with an ellipsis, 0-d stays an array
    view = view.transpose(draw(st.permutations(range(dims))))
    for axis in range(view.ndim):
        if view.shape[axis] == 1 and draw(st.booleans()):
            shape = list(view.shape)
            shape[axis] = draw(st.integers(1, 4))
            view = np.broadcast_to(view, shape)
    return view


def spec_of(array):
    return arrays.library_of(array).spec(array)


# -- layouts -----------------------------------------------------------------------------------


def significant(shape, strides):
    """Strides of the axes along which one moves."""
    return [s for n, s in zip(shape, strides, strict=True) if n > 1]


@given(views())
def test_dense_strides_are_those_of_numpy(view):
    expected = spec_of(np.empty_like(view, order="K")).strides
    got = arrays.dense_strides(view.shape, spec_of(view).strides)
    if view.size:
        assert significant(view.shape, got) == significant(view.shape, expected)


@given(views())
def test_dense_strides_fill_memory_without_holes(view):
    strides = arrays.dense_strides(view.shape, spec_of(view).strides)
    places = {
        sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(view.shape)
    }
    assert places == set(range(view.size))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((3,), (1,)), ((2, 3), (3, 1)), ((2, 0, 3), (3, 3, 1)), ((4, 1, 2), (2, 2, 1))],
)
def test_contiguous_strides(shape, strides):
    assert arrays.contiguous_strides(shape) == strides


@given(views())
def test_an_array_overlaps_itself_as_counting_its_places_says(view):
    strides = spec_of(view).strides
    places = [
        sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(view.shape)
    ]
    if view.size:
        shares = len(set(places)) < len(places)
        assert arrays.overlaps_itself(view.shape, strides) >= shares
        if not shares:  # slices of arrays are always told apart
            assert not arrays.overlaps_itself(view.shape, strides)


def test_windows_overlap_themselves():
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(10), 3)
    assert arrays.overlaps_itself(windows.shape, spec_of(windows).strides)


@given(views())
def test_the_extent_is_that_of_the_bytes(view):
    low, high = spec_of(view).extent
    first, last = np.lib.array_utils.byte_bounds(view)
    if view.size:
        assert (first, last) == (view.ctypes.data + low, view.ctypes.data + high)
    else:
        assert low == high


@given(views(max_dims=3), views(max_dims=3), st.integers(-6, 6))
def test_shared_memory_is_found_as_numpy_finds_it(one, other, shift):
    one, other = spec_of(one), spec_of(other)
    memory = np.zeros(4096, np.float32)
    start = memory.ctypes.data + 8192

    def view(spec, at):
        offset = (at - memory.ctypes.data) // 4
        strides = [4 * s for s in spec.strides]
        return np.ndarray(spec.shape, np.float32, memory, 4 * offset, strides)

    moved = start + 4 * shift
    expected = np.shares_memory(view(one, start), view(other, moved))
    assert arrays.share_memory(start, one, moved, other) == expected


def test_interleaved_columns_share_nothing():
    memory = np.zeros((4, 6), np.float32)
    left, right = memory[:, ::2], memory[:, 1::2]
    for array, other, shared in ((left, right, False), (left, memory[:, 2:3], True)):
        pointers = array.ctypes.data, other.ctypes.data
        got = arrays.share_memory(pointers[0], spec_of(array), pointers[1], spec_of(other))
        assert got is shared


def test_sharing_is_told_without_reading_memory():
    spec = ArraySpec.contiguous((1 << 20,), "float64")
    assert arrays.share_memory(1 << 46, spec, (1 << 46) + 8, spec)
    assert not arrays.share_memory(1 << 46, spec, 1 << 45, spec)


def test_outputs_may_be_interleaved_with_inputs():
    memory = np.arange(48, dtype=np.float64).reshape(4, 12)
    x, out = memory[:, ::2], memory[:, 1::2]
    expected = cunorm.layer_norm(x.copy(), 6)
    assert cunorm.layer_norm(x, 6, out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(x, np.arange(0, 48, 2).reshape(4, 6))


# -- libraries ---------------------------------------------------------------------------------


def test_numpy_arrays_and_subclasses_are_numpys(tmp_path):
    numpy = arrays.library_of(np.zeros(3))
    assert isinstance(numpy, arrays.NumPy)
    mapped = np.memmap(tmp_path / "x", dtype=np.float32, mode="w+", shape=(2, 4))
    mapped[:] = [[1, 2, 3, 4], [5, 6, 7, 9]]
    assert arrays.library_of(mapped) is numpy
    got = cunorm.layer_norm(mapped, 4)
    np.testing.assert_array_equal(got, cunorm.layer_norm(np.array(mapped), 4))
    out = np.memmap(tmp_path / "y", dtype=np.float32, mode="w+", shape=(2, 4))
    assert cunorm.layer_norm(mapped, 4, out=out) is out
    out.flush()
    written = np.fromfile(tmp_path / "y", np.float32).reshape(2, 4)
    np.testing.assert_array_equal(written, got)


@pytest.mark.parametrize("thing", [None, 1.0, [1.0], "x", np.float32(1), object(), np.ndarray])
def test_what_is_no_array_has_no_library(thing):
    assert arrays.library_of(thing) is None


def test_a_class_that_is_merely_called_ndarray_is_not_one():
    fake = type("ndarray", (), {"__module__": "elsewhere"})()
    assert arrays.library_of(fake) is None


def test_read_only_arrays_are_read():
    x = np.arange(12.0).reshape(3, 4)
    expected = cunorm.layer_norm(x, 4, x[0].copy())
    weight = x[0].copy()
    x.flags.writeable = weight.flags.writeable = False
    np.testing.assert_array_equal(cunorm.layer_norm(x, 4, weight), expected)
    y, total = cunorm.fused_add_rms_norm(x, x, weight)
    assert y.flags.writeable
    assert total.flags.writeable


# -- DLPack ------------------------------------------------------------------------------------


class Foreign:
    """An array of a library that offers DLPack and nothing else."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __array_namespace__(self):
        return foreign


class foreign:
    @staticmethod
    def from_dlpack(array):
        return Foreign(np.from_dlpack(array))


class Nameless:
    """DLPack without a namespace to go back to."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_a_foreign_array_comes_back_foreign():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y, mean, rstd = cunorm.layer_norm(Foreign(x), 4, Foreign(x[1]), return_stats=True)
    expected = cunorm.layer_norm(x, 4, x[1], return_stats=True)
    for got, want in zip((y, mean, rstd), expected, strict=True):
        assert isinstance(got, Foreign)
        np.testing.assert_array_equal(got._array, want)


def test_foreign_parameters_of_a_numpy_array():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = cunorm.layer_norm(x, 4, Foreign(x[1]))
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, cunorm.layer_norm(x, 4, x[1]))


def test_a_foreign_array_without_a_namespace_comes_back_as_numpy():
    x = np.arange(12, dtype=np.float64).reshape(3, 4)
    got = cunorm.rms_norm(Nameless(x), 4)
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, cunorm.rms_norm(x, 4))


def test_foreign_arrays_are_checked_like_others():
    x = np.arange(12).reshape(3, 4)
    with pytest.raises(TypeError, match="layer_norm: x must have dtype .*, got int64"):
        cunorm.layer_norm(Foreign(x), 4)
    with pytest.raises(ValueError, match=r"weight must have shape \(4,\), got \(3,\)"):
        cunorm.layer_norm(Foreign(x / 1), 4, Foreign(np.ones(3)))
    with pytest.raises(TypeError, match="out must be a CuPy, NumPy or torch array, got Foreign"):
        cunorm.layer_norm(Foreign(x / 1), 4, out=Foreign(x / 1))


# -- torch on the host -------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def bits(tensor, torch):
    """The bytes of a tensor."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


@pytest.mark.torch
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_give_what_numpy_arrays_give(torch, name):
    pytest.importorskip("ml_dtypes")
    dtype = getattr(torch, name)
    x, residual = torch.randn(5, 12).to(dtype), torch.randn(5, 12).to(dtype)
    weight, bias = torch.randn(12).to(dtype), torch.randn(12).to(dtype)
    results = cunorm.fused_add_layer_norm(x, residual, weight, bias, return_stats=True)
    library = arrays.library_of(x)
    views = [library.to_numpy(t) for t in (x, residual, weight, bias)]
    expected = cunorm.fused_add_layer_norm(*views, return_stats=True)
    for got, want in zip(results, expected, strict=True):
        assert type(got) is torch.Tensor
        assert str(got.dtype) == f"torch.{want.dtype.name}"
        assert bits(got, torch) == want.tobytes()


@pytest.mark.torch
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_out_tensors_are_written_where_they_are(torch, name):
    pytest.importorskip("ml_dtypes")
    dtype = getattr(torch, name)
    x = torch.randn(5, 12).to(dtype)
    expected = cunorm.layer_norm(x, 12)
    out = torch.full((5, 24), 7.0).to(dtype)
    view = out[:, ::2]
    assert cunorm.layer_norm(x, 12, out=view) is view
    assert torch.equal(out[:, ::2], expected)
    assert (out[:, 1::2] == 7).all()
    assert cunorm.layer_norm(x, 12, out=x) is x
    assert torch.equal(x, expected)


@pytest.mark.torch
def test_a_pair_of_out_tensors(torch):
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    expected = cunorm.fused_add_rms_norm(x, residual, weight, return_stats=True)
    y, total, rstd = cunorm.fused_add_rms_norm(
        x, residual, weight, out=(x, residual), return_stats=True
    )
    assert y is x
    assert total is residual
    for got, want in zip((y, total, rstd), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.torch
def test_the_memory_format_of_a_tensor_is_kept(torch):
    x = torch.randn(2, 6, 3, 5).to(memory_format=torch.channels_last)
    y = cunorm.layer_norm(x, (6, 3, 5))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, cunorm.layer_norm(x.contiguous(), (6, 3, 5)))
    y = cunorm.rms_norm(x.permute(0, 2, 3, 1), 6)
    assert y.stride() == x.permute(0, 2, 3, 1).stride()


@pytest.mark.torch
def test_parameters_and_gradients(torch):
    x = torch.randn(4, 8)
    weight = torch.nn.Parameter(torch.randn(8))
    assert isinstance(arrays.library_of(weight), arrays.Torch)
    with pytest.raises(ValueError, match="weight requires grad"):
        cunorm.layer_norm(x, 8, weight)
    expected = cunorm.layer_norm(x, 8, weight.detach())
    with torch.no_grad():
        got = cunorm.layer_norm(x, 8, weight)
    assert torch.equal(got, expected)
    assert not got.requires_grad
    with torch.inference_mode():
        assert torch.equal(cunorm.layer_norm(x, 8, weight), expected)


@pytest.mark.torch
def test_out_that_requires_grad_is_refused(torch):
    out = torch.zeros(4, 8, requires_grad=True)
    with pytest.raises(ValueError, match="out requires grad"):
        cunorm.layer_norm(torch.randn(4, 8), 8, out=out)
    assert (out == 0).all()


@pytest.mark.torch
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_library_of_x_decides(torch, name):
    dtypes = pytest.importorskip("cunorm.dtypes")
    x = np.arange(12).reshape(3, 4).astype(dtypes.numpy_dtype(name))
    tensor = arrays.library_of(torch.ones(1)).from_numpy(x.copy())
    got = cunorm.layer_norm(x, 4, tensor[1].clone())
    assert type(got) is np.ndarray
    np.testing.assert_array_equal(got, cunorm.layer_norm(x, 4, x[1]))
    got = cunorm.layer_norm(tensor, 4, x[1])
    assert type(got) is torch.Tensor
    assert torch.equal(got, cunorm.layer_norm(tensor, 4, tensor[1]))


@pytest.mark.torch
def test_numpy_parameters_that_torch_cannot_view(torch):
    x, weight = torch.randn(3, 4), np.arange(8, dtype=np.float32)
    expected = cunorm.layer_norm(x, 4, torch.tensor([7.0, 5.0, 3.0, 1.0]))
    assert torch.equal(cunorm.layer_norm(x, 4, weight[::-2]), expected)
    frozen = np.array([7, 5, 3, 1], np.float32)
    frozen.flags.writeable = False
    assert torch.equal(cunorm.layer_norm(x, 4, frozen), expected)


@pytest.mark.torch
def test_an_expanded_tensor(torch):
    x = torch.randn(1, 8).expand(5, 8)
    y = cunorm.layer_norm(x, 8)
    assert not arrays.overlaps_itself(y.shape, y.stride())
    assert torch.equal(y, cunorm.layer_norm(x.contiguous(), 8))
    with pytest.raises(ValueError, match="out must be an array whose elements do not share"):
        cunorm.layer_norm(torch.randn(5, 8), 8, out=torch.zeros(1, 8).expand(5, 8))


@pytest.mark.torch
def test_a_scalar_statistic_of_one_row(torch):
    y, mean, rstd = cunorm.layer_norm(torch.tensor([1.0, 3.0]), 2, eps=0.0, return_stats=True)
    assert y.tolist() == [-1, 1]
    assert mean.shape == rstd.shape == ()
    assert (mean.item(), rstd.item()) == (2, 1)
