"""Op objects of batch normalization: the whole, its two halves, and the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cunorm import dtypes, errors
from cunorm.arrays import ArraySpec
from cunorm.ops.base import Op
from cunorm.ops.channel import ChannelOp, RunningOp
from cunorm.ops.checks import checked_channel_axis, checked_eps, checked_flag, checked_momentum
from cunorm.ops.gradients import GradientOp


class _BatchOp(RunningOp):
    """Statistics over all axes but that of the channels."""

    def _check_enough(self, x: ArraySpec, axis: int | None) -> None:
        if x.size == self._channels(x, axis):
            expected = "more than one value per channel in training"
            raise errors.too_few(self.name, expected, x.shape)

    def _statistic_shape(self, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        return (self._channels(x, axis),)


class BatchNormFwdOp(_BatchOp):
    r"""Batch normalization, :math:`y = (x - \mu) / \sqrt{\sigma^2 + \epsilon} \cdot w + b`.

    Parameters
    ----------
    training : bool
        Whether to normalize with the statistics of x and update the running ones, or to
        normalize with the running ones.
    momentum : float
        Share of a new value in the running statistics, from 0 to 1.
    eps : float
        Added to the variance, inside the root.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.batch_norm : the same as a function, with every argument explained.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> op = cunorm.BatchNormFwdOp(training=True, eps=0.0)
    >>> op
    BatchNormFwdOp(training=True, momentum=0.1, eps=0.0)
    >>> op(np.array([[1.0, 5.0], [3.0, 9.0]]))
    array([[-1., -1.],
           [ 1.,  1.]])
    """

    name = "batch_norm"
    input_names = ("x", "running_mean", "running_var", "weight", "bias")
    statistic_names = ("mean", "rstd")
    required = frozenset({"x"})
    flag = "training=False"

    def __init__(
        self,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *,
        target: str | None = None,
    ) -> None:
        super().__init__(target=target)
        self.training = self.computes = checked_flag(self.name, "training", training)
        self.momentum = checked_momentum(self.name, momentum)
        self.eps = checked_eps(self.name, eps)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"training": self.training, "momentum": self.momentum, "eps": self.eps}

    def _flops_per_element(self) -> int:
        return 8 if self.training else 4  # as layer norm; difference, two products, one sum

    def backward_op(self) -> Op | None:
        """`BatchNormBwdOp` for statistics of x in training, for constant ones otherwise."""
        return BatchNormBwdOp(self.training, target=self.target)

    def __call__(
        self,
        x: Any,
        running_mean: Any = None,
        running_var: Any = None,
        weight: Any = None,
        bias: Any = None,
        *,
        out: Any = None,
        return_stats: bool = False,
        channel_axis: int = 1,
    ) -> Any:
        """Normalize x; see `cunorm.batch_norm`."""
        axis = checked_channel_axis(self.name, channel_axis)
        inputs = (x, running_mean, running_var, weight, bias)
        return self._run(inputs, out, return_stats, axis)


class BatchNormStatsOp(_BatchOp):
    r"""Statistics of each channel: the mean and :math:`1 / \sqrt{\sigma^2 + \epsilon}`.

    Parameters
    ----------
    momentum : float
        Share of a new value in the running statistics, from 0 to 1.
    eps : float
        Added to the variance, inside the root.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.batch_norm_stats : the same as a function, with every argument explained.
    """

    name = "batch_norm_stats"
    input_names = ("x", "running_mean", "running_var")
    output_names = ("mean", "rstd")
    required = frozenset({"x"})
    computes = True

    def __init__(
        self, momentum: float = 0.1, eps: float = 1e-5, *, target: str | None = None
    ) -> None:
        super().__init__(target=target)
        self.momentum = checked_momentum(self.name, momentum)
        self.eps = checked_eps(self.name, eps)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "eps": self.eps}

    def _output(self, name: str, inputs: Mapping[str, ArraySpec | None], axis: int | None) -> Any:
        x: Any = inputs["x"]
        wide = dtypes.accumulation(x.dtype)
        return ArraySpec.contiguous(self._statistic_shape(x, axis), wide)

    def _flops_per_element(self) -> int:
        return 4  # sum; difference, square, sum

    def __call__(
        self,
        x: Any,
        running_mean: Any = None,
        running_var: Any = None,
        *,
        out: Any = None,
        channel_axis: int = 1,
    ) -> Any:
        """Take the statistics of x; see `cunorm.batch_norm_stats`."""
        axis = checked_channel_axis(self.name, channel_axis)
        return self._run((x, running_mean, running_var), out, False, axis)


class BatchNormNormalizeOp(ChannelOp):
    """Normalization with given statistics, ``y = (x - mean) * rstd * weight + bias``.

    Parameters
    ----------
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.batch_norm_normalize : the same as a function, with every argument explained.
    """

    name = "batch_norm_normalize"
    input_names = ("x", "mean", "rstd", "weight", "bias")
    required = frozenset({"x", "mean", "rstd"})

    @property
    def attributes(self) -> dict[str, Any]:
        return {}

    def _flops_per_element(self) -> int:
        return 4  # difference, two products, one sum

    def __call__(
        self,
        x: Any,
        mean: Any,
        rstd: Any,
        weight: Any = None,
        bias: Any = None,
        *,
        out: Any = None,
        channel_axis: int = 1,
    ) -> Any:
        """Normalize x; see `cunorm.batch_norm_normalize`."""
        axis = checked_channel_axis(self.name, channel_axis)
        return self._run((x, mean, rstd, weight, bias), out, False, axis)


class BatchNormBwdOp(GradientOp, ChannelOp):
    """Gradients of batch normalization with respect to x, weight and bias.

    Parameters
    ----------
    training : bool
        Whether the statistics are those of x, so that the gradient goes through them as well;
        False for constant ones.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.batch_norm_backward : the same as a function, with every argument explained.
    """

    name = "batch_norm_backward"
    input_names = ("grad_out", "x", "weight", "mean", "rstd")
    output_names = ("grad_x", "grad_weight", "grad_bias")
    required = frozenset({"grad_out", "x", "mean", "rstd"})

    def __init__(self, training: bool = True, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.training = checked_flag(self.name, "training", training)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"training": self.training}

    def _flops_per_element(self) -> int:
        # Two for the normalized value, three for the sums; two differences, two products more.
        return 9 if self.training else 6

    def __call__(
        self,
        grad_out: Any,
        x: Any,
        weight: Any,
        mean: Any,
        rstd: Any,
        *,
        out: Any = None,
        channel_axis: int = 1,
    ) -> Any:
        """Take the gradients; see `cunorm.batch_norm_backward`."""
        axis = checked_channel_axis(self.name, channel_axis)
        return self._gradients((grad_out, x, weight, mean, rstd), out, axis)
