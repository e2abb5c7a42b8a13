"""Backward ops in streams and graphs, on torch tensors, and what they compile."""

from __future__ import annotations

import pytest
from backward_cases import (
    GROUP_OPS,
    OPS,
    ROW_OPS,
    assert_within_bounds,
    call,
    make_inputs,
    sizes_of,
)
from backward_on_gpu import assert_same, to_gpu
from on_gpu import cupy, down, spin

from cunorm.cuda import compiler

pytestmark = pytest.mark.gpu

every_op = pytest.mark.parametrize("op", OPS)
# Few rows, many rows, rows beyond a CTA; groups in a CTA, in several, channels last.
SHAPES = {
    op: [((9, 300), ""), ((3000, 1024), ""), ((40, 40_000), "")]
    if op in ROW_OPS
    else [
        ((4, 6, 20, 36), "channels first"),
        ((8, 6, 160, 256), "channels first"),
        ((8, 24, 48, 64), "channels last"),
    ]
    for op in OPS
}
REGIMES = [(op, *regime) for op in OPS for regime in SHAPES[op]]
every_regime = pytest.mark.parametrize(("op", "shape", "layout"), REGIMES, ids=str)


@every_regime
def test_a_graph_can_be_launched_again_and_again(op, shape, layout):
    sizes = sizes_of(op, shape)
    first, second = (make_inputs(op, sizes, "float32", seed=seed) for seed in (1, 40))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays, others = (to_gpu(op, inputs, layout) for inputs in (first, second))
        want = [call(op, given, sizes) for given in (arrays, others)]
        out = tuple(cupy.zeros_like(w) for w in want[0])
        stream.begin_capture()
        call(op, arrays, sizes, out=out)
        graph = stream.end_capture()
        graph.launch(stream)
        assert_same(op, out, want[0])
        for name, array in arrays.items():
            array[...] = others[name]
        for _ in range(3):
            graph.launch(stream)
            assert_same(op, out, want[1])


@every_regime
def test_streams_do_not_share_anything(op, shape, layout):
    sizes = sizes_of(op, shape)
    arrays = [to_gpu(op, make_inputs(op, sizes, "float32", seed=s), layout) for s in (1, 40)]
    want = [call(op, given, sizes) for given in arrays]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in arrays]
    cupy.cuda.Device().synchronize()
    for stream in streams:
        with stream:
            spin(1)
    got = []
    for _ in range(2):
        for stream, given in zip(streams, arrays, strict=True):
            with stream:
                got.append(call(op, given, sizes))
    cupy.cuda.Device().synchronize()
    for i, results in enumerate(got):
        assert_same(op, results, want[i % 2])


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@every_op
def test_torch_tensors(op, dtype):
    import torch

    from cunorm.arrays import Torch

    library = Torch()
    sizes = sizes_of(op, (70, 515) if op in ROW_OPS else (4, 24, 17, 12))
    inputs = make_inputs(op, sizes, dtype)
    tensors = {n: library.from_numpy(a.copy()).cuda() for n, a in inputs.items()}
    if op in GROUP_OPS:
        tensors = {
            n: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t
            for n, t in tensors.items()
        }
    results = call(op, tensors, sizes)
    assert all(isinstance(r, torch.Tensor) and r.is_cuda for r in results)
    if op in GROUP_OPS:
        assert results[0].is_contiguous(memory_format=torch.channels_last)
    assert_within_bounds(op, [library.to_numpy(r.cpu()) for r in results], inputs, sizes)


@every_op
def test_a_batch_of_another_size_compiles_little(op):
    """Nothing for rows; groups have few kernels, by how much is normalized together."""

    def run(count):
        sizes = sizes_of(op, (count, 1000) if op in ROW_OPS else (count, 24, 14, 14))
        call(op, to_gpu(op, make_inputs(op, sizes, "float16")), sizes)

    for count in (1, 2, 16, 64, 256, 5000 if op in ROW_OPS else 500):
        run(count)
    before = compiler.compilations()
    for count in (3, 5, 33, 65, 100, 200, 255, 300, *([1031, 4097] if op in ROW_OPS else [])):
        run(count)
    assert compiler.compilations() - before <= (0 if op in ROW_OPS else 4)


@every_op
def test_results_come_down_right_after_a_call_with_work_before_it(op):
    sizes = sizes_of(op, SHAPES[op][0][0])
    inputs = make_inputs(op, sizes, "float32")
    with cupy.cuda.Stream(non_blocking=True):
        arrays = to_gpu(op, inputs)
        grad = arrays["grad_out"].copy()
        arrays["grad_out"][...] = 0
        spin(2)
        arrays["grad_out"][...] = grad
        assert_within_bounds(op, down(tuple(call(op, arrays, sizes))), inputs, sizes)
