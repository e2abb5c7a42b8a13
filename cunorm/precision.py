"""How far from the true value a result may be: the one place for tolerances.

The rule: an output lies within one unit in the last place of its dtype beyond
``4 * eps * (|xhat * weight| + |bias|)`` of the value that exact arithmetic gives for the same
stored inputs, ``eps`` being that of the accumulation dtype. :func:`forward_bound` turns it into
numbers for the inputs of an operator; :func:`forward_deviation` holds computed outputs
against them. The self-check, the tests and the benchmarks all ask here.

Kernels flush float32 subnormals to zero, which bounds allow for: below the smallest normal
float32 there is only zero, for values that enter as well as for values that leave. bfloat16 has
the exponents of float32 and passes through float32, so the same holds for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cunorm import dtypes, reference

__all__ = [
    "Deviation",
    "Expected",
    "accumulation",
    "error_bound",
    "error_in_bounds",
    "forward_bound",
    "forward_deviation",
    "machine_eps",
    "ulp",
]

Array = npt.NDArray[Any]

_FLUSHED = ("bfloat16", "float32")
_SMALLEST_NORMAL = 2.0**-126


class Expected(NamedTuple):
    """An output's value in wide arithmetic and the error allowed, element by element."""

    value: Array
    bound: Array


class Deviation(NamedTuple):
    """The largest error of an output: over its bound, and beyond the allowance for arithmetic.

    ``ulps`` is in units in the last place of the output; what the bound allows in excess of one
    such unit is taken off first. Where terms cancel to a value near zero, its last place says
    nothing of the arithmetic.
    """

    ratio: float
    ulps: float


def _name(dtype: npt.DTypeLike) -> str:
    """The name of a dtype; ``"bfloat16"`` needs no ml_dtypes to be understood."""
    name = dtypes.name_of(dtype)
    if name not in dtypes.FLOATS:
        raise TypeError(f"dtype must be one of {', '.join(dtypes.FLOATS)}, got {name}")
    return name


def accumulation(dtype: npt.DTypeLike) -> str:
    """Name of the dtype that an input of this dtype is computed in."""
    return dtypes.accumulation(_name(dtype))


def machine_eps(dtype: npt.DTypeLike) -> float:
    """Distance from 1 to the next value."""
    return 2.0 ** -dtypes.FLOATS[_name(dtype)].mantissa_bits


def ulp(value: npt.ArrayLike, dtype: npt.DTypeLike) -> Array:
    """Spacing of the values of ``dtype`` at the magnitude of ``value``.

    Subnormals share one spacing, except in float32 and bfloat16: there the neighbours of the
    smallest normal value and of what lies below are that value and zero. Values past the largest
    one have the spacing that a wider exponent would give them. NaN for what is not finite.
    """
    name = _name(dtype)
    bits, lowest = dtypes.FLOATS[name].mantissa_bits, dtypes.FLOATS[name].min_exponent
    magnitude = np.abs(_wide(value))
    # Not np.spacing: it gives NaN for long doubles just below a power of two.
    exponent = np.where(magnitude == 0, lowest, np.frexp(magnitude)[1] - 1)
    exponent = np.maximum(exponent, lowest)
    spacing = np.ldexp(magnitude.dtype.type(1), exponent - bits)
    if name in _FLUSHED:
        spacing = np.where(magnitude <= _SMALLEST_NORMAL, _SMALLEST_NORMAL, spacing)
    return np.where(np.isfinite(magnitude), spacing, np.nan)


def error_bound(
    expected: npt.ArrayLike, xhat_weight: npt.ArrayLike, bias: npt.ArrayLike, dtype: npt.DTypeLike
) -> Array:
    """Error allowed in ``expected = xhat_weight + bias`` computed for output ``dtype``.

    For ``gate * (scale * xhat + shift)`` the two terms are ``gate * scale * xhat`` and
    ``gate * shift``.
    """
    eps = machine_eps(accumulation(dtype))
    terms: Array = np.abs(_wide(xhat_weight)) + np.abs(_wide(bias))
    return ulp(expected, dtype) + 4 * eps * terms


def error_in_bounds(
    actual: npt.ArrayLike, expected: npt.ArrayLike, bound: npt.ArrayLike, dtype: npt.DTypeLike
) -> float:
    """Largest error as a fraction of its bound: a result is right if this is at most 1.

    A NaN or an infinity must stand exactly where the expected value has it, else the ratio is
    infinite. Infinity is right as well for a finite expected value that ``dtype`` cannot hold,
    or is within its bound of not holding. Without elements the ratio is 0.
    """
    ratio = _error_ratios(actual, expected, bound, dtype)
    return float(ratio.max(initial=0.0))


