"""Calls on CuPy arrays, up to a driver that only writes down what it is given: needs no GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import cunorm
from cunorm import arrays
from cunorm.cuda import compiler, devices, driver, launch
from cunorm.ops import checks

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
    monkeypatch.setattr(driver, "_cupy_launch", lambda: driver_launch)
    monkeypatch.setattr(driver, "_dependent_bindings", lambda device: None)
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


def test_addresses_found_clear_do_not_clear_others(launched, monkeypatch):
    monkeypatch.setattr(checks, "_MOST_CLEAR", 2)
    op = cunorm.RMSNormFwdOp(8)
    x = at(X, (4, 8))
    for address in (Y, W, B, Y, X, Y):
        op(x, out=at(address, (4, 8)))
        with pytest.raises(ValueError, match="out partly overlaps x"):
            op(x, out=at(X + 64, (4, 8)))
    assert len(launched) == 6
    ((_, guard),) = op._plans.values()
    assert len(guard.clear) <= 2


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


@pytest.fixture
def allocated():
    """Sizes of what CuPy allocates, at Y and every mebibyte behind it."""
    sizes = []

    def memory(size):
        sizes.append(size)
        whole = cupy.cuda.UnownedMemory(Y + ((len(sizes) - 1) << 20), size, None, 0)
        return cupy.cuda.MemoryPointer(whole, 0)

    with cupy.cuda.using_allocator(memory):
        yield sizes


def test_all_workspaces_are_one_allocation(launched, allocated, monkeypatch):
    capturing = []
    monkeypatch.setattr(devices, "is_capturing", lambda stream: bool(capturing))
    cols = 1_000_003
    op = cunorm.LayerNormFwdOp(cols)
    assert op(at(X, (3, cols), "float16")).data.ptr == Y
    ((plan, _),) = op._plans.values()
    partial, summary = plan._workspaces
    of_summary = -(-partial.size * 8 // 256) * 256
    assert allocated == [3 * cols * 2, of_summary + 256]
    workspace = Y + (1 << 20)
    addresses = [X, 0, 0, 0, 0, Y, 0, 0, 0, workspace, workspace + of_summary]
    assert summary.size * 4 <= 256
    assert launched == [addresses] * 3
    assert plan._captured == []
    capturing.append(True)
    op(at(X, (3, cols), "float16"))
    assert [memory.ptr for memory in plan._captured] == [Y + (3 << 20)]


def test_outputs_that_are_given_allocate_nothing(launched, allocated):
    x, y = at(X, (4, 8)), at(Y, (4, 8))
    cunorm.layer_norm(x, 8, at(W, (8,)), at(B, (8,)), out=y)
    assert allocated == []
    _, mean, rstd = cunorm.layer_norm(x, 8, out=y, return_stats=True)
    assert allocated == [16, 16]
    assert launched[1][7:9] == [mean.data.ptr, rstd.data.ptr] == [Y, Y + (1 << 20)]


def test_a_thread_without_a_context_gets_one(launched, monkeypatch):
    """Whichever of the launches is the first to need it."""
    bound = []
    driver_launch = driver._cupy_launch()

    def without_context(*args):
        if not bound:
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")
        driver_launch(*args)

    def bind(index, error):
        bound.append(index)
        return "INVALID_CONTEXT" in str(error)

    monkeypatch.setattr(driver, "_cupy_launch", lambda: without_context)
    monkeypatch.setattr(devices, "bind_context", bind)
    cunorm.RMSNormFwdOp(8)(at(X, (4, 8)), out=at(Y, (4, 8)))
    assert bound == [0]
    assert len(launched) == 1


def test_calls_at_the_same_time_have_buffers_of_their_own(launched, monkeypatch):
    """The driver reads a buffer while another thread may call."""
    op = cunorm.RMSNormFwdOp(8)
    x, y = at(X, (4, 8)), at(Y, (4, 8))
    driver_launch = driver._cupy_launch()
    nested = []

    def calls_again(*args):
        if not nested:
            nested.append(True)
            op(at(B, (4, 8)), out=y)
        driver_launch(*args)

    monkeypatch.setattr(driver, "_cupy_launch", lambda: calls_again)
    op(x, out=y)
    assert [addresses[0] for addresses in launched] == [B, X]


@pytest.mark.parametrize("internals", [True, False])
def test_arrays_are_made_as_cupy_makes_them(internals):
    class Moved:
        """A CuPy whose arrays have no `_init`."""

        cuda = cupy.cuda

        class ndarray(np.ndarray):
            def __new__(cls, shape, dtype, memory, strides):
                return cupy.ndarray(shape, dtype, memory, strides)

    def memory(size):
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(Y, size, None, 0), 0)

    with cupy.cuda.using_allocator(memory):
        for shape, strides in (((4, 8), None), ((), None), ((3, 0), None), ((4, 8), (2, 8))):
            size = int(np.prod(shape)) * 2
            want = cupy.ndarray(shape, np.float16, memory(size), strides)
            place = arrays._cupy_placer(
                cupy if internals else Moved, shape, np.dtype("float16"), strides
            )
            made, address = place()
            assert type(made) is cupy.ndarray
            for attribute in ("shape", "strides", "dtype", "size", "nbytes", "base", "flags"):
                assert str(getattr(made, attribute)) == str(getattr(want, attribute))
            assert made._index_32_bits == want._index_32_bits
            assert made.data.ptr == address == Y
            assert made.data.mem.size == want.data.mem.size == size


def test_launches_have_numbers_of_their_own_unless_they_are_replayed(
    launched, allocated, monkeypatch
):
    queued = []

    def driver_launch(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):
        parameter = ctypes.c_void_p.from_address(arguments).value
        addresses = (ctypes.c_uint64 * 16).from_address(parameter + 72)  # of ChannelArgs
        queued.append((function, addresses[0], addresses[14], addresses[15]))

    def load(kernel, device):
        loaded.append(kernel.expression.partition("<")[0])
        return compiler.Function(loaded[-1], None)

    def is_capturing(stream):
        asked.append(stream)
        return bool(capturing)

    loaded, capturing, asked = [], [], []
    monkeypatch.setattr(driver, "_cupy_launch", lambda: driver_launch)
    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(devices, "is_capturing", is_capturing)
    x, y = at(X, (4, 32, 32, 64), "float16"), at(Y, (4, 32, 32, 64), "float16")
    op = cunorm.BatchNormFwdOp(training=True)
    op(x, None, None, None, None, out=y, channel_axis=-1)
    # Nothing is left to be compiled when a graph is captured.
    assert set(loaded) == {"clear_attendance", "column_kept"}
    op(x, None, None, None, None, out=y, channel_axis=-1)
    capturing.append(True)
    op(x, None, None, None, None, out=y, channel_axis=-1)
    assert [kernel for kernel, *_ in queued] == [
        *("column_kept", "column_kept"),
        *("clear_attendance", "column_kept"),
    ]
    assert {where for _, where, *_ in queued} == {X}
    assert len(asked) == 3  # once a call: it takes time
    ((plan, _),) = op._plans.values()
    assert [memory.ptr for memory in plan._captured] == [Y + (2 << 20)]
    first, second, cleared, third = queued
    assert len({number for *_, number in queued}) == 3
    assert cleared[1:] == third[1:]  # the same place, and number
