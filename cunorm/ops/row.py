"""Op objects that normalize rows: layer norm, RMS norm, their fused and adaptive forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cunorm import errors
from cunorm.arrays import ArraySpec
from cunorm.ops.base import Op
from cunorm.ops.checks import checked_eps, checked_shape


class _RowOp(Op):
    """A norm over the last axes of x; statistics are one number per row."""

    normalized_shape: tuple[int, ...] | None = None  # None: the last axis, whatever its length
    eps: float | None

    @property
    def attributes(self) -> dict[str, Any]:
        return {"eps": self.eps}

    def _row_shape(self, x: ArraySpec) -> tuple[int, ...]:
        """The trailing shape of x that is normalized."""
        shape = self.normalized_shape
        if shape is None:
            if not x.shape:
                raise errors.wrong_value(self.name, "x", "an array of one or more axes", x.shape)
            return x.shape[-1:]
        if len(shape) > len(x.shape) or x.shape[len(x.shape) - len(shape) :] != shape:
            raise errors.wrong_value(
                self.name,
                "normalized_shape",
                f"the trailing shape of x, which has shape {x.shape}",
                shape,
            )
        return shape

    def _expected_shape(self, argument: str, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        row = self._row_shape(x)
        return x.shape if argument in ("x", "residual") else row

    def _statistic_shape(self, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        return x.shape[: len(x.shape) - len(self._row_shape(x))]


class LayerNormFwdOp(_RowOp):
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


class RMSNormFwdOp(_RowOp):
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

    def __call__(
        self, x: Any, weight: Any = None, *, out: Any = None, return_stats: bool = False
    ) -> Any:
        """Normalize x; see `cunorm.rms_norm`."""
        return self._run((x, weight), out, return_stats)


class FusedAddLayerNormFwdOp(_RowOp):
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

    def __init__(self, eps: float = 1e-5, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.eps = checked_eps(self.name, eps)

    def _flops_per_element(self) -> int:
        return 9  # one more than layer norm

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


class FusedAddRMSNormFwdOp(_RowOp):
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
        super().__init__(target=target)
        self.eps = checked_eps(self.name, eps)

    def _flops_per_element(self) -> int:
        return 5  # one more than RMS norm

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


class _AdaptiveOp(_RowOp):
    """Layer norm modulated by arrays that broadcast to x along its leading axes."""

    def __init__(self, eps: float = 1e-5, *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.eps = checked_eps(self.name, eps)

    def _expected_shape(self, argument: str, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        self._row_shape(x)
        return x.shape

    def _shape_fits(self, argument: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        if argument == "x":
            return shape == expected
        tail = expected[len(expected) - len(shape) :]
        return (
            0 < len(shape) <= len(expected)
            and shape[-1] == expected[-1]
            and all(n in (1, m) for n, m in zip(shape, tail, strict=True))
        )

    def _shape_wording(self, argument: str, expected: tuple[int, ...]) -> str:
        if argument == "x":
            return str(expected)
        return f"{expected} or one that broadcasts to it along leading axes"


class AdaLayerNormFwdOp(_AdaptiveOp):
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

    def __call__(
        self, x: Any, scale: Any, shift: Any, *, out: Any = None, return_stats: bool = False
    ) -> Any:
        """Normalize and modulate x; see `cunorm.ada_layer_norm`."""
        return self._run((x, scale, shift), out, return_stats)


class AdaLayerNormZeroFwdOp(_AdaptiveOp):
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
