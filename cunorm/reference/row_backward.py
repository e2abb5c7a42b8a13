"""Definitions of the gradients of the norms over the last axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cunorm.reference import common
from cunorm.reference.common import Array
from cunorm.reference.gradients import PASSES, gradients


def _of_row(
    op: str, inputs: dict[str, Any], dtype: npt.DTypeLike | None, *shape: int | Sequence[int]
) -> tuple[Array | None, ...]:
    """The gradient of x and those of parameters of one row."""
    this = PASSES[op](inputs, *shape)
    grad_x = np.empty_like(this.x, dtype=common.output_dtypes(this.x, dtype)[0], subok=False)
    of_weight, *of_bias = gradients(this, grad_x)
    weight = inputs["weight"]
    sums = common.accumulation_dtype(this.x.dtype) if weight is None else weight.dtype
    sums = sums if dtype is None else np.dtype(dtype)
    first = None if weight is None else common.rounded(of_weight, sums)
    return grad_x, first, *(common.rounded(total, sums) for total in of_bias)


def layer_norm_backward(
    grad_out: Array,
    x: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None,
    mean: Array,
    rstd: Array,
    *,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array | None, ...]:
    r"""Gradients of :func:`layer_norm` with respect to ``x``, ``weight`` and ``bias``.

    With :math:`\hat x = (x - mean) \cdot rstd` and :math:`g = weight \cdot grad\_out`,

    .. math::

        grad\_x &= rstd \cdot (g - \overline{g} - \hat x \cdot \overline{g \hat x}) \\
        grad\_weight &= \sum grad\_out \cdot \hat x \\
        grad\_bias &= \sum grad\_out

    the means going over the row, the sums over the rows.

    Parameters
    ----------
    grad_out, x : ndarray
        The gradient of ``y``, and the input of the forward pass.
    normalized_shape : int or sequence of int
        The trailing shape that makes up a row.
    weight : ndarray or None
        Shape ``normalized_shape``.
    mean, rstd : ndarray
        As :func:`layer_norm` returns them.
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
    return _of_row("layer_norm_backward", inputs, dtype, normalized_shape)


def rms_norm_backward(
    grad_out: Array,
    x: Array,
    normalized_shape: int | Sequence[int],
    weight: Array | None,
    rstd: Array,
    *,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array | None, ...]:
    r"""Gradients of :func:`rms_norm` with respect to ``x`` and ``weight``.

    With :math:`\hat x = x \cdot rstd` and :math:`g = weight \cdot grad\_out`,

    .. math::

        grad\_x &= rstd \cdot (g - \hat x \cdot \overline{g \hat x}) \\
        grad\_weight &= \sum grad\_out \cdot \hat x

    Parameters and results are those of :func:`layer_norm_backward`, without mean and bias.
    """
    inputs = {"grad_out": grad_out, "x": x, "weight": weight, "rstd": rstd}
    return _of_row("rms_norm_backward", inputs, dtype, normalized_shape)


def fused_add_layer_norm_backward(
    grad_out: Array,
    grad_residual_out: Array | None,
    residual_out: Array,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    *,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array | None, ...]:
    """Gradients of :func:`fused_add_layer_norm`: of either addend, of ``weight`` and ``bias``.

    That of the sum is ``grad_x`` of :func:`layer_norm_backward` at ``residual_out``, plus
    ``grad_residual_out`` (nothing where that is None), rounded once; it is the gradient of ``x``
    and of ``residual`` alike. Everything else is as there.
    """
    inputs = {"grad_out": grad_out, "grad_residual_out": grad_residual_out}
    inputs |= {"residual_out": residual_out, "weight": weight, "mean": mean, "rstd": rstd}
    return _of_row("fused_add_layer_norm_backward", inputs, dtype)


