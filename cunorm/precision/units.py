"""Units in the last place, the bound of one output, and errors held against bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cunorm import dtypes

Array = npt.NDArray[Any]

FLUSHED = ("bfloat16", "float32")
SMALLEST_NORMAL = 2.0**-126


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


def name_of(dtype: npt.DTypeLike) -> str:
    """The name of a dtype; ``"bfloat16"`` needs no ml_dtypes to be understood."""
    name = dtypes.name_of(dtype)
    if name not in dtypes.FLOATS:
        raise TypeError(f"dtype must be one of {', '.join(dtypes.FLOATS)}, got {name}")
    return name


def accumulation(dtype: npt.DTypeLike) -> str:
    """Name of the dtype that an input of this dtype is computed in."""
    return dtypes.accumulation(name_of(dtype))


def machine_eps(dtype: npt.DTypeLike) -> float:
    """Distance from 1 to the next value."""
    return 2.0 ** -dtypes.FLOATS[name_of(dtype)].mantissa_bits


def ulp(value: npt.ArrayLike, dtype: npt.DTypeLike) -> Array:
    """Spacing of the values of ``dtype`` at the magnitude of ``value``.

    Subnormals share one spacing, except in float32 and bfloat16: there the neighbours of the
    smallest normal value and of what lies below are that value and zero. Values past the largest
    one have the spacing that a wider exponent would give them. NaN for what is not finite.
    """
    name = name_of(dtype)
    bits, lowest = dtypes.FLOATS[name].mantissa_bits, dtypes.FLOATS[name].min_exponent
    magnitude = np.abs(wide(value))
    # Not np.spacing: it gives NaN for long doubles just below a power of two.
    exponent = np.where(magnitude == 0, lowest, np.frexp(magnitude)[1] - 1)
    exponent = np.maximum(exponent, lowest)
    spacing = np.ldexp(magnitude.dtype.type(1), exponent - bits)
    if name in FLUSHED:
        spacing = np.where(magnitude <= SMALLEST_NORMAL, SMALLEST_NORMAL, spacing)
    return np.where(np.isfinite(magnitude), spacing, np.nan)


def error_bound(
    expected: npt.ArrayLike, xhat_weight: npt.ArrayLike, bias: npt.ArrayLike, dtype: npt.DTypeLike
) -> Array:
    """Error allowed in ``expected = xhat_weight + bias`` computed for output ``dtype``.

    For ``gate * (scale * xhat + shift)`` the two terms are ``gate * scale * xhat`` and
    ``gate * shift``.
    """
    eps = machine_eps(accumulation(dtype))
    terms: Array = np.abs(wide(xhat_weight)) + np.abs(wide(bias))
    return ulp(expected, dtype) + 4 * eps * terms


def error_in_bounds(
    actual: npt.ArrayLike, expected: npt.ArrayLike, bound: npt.ArrayLike, dtype: npt.DTypeLike
) -> float:
    """Largest error as a fraction of its bound: a result is right if this is at most 1.

    A NaN or an infinity must stand exactly where the expected value has it, else the ratio is
    infinite. Infinity is right as well for a finite expected value that ``dtype`` cannot hold,
    or is within its bound of not holding. Without elements the ratio is 0.
    """
    ratio = error_ratios(actual, expected, bound, dtype)
    return float(ratio.max(initial=0.0))


def error_ratios(
    actual: npt.ArrayLike, expected: npt.ArrayLike, bound: npt.ArrayLike, dtype: npt.DTypeLike
) -> Array:
    got, want = wide(actual), wide(expected)
    if got.shape != want.shape:
        raise ValueError(f"actual must have shape {want.shape}, got {got.shape}")
    allowed = np.atleast_1d(np.broadcast_to(wide(bound), want.shape))
    got, want = np.atleast_1d(got), np.atleast_1d(want)
    kind = dtypes.FLOATS[name_of(dtype)]
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


def wide(values: npt.ArrayLike) -> Array:
    """As float64, or long double where the values already are: exact for every dtype."""
    array = np.asarray(values)
    return array if array.dtype == np.longdouble else array.astype(np.float64)


def deviation(actual: Array, expected: Expected, dtype: npt.DTypeLike) -> Deviation:
    ratio = error_ratios(actual, expected.value, expected.bound, dtype)
    one = ulp(expected.value, dtype)
    units = error_ratios(actual, expected.value, one, dtype)
    with np.errstate(all="ignore"):
        allowance = np.maximum(np.atleast_1d(expected.bound / one) - 1, 0)
        units = np.where(np.isfinite(allowance), np.maximum(units - allowance, 0), units)
    return Deviation(float(ratio.max(initial=0.0)), float(units.max(initial=0.0)))


def stats_bounds(
    values: Mapping[str, Array], dtype: npt.DTypeLike, eps: float | None
) -> dict[str, Array]:
    unit = machine_eps(accumulation(dtype))
    floor = SMALLEST_NORMAL if name_of(dtype) in FLUSHED else 0
    bounds = {"rstd": 8 * unit * values["rstd"] + floor}
    if "mean" in values:
        variance = 1 / np.square(values["rstd"]) - (eps or 0)
        std = np.sqrt(np.maximum(variance, 0))
        bounds["mean"] = 4 * unit * (np.abs(values["mean"]) + std) + floor
    return bounds


def is_subnormal(array: Array | None) -> Array:
    magnitude = np.abs(wide(0.0 if array is None else array))
    return (magnitude > 0) & (magnitude < SMALLEST_NORMAL)


def has_subnormals(array: Array | None) -> bool:
    return bool(is_subnormal(array).any())
