"""Functions of the gradients of the row family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cunorm.functional.cache import op_of
from cunorm.ops import (
    AdaLayerNormBwdOp,
    AdaLayerNormZeroBwdOp,
    FusedAddLayerNormBwdOp,
    FusedAddRMSNormBwdOp,
    LayerNormBwdOp,
    RMSNormBwdOp,
)


def layer_norm_backward(
    grad_out: Any,
    x: Any,
    normalized_shape: int | Sequence[int],
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    out: Any = None,
    target: str | None = None,
) -> Any:
    r"""Gradients of layer normalization with respect to x, weight and bias.

    With :math:`\hat x = (x - mean) \cdot rstd`, :math:`g = w \cdot \nabla y`, means over each
    row and sums over all rows,

    .. math::

        \nabla x &= rstd \cdot \left(g - \overline{g} - \hat x \cdot \overline{g \hat x}\right) \\
        \nabla w &= \sum \nabla y \cdot \hat x \\
        \nabla b &= \sum \nabla y

    Parameters
    ----------
    grad_out : array, shape and dtype of x
        The gradient of y; of any strides, expanded arrays included.
    x : array, shape (..., *normalized_shape)
        The input of the forward pass: float16, bfloat16, float32 or float64; CuPy, NumPy, torch
        or anything with DLPack.
    normalized_shape : int or sequence of int
        Trailing shape of x that was normalized.
    weight : array, shape normalized_shape, or None
        In the dtype of x or in its accumulation dtype (float32; float64 for float64).
    mean, rstd : array, shape ``x.shape[:-len(normalized_shape)]``
        As ``layer_norm(..., return_stats=True)`` gives them, in the accumulation dtype.
    out : tuple of three arrays, optional
        Where to write the gradients; None in the place of grad_weight if there is no weight. That
        of x may be grad_out or x itself.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    grad_x : array, shape and dtype of x, in its memory order
    grad_weight : array, shape normalized_shape, in the dtype of weight; None where that is None
    grad_bias : array, shape normalized_shape
        In the dtype of weight, or in the accumulation dtype where that is None.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, and bad parameters.

    Notes
    -----
    grad_x is right to one unit in its last place, beyond the rounding of the arithmetic in
    float32 (float64 for float64). A sum is wrong by no more than its own rounding and
    ``8 * eps * sqrt(rows)`` times the root mean square of its terms, eps being that of the
    accumulation dtype. Sums over nothing are zero. The bits are the same on every run, and those
    of a row of grad_x whatever the other rows.

    References
    ----------
    .. [1] J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", arXiv:1607.06450.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[1.0, 1.0, 3.0, 3.0]])
    >>> y, mean, rstd = cunorm.layer_norm(x, 4, eps=0.0, return_stats=True)
    >>> grad_out = np.array([[1.0, 0.0, 0.0, 0.0]])
    >>> cunorm.layer_norm_backward(grad_out, x, 4, np.ones(4), mean, rstd)
    (array([[ 0.5, -0.5,  0. ,  0. ]]), array([-1.,  0.,  0.,  0.]), array([1., 0., 0., 0.]))
    """
    op = op_of(LayerNormBwdOp, target, normalized_shape, type(normalized_shape))
    return op._gradients((grad_out, x, weight, mean, rstd), out)


def rms_norm_backward(
    grad_out: Any,
    x: Any,
    normalized_shape: int | Sequence[int],
    weight: Any,
    rstd: Any,
    *,
    out: Any = None,
    target: str | None = None,
) -> Any:
    r"""Gradients of root mean square normalization with respect to x and weight.

    With :math:`\hat x = x \cdot rstd`, :math:`g = w \cdot \nabla y`, means over each row and sums
    over all rows,

    .. math::

        \nabla x &= rstd \cdot \left(g - \hat x \cdot \overline{g \hat x}\right) \\
        \nabla w &= \sum \nabla y \cdot \hat x

    Parameters
    ----------
    grad_out : array, shape and dtype of x
        The gradient of y; of any strides, expanded arrays included.
    x : array, shape (..., *normalized_shape)
        The input of the forward pass: float16, bfloat16, float32 or float64; CuPy, NumPy, torch
        or anything with DLPack.
    normalized_shape : int or sequence of int
        Trailing shape of x that was normalized.
    weight : array, shape normalized_shape, or None
        In the dtype of x or in its accumulation dtype (float32; float64 for float64).
    rstd : array, shape ``x.shape[:-len(normalized_shape)]``
        As ``rms_norm(..., return_stats=True)`` gives it, in the accumulation dtype.
    out : tuple of two arrays, optional
        Where to write the gradients; None in the place of grad_weight if there is no weight. That
        of x may be grad_out or x itself.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    grad_x : array, shape and dtype of x, in its memory order
    grad_weight : array, shape normalized_shape, in the dtype of weight; None where that is None

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, and bad parameters.

    Notes
    -----
    Precision and determinism as for `layer_norm_backward`.

    References
    ----------
    .. [1] B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[3.0, -4.0, 0.0, 0.0]])
    >>> y, rstd = cunorm.rms_norm(x, 4, eps=0.0, return_stats=True)
    >>> grad_out = np.array([[0.0, 0.0, 2.5, 0.0]])
    >>> cunorm.rms_norm_backward(grad_out, x, 4, None, rstd)
    (array([[0., 0., 1., 0.]]), None)
    """
    op = op_of(RMSNormBwdOp, target, normalized_shape, type(normalized_shape))
    return op._gradients((grad_out, x, weight, rstd), out)


def fused_add_layer_norm_backward(
    grad_out: Any,
    grad_residual_out: Any,
    residual_out: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    out: Any = None,
    target: str | None = None,
) -> Any:
    r"""Gradients of a residual addition and layer normalization of the sum over its last axis.

    With the sum :math:`s` and its gradient :math:`\nabla r` from where else it is used,
    :math:`\hat s = (s - mean) \cdot rstd`, :math:`g = w \cdot \nabla y`, means over each row and
    sums over all rows,

    .. math::

        \nabla s &= rstd \cdot \left(g - \overline{g} - \hat s \cdot \overline{g \hat s}\right)
                    + \nabla r \\
        \nabla w &= \sum \nabla y \cdot \hat s \\
        \nabla b &= \sum \nabla y

    Parameters
    ----------
    grad_out : array, shape and dtype of residual_out
        The gradient of y; of any strides, expanded arrays included.
    grad_residual_out : array, shape and dtype of residual_out, or None
        The gradient of residual_out, or None if nothing else came of it.
    residual_out : array, shape (..., N)
        The sum, as `fused_add_layer_norm` gives it: float16, bfloat16, float32 or float64; CuPy,
        NumPy, torch or anything with DLPack.
    weight : array, shape (N,), or None
        In the dtype of residual_out or in its accumulation dtype (float32; float64 for float64).
    mean, rstd : array, shape ``residual_out.shape[:-1]``
        As ``fused_add_layer_norm(..., return_stats=True)`` gives them, in the accumulation dtype.
    out : tuple of three arrays, optional
        Where to write the gradients; None in the place of grad_weight if there is no weight. That
        of the sum may be grad_out, grad_residual_out or residual_out itself.
    target : str, optional
        Which kernels to use; by default, decided from where residual_out lives.

    Returns
    -------
    grad_sum : array, shape and dtype of residual_out, in its memory order
        The gradient of x and of residual, which is one.
    grad_weight : array, shape (N,), in the dtype of weight; None where that is None
    grad_bias : array, shape (N,)
        In the dtype of weight, or in the accumulation dtype where that is None.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree.

    Notes
    -----
    Precision and determinism as for `layer_norm_backward`; grad_sum is rounded once, after the
    addition.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x, r = np.array([[0.0, 1.0, 2.0, 3.0]]), np.array([[1.0, 0.0, 1.0, 0.0]])
    >>> y, s, mean, rstd = cunorm.fused_add_layer_norm(
    ...     x, r, None, None, eps=0.0, return_stats=True
    ... )
    >>> grad_out, more = np.array([[1.0, 0.0, 0.0, 0.0]]), np.ones((1, 4))
    >>> cunorm.fused_add_layer_norm_backward(grad_out, more, s, None, mean, rstd)
    (array([[1.5, 0.5, 1. , 1. ]]), None, array([1., 0., 0., 0.]))
    """
    op = op_of(FusedAddLayerNormBwdOp, target)
    return op._gradients((grad_out, grad_residual_out, residual_out, weight, mean, rstd), out)


def fused_add_rms_norm_backward(
    grad_out: Any,
    grad_residual_out: Any,
    residual_out: Any,
    weight: Any,
    rstd: Any,
    *,
    out: Any = None,
    target: str | None = None,
) -> Any:
    r"""Gradients of a residual addition and RMS normalization of the sum over its last axis.

    With the sum :math:`s` and its gradient :math:`\nabla r` from where else it is used,
    :math:`\hat s = s \cdot rstd`, :math:`g = w \cdot \nabla y`, means over each row and sums over
    all rows,

    .. math::

        \nabla s &= rstd \cdot \left(g - \hat s \cdot \overline{g \hat s}\right) + \nabla r \\
        \nabla w &= \sum \nabla y \cdot \hat s

    Parameters
    ----------
    grad_out : array, shape and dtype of residual_out
        The gradient of y; of any strides, expanded arrays included.
    grad_residual_out : array, shape and dtype of residual_out, or None
        The gradient of residual_out, or None if nothing else came of it.
    residual_out : array, shape (..., N)
        The sum, as `fused_add_rms_norm` gives it: float16, bfloat16, float32 or float64; CuPy,
        NumPy, torch or anything with DLPack.
    weight : array, shape (N,), or None
        In the dtype of residual_out or in its accumulation dtype (float32; float64 for float64).
    rstd : array, shape ``residual_out.shape[:-1]``
        As ``fused_add_rms_norm(..., return_stats=True)`` gives it, in the accumulation dtype.
    out : tuple of two arrays, optional
        Where to write the gradients; None in the place of grad_weight if there is no weight. That
        of the sum may be grad_out, grad_residual_out or residual_out itself.
    target : str, optional
        Which kernels to use; by default, decided from where residual_out lives.

    Returns
    -------
    grad_sum : array, shape and dtype of residual_out, in its memory order
        The gradient of x and of residual, which is one.
    grad_weight : array, shape (N,), in the dtype of weight; None where that is None

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree.

    Notes
    -----
    Precision and determinism as for `layer_norm_backward`; grad_sum is rounded once, after the
    addition.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x, r = np.array([[2.0, -4.0, 0.0, 0.0]]), np.array([[1.0, 0.0, 0.0, 0.0]])
    >>> y, s, rstd = cunorm.fused_add_rms_norm(x, r, None, eps=0.0, return_stats=True)
    >>> grad_out = np.array([[0.0, 0.0, 2.5, 0.0]])
    >>> cunorm.fused_add_rms_norm_backward(grad_out, None, s, None, rstd)
    (array([[0., 0., 1., 0.]]), None)
    """
    op = op_of(FusedAddRMSNormBwdOp, target)
    return op._gradients((grad_out, grad_residual_out, residual_out, weight, rstd), out)


def ada_layer_norm_backward(
    grad_out: Any,
    x: Any,
    scale: Any,
    mean: Any,
    rstd: Any,
    *,
    out: Any = None,
    target: str | None = None,
) -> Any:
    r"""Gradients of adaptive layer normalization with respect to x, scale and shift.

    With :math:`\hat x = (x - mean) \cdot rstd`, scale :math:`a`, shift :math:`b`,
    :math:`g = a \cdot \nabla y` and means over each row,

    .. math::

        \nabla x &= rstd \cdot \left(g - \overline{g} - \hat x \cdot \overline{g \hat x}\right) \\
        \nabla a &= \sum \nabla y \cdot \hat x \\
        \nabla b &= \sum \nabla y

    the sums going over what scale was broadcast over.

    Parameters
    ----------
    grad_out : array, shape and dtype of x
        The gradient of y; of any strides, expanded arrays included.
    x : array, shape (..., N)
        The input of the forward pass: float16, bfloat16, float32 or float64; CuPy, NumPy, torch
        or anything with DLPack.
    scale : array
        Of the shape of x, or any that broadcasts to it along leading axes, such as ``(N,)`` or
        ``(B, 1, N)``; read in place. In the dtype of x or in its accumulation dtype.
    mean, rstd : array, shape ``x.shape[:-1]``
        As ``ada_layer_norm(..., return_stats=True)`` gives them, in the accumulation dtype.
    out : tuple of three arrays, optional
        Where to write the gradients. That of x may be grad_out, x or a scale of its shape itself.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    grad_x : array, shape and dtype of x, in its memory order
    grad_scale, grad_shift : array, shape and dtype of scale
        For a shift that was broadcast otherwise, grad_shift is a sum of grad_out that the caller
        takes.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree.

    Notes
    -----
    Precision and determinism as for `layer_norm_backward`, with as many rows as a sum has terms.

    References
    ----------
    .. [1] W. Peebles, S. Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x, scale = np.array([[1.0, 1.0, 3.0, 3.0]]), np.full(4, 2.0)
    >>> y, mean, rstd = cunorm.ada_layer_norm(x, scale, np.ones(4), eps=0.0, return_stats=True)
    >>> grad_out = np.array([[1.0, 0.0, 0.0, 0.0]])
    >>> cunorm.ada_layer_norm_backward(grad_out, x, scale, mean, rstd)
    (array([[ 1., -1.,  0.,  0.]]), array([-1.,  0.,  0.,  0.]), array([1., 0., 0., 0.]))
    """
    op = op_of(AdaLayerNormBwdOp, target)
    return op._run((grad_out, x, scale, mean, rstd), out, False)


def ada_layer_norm_zero_backward(
    grad_out: Any,
    x: Any,
    scale: Any,
    shift: Any,
    gate: Any,
    mean: Any,
    rstd: Any,
    *,
    out: Any = None,
    target: str | None = None,
) -> Any:
    r"""Gradients of gated adaptive layer normalization: of x, scale, shift and gate.

    With :math:`\hat x = (x - mean) \cdot rstd`, scale :math:`a`, shift :math:`b`, gate :math:`c`,
    :math:`g = a \cdot c \cdot \nabla y` and means over each row,

    .. math::

        \nabla x &= rstd \cdot \left(g - \overline{g} - \hat x \cdot \overline{g \hat x}\right) \\
        \nabla a &= \sum c \cdot \nabla y \cdot \hat x \\
        \nabla b &= \sum c \cdot \nabla y \\
        \nabla c &= \sum \nabla y \cdot (a \cdot \hat x + b)

    each sum going over what its array was broadcast over.

    Parameters
    ----------
    grad_out : array, shape and dtype of x
        The gradient of y; of any strides, expanded arrays included.
    x : array, shape (..., N)
        The input of the forward pass: float16, bfloat16, float32 or float64; CuPy, NumPy, torch
        or anything with DLPack.
    scale, shift, gate : array
        Of the shape of x, or any that broadcasts to it along leading axes, such as ``(N,)`` or
        ``(B, 1, N)``; read in place. In the dtype of x or in its accumulation dtype.
    mean, rstd : array, shape ``x.shape[:-1]``
        As ``ada_layer_norm_zero(..., return_stats=True)`` gives them, in the accumulation dtype.
    out : tuple of four arrays, optional
        Where to write the gradients. Each may be an input of its shape and dtype itself, that of
        x grad_out or x, say.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    grad_x : array, shape and dtype of x, in its memory order
    grad_scale, grad_shift, grad_gate : array, shapes and dtypes of scale, shift and gate

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree.

    Notes
    -----
    Precision and determinism as for `layer_norm_backward`, with as many rows as a sum has terms.

    References
    ----------
    .. [1] W. Peebles, S. Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[1.0, 3.0]])
    >>> scale, shift, gate = np.full(2, 2.0), np.ones(2), np.full(2, 0.5)
    >>> y, mean, rstd = cunorm.ada_layer_norm_zero(
    ...     x, scale, shift, gate, eps=0.0, return_stats=True
    ... )
    >>> grads = cunorm.ada_layer_norm_zero_backward(
    ...     np.array([[1.0, 0.0]]), x, scale, shift, gate, mean, rstd
    ... )
    >>> grads[0], grads[1:]
    (array([[0., 0.]]), (array([-0.5,  0. ]), array([0.5, 0. ]), array([-1.,  0.])))
    """
    op = op_of(AdaLayerNormZeroBwdOp, target)
    return op._run((grad_out, x, scale, shift, gate, mean, rstd), out, False)
