"""Functions of the row family: layer norm, RMS norm, their fused and adaptive forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cunorm.functional.cache import op_of
from cunorm.ops import (
    AdaLayerNormFwdOp,
    AdaLayerNormZeroFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    LayerNormFwdOp,
    RMSNormFwdOp,
)


def layer_norm(
    x: Any,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    out: Any = None,
    return_stats: bool = False,
    target: str | None = None,
) -> Any:
    r"""Layer normalization over the trailing axes of x.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot w + b

    with mean :math:`\mu` and (biased) variance :math:`\sigma^2` of each row.

    Parameters
    ----------
    x : array, shape (..., *normalized_shape)
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
    normalized_shape : int or sequence of int
        Trailing shape of x over which mean and variance are taken.
    weight, bias : array, shape normalized_shape, optional
        In the dtype of x or in its accumulation dtype (float32; float64 for float64).
    eps : float
        Added to the variance, inside the root, in the accumulation dtype.
    out : array, shape of x, optional
        Where to write; may be x itself.
    return_stats : bool
        Also return mean and rstd.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    y : array, shape and dtype of x, in its memory order
    mean, rstd : array, shape ``x.shape[:-len(normalized_shape)]``
        Only with ``return_stats=True``, in the accumulation dtype;
        :math:`rstd = 1 / \sqrt{\sigma^2 + \epsilon}`.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, and bad parameters.

    Notes
    -----
    Within one unit in the last place of the output dtype, beyond the rounding of the arithmetic
    in float32 (float64 for float64), whatever the offset of the data: the mean carries twice the
    digits of the accumulation dtype. A constant row gives exactly the bias. The bits of a row
    are the same on every run and whatever the other rows. Rows may have any stride; arrays whose
    normalized axes are not neighbours in memory are copied first.

    References
    ----------
    .. [1] J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", arXiv:1607.06450.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> cunorm.layer_norm(np.array([[1.0, 1.0, 3.0, 3.0]]), 4, eps=0.0)
    array([[-1., -1.,  1.,  1.]])
    """
    op = op_of(LayerNormFwdOp, target, normalized_shape, eps, type(normalized_shape), type(eps))
    return op._run((x, weight, bias), out, return_stats)


def rms_norm(
    x: Any,
    normalized_shape: int | Sequence[int],
    weight: Any = None,
    eps: float | None = None,
    *,
    out: Any = None,
    return_stats: bool = False,
    target: str | None = None,
) -> Any:
    r"""Root mean square normalization over the trailing axes of x.

    .. math:: y = \frac{x}{\sqrt{\frac{1}{n} \sum x^2 + \epsilon}} \cdot w

    Parameters
    ----------
    x : array, shape (..., *normalized_shape)
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
    normalized_shape : int or sequence of int
        Trailing shape of x over which the mean of squares is taken.
    weight : array, shape normalized_shape, optional
        In the dtype of x or in its accumulation dtype (float32; float64 for float64).
    eps : float, optional
        Added to the mean of squares, inside the root; by default the machine epsilon of the
        accumulation dtype (2**-23; 2**-52 for float64).
    out : array, shape of x, optional
        Where to write; may be x itself.
    return_stats : bool
        Also return rstd.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    y : array, shape and dtype of x, in its memory order
    rstd : array, shape ``x.shape[:-len(normalized_shape)]``
        Only with ``return_stats=True``, in the accumulation dtype.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, and bad parameters.

    Notes
    -----
    Precision, determinism and layouts as for `layer_norm`. Rows whose squares leave the range of
    the accumulation dtype are taken in units that keep them inside: no overflow, and eps keeps
    its meaning.

    References
    ----------
    .. [1] B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> cunorm.rms_norm(np.array([[3.0, -4.0, 0.0, 0.0]]), 4, eps=0.0)
    array([[ 1.2, -1.6,  0. ,  0. ]])
    """
    op = op_of(RMSNormFwdOp, target, normalized_shape, eps, type(normalized_shape), type(eps))
    return op._run((x, weight), out, return_stats)


def fused_add_layer_norm(
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    eps: float = 1e-5,
    *,
    out: Any = None,
    return_stats: bool = False,
    target: str | None = None,
) -> Any:
    r"""Residual addition, then layer normalization of the sum over its last axis.

    .. math:: s = x + r, \qquad y = \frac{s - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot w + b

    Parameters
    ----------
    x, residual : array, shape (..., N), of the same shape and dtype
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
    weight, bias : array, shape (N,), or None
        In the dtype of x or in its accumulation dtype (float32; float64 for float64).
    eps : float
        Added to the variance, inside the root, in the accumulation dtype.
    out : tuple of two arrays, optional
        Where to write y and residual_out; ``out=(x, residual)`` works in place.
    return_stats : bool
        Also return mean and rstd, those of the sum.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    y, residual_out : array, shape and dtype of x, in its memory order
        residual_out is ``x + residual`` rounded to the dtype, y the norm of that rounded sum:
        bit for bit what the two calls give.
    mean, rstd : array, shape ``x.shape[:-1]``
        Only with ``return_stats=True``, in the accumulation dtype.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, and bad parameters.

    Notes
    -----
    Precision, determinism and layouts as for `layer_norm`.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x, r = np.array([[0.0, 1.0, 2.0, 3.0]]), np.array([[1.0, 0.0, 1.0, 0.0]])
    >>> y, s = cunorm.fused_add_layer_norm(x, r, None, None, eps=0.0)
    >>> y, s
    (array([[-1., -1.,  1.,  1.]]), array([[1., 1., 3., 3.]]))
    """
    op = op_of(FusedAddLayerNormFwdOp, target, eps, type(eps))
    return op._run((x, residual, weight, bias), out, return_stats)


def fused_add_rms_norm(
    x: Any,
    residual: Any,
    weight: Any,
    eps: float = 1e-6,
    *,
    out: Any = None,
    return_stats: bool = False,
    target: str | None = None,
) -> Any:
    r"""Residual addition, then root mean square normalization of the sum over its last axis.

    .. math:: s = x + r, \qquad y = \frac{s}{\sqrt{\frac{1}{N} \sum s^2 + \epsilon}} \cdot w

    Parameters
    ----------
    x, residual : array, shape (..., N), of the same shape and dtype
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
    weight : array, shape (N,), or None
        In the dtype of x or in its accumulation dtype (float32; float64 for float64).
    eps : float
        Added to the mean of squares, inside the root, in the accumulation dtype.
    out : tuple of two arrays, optional
        Where to write y and residual_out; ``out=(x, residual)`` works in place.
    return_stats : bool
        Also return rstd, that of the sum.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    y, residual_out : array, shape and dtype of x, in its memory order
        residual_out is ``x + residual`` rounded to the dtype, y the norm of that rounded sum:
        bit for bit what the two calls give.
    rstd : array, shape ``x.shape[:-1]``
        Only with ``return_stats=True``, in the accumulation dtype.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, and bad parameters.

    Notes
    -----
    Precision, determinism and layouts as for `rms_norm`.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x, r = np.array([[2.0, -4.0, 0.0, 0.0]]), np.array([[1.0, 0.0, 0.0, 0.0]])
    >>> y, s = cunorm.fused_add_rms_norm(x, r, None, eps=0.0)
    >>> y, s
    (array([[ 1.2, -1.6,  0. ,  0. ]]), array([[ 3., -4.,  0.,  0.]]))
    """
    op = op_of(FusedAddRMSNormFwdOp, target, eps, type(eps))
    return op._run((x, residual, weight), out, return_stats)


def ada_layer_norm(
    x: Any,
    scale: Any,
    shift: Any,
    eps: float = 1e-5,
    *,
    out: Any = None,
    return_stats: bool = False,
    target: str | None = None,
) -> Any:
    r"""Adaptive layer normalization over the last axis of x.

    .. math:: y = a \cdot \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + b

    with scale a and shift b. (Where a network computes ``(1 + scale) * LN(x) + shift``, pass
    ``1 + scale``.)

    Parameters
    ----------
    x : array, shape (..., N)
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
    scale, shift : array
        Of the shape of x, or any that broadcasts to it along leading axes, such as ``(N,)`` or
        ``(B, 1, N)``; read in place. In the dtype of x or in its accumulation dtype.
    eps : float
        Added to the variance, inside the root, in the accumulation dtype.
    out : array, shape of x, optional
        Where to write; may be x itself.
    return_stats : bool
        Also return mean and rstd.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    y : array, shape and dtype of x, in its memory order
    mean, rstd : array, shape ``x.shape[:-1]``
        Only with ``return_stats=True``, in the accumulation dtype.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, and bad parameters.

    Notes
    -----
    Precision, determinism and layouts as for `layer_norm`.

    References
    ----------
    .. [1] W. Peebles, S. Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[1.0, 1.0, 3.0, 3.0]])
    >>> cunorm.ada_layer_norm(x, np.full(4, 2.0), np.ones(4), eps=0.0)
    array([[-1., -1.,  3.,  3.]])
    """
    op = op_of(AdaLayerNormFwdOp, target, eps, type(eps))
    return op._run((x, scale, shift), out, return_stats)


def ada_layer_norm_zero(
    x: Any,
    scale: Any,
    shift: Any,
    gate: Any,
    eps: float = 1e-5,
    *,
    out: Any = None,
    return_stats: bool = False,
    target: str | None = None,
) -> Any:
    r"""Gated adaptive layer normalization over the last axis of x.

    .. math:: y = g \cdot \left(a \cdot \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + b\right)

    with scale a, shift b and gate g.

    Parameters
    ----------
    x : array, shape (..., N)
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
    scale, shift, gate : array
        Of the shape of x, or any that broadcasts to it along leading axes, such as ``(N,)`` or
        ``(B, 1, N)``; read in place. In the dtype of x or in its accumulation dtype.
    eps : float
        Added to the variance, inside the root, in the accumulation dtype.
    out : array, shape of x, optional
        Where to write; may be x itself.
    return_stats : bool
        Also return mean and rstd.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    y : array, shape and dtype of x, in its memory order
    mean, rstd : array, shape ``x.shape[:-1]``
        Only with ``return_stats=True``, in the accumulation dtype.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, and bad parameters.

    Notes
    -----
    Precision, determinism and layouts as for `layer_norm`.

    References
    ----------
    .. [1] W. Peebles, S. Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[1.0, 1.0, 3.0, 3.0]])
    >>> cunorm.ada_layer_norm_zero(x, np.full(4, 2.0), np.ones(4), np.full(4, 0.5), eps=0.0)
    array([[-0.5, -0.5,  1.5,  1.5]])
    """
    op = op_of(AdaLayerNormZeroFwdOp, target, eps, type(eps))
    return op._run((x, scale, shift, gate), out, return_stats)
