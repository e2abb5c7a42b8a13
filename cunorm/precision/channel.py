"""Bounds of the ops with channels: batch norm and its backward, group and instance norm."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    machine_eps,
    name_of,
    stats_bounds,
    ulp,
)

RUNNING = ("running_mean", "running_var")
_LIKE_X = ("x", "grad_out", "y", "grad_x")
_PER_GROUP = ("mean", "rstd")  # or per instance, where statistics are not per channel
_OUTPUTS = {
    "batch_norm": ("y", "mean", "rstd"),
    "batch_norm_stats": ("mean", "rstd"),
    "batch_norm_normalize": ("y",),
    "batch_norm_backward": ("grad_x", "grad_weight", "grad_bias"),
    "group_norm": ("y", "mean", "rstd"),
    "instance_norm": ("y", "mean", "rstd"),
}


def _attributes(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of an operator that are not arrays, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default not in (None, p.empty)}
    defaults.pop("return_stats", None)
    return {**defaults, **given}


def _computes(attributes: Mapping[str, Any]) -> bool:
    """Whether statistics are those of x; batch_norm_stats has no flag that says otherwise."""
    return bool(attributes.get("training", attributes.get("use_input_stats", True)))


def _along(values: Array, x: Array, axis: int) -> Array:
    """Per channel, group or instance: spread to broadcast to x."""
    channels = x.shape[axis]
    if values.ndim == 1:
        values = values[None]
    values = np.repeat(values, channels // max(1, values.shape[1]), axis=1)
    spatial = (1,) * (x.ndim - 2)
    shape = (len(values), *spatial, channels) if axis == -1 else (len(values), channels, *spatial)
    return values.reshape(shape)


def _floor(dtype: npt.DTypeLike) -> float:
    return SMALLEST_NORMAL if name_of(dtype) in FLUSHED else 0.0


# ---------------------------------------------------------------------------------------------
# forward
# ---------------------------------------------------------------------------------------------


def forward_bound(op: str, inputs: Mapping[str, Any], **given: Any) -> dict[str, Expected]:
    """Expected outputs and the error allowed in each; see `cunorm.precision.forward_bound`."""
    function = reference.FORWARD[op]
    attributes = _attributes(function, given)
    x: Array = inputs["x"]
    work = reference.working_dtype(x.dtype)
    running = {n: np.array(inputs[n], work) for n in RUNNING if inputs.get(n) is not None}
    options = {"return_stats": True} if "return_stats" in _parameters(function) else {}
    results = function(**{**inputs, **running}, **attributes, **options, dtype=work)
    results = results if isinstance(results, tuple) else (results,)
    values = dict(zip(_OUTPUTS[op], results, strict=True))

    with np.errstate(all="ignore"):
        bounds = {}
        if "y" in values:
            bounds["y"] = _y_bound(values, inputs, x, attributes["channel_axis"])
        if "mean" in values:
            bounds |= _statistics_bounds(values, x.dtype, attributes)
        if running and _computes(attributes):
            values |= running
            bounds |= _running_bounds(op, values, inputs, attributes)
    return {name: Expected(value, bounds[name]) for name, value in values.items()}


def _parameters(function: Any) -> Mapping[str, Any]:
    return inspect.signature(function).parameters


def _y_bound(values: Mapping[str, Array], inputs: Mapping[str, Any], x: Array, axis: int) -> Array:
    work = reference.working_dtype(x.dtype)

    def wide(name: str, default: float) -> Array:
        array = inputs.get(name)
        return np.asarray(default, work) if array is None else _along(array.astype(work), x, axis)

    y, bias = values["y"], wide("bias", 0)
    bound = error_bound(y, y - bias, bias, x.dtype)
    if name_of(x.dtype) in FLUSHED and has_subnormals(x):
        rstd = values["rstd"] if "rstd" in values else inputs["rstd"]
        bound = bound + 4 * SMALLEST_NORMAL * _along(rstd, x, axis) * np.abs(wide("weight", 1))
    return bound


def _statistics_bounds(
    values: Mapping[str, Array], dtype: npt.DTypeLike, attributes: Mapping[str, Any]
) -> dict[str, Array]:
    bounds = stats_bounds(values, dtype, attributes["eps"])
    if not _computes(attributes):  # the running mean itself
        bounds["mean"] = np.full(values["mean"].shape, _floor(dtype))
    return bounds


def _running_bounds(
    op: str, values: Mapping[str, Array], inputs: Mapping[str, Any], attributes: Mapping[str, Any]
) -> dict[str, Array]:
    dtype, momentum = inputs["x"].dtype, attributes["momentum"]
    unit = machine_eps(accumulation(dtype))
    variance = np.maximum(1 / np.square(values["rstd"]) - attributes["eps"], 0)
    mean_size = np.abs(values["mean"]) + np.sqrt(variance)
    of_mean, of_variance = 4.0, 8.0
    if op == "instance_norm":
        mean_size, variance = mean_size.mean(axis=0), variance.mean(axis=0)
        of_mean, of_variance = of_mean + 4, of_variance + 4
    new = {"running_mean": of_mean * mean_size, "running_var": of_variance * variance}
    bounds = {}
    for name, size in new.items():
        old: Array = np.abs(inputs[name].astype(size.dtype))
        stored = dtype if op == "instance_norm" else inputs[name].dtype
        allowed = unit * (4 * (1 - momentum) * old + momentum * size)
        bounds[name] = ulp(values[name], stored) + allowed + _floor(dtype)
    return bounds


# ---------------------------------------------------------------------------------------------
# backward
# ---------------------------------------------------------------------------------------------


class _Sum(NamedTuple):
    """A sum over each channel, and how far from it float arithmetic may end."""

    value: Array
    error: Array


def _sum(terms: Array, axis: int, unit: float, floor: Array) -> _Sum:
    axes = tuple(i for i in range(terms.ndim) if i != axis % terms.ndim)
    # sqrt(count) * rms(term) is the length of the vector of terms.
    length = np.sqrt(np.square(terms).sum(axis=axes))
    return _Sum(terms.sum(axis=axes), 8 * unit * length + floor)


def backward_bound(op: str, inputs: Mapping[str, Any], **given: Any) -> dict[str, Expected]:
    """Expected gradients and the error allowed; see `cunorm.precision.backward_bound`."""
    function = reference.BACKWARD[op]
    attributes = _attributes(function, given)
    x: Array = inputs["x"]
    axis, weight = attributes["channel_axis"], inputs["weight"]
    work = reference.working_dtype(x.dtype)
    unit = machine_eps(accumulation(x.dtype))
    results = function(**inputs, **attributes, dtype=work)
    values = dict(zip(_OUTPUTS[op], results, strict=True))

    with np.errstate(all="ignore"):
        mean, rstd = (_along(inputs[n].astype(work), x, axis) for n in ("mean", "rstd"))
        xhat = (x.astype(work) - mean) * rstd
        grad = inputs["grad_out"].astype(work)
        factor = rstd if weight is None else rstd * _along(weight.astype(work), x, axis)
        floor = _flushed_terms(inputs, xhat, rstd, axis)
        of_bias = _sum(grad, axis, unit, floor)
        of_weight = _sum(grad * xhat, axis, unit, floor)
        terms, error = np.abs(grad), np.zeros((), work)
        if attributes["training"]:
            count = max(1, x.size // max(1, x.shape[axis]))
            spread = [_along(p / count, x, axis) for p in (*of_bias, *of_weight)]
            terms = terms + np.abs(spread[0]) + np.abs(xhat * spread[2])
            error = spread[1] + np.abs(xhat) * spread[3]
        size = np.abs(factor) * (4 * unit * terms + error + 4 * floor.max(initial=0))
        sums = accumulation(x.dtype) if weight is None else weight.dtype
        bounds = {
            "grad_x": ulp(values["grad_x"], x.dtype) + size,
            "grad_weight": ulp(of_weight.value, sums) + of_weight.error,
            "grad_bias": ulp(of_bias.value, sums) + of_bias.error,
        }
    return {n: Expected(v, bounds[n]) for n, v in values.items() if v is not None}


def _flushed_terms(inputs: Mapping[str, Any], xhat: Array, rstd: Array, axis: int) -> Array:
    """What flushed subnormals may take from the sums of each channel."""
    x, grad = inputs["x"], inputs["grad_out"]
    axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    lost = np.zeros(x.shape)
    if _floor(x.dtype):
        # Selected, not multiplied: what is not a number elsewhere loses nothing.
        of_x = rstd * np.abs(grad.astype(xhat.dtype))
        lost = np.where(is_subnormal(grad), np.maximum(1, np.abs(xhat)), 0)
        lost = lost + np.where(is_subnormal(x), of_x, 0)
    lost_each: Array = _floor(x.dtype) * (1 + lost.sum(axis=axes))
    return lost_each


# ---------------------------------------------------------------------------------------------
# computed results
# ---------------------------------------------------------------------------------------------


def deviations(
    op: str,
    outputs: Sequence[Array | None] | Array,
    inputs: Mapping[str, Any],
    updated: Mapping[str, Array],
    attributes: Mapping[str, Any],
) -> dict[str, Deviation]:
    """Errors of what an op returned and updated, in blocks of channels or samples."""
    given = [outputs] if isinstance(outputs, np.ndarray) else list(outputs)
    names = zip(_OUTPUTS[op], given, strict=False)
    found: dict[str, Any] = {n: a for n, a in names if a is not None} | dict(updated)
    bound = backward_bound if op in reference.BACKWARD else forward_bound
    worst = dict.fromkeys(found, Deviation(0.0, 0.0))
    axis = attributes.get("channel_axis", 1)
    _check_shapes(op, found, inputs, attributes)
    for at in _blocks(op, inputs["x"], axis):
        part = {n: _part(op, n, a, at, axis) for n, a in inputs.items()}
        expected = bound(op, part, **attributes)
        for name, array in found.items():
            one = expected[name]
            actual = np.asarray(_part(op, name, array, at, axis))
            if name in ("mean", "running_mean"):  # sums of infinities may end as NaN
                actual = np.where(np.isinf(one.value) & np.isnan(actual), one.value, actual)
            dtype = _judged_as(op, name, array, inputs["x"])
            worst[name] = Deviation(*map(max, worst[name], deviation(actual, one, dtype)))
    return worst


def _judged_as(op: str, name: str, array: Array, x: Array) -> npt.DTypeLike:
    """dtype whose last place counts."""
    if name in _PER_GROUP:
        return accumulation(x.dtype)
    if name in ("grad_weight", "grad_bias") or (name in RUNNING and op != "instance_norm"):
        return array.dtype
    return x.dtype


def _check_shapes(
    op: str,
    found: Mapping[str, Array],
    inputs: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> None:
    x: Array = inputs["x"]
    channels = (x.shape[attributes.get("channel_axis", 1)],)
    per_group = {
        "group_norm": (x.shape[0], attributes.get("num_groups")),
        "instance_norm": (x.shape[0], *channels),
    }
    for name, array in found.items():
        shape: Any = x.shape if name in _LIKE_X else channels
        if name in _PER_GROUP:
            shape = per_group.get(op, channels)
        if array.shape != shape:
            raise ValueError(f"{op}: {name} must have shape {shape}, got {array.shape}")


def _blocks(op: str, x: Array, axis: int) -> Iterator[slice]:
    """Slices that hold about a block of elements: of samples for group norm, else of channels."""
    count = x.shape[0 if op == "group_norm" else axis]
    step = max(1, reference.common.BLOCK_ELEMENTS // max(1, x.size // max(1, count)))
    for start in range(0, count, step):
        yield slice(start, start + step)


def _part(op: str, name: str, array: Any, at: slice, axis: int) -> Any:
    """The piece of an array that belongs to a block."""
    if array is None:
        return None
    if op == "group_norm":
        return array[at] if name in (*_LIKE_X, *_PER_GROUP) else array
    if name in _LIKE_X:
        return array[:, at] if axis == 1 else array[..., at]
    return array[..., at]  # one value per channel, or per sample and channel
