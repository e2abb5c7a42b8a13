"""Op objects of group and instance normalization and of their gradients."""

from __future__ import annotations

from typing import Any

from cunorm import errors
from cunorm.arrays import ArraySpec
from cunorm.ops.base import STATISTICS, Op
from cunorm.ops.channel import ChannelOp, RunningOp
from cunorm.ops.checks import (
    checked_channel_axis,
    checked_eps,
    checked_flag,
    checked_groups,
    checked_momentum,
)
from cunorm.ops.gradients import GradientOp


class _GroupOp(ChannelOp):
    """Statistics of each sample and group of neighbouring channels."""

    num_groups: int

    def _channels(self, x: ArraySpec, axis: int | None) -> int:
        channels = super()._channels(x, axis)
        if channels % self.num_groups:
            expected = f"a divisor of the {channels} channels of x"
            raise errors.wrong_value(self.name, "num_groups", expected, self.num_groups)
        return channels

    def _statistic_shape(self, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        return (x.shape[0], self.num_groups)


class _InstanceOp(ChannelOp):
    """Statistics of each sample and channel."""

    def _statistic_shape(self, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        return (x.shape[0], self._channels(x, axis))


class _SampleGradientOp(GradientOp, ChannelOp):
    """Takes the statistics of each sample."""

    def _expected_shape(self, argument: str, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        expected = super()._expected_shape(argument, x, axis)
        return self._statistic_shape(x, axis) if argument in STATISTICS else expected

    def _flops_per_element(self) -> int:
        return 13  # as layer norm


class GroupNormFwdOp(_GroupOp):
    """Group normalization: each group of neighbouring channels of each sample by itself.

    Parameters
    ----------
    num_groups : int
        How many groups the channels make; it must divide their number.
    eps : float
        Added to the variance, inside the root.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.group_norm : the same as a function, with every argument explained.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> op = cunorm.GroupNormFwdOp(2, eps=0.0)
    >>> op
    GroupNormFwdOp(num_groups=2, eps=0.0)
    >>> op(np.array([[1.0, 3.0, 10.0, 30.0]]))
    array([[-1.,  1., -1.,  1.]])
    """

    name = "group_norm"
    input_names = ("x", "weight", "bias")
    statistic_names = ("mean", "rstd")
    required = frozenset({"x"})

    def __init__(self, num_groups: int, eps: float = 1e-5, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.num_groups = checked_groups(self.name, num_groups)
        self.eps = checked_eps(self.name, eps)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"num_groups": self.num_groups, "eps": self.eps}

    def _channels(self, x: ArraySpec, axis: int | None) -> int:
        channels = super()._channels(x, axis)
        if x.size and channels == self.num_groups and self._spatial(x, axis) == 1:
            raise errors.too_few(self.name, "more than one value per group", x.shape)
        return channels

    def _flops_per_element(self) -> int:
        return 8  # as layer norm

    def backward_op(self) -> Op | None:
        """`GroupNormBwdOp` of as many groups."""
        return GroupNormBwdOp(self.num_groups, target=self.target)

    def __call__(
        self,
        x: Any,
        weight: Any = None,
        bias: Any = None,
        *,
        out: Any = None,
        return_stats: bool = False,
        channel_axis: int = 1,
    ) -> Any:
        """Normalize x; see `cunorm.group_norm`."""
        axis = checked_channel_axis(self.name, channel_axis)
        return self._run((x, weight, bias), out, return_stats, axis)


class InstanceNormFwdOp(_InstanceOp, RunningOp):
    """Instance normalization: each channel of each sample by itself.

    Parameters
    ----------
    use_input_stats : bool
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
    cunorm.instance_norm : the same as a function, with every argument explained.
    """

    name = "instance_norm"
    input_names = ("x", "running_mean", "running_var", "weight", "bias")
    statistic_names = ("mean", "rstd")
    required = frozenset({"x"})
    flag = "use_input_stats=False"

    def __init__(
        self,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *,
        target: str | None = None,
    ) -> None:
        super().__init__(target=target)
        self.use_input_stats = checked_flag(self.name, "use_input_stats", use_input_stats)
        self.computes = self.use_input_stats
        self.momentum = checked_momentum(self.name, momentum)
        self.eps = checked_eps(self.name, eps)

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "use_input_stats": self.use_input_stats,
            "momentum": self.momentum,
            "eps": self.eps,
        }

    def _check_enough(self, x: ArraySpec, axis: int | None) -> None:
        if self._spatial(x, axis) == 1:
            raise errors.too_few(self.name, "more than one spatial element", x.shape)

    def _flops_per_element(self) -> int:
        return 8 if self.use_input_stats else 4  # as batch norm

    def backward_op(self) -> Op | None:
        """`InstanceNormBwdOp`; None where running statistics normalize.

        Those are constants, and one for each channel: `BatchNormBwdOp` without training has
        their gradients.
        """
        return InstanceNormBwdOp(target=self.target) if self.use_input_stats else None

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
        """Normalize x; see `cunorm.instance_norm`."""
        axis = checked_channel_axis(self.name, channel_axis)
        inputs = (x, running_mean, running_var, weight, bias)
        return self._run(inputs, out, return_stats, axis)


class GroupNormBwdOp(_SampleGradientOp, _GroupOp):
    """Gradients of group normalization with respect to x, weight and bias.

    Parameters
    ----------
    num_groups : int
        How many groups the channels make; it must divide their number.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.group_norm_backward : the same as a function, with every argument explained.
    """

    name = "group_norm_backward"
    input_names = ("grad_out", "x", "weight", "mean", "rstd")
    output_names = ("grad_x", "grad_weight", "grad_bias")
    required = frozenset({"grad_out", "x", "mean", "rstd"})

    def __init__(self, num_groups: int, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.num_groups = checked_groups(self.name, num_groups)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"num_groups": self.num_groups}

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
        """Take the gradients; see `cunorm.group_norm_backward`."""
        axis = checked_channel_axis(self.name, channel_axis)
        return self._gradients((grad_out, x, weight, mean, rstd), out, axis)


class InstanceNormBwdOp(_SampleGradientOp, _InstanceOp):
    """Gradients of instance normalization with respect to x, weight and bias.

    Parameters
    ----------
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.instance_norm_backward : the same as a function, with every argument explained.
    """

    name = "instance_norm_backward"
    input_names = ("grad_out", "x", "weight", "mean", "rstd")
    output_names = ("grad_x", "grad_weight", "grad_bias")
    required = frozenset({"grad_out", "x", "mean", "rstd"})

    @property
    def attributes(self) -> dict[str, Any]:
        return {}

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
        """Take the gradients; see `cunorm.instance_norm_backward`."""
        axis = checked_channel_axis(self.name, channel_axis)
        return self._gradients((grad_out, x, weight, mean, rstd), out, axis)
