"""Definitions of batch normalization: one pair of statistics per channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cunorm.reference import common
from cunorm.reference.common import Array, Finish, Result

# ---------------------------------------------------------------------------------------------
# channels
# ---------------------------------------------------------------------------------------------


def _by_channel(x: Array, channel_axis: int) -> Array:
    """``x`` with its channels first: a row for each."""
    return np.moveaxis(x, channel_axis, 0)


def _channel_blocks(view: Array) -> Iterator[tuple[Any, ...]]:
    """Indices of channels of ``view``, whose first axis they are, that fit a block together."""
    channels = view.shape[0]
    return common.row_blocks((channels,), view.size // max(1, channels))


def _spread(values: Array, ndim: int) -> Array:
    """One value per channel, to be broadcast over the other axes."""
    return values.reshape(-1, *(1,) * (ndim - 1))


def affine(view: Array, weight: Array | None, bias: Array | None) -> Finish:
    """``weight * xhat + bias`` for parameters that broadcast to ``view``; either may be None."""
    present = [parameter for parameter in (weight, bias) if parameter is not None]
    blocks = common.blocks_of(view, *present)

    def finish(xhat: Array, at: tuple[Any, ...]) -> Array:
        parameters = iter(blocks(at))
        y = xhat if weight is None else next(parameters) * xhat
        return y if bias is None else y + next(parameters)

    return finish


def _channel_affine(view: Array, weight: Array | None, bias: Array | None) -> Finish:
    spread = (None if p is None else _spread(p, view.ndim) for p in (weight, bias))
    return affine(view, *spread)


def moved(running: Array, value: Array, momentum: float) -> Array:
    """``(1 - momentum) * running + momentum * value`` in the dtype of ``value``."""
    weight = value.dtype.type(momentum)
    with np.errstate(all="ignore"):
        result: Array = (1 - weight) * running.astype(value.dtype) + weight * value
        return result


def unbiased(variance: Array, count: int) -> Array:
    """The variance that enters the running one: over ``count - 1``."""
    with np.errstate(all="ignore"):
        result: Array = variance * (variance.dtype.type(count) / (count - 1))
        return result


def _update(
    running_mean: Array | None,
    running_var: Array | None,
    found: common.Statistics,
    count: int,
    momentum: float,
) -> None:
    """Move the running statistics towards those of a batch; not at all if it was empty."""
    if running_mean is None or running_var is None or count == 0:
        return
    mean = moved(running_mean, found.mean, momentum)
    variance = moved(running_var, unbiased(found.variance, count), momentum)
    with np.errstate(all="ignore"):
        running_mean[...] = mean
        running_var[...] = variance


def frozen_statistics(
    running_mean: Any, running_var: Any, eps: float, work: npt.DTypeLike
) -> tuple[Array, Array]:
    """Mean and rstd that inference normalizes with, unrounded."""
    variance = running_var.astype(work)
    with np.errstate(all="ignore"):
        rstd: Array = 1 / np.sqrt(variance + variance.dtype.type(eps))
    return running_mean.astype(work), rstd


def normalize_with(view: Array, y: Array, mean: Array, rstd: Array, finish: Finish) -> None:
    """Fill ``y`` from ``(view - mean) * rstd``; the first axis of ``view`` is that of blocks."""
    blocks = common.blocks_of(view, mean, rstd)
    with np.errstate(all="ignore"):
        for at in _channel_blocks(view):
            centre, scale = blocks(at)
            xhat = (view[at].astype(centre.dtype) - centre) * scale
            y[at] = finish(xhat, at).astype(y.dtype)


# ---------------------------------------------------------------------------------------------
# forward
# ---------------------------------------------------------------------------------------------


def batch_norm(
    x: Array,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    channel_axis: int = 1,
    return_stats: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Result:
    r"""Normalize each channel over all other axes, then scale and shift.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot weight + bias

    with the mean and the biased variance of the channel in training, the running ones otherwise.

    Parameters
    ----------
    x : ndarray
        float16, bfloat16, float32 or float64, shape ``(N, C, ...)``, or ``(N, ..., C)`` for
        ``channel_axis=-1``.
    running_mean, running_var : ndarray, optional
        Shape ``(C,)``. Read in inference. In training updated in place, if there are elements:
        ``(1 - momentum) * old + momentum * new``, the new variance being the unbiased one.
    weight, bias : ndarray, optional
        Shape ``(C,)``, in the dtype of ``x`` or the accumulation dtype.
    training : bool
        Whether to use the statistics of ``x``.
    momentum : float
        Share of the new value in the running statistics.
    eps : float
        Added to the variance, inside the root.
    channel_axis : int
        1 or -1.
    return_stats : bool
        Also return the statistics that were used.
    dtype : dtype, optional
        dtype of ``y``, by default that of ``x``. float64 (``np.longdouble`` for float64 input)
        gives the value before the last rounding. Statistics follow it if it is the wider one.

    Returns
    -------
    y : ndarray
        The shape and memory order of ``x``.
    mean, rstd : ndarray
        With ``return_stats``: mean and ``1 / sqrt(var + eps)`` of each channel, shape ``(C,)``,
        in the accumulation dtype. NaN for channels without elements in training.

    Notes
    -----
    In training a constant channel gives exactly the bias. A NaN or an infinity stays within its
    channel.
    """
    out_dtype, stats_dtype = common.output_dtypes(x, dtype)
    y = np.empty_like(x, dtype=out_dtype, subok=False)
    view, y_view = _by_channel(x, channel_axis), _by_channel(y, channel_axis)
    finish = _channel_affine(view, weight, bias)
    if training:
        found = common.normalize_rows(view, y_view, x.ndim - 1, eps, finish)
        mean, rstd = found.mean, found.rstd
        _update(running_mean, running_var, found, x.size // max(1, len(view)), momentum)
    else:
        work = common.working_dtype(x.dtype)
        mean, rstd = frozen_statistics(running_mean, running_var, eps, work)
        normalize_with(view, y_view, _spread(mean, x.ndim), _spread(rstd, x.ndim), finish)
    if not return_stats:
        return y
    return y, common.rounded(mean, stats_dtype), common.rounded(rstd, stats_dtype)


def batch_norm_stats(
    x: Array,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    channel_axis: int = 1,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Array]:
    """The statistics of :func:`batch_norm` in training: mean and ``1 / sqrt(var + eps)``.

    Parameters are those of :func:`batch_norm`; running statistics are updated as there.

    Returns
    -------
    mean, rstd : ndarray
        Shape ``(C,)``, in the accumulation dtype, or in ``dtype`` if that is wider.
    """
    view = _by_channel(x, channel_axis)
    found = common.normalize_rows(view, None, x.ndim - 1, eps, lambda xhat, at: xhat)
    _update(running_mean, running_var, found, x.size // max(1, len(view)), momentum)
    stats_dtype = common.output_dtypes(x, dtype)[1]
    return common.rounded(found.mean, stats_dtype), common.rounded(found.rstd, stats_dtype)


def batch_norm_normalize(
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    channel_axis: int = 1,
    dtype: npt.DTypeLike | None = None,
) -> Array:
    """``(x - mean) * rstd * weight + bias`` with statistics that are given, shape ``(C,)``.

    The second half of :func:`batch_norm`; everything else is as there.
    """
    y = np.empty_like(x, dtype=common.output_dtypes(x, dtype)[0], subok=False)
    view, y_view = _by_channel(x, channel_axis), _by_channel(y, channel_axis)
    finish = _channel_affine(view, weight, bias)
    normalize_with(view, y_view, _spread(mean, x.ndim), _spread(rstd, x.ndim), finish)
    return y


# ---------------------------------------------------------------------------------------------
# backward
# ---------------------------------------------------------------------------------------------


def batch_norm_backward(
    grad_out: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    training: bool = True,
    *,
    channel_axis: int = 1,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Array | None, Array]:
    r"""Gradients of :func:`batch_norm` with respect to ``x``, ``weight`` and ``bias``.

    With :math:`\hat x = (x - mean) \cdot rstd`, the sums going over the channel:

    .. math::

        grad\_bias &= \sum grad\_out \\
        grad\_weight &= \sum grad\_out \cdot \hat x \\
        grad\_x &= weight \cdot rstd \cdot \left(grad\_out - \frac{grad\_bias}{n}
                   - \hat x \cdot \frac{grad\_weight}{n}\right)

    The last two terms are the way through the statistics, which ``training=False`` takes to be
    constants.

    Parameters
    ----------
    grad_out, x : ndarray
        The gradient of ``y``, and the input of the forward pass.
    weight : ndarray or None
        Shape ``(C,)``.
    mean, rstd : ndarray
        Shape ``(C,)``, as :func:`batch_norm` returns them.
    training : bool
        Whether the statistics are those of ``x``.
    channel_axis : int
        1 or -1.
    dtype : dtype, optional
        dtype of all gradients, for the values before the last rounding.

    Returns
    -------
    grad_x : ndarray
        The shape, dtype and memory order of ``x``.
    grad_weight : ndarray or None
        In the dtype of ``weight``; None where that is None.
    grad_bias : ndarray
        In the dtype of ``weight``, or the accumulation dtype where that is None. Sums over
        nothing are zero.
    """
    work = common.working_dtype(x.dtype)
    grad_x = np.empty_like(x, dtype=common.output_dtypes(x, dtype)[0], subok=False)
    view, grad, result = (_by_channel(a, channel_axis) for a in (x, grad_out, grad_x))
    count, axes = x.size // max(1, len(view)), tuple(range(1, x.ndim))
    factor = rstd if weight is None else rstd.astype(work) * weight.astype(work)
    blocks = common.blocks_of(view, *(_spread(p, x.ndim) for p in (mean, rstd, factor)))
    grad_weight, grad_bias = np.zeros((2, len(view)), work)
    with np.errstate(all="ignore"):
        for at in _channel_blocks(view):
            centre, scale, outer = blocks(at)
            g = grad[at].astype(work)
            xhat = (view[at].astype(work) - centre) * scale
            grad_bias[at] = g.sum(axis=axes)
            grad_weight[at] = (g * xhat).sum(axis=axes)
            if training:
                through_mean = _spread(grad_bias[at] / count, x.ndim)
                through_rstd = _spread(grad_weight[at] / count, x.ndim)
                g = g - through_mean - xhat * through_rstd
            result[at] = (outer * g).astype(result.dtype)

    sums = common.accumulation_dtype(x.dtype) if weight is None else weight.dtype
    sums = sums if dtype is None else np.dtype(dtype)
    of_weight = None if weight is None else common.rounded(grad_weight, sums)
    return grad_x, of_weight, common.rounded(grad_bias, sums)


FORWARD: dict[str, Callable[..., Any]] = {
    "batch_norm": batch_norm,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_normalize": batch_norm_normalize,
}
BACKWARD: dict[str, Callable[..., Any]] = {"batch_norm_backward": batch_norm_backward}
