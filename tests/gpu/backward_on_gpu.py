"""Backward ops between host and GPU: inputs up in any layout, gradients down and judged."""

from __future__ import annotations

from backward_cases import CLASSES, GROUP_OPS, assert_within_bounds, call, deviations
from channels_on_gpu import laid
from on_gpu import cupy, down, up


def to_gpu(op, inputs, layout="channels first"):
    """Host inputs on the GPU; group and instance norm in a memory order."""
    if op not in GROUP_OPS:
        return up(inputs)
    return {name: laid(array, layout) for name, array in inputs.items()}


def run(op, inputs, sizes, layout="channels first", **options):
    """Gradients of host inputs, on the host."""
    return down(tuple(call(op, to_gpu(op, inputs, layout), sizes, **options)))


def check(op, inputs, sizes, layout="channels first", **options):
    """Run a backward op on host inputs; its gradients within bounds, back on the host."""
    results = run(op, inputs, sizes, layout, **options)
    assert_within_bounds(op, results, inputs, sizes)
    return results


def check_some(op, results, inputs, sizes):
    """Those gradients that are not None within bounds."""
    found = deviations(op, results, inputs, sizes)
    beyond = {name: d for name, d in found.items() if not d.ratio <= 1}
    assert not beyond, f"{op} {sizes.x}: {beyond}"


def same_bits(got, want):
    """Whether two arrays on the GPU are one bit for bit; nothing is copied to the host."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    kind = f"u{got.dtype.itemsize}"
    flat = (cupy.ascontiguousarray(array).reshape(-1).view(kind) for array in (got, want))
    return bool(cupy.array_equal(*flat))


def assert_same(op, results, expected):
    for name, got, want in zip(CLASSES[op].output_names, results, expected, strict=True):
        assert (got is None) == (want is None), name
        assert want is None or same_bits(got, want), name
