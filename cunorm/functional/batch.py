"""Functions of batch normalization: the whole, its two halves, and the backward pass."""

from __future__ import annotations

from typing import Any

from cunorm.functional.cache import op_of
from cunorm.ops import BatchNormBwdOp, BatchNormFwdOp, BatchNormNormalizeOp, BatchNormStatsOp
from cunorm.ops.checks import checked_channel_axis


def batch_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    out: Any = None,
    return_stats: bool = False,
    channel_axis: int = 1,
    target: str | None = None,
) -> Any:
    r"""Batch normalization: each channel over the batch and all spatial axes.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot w + b

    In training :math:`\mu` and :math:`\sigma^2` are the mean and the (biased) variance of the
    channel in x, and the running statistics follow them; otherwise they are the running ones.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
        (N, ..., C) with ``channel_axis=-1``.
    running_mean, running_var : array, shape (C,), optional
        In the dtype of x or in its accumulation dtype (float32; float64 for float64). Needed and
        only read if not training. In training they are updated in place, whatever their strides:
        ``(1 - momentum) * old + momentum * new``, where the new variance is the unbiased one.
    weight, bias : array, shape (C,), optional
        In the dtype of x or in its accumulation dtype.
    training : bool
        Whether to normalize with the statistics of x.
    momentum : float
        Share of the new values in the running statistics, from 0 to 1. There is no None: for a
        plain average over batches, pass 1, 1/2, 1/3, ...
    eps : float
        Added to the variance, inside the root, in the accumulation dtype.
    out : array, shape of x, optional
        Where to write; may be x itself.
    return_stats : bool
        Also return mean and rstd.
    channel_axis : int
        Where the channels are: 1, or -1 for the last axis.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    y : array, shape and dtype of x, in its memory order
    mean, rstd : array, shape (C,)
        Only with ``return_stats=True``, in the accumulation dtype: what x was normalized with,
        :math:`rstd = 1 / \sqrt{\sigma^2 + \epsilon}`.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, bad parameters, running statistics that
        are missing, and running statistics to be updated that share memory with another argument
        or are read-only; in training for an x with one value per channel.

    Notes
    -----
    Within one unit in the last place of the output dtype, beyond the rounding of the arithmetic
    in float32 (float64 for float64), whatever the offset of the data. In training a constant
    channel gives exactly the bias. A NaN or an infinity stays in its channel. The bits are the
    same on every run. An x without elements leaves the running statistics as they are.

    References
    ----------
    .. [1] S. Ioffe, C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by
       Reducing Internal Covariate Shift", arXiv:1502.03167.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[1.0, 5.0], [3.0, 9.0]])
    >>> mean, var = np.zeros(2), np.ones(2)
    >>> cunorm.batch_norm(x, mean, var, training=True, momentum=0.5, eps=0.0)
    array([[-1., -1.],
           [ 1.,  1.]])
    >>> mean, var
    (array([1. , 3.5]), array([1.5, 4.5]))
    >>> cunorm.batch_norm(np.array([[1.0, 8.0]]), mean, var * 2, eps=0.0)
    array([[0. , 1.5]])
    """
    types = type(training), type(momentum), type(eps)
    op = op_of(BatchNormFwdOp, target, training, momentum, eps, *types)
    axis = checked_channel_axis(op.name, channel_axis)
    return op._run((x, running_mean, running_var, weight, bias), out, return_stats, axis)


def batch_norm_stats(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    out: Any = None,
    channel_axis: int = 1,
    target: str | None = None,
) -> Any:
    r"""The statistics of batch normalization in training, without the normalization.

    .. math:: mean = \frac{1}{n} \sum x, \qquad
              rstd = 1 / \sqrt{\frac{1}{n} \sum (x - mean)^2 + \epsilon}

    over the n values of each channel. `batch_norm_normalize` is the other half.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
        (N, ..., C) with ``channel_axis=-1``.
    running_mean, running_var : array, shape (C,), optional
        Updated in place, as `batch_norm` does in training.
    momentum : float
        Share of the new values in the running statistics, from 0 to 1.
    eps : float
        Added to the variance, inside the root, in the accumulation dtype.
    out : tuple of two arrays, shape (C,), optional
        Where to write mean and rstd.
    channel_axis : int
        Where the channels are: 1, or -1 for the last axis.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    mean, rstd : array, shape (C,)
        In the accumulation dtype (float32; float64 for float64); NaN for an x without elements.

    Raises
    ------
    TypeError, ValueError
        As `batch_norm` in training.

    Notes
    -----
    Sums are shifted or centred, never the difference of two large ones, and the bits are the
    same on every run.

    References
    ----------
    .. [1] S. Ioffe, C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by
       Reducing Internal Covariate Shift", arXiv:1502.03167.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> cunorm.batch_norm_stats(np.array([[1.0, 5.0], [3.0, 9.0]]), eps=0.0)
    (array([2., 7.]), array([1. , 0.5]))
    """
    op = op_of(BatchNormStatsOp, target, momentum, eps, type(momentum), type(eps))
    axis = checked_channel_axis(op.name, channel_axis)
    return op._run((x, running_mean, running_var), out, False, axis)


