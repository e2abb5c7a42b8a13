"""Functions of group and instance normalization and of their gradients."""

from __future__ import annotations

from typing import Any

from cunorm.functional.cache import op_of
from cunorm.ops import GroupNormBwdOp, GroupNormFwdOp, InstanceNormBwdOp, InstanceNormFwdOp
from cunorm.ops.checks import checked_channel_axis


def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    out: Any = None,
    return_stats: bool = False,
    channel_axis: int = 1,
    target: str | None = None,
) -> Any:
    r"""Group normalization: each group of neighbouring channels of each sample by itself.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot w + b

    with mean :math:`\mu` and (biased) variance :math:`\sigma^2` over the channels of the group
    and all spatial axes.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
        (N, ..., C) with ``channel_axis=-1``.
    num_groups : int
        How many groups the channels make; it must divide C.
    weight, bias : array, shape (C,), optional
        In the dtype of x or in its accumulation dtype (float32; float64 for float64).
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
    mean, rstd : array, shape (N, num_groups)
        Only with ``return_stats=True``, in the accumulation dtype;
        :math:`rstd = 1 / \sqrt{\sigma^2 + \epsilon}`.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, bad parameters, and an x with one value
        per group.

    Notes
    -----
    Within one unit in the last place of the output dtype, beyond the rounding of the arithmetic
    in float32 (float64 for float64), whatever the offset of the data. A constant group gives
    exactly the bias, and a NaN or an infinity stays in its group. The bits are the same on every
    run.

    References
    ----------
    .. [1] Y. Wu, K. He, "Group Normalization", arXiv:1803.08494.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> cunorm.group_norm(np.array([[1.0, 3.0, 10.0, 30.0]]), 2, eps=0.0)
    array([[-1.,  1., -1.,  1.]])
    """
    op = op_of(GroupNormFwdOp, target, num_groups, eps, type(num_groups), type(eps))
    axis = checked_channel_axis(op.name, channel_axis)
    return op._run((x, weight, bias), out, return_stats, axis)


def instance_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    out: Any = None,
    return_stats: bool = False,
    channel_axis: int = 1,
    target: str | None = None,
) -> Any:
    r"""Instance normalization: each channel of each sample over its spatial axes.

    .. math:: y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \cdot w + b

    with the mean :math:`\mu` and the (biased) variance :math:`\sigma^2` of the instance, or
    those that run along for its channel if ``use_input_stats`` is False.

    Parameters
    ----------
    x : array, shape (N, C, ...)
        float16, bfloat16, float32 or float64; CuPy, NumPy, torch or anything with DLPack.
        (N, ..., C) with ``channel_axis=-1``.
    running_mean, running_var : array, shape (C,), optional
        In the dtype of x or in its accumulation dtype (float32; float64 for float64), but read
        and updated as values of the dtype of x. Needed and only read if ``use_input_stats`` is
        False. Else they are updated in place, whatever their strides:
        ``(1 - momentum) * old + momentum * new``, where the new values are the means over the
        samples of the means and of the unbiased variances of their instances.
    weight, bias : array, shape (C,), optional
        In the dtype of x or in its accumulation dtype.
    use_input_stats : bool
        Whether to normalize with the statistics of x.
    momentum : float
        Share of the new values in the running statistics, from 0 to 1.
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
    mean, rstd : array, shape (N, C)
        Only with ``return_stats=True``, in the accumulation dtype: what x was normalized with,
        :math:`rstd = 1 / \sqrt{\sigma^2 + \epsilon}`.

    Raises
    ------
    TypeError
        For what is not an array, or a dtype that is not supported.
    ValueError
        For shapes, dtypes or devices that do not agree, bad parameters, running statistics that
        are missing, and running statistics to be updated that share memory with another argument
        or are read-only; with ``use_input_stats`` for an x with one spatial element.

    Notes
    -----
    Precision and determinism as for `group_norm`. A constant instance gives exactly the bias,
    and a NaN or an infinity stays in its instance, and in the running statistics of its channel.

    References
    ----------
    .. [1] D. Ulyanov, A. Vedaldi, V. Lempitsky, "Instance Normalization: The Missing Ingredient
       for Fast Stylization", arXiv:1607.08022.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> cunorm.instance_norm(np.array([[[1.0, 3.0], [10.0, 30.0]]]), eps=0.0)
    array([[[-1.,  1.],
            [-1.,  1.]]])
    """
    types = type(use_input_stats), type(momentum), type(eps)
    op = op_of(InstanceNormFwdOp, target, use_input_stats, momentum, eps, *types)
    axis = checked_channel_axis(op.name, channel_axis)
    return op._run((x, running_mean, running_var, weight, bias), out, return_stats, axis)


