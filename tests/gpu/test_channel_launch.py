"""Batch, group and instance norm: layouts, running statistics, streams, graphs, torch."""

from __future__ import annotations

import pytest
from cases import assert_same_bits
from channel_cases import (
    COMPUTING,
    MODES,
    RUNNING,
    assert_within_bounds,
    call,
    make_inputs,
    make_op,
)
from channels_on_gpu import backwards, check, laid, on_gpu, run
from on_gpu import assert_same, cupy, down, spin, up

from cunorm import dtypes
from cunorm.cuda import compiler

pytestmark = pytest.mark.gpu

every_mode = pytest.mark.parametrize("mode", MODES)
updating = pytest.mark.parametrize("mode", COMPUTING)
# A set in a CTA, in a cluster, in segments; strips of channels; a tile of columns, blocks of rows
# kept on chip and read twice.
REGIMES = {
    "CTA": ((4, 6, 20, 36), "channels first"),
    "cluster": ((8, 6, 160, 256), "channels first"),
    "segments": ((8, 3, 768, 512), "channels first"),
    "strips": ((37, 120, 7, 7), "channels first"),
    "tile": ((4, 6, 5, 4), "channels last"),
    "kept blocks": ((8, 24, 96, 64), "channels last"),
    "blocks": ((8, 6, 96, 64), "channels last"),
}
# A few lanes a set, a CTA, a cluster, sets kept on chip, segments.
BACKWARDS = ((5, 6, 3, 3), (4, 6, 20, 36), (8, 6, 160, 256), (4, 6, 640, 512), (8, 3, 768, 512))
every_regime = pytest.mark.parametrize("regime", REGIMES)


@pytest.mark.parametrize(
    "layout", ["samples last", "every other sample", "some channels", "reversed"]
)
@every_mode
def test_layouts(mode, layout):
    check(mode, make_inputs(mode, (4, 6, 12, 10), "float32"), layout)


@pytest.mark.parametrize("layout", ["channels first", "channels last"])
@pytest.mark.parametrize("shape", BACKWARDS, ids=str)
@every_mode
def test_samples_of_all_arrays_run_backwards(mode, shape, layout):
    if mode == "batch_norm_stats":
        pytest.skip("there is no output of the shape of x")
    for dtype in ("float16", "float32"):
        inputs = make_inputs(mode, shape, dtype, centre=0.5)
        arrays = backwards(inputs, layout)
        out = cupy.empty_like(laid(inputs["x"], layout))[::-1]
        sums = tuple(cupy.empty_like(arrays["weight"]) for _ in range(2))
        results, after = run(mode, arrays, out=(out, *sums) if "backward" in mode else out)
        assert out.strides[0] < 0
        assert_same_bits(down(out), results[0])
        assert_within_bounds(mode, results, inputs, after)


def test_one_kernel_for_planes_of_several_sizes():
    """CuPy has one function for all, and the last one loaded needs less shared memory."""
    mode, many, few = "batch_norm_normalize", (4, 512, 32, 32), (4, 32, 128, 128)
    of_many, of_few = (make_op(mode).plan("float16", shape)[0] for shape in (many, few))
    assert of_many.kernel == of_few.kernel
    assert of_many.shared_memory > of_few.shared_memory
    for shape in (many, few, many):
        check(mode, make_inputs(mode, shape, "float16"))


@every_mode
def test_strided_parameters_of_another_dtype(mode):
    for shape, layout in REGIMES.values():
        inputs = make_inputs(mode, shape, "float16", parameter_dtype="float32")
        arrays = on_gpu(inputs, layout)
        tables = {}
        for name, array in inputs.items():
            if array.ndim == 1:
                tables[name] = cupy.full((len(array), 3), 77, array.dtype)
                tables[name][:, 1] = up(array)
                arrays[name] = tables[name][:, 1]
        results, after = run(mode, arrays)
        assert_within_bounds(mode, results, inputs, after)
        for table in tables.values():
            assert (down(table)[:, ::2] == 77).all()


