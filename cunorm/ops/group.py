"""Op objects of group and instance normalization: statistics of each sample."""

from __future__ import annotations

from typing import Any

from cunorm import errors
from cunorm.arrays import ArraySpec
from cunorm.ops.channel import ChannelOp, RunningOp
from cunorm.ops.checks import (
    checked_channel_axis,
    checked_eps,
    checked_flag,
    checked_groups,
    checked_momentum,
)


class GroupNormFwdOp(ChannelOp):
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
        if channels % self.num_groups:
            expected = f"a divisor of the {channels} channels of x"
            raise errors.wrong_value(self.name, "num_groups", expected, self.num_groups)
        if x.size and channels == self.num_groups and self._spatial(x, axis) == 1:
            raise errors.too_few(self.name, "more than one value per group", x.shape)
        return channels

    def _statistic_shape(self, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        return (x.shape[0], self.num_groups)

    def _flops_per_element(self) -> int:
        return 8  # as layer norm

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


class InstanceNormFwdOp(RunningOp):
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

    def _statistic_shape(self, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        return (x.shape[0], self._channels(x, axis))

    def _flops_per_element(self) -> int:
        return 8 if self.use_input_stats else 4  # as batch norm

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
