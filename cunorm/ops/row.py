"""Op objects that normalize rows: layer norm, RMS norm, their fused and adaptive forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cunorm.ops.base import Op
from cunorm.ops.checks import checked_eps, checked_shape
from cunorm.ops.row_backward import (
    AdaLayerNormBwdOp,
    AdaLayerNormZeroBwdOp,
    FusedAddLayerNormBwdOp,
    FusedAddRMSNormBwdOp,
    LayerNormBwdOp,
    RMSNormBwdOp,
)
from cunorm.ops.row_base import AdaptiveOp, RowOp


class _EpsOp(Op):
    """An op whose one parameter is eps."""

    def __init__(self, eps: float = 1e-5, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.eps = checked_eps(self.name, eps)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"eps": self.eps}


class LayerNormFwdOp(RowOp):
    r"""Layer normalization, :math:`y = (x - \mu) / \sqrt{\sigma^2 + \epsilon} \cdot w + b`.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        Trailing shape of x over which mean and variance are taken.
    eps : float
        Added to the variance, inside the root.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.layer_norm : the same as a function, with every argument explained.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> op = cunorm.LayerNormFwdOp(4, eps=0.0)
    >>> op
    LayerNormFwdOp(normalized_shape=(4,), eps=0.0)
    >>> op(np.array([[1.0, 1.0, 3.0, 3.0]]))
    array([[-1., -1.,  1.,  1.]])
    """

    name = "layer_norm"
    normalized_shape: tuple[int, ...]
    input_names = ("x", "weight", "bias")
    statistic_names = ("mean", "rstd")
    required = frozenset({"x"})

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, target: str | None = None
    ) -> None:
        super().__init__(target=target)
        self.normalized_shape = checked_shape(self.name, normalized_shape)
        self.eps = checked_eps(self.name, eps)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"normalized_shape": self.normalized_shape, "eps": self.eps}

    def _flops_per_element(self) -> int:
        return 8  # sum; difference, square, sum; difference, two products, one sum

    def backward_op(self) -> Op | None:
        """`LayerNormBwdOp` of the same shape."""
        return LayerNormBwdOp(self.normalized_shape, target=self.target)

    def __call__(
        self,
        x: Any,
        weight: Any = None,
        bias: Any = None,
        *,
        out: Any = None,
        return_stats: bool = False,
    ) -> Any:
        """Normalize x; see `cunorm.layer_norm`."""
        return self._run((x, weight, bias), out, return_stats)


class RMSNormFwdOp(RowOp):
    r"""Root mean square normalization, :math:`y = x / \sqrt{\overline{x^2} + \epsilon} \cdot w`.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        Trailing shape of x over which the mean of squares is taken.
    eps : float, optional
        Added to the mean of squares, inside the root; by default the machine epsilon of the
        accumulation dtype.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.rms_norm : the same as a function, with every argument explained.
    """

    name = "rms_norm"
    normalized_shape: tuple[int, ...]
    input_names = ("x", "weight")
    statistic_names = ("rstd",)
    required = frozenset({"x"})

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        *,
        target: str | None = None,
    ) -> None:
        super().__init__(target=target)
        self.normalized_shape = checked_shape(self.name, normalized_shape)
        self.eps = None if eps is None else checked_eps(self.name, eps)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"normalized_shape": self.normalized_shape, "eps": self.eps}

    def _flops_per_element(self) -> int:
        return 4  # square, sum; two products

    def backward_op(self) -> Op | None:
        """`RMSNormBwdOp` of the same shape."""
        return RMSNormBwdOp(self.normalized_shape, target=self.target)

    def __call__(
        self, x: Any, weight: Any = None, *, out: Any = None, return_stats: bool = False
    ) -> Any:
        """Normalize x; see `cunorm.rms_norm`."""
        return self._run((x, weight), out, return_stats)


class FusedAddLayerNormFwdOp(_EpsOp, RowOp):
    """``residual_out = x + residual``, then layer normalization of it over the last axis.

    Parameters
    ----------
    eps : float
        Added to the variance, inside the root.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.fused_add_layer_norm : the same as a function, with every argument explained.
    """

    name = "fused_add_layer_norm"
    input_names = ("x", "residual", "weight", "bias")
    output_names = ("y", "residual_out")
    statistic_names = ("mean", "rstd")
    required = frozenset({"x", "residual"})

    def _flops_per_element(self) -> int:
        return 9  # one more than layer norm

    def backward_op(self) -> Op | None:
        """`FusedAddLayerNormBwdOp`, which needs no eps."""
        return FusedAddLayerNormBwdOp(target=self.target)

    def __call__(
        self,
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        *,
        out: Any = None,
        return_stats: bool = False,
    ) -> Any:
        """Add and normalize; see `cunorm.fused_add_layer_norm`."""
        return self._run((x, residual, weight, bias), out, return_stats)


class FusedAddRMSNormFwdOp(_EpsOp, RowOp):
    """``residual_out = x + residual``, then RMS normalization of it over the last axis.

    Parameters
    ----------
    eps : float
        Added to the mean of squares, inside the root.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.fused_add_rms_norm : the same as a function, with every argument explained.
    """

    name = "fused_add_rms_norm"
    input_names = ("x", "residual", "weight")
    output_names = ("y", "residual_out")
    statistic_names = ("rstd",)
    required = frozenset({"x", "residual"})

    def __init__(self, eps: float = 1e-6, *, target: str | None = None) -> None:
        super().__init__(eps, target=target)

    def _flops_per_element(self) -> int:
        return 5  # one more than RMS norm

    def backward_op(self) -> Op | None:
        """`FusedAddRMSNormBwdOp`, which needs no eps."""
        return FusedAddRMSNormBwdOp(target=self.target)

    def __call__(
        self,
        x: Any,
        residual: Any,
        weight: Any,
        *,
        out: Any = None,
        return_stats: bool = False,
    ) -> Any:
        """Add and normalize; see `cunorm.fused_add_rms_norm`."""
        return self._run((x, residual, weight), out, return_stats)


class AdaLayerNormFwdOp(_EpsOp, AdaptiveOp):
    """Adaptive layer normalization, ``y = scale * LN(x) + shift`` over the last axis.

    Parameters
    ----------
    eps : float
        Added to the variance, inside the root.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.ada_layer_norm : the same as a function, with every argument explained.
    """

    name = "ada_layer_norm"
    input_names = ("x", "scale", "shift")
    statistic_names = ("mean", "rstd")
    required = frozenset({"x", "scale", "shift"})

    def _flops_per_element(self) -> int:
        return 8

    def backward_op(self) -> Op | None:
        """`AdaLayerNormBwdOp`, which needs no eps."""
        return AdaLayerNormBwdOp(target=self.target)

    def __call__(
        self, x: Any, scale: Any, shift: Any, *, out: Any = None, return_stats: bool = False
    ) -> Any:
        """Normalize and modulate x; see `cunorm.ada_layer_norm`."""
        return self._run((x, scale, shift), out, return_stats)


class AdaLayerNormZeroFwdOp(_EpsOp, AdaptiveOp):
    """Gated adaptive layer normalization, ``y = gate * (scale * LN(x) + shift)``.

    Parameters
    ----------
    eps : float
        Added to the variance, inside the root.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.ada_layer_norm_zero : the same as a function, with every argument explained.
    """

    name = "ada_layer_norm_zero"
    input_names = ("x", "scale", "shift", "gate")
    statistic_names = ("mean", "rstd")
    required = frozenset({"x", "scale", "shift", "gate"})

    def _flops_per_element(self) -> int:
        return 9

    def backward_op(self) -> Op | None:
        """`AdaLayerNormZeroBwdOp`, which needs no eps."""
        return AdaLayerNormZeroBwdOp(target=self.target)

    def __call__(
        self,
        x: Any,
        scale: Any,
        shift: Any,
        gate: Any,
        *,
        out: Any = None,
        return_stats: bool = False,
    ) -> Any:
        """Normalize, modulate and gate x; see `cunorm.ada_layer_norm_zero`."""
        return self._run((x, scale, shift, gate), out, return_stats)