@every_regime
@every_mode
def test_in_place_and_out(mode, regime):
    if mode == "batch_norm_stats":
        pytest.skip("there is no output of the shape of x")
    shape, layout = REGIMES[regime]
    inputs = make_inputs(mode, shape, "bfloat16")
    want = call(mode, on_gpu(inputs, layout))
    arrays = on_gpu(inputs, layout)
    if "backward" in mode:
        sums = [cupy.empty_like(w) for w in want[1:]]
        got = call(mode, arrays, out=(arrays["grad_out"], *sums))
    else:
        got = call(mode, arrays, out=arrays["x"])
    assert_same(got, want)
    if "backward" not in mode:
        flat = cupy.zeros((2, *shape), want.dtype)[1]  # channels first, whatever x is
        assert_same(call(mode, on_gpu(inputs, layout), out=flat), want)


@every_regime
@updating
def test_graphs_move_running_statistics_once_a_replay(mode, regime):
    shape, layout = REGIMES[regime]
    inputs = make_inputs(mode, shape, "float32")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays, plain = on_gpu(inputs, layout), on_gpu(inputs, layout)
        call(mode, on_gpu(inputs, layout))  # compiles
        stream.begin_capture()
        call(mode, arrays)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
            call(mode, plain)
        stream.synchronize()
    for name in RUNNING:
        assert_same_bits(down(arrays[name]), down(plain[name]), name)
        assert (down(arrays[name]) != inputs[name]).any()


@every_regime
@every_mode
def test_streams_do_not_share_anything(mode, regime):
    shape, layout = REGIMES[regime]
    sets = [make_inputs(mode, shape, "float32", seed=seed) for seed in (1, 40)]
    want = [run(mode, on_gpu(inputs, layout)) for inputs in sets]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in sets]
    arrays = [on_gpu(inputs, layout) for inputs in sets]
    cupy.cuda.Device().synchronize()
    got = []
    for stream in streams:
        with stream:
            spin(1)
    for stream, mine in zip(streams, arrays, strict=True):
        with stream:
            got.append(call(mode, mine))
    for stream, results, mine, (expected, after) in zip(streams, got, arrays, want, strict=True):
        stream.synchronize()
        results = results if isinstance(results, (tuple, list)) else (results,)
        for one, other in zip(results, expected, strict=False):
            assert_same_bits(down(one), other)
        for name in RUNNING:
            if name in mine:
                assert_same_bits(down(mine[name]), after[name], name)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@every_mode
def test_torch_channels_last(mode, dtype):
    import torch

    from cunorm.arrays import Torch

    library = Torch()
    inputs = make_inputs(mode, (4, 24, 17, 12), dtype)
    tensors = {n: library.from_numpy(a.copy()).cuda() for n, a in inputs.items()}
    last = {
        n: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t.clone()
        for n, t in tensors.items()
    }
    results = call(mode, last)
    results = results if isinstance(results, tuple) else (results,)
    if results[0].ndim == 4:
        assert results[0].is_contiguous(memory_format=torch.channels_last)
    host = [library.to_numpy(r.cpu()) for r in results]
    after = {n: library.to_numpy(t.cpu()) for n, t in last.items()}
    assert_within_bounds(mode, host, inputs, after)
    assert host[0].dtype == dtypes.numpy_dtype(dtype) or mode == "batch_norm_stats"


def test_a_batch_of_another_size_compiles_little():
    mode = "batch_norm-training"
    for batch in (2, 16, 64, 256):
        call(mode, on_gpu(make_inputs(mode, (batch, 24, 14, 14), "float16")))
    before = compiler.compilations()
    for batch in (*range(3, 16), 33, 65, 100, 200, 255):
        call(mode, on_gpu(make_inputs(mode, (batch, 24, 14, 14), "float16")))
    assert compiler.compilations() - before <= 6
