"""Bounds of the norms over the last axes: layer norm, RMS norm, fused and adaptive forms."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cunorm import reference
from cunorm.precision.units import (
    FLUSHED,
    SMALLEST_NORMAL,
    Array,
    Deviation,
    Expected,
    accumulation,
    deviation,
    error_bound,
    has_subnormals,
    is_subnormal,
    name_of,
    stats_bounds,
)


def forward_bound(
    op: str,
    inputs: Mapping[str, Any],
    *,
    normalized_shape: int | Sequence[int] | None = None,
    eps: float | None = None,
) -> dict[str, Expected]:
    """Expected outputs and the error allowed in each; see `cunorm.precision.forward_bound`."""
    function = reference.FORWARD[op]
    x: Array = inputs["x"]
    work = reference.working_dtype(x.dtype)
    arguments: dict[str, Any] = dict(inputs)
    if normalized_shape is not None:
        arguments["normalized_shape"] = normalized_shape
    if eps is None:
        eps = inspect.signature(function).parameters["eps"].default
    results = function(**arguments, eps=eps, return_stats=True, dtype=work)
    values = dict(zip(_output_names(op), results, strict=True))

    axes = 1 if normalized_shape is None else np.size(normalized_shape)
    with np.errstate(all="ignore"):
        bounds = {"y": _y_bound(values, inputs, x, axes)}
        if "residual_out" in values:
            bounds["residual_out"] = _sum_bound(values["residual_out"], inputs)
        bounds |= stats_bounds(values, x.dtype, eps)
    return {name: Expected(value, bounds[name]) for name, value in values.items()}


def forward_deviation(
    op: str,
    outputs: Sequence[Array] | Array,
    inputs: Mapping[str, Any],
    *,
    normalized_shape: int | Sequence[int] | None = None,
    eps: float | None = None,
) -> dict[str, Deviation]:
    """Errors of computed outputs; see `cunorm.precision.forward_deviation`."""
    x: Array = inputs["x"]
    given = [outputs] if isinstance(outputs, np.ndarray) else list(outputs)
    named = dict(zip(_output_names(op), given, strict=False))
    axes = 1 if normalized_shape is None else np.size(normalized_shape)
    lead = x.shape[: x.ndim - axes]
    for name, array in named.items():
        shape = lead if name in ("mean", "rstd") else x.shape
        if array.shape != shape:
            raise ValueError(f"{op}: {name} must have shape {shape}, got {array.shape}")

    worst = dict.fromkeys(named, Deviation(0.0, 0.0))
    cols = x.size // max(1, int(np.prod(lead)))
    for at in reference.row_blocks(lead, cols):
        expected = forward_bound(
            op, _block(inputs, x, at), normalized_shape=normalized_shape, eps=eps
        )
        for name, array in named.items():
            stats = name in ("mean", "rstd")
            dtype = accumulation(x.dtype) if stats else x.dtype
            actual = np.asarray(array[at])
            if name == "mean":  # a sum that keeps its rounding errors makes NaN of an infinity
                lost = np.isinf(expected[name].value) & np.isnan(actual)
                actual = np.where(lost, expected[name].value, actual)
            found = deviation(actual, expected[name], dtype)
            worst[name] = Deviation(*map(max, worst[name], found))
    return worst


def _output_names(op: str) -> list[str]:
    names = ["y"]
    if op.startswith("fused_add"):
        names.append("residual_out")
    return names + (["rstd"] if op.endswith("rms_norm") else ["mean", "rstd"])


def _block(inputs: Mapping[str, Any], x: Array, at: tuple[Any, ...]) -> dict[str, Array | None]:
    """The inputs of the rows at ``at``; parameters of one row stay whole."""
    return {
        name: array
        if array is None or name in ("weight", "bias")
        else np.broadcast_to(array, x.shape)[at]
        for name, array in inputs.items()
    }


def _y_bound(values: Mapping[str, Array], inputs: Mapping[str, Any], x: Array, axes: int) -> Array:
    """:func:`error_bound` of ``y``, its two terms told apart by what the operator adds last."""
    work = reference.working_dtype(x.dtype)

    def wide(name: str, default: float) -> Array:
        array = inputs.get(name)
        return np.asarray(default, work) if array is None else array.astype(work)

    gate = wide("gate", 1)
    weight = gate * wide("weight", 1) * wide("scale", 1)
    bias = gate * (wide("bias", 0) + wide("shift", 0))
    bound = error_bound(values["y"], values["y"] - bias, bias, x.dtype)
    if name_of(x.dtype) in FLUSHED:
        # Flushed x and residual shift the sum by two smallest normals, and the mean as much.
        rstd = values["rstd"].reshape(values["rstd"].shape + (1,) * axes)
        flushed = has_subnormals(x) or has_subnormals(inputs.get("residual"))
        bound = bound + (4 * SMALLEST_NORMAL * rstd * np.abs(weight) if flushed else 0)
    return bound


def _sum_bound(total: Array, inputs: Mapping[str, Any]) -> Array:
    """Zero, except where a flushed subnormal takes part in the sum."""
    bound = np.zeros(total.shape)
    if name_of(total.dtype) in FLUSHED:
        for array in (inputs["x"], inputs["residual"], total):
            bound[is_subnormal(array)] = 2 * SMALLEST_NORMAL
    return bound
