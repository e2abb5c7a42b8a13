"""Definitions of group and instance normalization: statistics per sample and group of channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cunorm.reference import batch, common
from cunorm.reference.common import Array, Result


def by_group(x: Array, num_groups: int, channel_axis: int) -> Array:
    """``x`` as ``(N, num_groups, C / num_groups, ...)``, over the same memory."""
    first = np.moveaxis(x, channel_axis, 1)
    samples, channels, *spatial = first.shape
    return first.reshape(samples, num_groups, channels // max(1, num_groups), *spatial)


def spread(values: Array | None, view: Array) -> Array | None:
    """One value per channel, to be broadcast to an array that is laid out as `by_group` does."""
    if values is None:
        return None
    return values.reshape(*view.shape[1:3], *(1,) * (view.ndim - 3))


def _update(
    running: Array | None,
    value: Array,
    momentum: float,
    read_as: np.dtype[Any],
    written_as: np.dtype[Any],
) -> None:
    """Move a running statistic, kept in any dtype, that counts as one of ``read_as``."""
    if running is not None:
        old = common.rounded(running, read_as)
        running[...] = common.rounded(batch.moved(old, value, momentum), written_as)


def group_norm(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    eps: float = 1e-5,
    *,
    channel_axis: int = 1,
    return_stats: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Result:
    r"""Normalize each group of neighbouring channels of each sample, then scale and shift.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot weight + bias

    with the mean and the biased variance over the channels of the group and all spatial axes.

    Parameters
    ----------
    x : ndarray
        Shape ``(N, C, ...)``, or ``(N, ..., C)`` for ``channel_axis=-1``.
    num_groups : int
        Divides ``C``.
    weight, bias : ndarray, optional
        Shape ``(C,)``.
    eps, channel_axis, return_stats, dtype
        As for :func:`batch_norm`.

    Returns
    -------
    y : ndarray
        The shape and memory order of ``x``.
    mean, rstd : ndarray
        With ``return_stats``: shape ``(N, num_groups)``, in the accumulation dtype. NaN for
        groups without elements.
    """
    out_dtype, stats_dtype = common.output_dtypes(x, dtype)
    y = np.empty_like(x, dtype=out_dtype, subok=False)
    view, y_view = (by_group(a, num_groups, channel_axis) for a in (x, y))
    finish = batch.affine(view, spread(weight, view), spread(bias, view))
    found = common.normalize_rows(view, y_view, view.ndim - 2, eps, finish)
    if not return_stats:
        return y
    return y, common.rounded(found.mean, stats_dtype), common.rounded(found.rstd, stats_dtype)


def instance_norm(
    x: Array,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    weight: Array | None = None,
    bias: Array | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    channel_axis: int = 1,
    return_stats: bool = False,
    dtype: npt.DTypeLike | None = None,
) -> Result:
    r"""Normalize each channel of each sample over the spatial axes, then scale and shift.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot weight + bias

    with the mean and the biased variance of the instance, or the running ones of its channel
    where ``use_input_stats`` is false.

    Parameters
    ----------
    x : ndarray
        Shape ``(N, C, ...)``, or ``(N, ..., C)`` for ``channel_axis=-1``.
    running_mean, running_var : ndarray, optional
        Shape ``(C,)``. Read as values of the dtype of ``x``. With ``use_input_stats`` updated in
        place, in that dtype too, if there are elements: what enters is the mean over the samples
        of the means, and of the unbiased variances, of the instances.
    weight, bias : ndarray, optional
        Shape ``(C,)``.
    use_input_stats : bool
        Whether to use the statistics of ``x``.
    momentum, eps, channel_axis, return_stats, dtype
        As for :func:`batch_norm`; running statistics follow ``dtype`` as well.

    Returns
    -------
    y : ndarray
        The shape and memory order of ``x``.
    mean, rstd : ndarray
        With ``return_stats``: shape ``(N, C)``, in the accumulation dtype.
    """
    out_dtype, stats_dtype = common.output_dtypes(x, dtype)
    y = np.empty_like(x, dtype=out_dtype, subok=False)
    channels = x.shape[channel_axis]
    view, y_view = (by_group(a, channels, channel_axis) for a in (x, y))
    finish = batch.affine(view, spread(weight, view), spread(bias, view))
    if use_input_stats:
        found = common.normalize_rows(view, y_view, view.ndim - 2, eps, finish)
        mean, rstd = found.mean, found.rstd
        if x.size:
            variance = batch.unbiased(found.variance, x.size // mean.size)
            _update(running_mean, mean.mean(axis=0), momentum, x.dtype, out_dtype)
            _update(running_var, variance.mean(axis=0), momentum, x.dtype, out_dtype)
    else:
        running = (common.rounded(r, x.dtype) for r in (running_mean, running_var))
        frozen = batch.frozen_statistics(*running, eps, common.working_dtype(x.dtype))
        batch.normalize_with(view, y_view, *(spread(value, view) for value in frozen), finish)
        mean, rstd = (np.broadcast_to(value, view.shape[:2]) for value in frozen)
    if not return_stats:
        return y
    return y, common.rounded(mean, stats_dtype), common.rounded(rstd, stats_dtype)


FORWARD: dict[str, Callable[..., Any]] = {
    "group_norm": group_norm,
    "instance_norm": instance_norm,
}