def batch_norm_normalize(
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    out: Any = None,
    channel_axis: int = 1,
    target: str | None = None,
) -> Any:
    r"""Normalization of each channel with statistics that are given.

    .. math:: y = (x - mean) \cdot rstd \cdot w + b

    After `batch_norm_stats` it is the second half of `batch_norm` in training.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
        (N, ..., C) with ``channel_axis=-1``.
    mean, rstd : array, shape (C,)
        In the accumulation dtype (float32; float64 for float64).
    weight, bias : array, shape (C,), optional
        In the dtype of x or in its accumulation dtype.
    out : array, shape of x, optional
        Where to write; may be x itself.
    channel_axis : int
        Where the channels are: 1, or -1 for the last axis.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    y : array, shape and dtype of x, in its memory order

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree.

    Notes
    -----
    Precision and determinism as for `batch_norm`, with the statistics taken as they are: their
    rounding to the accumulation dtype, which `batch_norm` does not suffer from, is the caller's.

    References
    ----------
    .. [1] S. Ioffe, C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by
       Reducing Internal Covariate Shift", arXiv:1502.03167.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[1.0, 5.0], [3.0, 9.0]])
    >>> cunorm.batch_norm_normalize(x, np.array([2.0, 7.0]), np.array([1.0, 0.5]))
    array([[-1., -1.],
           [ 1.,  1.]])
    """
    op = op_of(BatchNormNormalizeOp, target)
    axis = checked_channel_axis(op.name, channel_axis)
    return op._run((x, mean, rstd, weight, bias), out, False, axis)


def batch_norm_backward(
    grad_out: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    training: bool = True,
    *,
    out: Any = None,
    channel_axis: int = 1,
    target: str | None = None,
) -> Any:
    r"""Gradients of batch normalization with respect to x, weight and bias.

    With :math:`\hat x = (x - mean) \cdot rstd` and sums over the n values of each channel,

    .. math::

        \nabla b &= \sum \nabla y \\
        \nabla w &= \sum \nabla y \cdot \hat x \\
        \nabla x &= w \cdot rstd \cdot \left(\nabla y - \frac{\nabla b}{n}
                    - \hat x \cdot \frac{\nabla w}{n}\right)

    Without training the statistics are constants: :math:`\nabla x = \nabla y \cdot w \cdot rstd`.

    Parameters
    ----------
    grad_out : array, shape and dtype of x
        The gradient of y.
    x : array, shape (N, C, ...)
        The input of the forward pass: float16, bfloat16, float32 or float64; CuPy, NumPy, torch
        or anything with DLPack. (N, ..., C) with ``channel_axis=-1``.
    weight : array, shape (C,), or None
        In the dtype of x or in its accumulation dtype.
    mean, rstd : array, shape (C,)
        As ``batch_norm(..., return_stats=True)`` gives them, in the accumulation dtype.
    training : bool
        Whether the statistics are those of x; False for frozen or running ones.
    out : tuple of three arrays, optional
        Where to write the gradients; None in the place of grad_weight if there is no weight. That
        of x may be grad_out or x itself.
    channel_axis : int
        Where the channels are: 1, or -1 for the last axis.
    target : str, optional
        Which kernels to use; by default, decided from where x lives.

    Returns
    -------
    grad_x : array, shape and dtype of x, in its memory order
    grad_weight : array, shape (C,), in the dtype of weight; None where that is None
    grad_bias : array, shape (C,)
        In the dtype of weight, or in the accumulation dtype where that is None.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree.

    Notes
    -----
    A sum is wrong by no more than its own rounding and ``8 * eps * sqrt(n)`` times the root mean
    square of its terms, eps being that of the accumulation dtype. Sums over nothing are zero.
    The bits are the same on every run.

    References
    ----------
    .. [1] S. Ioffe, C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by
       Reducing Internal Covariate Shift", arXiv:1502.03167.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[1.0], [3.0], [1.0], [3.0]])
    >>> y, mean, rstd = cunorm.batch_norm(x, training=True, eps=0.0, return_stats=True)
    >>> grad_out = np.array([[1.0], [0.0], [0.0], [0.0]])
    >>> grad_x, grad_weight, grad_bias = cunorm.batch_norm_backward(
    ...     grad_out, x, np.ones(1), mean, rstd
    ... )
    >>> grad_x.ravel(), grad_weight, grad_bias
    (array([ 0.5,  0. , -0.5,  0. ]), array([-1.]), array([1.]))
    """
    op = op_of(BatchNormBwdOp, target, training, type(training))
    axis = checked_channel_axis(op.name, channel_axis)
    return op._gradients((grad_out, x, weight, mean, rstd), out, axis)
