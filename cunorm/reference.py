"""The operators as plain NumPy definitions.

Every function here says what an operator means, in wide arithmetic and without a thought for
speed beyond cutting large arrays into blocks. They serve host arrays (target ``"numpy"``) and
are the oracle of the tests and of the self-check.

Arithmetic is float64 for 16- and 32-bit input and ``np.longdouble`` for float64 input, so that
the value before the last rounding is known well enough to judge float64 results too (64 bits of
mantissa on x86; where long double is no wider than double, float64 results are as good as
float64 arithmetic allows). Arguments are taken to be valid: the op objects check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "FORWARD",
    "accumulation_dtype",
    "ada_layer_norm",
    "ada_layer_norm_zero",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "rms_norm",
    "row_blocks",
    "working_dtype",
]

Array = npt.NDArray[Any]
Result = Array | tuple[Array, ...]
# Takes the normalized values of one block and where the block lies; gives the finished output.
Finish = Callable[[Array, tuple[Any, ...]], Array]

# Elements handled at once: a few long double temporaries of this size stay in a CPU's cache.
BLOCK_ELEMENTS = 1 << 17


# ---------------------------------------------------------------------------------------------
# dtypes and blocks
# ---------------------------------------------------------------------------------------------


def accumulation_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype of the statistics: float64 for float64 input, else float32."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def working_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype the definitions compute in: long double for float64 input, else float64."""
    return np.dtype(np.longdouble if np.dtype(dtype) == np.float64 else np.float64)


def row_blocks(lead: Sequence[int], cols: int) -> Iterator[tuple[Any, ...]]:
    """Indices into the leading axes that together cover every row once.

    Each selects about ``BLOCK_ELEMENTS`` elements (at least one row) of an array shaped
    ``(*lead, cols)``. Without elements there are no blocks.
    """
    if cols == 0 or 0 in lead:
        return
    axis, below = len(lead), cols
    while axis > 0 and below * lead[axis - 1] <= BLOCK_ELEMENTS:
        axis -= 1
        below *= lead[axis]
    if axis == 0:
        yield ()
        return
    step = max(1, BLOCK_ELEMENTS // below)
    for outer in np.ndindex(*lead[: axis - 1]):
        for start in range(0, lead[axis - 1], step):
            yield (*outer, slice(start, start + step))


# ---------------------------------------------------------------------------------------------
# statistics along the last axis
# ---------------------------------------------------------------------------------------------


def _mean(rows: Array, lowest: Array, highest: Array, peak: Array) -> tuple[Array, Array]:
    """Row means as an unrounded sum ``high + low``.

    One number of the working precision would not do: next to the mean, ``x - mean`` is as
    wrong as the mean is. ``rows`` is cut into multiples of one coarse unit, whose sum is exact,
    and a rest. ``high`` has so few bits that ``cols * high`` is exact as well, and ``x - high``
    is exact wherever ``x`` lies close to it.
    """
    cols = rows.shape[-1]
    unit = rows.dtype.type(1)
    bound = np.ldexp(unit, np.frexp(peak)[1] + (cols - 1).bit_length())[..., None]
    coarse = (rows + bound) - bound
    rest = (rows - coarse).sum(axis=-1)
    total = coarse.sum(axis=-1)

    bits = np.finfo(rows.dtype).nmant + 1 - cols.bit_length()
    mantissa, exponent = np.frexp(total / cols)
    high = np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)
    low = ((total - cols * high) + rest) / cols

    # The mean of equal values is that value, and a mean with an infinity in it needs no rest.
    constant = lowest == highest
    high = np.where(constant, lowest, high)
    low = np.where(constant | ~np.isfinite(high), 0, low)
    return high, low


def _range_scale(peak: Array) -> Array:
    """A power of two per row: 1, or small enough for squares of the scaled row to be finite.

    Only float64 input computed in float64 ever needs it, where long double is no wider.
    """
    half = np.finfo(peak.dtype).maxexp // 2
    unit = peak.dtype.type(1)
    small: Array = np.ldexp(unit, -half - 48)
    return np.where(peak > np.ldexp(unit, half - 72), small, unit)


