"""The "numpy" target: the reference, with the outputs laid out and written as ops promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cunorm import reference
from cunorm.arrays import dense_strides


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
    def kernel(op: Any, *inputs: Any, out: Sequence[Any], return_stats: bool) -> Any:
        named = dict(zip(op.input_names, inputs, strict=True))
        results = function(**named, **op.attributes, return_stats=return_stats)
        results = list(results) if isinstance(results, tuple) else [results]
        for i in range(len(op.output_names)):
            if out:
                out[i][...] = results[i]
                results[i] = out[i]
            else:
                results[i] = _like(inputs[0], results[i])
        return results[0] if len(results) == 1 else tuple(results)

    return kernel


KERNELS = {name: _kernel(function) for name, function in reference.FORWARD.items()}
