"""Definitions of the norms over the last axes: layer norm, RMS norm, fused and adaptive forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cunorm.reference import common
from cunorm.reference.common import Array, Finish, Result


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
    """Normalize the last ``axes`` axes of ``x`` and let ``finish`` do the rest."""
    out_dtype, stats_dtype = common.output_dtypes(x, dtype)
    y = np.empty_like(x, dtype=out_dtype, subok=False)
    found = common.normalize_rows(x, y, axes, eps, finish, centred=centred)
    if not return_stats:
        return y
    rstd = common.rounded(found.rstd, stats_dtype)
    return (y, common.rounded(found.mean, stats_dtype), rstd) if centred else (y, rstd)


def _affine(x: Array, weight: Array | None, bias: Array | None) -> Finish:
    """``weight * xhat + bias`` with one parameter per normalized element, either may be None."""
    work = common.working_dtype(x.dtype)
    wide_weight = None if weight is None else weight.astype(work)
    wide_bias = None if bias is None else bias.astype(work)

    def finish(xhat: Array, at: tuple[Any, ...]) -> Array:
        y = xhat if wide_weight is None else wide_weight * xhat
        return y if wide_bias is None else y + wide_bias

    return finish


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
        eps = float(np.finfo(common.accumulation_dtype(x.dtype)).eps)
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
    modulation = common.blocks_of(x, scale, shift)

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
    modulation = common.blocks_of(x, scale, shift, gate)

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