def _standardize(rows: Array, eps: float, centred: bool) -> tuple[Array, Array | None, Array]:
    """Normalize along the last axis: ``(xhat, mean, rstd)``; ``mean`` is None if not centred."""
    lowest, highest = rows.min(axis=-1), rows.max(axis=-1)
    peak = np.maximum(highest, -lowest)
    scale = _range_scale(peak)
    mean = None
    if np.any(scale != 1):
        rows = rows * scale[..., None]
        lowest, highest, peak = lowest * scale, highest * scale, peak * scale
    if centred:
        high, low = _mean(rows, lowest, highest, peak)
        rows = (rows - high[..., None]) - low[..., None]
        mean = (high + low) / scale
    mean_square = np.square(rows).mean(axis=-1)
    # scale * sqrt(mean_square / scale**2 + eps), with no square of the scale to underflow.
    root = np.hypot(np.sqrt(mean_square), scale * np.sqrt(rows.dtype.type(eps)))
    # A root of zero (eps = 0) leaves a row of zeros: its normalized values are zero.
    xhat = rows / np.where(root == 0, 1, root)[..., None]
    return xhat, mean, np.where(root == 0, 0, scale / root)


# ---------------------------------------------------------------------------------------------
# row norms, forward
# ---------------------------------------------------------------------------------------------


def _row_norm(
    x: Array,
    axes: int,
    eps: float,
    finish: Finish,
    *,
    centred: bool,
    return_stats: bool,
    dtype: npt.DTypeLike | None,
) -> Result:
    """Normalize the last ``axes`` axes of ``x`` block by block and let ``finish`` do the rest."""
    lead, cols = x.shape[: x.ndim - axes], math.prod(x.shape[x.ndim - axes :])
    out_dtype = x.dtype if dtype is None else np.dtype(dtype)
    stats_dtype = accumulation_dtype(x.dtype)
    if out_dtype.itemsize > stats_dtype.itemsize:
        stats_dtype = out_dtype
    y = np.empty_like(x, dtype=out_dtype, subok=False)
    mean = np.full(lead, np.nan, stats_dtype)
    rstd = np.full(lead, np.nan, stats_dtype)
    with np.errstate(all="ignore"):
        for at in row_blocks(lead, cols):
            block = x[at].astype(working_dtype(x.dtype), order="C")
            rows = block.reshape(*block.shape[: block.ndim - axes], cols)
            xhat, block_mean, rstd[at] = _standardize(rows, eps, centred)
            if block_mean is not None:
                mean[at] = block_mean
            y[at] = finish(xhat.reshape(block.shape), at).astype(out_dtype)
    if not return_stats:
        return y
    return (y, mean, rstd) if centred else (y, rstd)


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Finish:
    """``weight * xhat + bias`` with one parameter per normalized element, either may be None."""
    work = working_dtype(x.dtype)
    wide_weight = None if weight is None else weight.astype(work)
    wide_bias = None if bias is None else bias.astype(work)

    def finish(xhat: Array, at: tuple[Any, ...]) -> Array:
        y = xhat if wide_weight is None else wide_weight * xhat
        return y if wide_bias is None else y + wide_bias

    return finish


def _modulation(x: Array, *parameters: Array) -> Callable[[tuple[Any, ...]], list[Array]]:
    """Blocks of parameters that broadcast to the shape of ``x``, widened."""
    views = [np.broadcast_to(parameter, x.shape) for parameter in parameters]
    return lambda at: [view[at].astype(working_dtype(x.dtype)) for view in views]


def _add(x: Array, residual: Array) -> Array:
    """``x + residual`` rounded once to the dtype of ``x``, in its memory order."""
    total = np.empty_like(x, subok=False)
    with np.errstate(all="ignore"):
        np.add(x, residual, out=total)
    return total