def group_norm_backward(
    grad_out: Any,
    x: Any,
    num_groups: int,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    out: Any = None,
    channel_axis: int = 1,
    target: str | None = None,
) -> Any:
    r"""Gradients of group normalization with respect to x, weight and bias.

    With :math:`\hat x = (x - mean) \cdot rstd`, :math:`g = w \cdot \nabla y`, means over each
    group of each sample, and sums over each channel of all samples,

    .. math::

        \nabla x &= rstd \cdot \left(g - \overline{g} - \hat x \cdot \overline{g \hat x}\right) \\
        \nabla w &= \sum \nabla y \cdot \hat x \\
        \nabla b &= \sum \nabla y

    Parameters
    ----------
    grad_out : array, shape and dtype of x
        The gradient of y; of any strides, expanded arrays included.
    x : array, shape (N, C, ...)
        The input of the forward pass: float16, bfloat16, float32 or float64; CuPy, NumPy, torch
        or anything with DLPack. (N, ..., C) with ``channel_axis=-1``.
    num_groups : int
        How many groups the channels make; it must divide C.
    weight : array, shape (C,), or None
        In the dtype of x or in its accumulation dtype (float32; float64 for float64).
    mean, rstd : array, shape (N, num_groups)
        As ``group_norm(..., return_stats=True)`` gives them, in the accumulation dtype.
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
        For shapes, dtypes or devices that do not agree, and bad parameters.

    Notes
    -----
    grad_x is right to one unit in its last place, beyond the rounding of the arithmetic in
    float32 (float64 for float64). A sum is wrong by no more than its own rounding and
    ``8 * eps * sqrt(n)`` times the root mean square of its n terms, eps being that of the
    accumulation dtype. Sums over nothing are zero. The bits are the same on every run.

    References
    ----------
    .. [1] Y. Wu, K. He, "Group Normalization", arXiv:1803.08494.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[1.0, 1.0, 3.0, 3.0]])
    >>> y, mean, rstd = cunorm.group_norm(x, 1, eps=0.0, return_stats=True)
    >>> grad_out = np.array([[1.0, 0.0, 0.0, 0.0]])
    >>> cunorm.group_norm_backward(grad_out, x, 1, np.ones(4), mean, rstd)
    (array([[ 0.5, -0.5,  0. ,  0. ]]), array([-1.,  0.,  0.,  0.]), array([1., 0., 0., 0.]))
    """
    op = op_of(GroupNormBwdOp, target, num_groups, type(num_groups))
    axis = checked_channel_axis(op.name, channel_axis)
    return op._gradients((grad_out, x, weight, mean, rstd), out, axis)


def instance_norm_backward(
    grad_out: Any,
    x: Any,
    weight: Any,
    mean: Any,
    rstd: Any,
    *,
    out: Any = None,
    channel_axis: int = 1,
    target: str | None = None,
) -> Any:
    r"""Gradients of instance normalization with respect to x, weight and bias.

    With :math:`\hat x = (x - mean) \cdot rstd`, means over each channel of each sample, and sums
    over each channel of all samples,

    .. math::

        \nabla x &= w \cdot rstd \cdot \left(\nabla y - \overline{\nabla y}
                    - \hat x \cdot \overline{\nabla y \, \hat x}\right) \\
        \nabla w &= \sum \nabla y \cdot \hat x \\
        \nabla b &= \sum \nabla y

    for an x that was normalized with its own statistics; where running ones did it, they are
    constants: see `batch_norm_backward` without training.

    Parameters
    ----------
    grad_out : array, shape and dtype of x
        The gradient of y; of any strides, expanded arrays included.
    x : array, shape (N, C, ...)
        The input of the forward pass: float16, bfloat16, float32 or float64; CuPy, NumPy, torch
        or anything with DLPack. (N, ..., C) with ``channel_axis=-1``.
    weight : array, shape (C,), or None
        In the dtype of x or in its accumulation dtype (float32; float64 for float64).
    mean, rstd : array, shape (N, C)
        As ``instance_norm(..., return_stats=True)`` gives them, in the accumulation dtype.
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
    Precision and determinism as for `group_norm_backward`.

    References
    ----------
    .. [1] D. Ulyanov, A. Vedaldi, V. Lempitsky, "Instance Normalization: The Missing Ingredient
       for Fast Stylization", arXiv:1607.08022.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> x = np.array([[[1.0, 1.0, 3.0, 3.0]]])
    >>> y, mean, rstd = cunorm.instance_norm(x, eps=0.0, return_stats=True)
    >>> grad_out = np.array([[[1.0, 0.0, 0.0, 0.0]]])
    >>> cunorm.instance_norm_backward(grad_out, x, np.ones(1), mean, rstd)
    (array([[[ 0.5, -0.5,  0. ,  0. ]]]), array([-1.]), array([1.]))
    """
    op = op_of(InstanceNormBwdOp, target)
    axis = checked_channel_axis(op.name, channel_axis)
    return op._gradients((grad_out, x, weight, mean, rstd), out, axis)