def fused_add_rms_norm_backward(
    grad_out: Array,
    grad_residual_out: Array | None,
    residual_out: Array,
    weight: Array | None,
    rstd: Array,
    *,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array | None, ...]:
    """Gradients of :func:`fused_add_rms_norm`: of either addend and of ``weight``.

    That of the sum is ``grad_x`` of :func:`rms_norm_backward` at ``residual_out``, plus
    ``grad_residual_out``, as in :func:`fused_add_layer_norm_backward`.
    """
    inputs = {"grad_out": grad_out, "grad_residual_out": grad_residual_out}
    inputs |= {"residual_out": residual_out, "weight": weight, "rstd": rstd}
    return _of_row("fused_add_rms_norm_backward", inputs, dtype)


def _of_modulated(
    op: str, inputs: dict[str, Any], dtypes: Sequence[Any], dtype: npt.DTypeLike | None
) -> tuple[Array, ...]:
    """The gradient of x and those of arrays that broadcast to it, which have these dtypes."""
    this = PASSES[op](inputs)
    grad_x = np.empty_like(this.x, dtype=common.output_dtypes(this.x, dtype)[0], subok=False)
    totals = gradients(this, grad_x)
    stored = dtypes if dtype is None else [dtype] * len(totals)
    return grad_x, *(common.rounded(t, kind) for t, kind in zip(totals, stored, strict=True))


def ada_layer_norm_backward(
    grad_out: Array,
    x: Array,
    scale: Array,
    mean: Array,
    rstd: Array,
    *,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array, ...]:
    """Gradients of :func:`ada_layer_norm` with respect to ``x``, ``scale`` and ``shift``.

    As :func:`layer_norm_backward` with ``scale`` for the weight, but that the gradients of
    ``scale`` and ``shift`` are sums over what ``scale`` was broadcast over: both have its shape
    and its dtype. For a ``shift`` of another shape it is ``grad_out`` that is to be summed.
    """
    inputs = {"grad_out": grad_out, "x": x, "scale": scale, "mean": mean, "rstd": rstd}
    return _of_modulated("ada_layer_norm_backward", inputs, [scale.dtype] * 2, dtype)


def ada_layer_norm_zero_backward(
    grad_out: Array,
    x: Array,
    scale: Array,
    shift: Array,
    gate: Array,
    mean: Array,
    rstd: Array,
    *,
    dtype: npt.DTypeLike | None = None,
) -> tuple[Array, ...]:
    r"""Gradients of :func:`ada_layer_norm_zero`: of ``x``, ``scale``, ``shift`` and ``gate``.

    With :math:`\hat x` and means as in :func:`layer_norm_backward`, and
    :math:`g = gate \cdot scale \cdot grad\_out`,

    .. math::

        grad\_x &= rstd \cdot (g - \overline{g} - \hat x \cdot \overline{g \hat x}) \\
        grad\_scale &= \sum gate \cdot grad\_out \cdot \hat x \\
        grad\_shift &= \sum gate \cdot grad\_out \\
        grad\_gate &= \sum grad\_out \cdot (scale \cdot \hat x + shift)

    each sum going over what its array was broadcast over: a gradient has the shape and the dtype
    of its array.
    """
    inputs = {"grad_out": grad_out, "x": x, "scale": scale, "shift": shift, "gate": gate}
    inputs |= {"mean": mean, "rstd": rstd}
    stored = [scale.dtype, shift.dtype, gate.dtype]
    return _of_modulated("ada_layer_norm_zero_backward", inputs, stored, dtype)


BACKWARD: dict[str, Callable[..., Any]] = {
    "layer_norm_backward": layer_norm_backward,
    "rms_norm_backward": rms_norm_backward,
    "fused_add_layer_norm_backward": fused_add_layer_norm_backward,
    "fused_add_rms_norm_backward": fused_add_rms_norm_backward,
    "ada_layer_norm_backward": ada_layer_norm_backward,
    "ada_layer_norm_zero_backward": ada_layer_norm_zero_backward,
}
