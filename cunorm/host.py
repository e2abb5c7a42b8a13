"""The "numpy" target: the reference, with the outputs laid out and written as ops promise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cunorm import reference
from cunorm.arrays import dense_strides

_LIKE_X = ("y", "residual_out", "grad_x", "grad_sum")  # outputs in the memory order of x


def _like(x: Any, values: Any) -> Any:
    """`values` in the memory order of `x`."""
    import numpy

    order = dense_strides(x.shape, x.strides)
    axes = sorted(range(x.ndim), key=lambda axis: -order[axis])
    laid = numpy.empty([x.shape[axis] for axis in axes], values.dtype)
    laid = laid.transpose(sorted(range(x.ndim), key=axes.__getitem__))
    laid[...] = values
    return laid


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    has_stats = "return_stats" in inspect.signature(function).parameters

    def kernel(
        op: Any, *inputs: Any, out: Sequence[Any], return_stats: bool, **channel_axis: int
    ) -> Any:
        named = dict(zip(op.input_names, inputs, strict=True))
        options = {"return_stats": return_stats} if has_stats else {}
        found = function(**named, **op.attributes, **options, **channel_axis)
        found = found if isinstance(found, tuple) else (found,)
        results = [result for result in found if result is not None]
        names = [n for n, r in zip(op.output_names, found, strict=False) if r is not None]
        for i, name in enumerate(names):
            if out:
                out[i][...] = results[i]
                results[i] = out[i]
            elif name in _LIKE_X:
                results[i] = _like(named[op.x_name], results[i])
        return results[0] if len(results) == 1 else tuple(results)

    return kernel


KERNELS = {
    name: _kernel(function)
    for name, function in {**reference.FORWARD, **reference.BACKWARD}.items()
}