def _error_ratios(
    actual: npt.ArrayLike, expected: npt.ArrayLike, bound: npt.ArrayLike, dtype: npt.DTypeLike
) -> Array:
    got, want = _wide(actual), _wide(expected)
    if got.shape != want.shape:
        raise ValueError(f"actual must have shape {want.shape}, got {got.shape}")
    allowed = np.atleast_1d(np.broadcast_to(_wide(bound), want.shape))
    got, want = np.atleast_1d(got), np.atleast_1d(want)
    kind = dtypes.FLOATS[_name(dtype)]
    bits, highest = kind.mantissa_bits, 1 - kind.min_exponent
    # Half a unit past the largest value rounding turns to infinity (2**1024 needs long double).
    one = np.longdouble(1) if want.dtype == np.longdouble else np.float64(1)
    with np.errstate(all="ignore"):
        ratio: Array = (np.abs(got - want) / allowed).astype(np.float64)
        odd = ~np.isfinite(ratio)
        if odd.any():
            got, want, allowed = got[odd], want[odd], allowed[odd]
            overflow = np.ldexp(2 * one - one * 2.0 ** (-bits - 1), highest)
            same = (got == want) | (np.isnan(got) & np.isnan(want))
            same |= np.isinf(got) & (np.sign(got) * want + allowed >= overflow)
            ratio[odd] = np.where(same, 0.0, np.inf)
    return ratio


def _wide(values: npt.ArrayLike) -> Array:
    """As float64, or long double where the values already are: exact for every dtype."""
    array = np.asarray(values)
    return array if array.dtype == np.longdouble else array.astype(np.float64)


# ---------------------------------------------------------------------------------------------
# forward operators
# ---------------------------------------------------------------------------------------------


def forward_bound(
    op: str,
    inputs: Mapping[str, Any],
    *,
    normalized_shape: int | Sequence[int] | None = None,
    eps: float | None = None,
) -> dict[str, Expected]:
    """Expected outputs of a forward operator and the error allowed in each.

    Parameters
    ----------
    op : str
        Name of a function in :data:`cunorm.reference.FORWARD`.
    inputs : mapping
        The operator's arrays by parameter name (``x``, ``weight``, ...), as NumPy arrays.
    normalized_shape : int or sequence of int
        For ``layer_norm`` and ``rms_norm``.
    eps : float, optional
        By default the operator's own.

    Returns
    -------
    dict
        :class:`Expected` under ``y``, ``residual_out`` (fused adds), ``mean`` (all but the RMS
        norms) and ``rstd``, in the order in which the operator returns them.

    Notes
    -----
    ``residual_out`` is exact. ``mean`` lies within ``4 * eps * (|mean| + std)``: it is rounded
    once and comes from sums whose errors are proportional to the deviations from the mean. That
    of a row with an infinity may be NaN as well.
    ``rstd`` lies within ``8 * eps`` of itself: half the relative error of the variance, the
    reciprocal root (2 units) and its rounding.
    """
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
        bounds |= _stats_bounds(values, x.dtype, eps)
    return {name: Expected(value, bounds[name]) for name, value in values.items()}


def forward_deviation(
    op: str,
    outputs: Sequence[Array] | Array,
    inputs: Mapping[str, Any],
    *,
    normalized_shape: int | Sequence[int] | None = None,
    eps: float | None = None,
) -> dict[str, Deviation]:
    """Hold computed outputs of a forward operator against :func:`forward_bound`.

    ``outputs`` are what the operator returned, with or without statistics. The work is done in
    blocks of rows: memory beyond inputs and outputs does not grow with their number.
    """
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
            found = _deviation(actual, expected[name], dtype)
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


def _deviation(actual: Array, expected: Expected, dtype: npt.DTypeLike) -> Deviation:
    ratio = _error_ratios(actual, expected.value, expected.bound, dtype)
    one = ulp(expected.value, dtype)
    units = _error_ratios(actual, expected.value, one, dtype)
    with np.errstate(all="ignore"):
        allowance = np.maximum(np.atleast_1d(expected.bound / one) - 1, 0)
        units = np.where(np.isfinite(allowance), np.maximum(units - allowance, 0), units)
    return Deviation(float(ratio.max(initial=0.0)), float(units.max(initial=0.0)))


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
    if _name(x.dtype) in _FLUSHED:
        # Flushed x and residual shift the sum by two smallest normals, and the mean as much.
        rstd = values["rstd"].reshape(values["rstd"].shape + (1,) * axes)
        flushed = _has_subnormals(x) or _has_subnormals(inputs.get("residual"))
        bound = bound + (4 * _SMALLEST_NORMAL * rstd * np.abs(weight) if flushed else 0)
    return bound


def _sum_bound(total: Array, inputs: Mapping[str, Any]) -> Array:
    """Zero, except where a flushed subnormal takes part in the sum."""
    bound = np.zeros(total.shape)
    if _name(total.dtype) in _FLUSHED:
        for array in (inputs["x"], inputs["residual"], total):
            bound[_is_subnormal(array)] = 2 * _SMALLEST_NORMAL
    return bound


def _stats_bounds(
    values: Mapping[str, Array], dtype: npt.DTypeLike, eps: float | None
) -> dict[str, Array]:
    unit = machine_eps(accumulation(dtype))
    floor = _SMALLEST_NORMAL if _name(dtype) in _FLUSHED else 0
    bounds = {"rstd": 8 * unit * values["rstd"] + floor}
    if "mean" in values:
        variance = 1 / np.square(values["rstd"]) - (eps or 0)
        std = np.sqrt(np.maximum(variance, 0))
        bounds["mean"] = 4 * unit * (np.abs(values["mean"]) + std) + floor
    return bounds


def _is_subnormal(array: Array | None) -> Array:
    magnitude = np.abs(_wide(0.0 if array is None else array))
    return (magnitude > 0) & (magnitude < _SMALLEST_NORMAL)


def _has_subnormals(array: Array | None) -> bool:
    return bool(_is_subnormal(array).any())