def layer_norm(
    x: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    return_stats: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Result:
    r"""Normalize the trailing axes to mean zero and variance one, then scale and shift.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot weight + bias

    with the mean and the biased variance of each row.

    Parameters
    ----------
    x : ndarray
        float16, bfloat16, float32 or float64, shape ``(..., *normalized_shape)``.
    normalized_shape : int or sequence of int
        The trailing shape that makes up a row.
    weight, bias : ndarray, optional
        Shape ``normalized_shape``, in the dtype of ``x`` or the accumulation dtype.
    eps : float
        Added to the variance, inside the root.
    return_stats : bool
        Also return the statistics.
    dtype : dtype, optional
        dtype of ``y``, by default that of ``x``. float64 (``np.longdouble`` for float64 input)
        gives the value before the last rounding. Statistics follow it if it is the wider one.

    Returns
    -------
    y : ndarray
        The shape and memory order of ``x``.
    mean, rstd : ndarray
        With ``return_stats``: mean and ``1 / sqrt(var + eps)`` of each row, in the accumulation
        dtype (float32, or float64 for float64 input), shape
        ``x.shape[:-len(normalized_shape)]``. NaN for rows without elements.

    Notes
    -----
    A constant row gives exactly the bias, with ``eps=0`` too. A NaN or an infinity makes its
    own row NaN and nothing else. No finite input overflows on the way. A row without spread and
    ``eps=0`` has ``rstd`` 0: it gives its bias, and no gradient.
    """
    return _row_norm(
        x,
        np.size(normalized_shape),
        eps,
        _affine(x, weight, bias),
        centred=True,
        return_stats=return_stats,
        dtype=dtype,
    )


def rms_norm(
    x: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None = None,
    eps: float | None = None,
    *,
    return_stats: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Result:
    r"""Divide the trailing axes by their root mean square, then scale.

    .. math:: y = \frac{x}{\sqrt{\overline{x^2} + \epsilon}} \cdot weight

    Parameters are those of :func:`layer_norm`. ``eps=None`` is the machine epsilon of the
    accumulation dtype: ``2**-23``, or ``2**-52`` for float64 input.

    Returns
    -------
    y : ndarray
        The shape and memory order of ``x``.
    rstd : ndarray
        With ``return_stats``: ``1 / sqrt(mean(x**2) + eps)`` of each row.

    Notes
    -----
    In a row with an infinity the finite elements give zero and the infinite ones NaN, as the
    formula says. A NaN makes its own row NaN.
    """
    if eps is None:
        eps = float(np.finfo(accumulation_dtype(x.dtype)).eps)
    return _row_norm(
        x,
        np.size(normalized_shape),
        eps,
        _affine(x, weight, None),
        centred=False,
        return_stats=return_stats,
        dtype=dtype,
    )


def fused_add_layer_norm(
    x: Array,
    residual: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float = 1e-5,
    *,
    return_stats: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array, ...]:
    """LayerNorm over the last axis of ``x + residual``, and that sum.

    Returns
    -------
    y : ndarray
        ``layer_norm(residual_out, x.shape[-1], weight, bias, eps)``.
    residual_out : ndarray
        ``x + residual`` rounded to the dtype of ``x``, whatever ``dtype`` is.
    mean, rstd : ndarray
        With ``return_stats``: the statistics of ``residual_out``.
    """
    residual_out = _add(x, residual)
    y, mean, rstd = layer_norm(
        residual_out, x.shape[-1], weight, bias, eps, return_stats=True, dtype=dtype
    )
    return (y, residual_out, mean, rstd) if return_stats else (y, residual_out)


def fused_add_rms_norm(
    x: Array,
    residual: Array,
    weight: Array | None,
    eps: float = 1e-6,
    *,
    return_stats: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array, ...]:
    """RMSNorm over the last axis of ``x + residual``, and that sum.

    Returns
    -------
    y : ndarray
        ``rms_norm(residual_out, x.shape[-1], weight, eps)``.
    residual_out : ndarray
        ``x + residual`` rounded to the dtype of ``x``, whatever ``dtype`` is.
    rstd : ndarray
        With ``return_stats``: the statistic of ``residual_out``.
    """
    residual_out = _add(x, residual)
    y, rstd = rms_norm(residual_out, x.shape[-1], weight, eps, return_stats=True, dtype=dtype)
    return (y, residual_out, rstd) if return_stats else (y, residual_out)


def ada_layer_norm(
    x: Array,
    scale: Array,
    shift: Array,
    eps: float = 1e-5,
    *,
    return_stats: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Result:
    """``scale * layer_norm(x) + shift`` over the last axis.

    ``scale`` and ``shift`` have the shape of ``x`` or broadcast to it along leading axes.
    Everything else is as in :func:`layer_norm`.
    """
    modulation = _modulation(x, scale, shift)

    def finish(xhat: Array, at: tuple[Any, ...]) -> Array:
        scale, shift = modulation(at)
        return scale * xhat + shift

    return _row_norm(x, 1, eps, finish, centred=True, return_stats=return_stats, dtype=dtype)


def ada_layer_norm_zero(
    x: Array,
    scale: Array,
    shift: Array,
    gate: Array,
    eps: float = 1e-5,
    *,
    return_stats: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Result:
    """``gate * (scale * layer_norm(x) + shift)`` over the last axis.

    ``scale``, ``shift`` and ``gate`` have the shape of ``x`` or broadcast to it along leading
    axes. Everything else is as in :func:`layer_norm`.
    """
    modulation = _modulation(x, scale, shift, gate)

    def finish(xhat: Array, at: tuple[Any, ...]) -> Array:
        scale, shift, gate = modulation(at)
        y: Array = gate * (scale * xhat + shift)
        return y

    return _row_norm(x, 1, eps, finish, centred=True, return_stats=return_stats, dtype=dtype)


FORWARD: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "fused_add_layer_norm": fused_add_layer_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "ada_layer_norm": ada_layer_norm,
    "ada_layer_norm_zero": ada_layer_norm_zero,
}
