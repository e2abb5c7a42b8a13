"""Calls on CuPy arrays, up to a driver that only writes down what it is given: needs no GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import cunorm
from cunorm import arrays
from cunorm.cuda import compiler, launch

cupy = pytest.importorskip("cupy")

X, W, B, Y = (n << 20 for n in range(1, 5))  # addresses: nobody reads there
HEAD = 40  # bytes of RowArgs before its addresses


def at(address, shape, dtype="float32", strides=None, device=0):
    """A CuPy array at an address."""
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(shape, np.dtype(dtype), pointer, strides)


@pytest.fixture
def launched(monkeypatch):
    """The addresses of each launch, in the order of RowArgs."""
    given = []

    def driver_launch(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):
        parameter = ctypes.c_void_p.from_address(arguments).value
        given.append(list((ctypes.c_uint64 * 11).from_address(parameter + HEAD)))

    library = arrays.library_of(at(X, (1,)))
    monkeypatch.setattr(launch, "_driver_launch", lambda: driver_launch)
    monkeypatch.setattr(launch, "load", lambda kernel, device: compiler.Function(1, None))
    monkeypatch.setattr(library, "current_device", lambda: 0)
    monkeypatch.setattr(library, "stream", lambda device: 0)
    return given


def test_addresses_reach_the_driver(launched):
    op = cunorm.LayerNormFwdOp(8)
    y = at(Y, (4, 8))
    assert op(at(X, (4, 8)), at(W, (8,)), at(B, (8,)), out=y) is y
    op(at(X + 64, (4, 8)), at(W + 64, (8,)), at(B + 64, (8,)), out=at(Y + 64, (4, 8)))
    op(at(X, (4, 8)), None, at(B, (8,)), out=y)
    first = [X, 0, W, B, 0, Y, 0, 0, 0, 0, 0]
    assert launched == [
        first,
        [a and a + 64 for a in first],
        [X, 0, 0, B, 0, Y, 0, 0, 0, 0, 0],
    ]
    assert len(op._plans) == 2


def test_a_pair_of_outputs_reaches_the_driver(launched):
    op = cunorm.FusedAddRMSNormFwdOp()
    pair = at(Y, (4, 8)), at(Y + 4096, (4, 8))
    for out in (pair, list(pair)):
        assert op(at(X, (4, 8)), at(B, (4, 8)), at(W, (8,)), out=out) == pair
    assert launched == [[X, B, W, 0, 0, Y, Y + 4096, 0, 0, 0, 0]] * 2
    assert len(op._plans) == 1


def test_outputs_are_checked_at_every_call(launched):
    op = cunorm.LayerNormFwdOp(8)
    x, y = at(X, (4, 8)), at(Y, (4, 8))
    op(x, out=y)
    for out in ((), [], (y, y), (None,), [None]):
        with pytest.raises(TypeError, match="out must be an array"):
            op(x, out=out)
    for out in ((y,), [y]):
        assert op(x, out=out) is y
    assert len(op._plans) == 1


@pytest.mark.parametrize("shift", [-124, -4, 4, 124])
def test_overlap_is_refused_at_every_call(launched, shift):
    op = cunorm.RMSNormFwdOp(8)
    op(at(X, (4, 8)), out=at(Y + shift % 16, (4, 8)))
    with pytest.raises(ValueError, match="out"):
        op(at(X, (4, 8)), out=at(X + shift, (4, 8)))
    assert len(launched) == len(op._plans) == 1


def test_neighbours_and_the_input_itself_may_be_written(launched):
    op = cunorm.RMSNormFwdOp(8)
    x = at(X, (4, 8))
    for address in (Y, X, X - 128, X + 128):
        op(x, out=at(address, (4, 8)))
    assert [addresses[5] for addresses in launched] == [Y, X, X - 128, X + 128]
    assert len(op._plans) == 1


def without_c_contiguous(library):
    """The fingerprint of a CuPy that does not say what is contiguous."""
    return super(type(library), library).fingerprint


@pytest.mark.parametrize("kind", ["fast", "without _c_contiguous"])
def test_a_fingerprint_holds_all_that_a_plan_depends_on(kind):
    x = at(X, (4, 8))
    library = arrays.library_of(x)
    fingerprint = library.fingerprint if kind == "fast" else without_c_contiguous(library)
    different = [
        [x],
        [x, x],
        [x, None],
        [None, x],
        [at(X, (4, 1, 8))],
        [at(X, (4, 8), "float16")],
        [at(X, (4, 8), "int32")],
        [at(X, (4, 8), strides=(64, 4))],
        [at(X, (4, 8), strides=(0, 4))],
        [at(X, (4, 8), strides=(4, 16))],
        [at(X + 4, (4, 8))],
        [at(X + 8, (4, 8))],
        [at(X, (4, 8), device=1)],
    ]
    found = [fingerprint(given) for given in different]
    assert len({key for key, _ in found}) == len(different)
    for given, (key, pointers) in zip(different, found, strict=True):
        assert fingerprint(given) == (key, pointers)
        assert pointers == [0 if a is None else a.data.ptr for a in given]
    assert fingerprint([at(X + 64, (4, 8))])[0] == found[0][0]
    assert fingerprint([np.zeros(3)]) is None


def test_the_stride_of_an_axis_of_one_says_nothing(launched):
    op = cunorm.RMSNormFwdOp(8)
    op(at(X, (1, 8), strides=(4096, 4)), out=at(Y, (1, 8)))
    op(at(X, (1, 8)), out=at(X, (1, 8), strides=(4, 4)))
    assert len(launched) == 2
    assert len(op._plans) == 1


def test_arrays_are_made_as_cupy_makes_them():
    def memory(size):
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(Y, size, None, 0), 0)

    class Other(np.ndarray):
        pass

    with cupy.cuda.using_allocator(memory):
        for shape in ((4, 8), (), (3, 0)):
            want = cupy.ndarray(shape, np.float16)
            made = arrays._contiguous_allocator(cupy.ndarray, shape, np.dtype("float16"))()
            assert type(made) is cupy.ndarray
            for attribute in ("shape", "strides", "dtype", "size", "nbytes", "base"):
                assert getattr(made, attribute) == getattr(want, attribute)
            assert made.data.ptr == Y
            assert made.data.mem.size == want.data.mem.size
    made = arrays._contiguous_allocator(Other, (2, 3), np.dtype("float16"))()
    assert (type(made), made.shape, made.dtype) == (Other, (2, 3), np.float16)
