"""Definitions of the gradients of group and instance normalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from cunorm.reference import common
from cunorm.reference.common import Array
from cunorm.reference.gradients import PASSES, gradients
from cunorm.reference.group import by_group


def group_norm_backward(
    grad_out: Array,
    x: Array,
    num_groups: int,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    *,
    channel_axis: int = 1,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Array | None, Array]:
    r"""Gradients of :func:`group_norm` with respect to ``x``, ``weight`` and ``bias``.

    With :math:`\hat x = (x - mean) \cdot rstd` and :math:`g = weight \cdot grad\_out`,

    .. math::

        grad\_x &= rstd \cdot (g - \overline{g} - \hat x \cdot \overline{g \hat x}) \\
        grad\_weight &= \sum grad\_out \cdot \hat x \\
        grad\_bias &= \sum grad\_out

    the means going over the group of a sample, the sums over the channel in all samples.

    Parameters
    ----------
    grad_out, x : ndarray
        The gradient of ``y``, and the input of the forward pass.
    num_groups : int
        Divides the channels.
    weight : ndarray or None
        Shape ``(C,)``.
    mean, rstd : ndarray
        Shape ``(N, num_groups)``, as :func:`group_norm` returns them.
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
    inputs = {"grad_out": grad_out, "x": x, "weight": weight, "mean": mean, "rstd": rstd}
    this = PASSES["group_norm_backward"](inputs, num_groups, channel_axis)
    grad_x = np.empty_like(x, dtype=common.output_dtypes(x, dtype)[0], subok=False)
    totals = gradients(this, by_group(grad_x, num_groups, channel_axis))
    sums = common.accumulation_dtype(x.dtype) if weight is None else weight.dtype
    sums = sums if dtype is None else np.dtype(dtype)
    of_weight, of_bias = (common.rounded(total.ravel(), sums) for total in totals)
    return grad_x, None if weight is None else of_weight, of_bias


def instance_norm_backward(
    grad_out: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    *,
    channel_axis: int = 1,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Array | None, Array]:
    """Gradients of :func:`instance_norm` with respect to ``x``, ``weight`` and ``bias``.

    As :func:`group_norm_backward` with a group for each channel: ``mean`` and ``rstd`` have the
    shape ``(N, C)`` and are those of ``x``.
    """
    channels = x.shape[channel_axis]
    options: dict[str, Any] = {"channel_axis": channel_axis, "dtype": dtype}
    return group_norm_backward(grad_out, x, channels, weight, mean, rstd, **options)


BACKWARD: dict[str, Callable[..., Any]] = {
    "group_norm_backward": group_norm_backward,
    "instance_norm_backward": instance_norm_backward,
}
