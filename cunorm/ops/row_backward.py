"""Op objects of the gradients of the norms over the last axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cunorm.arrays import ArraySpec
from cunorm.ops.checks import checked_shape
from cunorm.ops.gradients import GradientOp
from cunorm.ops.row_base import AdaptiveOp, RowOp


class LayerNormBwdOp(GradientOp, RowOp):
    """Gradients of layer normalization with respect to x, weight and bias.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        Trailing shape of x that was normalized.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.layer_norm_backward : the same as a function, with every argument explained.

    Examples
    --------
    >>> import numpy as np, cunorm
    >>> forward = cunorm.LayerNormFwdOp(2, eps=0.0)
    >>> backward = forward.backward_op()
    >>> backward
    LayerNormBwdOp(normalized_shape=(2,))
    >>> x = np.array([[1.0, 3.0]])
    >>> y, mean, rstd = forward(x, return_stats=True)
    >>> backward(np.array([[5.0, 1.0]]), x, None, mean, rstd)
    (array([[0., 0.]]), None, array([5., 1.]))
    """

    name = "layer_norm_backward"
    normalized_shape: tuple[int, ...]
    input_names = ("grad_out", "x", "weight", "mean", "rstd")
    output_names = ("grad_x", "grad_weight", "grad_bias")
    required = frozenset({"grad_out", "x", "mean", "rstd"})

    def __init__(self, normalized_shape: int | Sequence[int], *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.normalized_shape = checked_shape(self.name, normalized_shape)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"normalized_shape": self.normalized_shape}

    def _flops_per_element(self) -> int:
        # Normalized value two, times weight one, sums along the row three, what they give four;
        # sums over the rows three.
        return 13

    def __call__(
        self, grad_out: Any, x: Any, weight: Any, mean: Any, rstd: Any, *, out: Any = None
    ) -> Any:
        """Take the gradients; see `cunorm.layer_norm_backward`."""
        return self._gradients((grad_out, x, weight, mean, rstd), out)


class RMSNormBwdOp(GradientOp, RowOp):
    """Gradients of root mean square normalization with respect to x and weight.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        Trailing shape of x that was normalized.
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.rms_norm_backward : the same as a function, with every argument explained.
    """

    name = "rms_norm_backward"
    normalized_shape: tuple[int, ...]
    input_names = ("grad_out", "x", "weight", "rstd")
    output_names = ("grad_x", "grad_weight")
    required = frozenset({"grad_out", "x", "rstd"})

    def __init__(self, normalized_shape: int | Sequence[int], *, target: str | None = None) -> None:
        super().__init__(target=target)
        self.normalized_shape = checked_shape(self.name, normalized_shape)

    @property
    def attributes(self) -> dict[str, Any]:
        return {"normalized_shape": self.normalized_shape}

    def _flops_per_element(self) -> int:
        return 9  # one, one, two, three; two

    def __call__(self, grad_out: Any, x: Any, weight: Any, rstd: Any, *, out: Any = None) -> Any:
        """Take the gradients; see `cunorm.rms_norm_backward`."""
        return self._gradients((grad_out, x, weight, rstd), out)


class FusedAddLayerNormBwdOp(GradientOp, RowOp):
    """Gradients of a residual addition and layer normalization of the sum.

    Parameters
    ----------
    target : str, optional
        Which kernels serve the op; by default, decided from where residual_out lives.

    See Also
    --------
    cunorm.fused_add_layer_norm_backward : the same as a function, with every argument explained.
    """

    name = "fused_add_layer_norm_backward"
    input_names = ("grad_out", "grad_residual_out", "residual_out", "weight", "mean", "rstd")
    output_names = ("grad_sum", "grad_weight", "grad_bias")
    required = frozenset({"grad_out", "residual_out", "mean", "rstd"})
    x_name = "residual_out"

    def _flops_per_element(self) -> int:
        return 14  # one more than layer norm

    def __call__(
        self,
        grad_out: Any,
        grad_residual_out: Any,
        residual_out: Any,
        weight: Any,
        mean: Any,
        rstd: Any,
        *,
        out: Any = None,
    ) -> Any:
        """Take the gradients; see `cunorm.fused_add_layer_norm_backward`."""
        inputs = (grad_out, grad_residual_out, residual_out, weight, mean, rstd)
        return self._gradients(inputs, out)


class FusedAddRMSNormBwdOp(GradientOp, RowOp):
    """Gradients of a residual addition and root mean square normalization of the sum.

    Parameters
    ----------
    target : str, optional
        Which kernels serve the op; by default, decided from where residual_out lives.

    See Also
    --------
    cunorm.fused_add_rms_norm_backward : the same as a function, with every argument explained.
    """

    name = "fused_add_rms_norm_backward"
    input_names = ("grad_out", "grad_residual_out", "residual_out", "weight", "rstd")
    output_names = ("grad_sum", "grad_weight")
    required = frozenset({"grad_out", "residual_out", "rstd"})
    x_name = "residual_out"

    def _flops_per_element(self) -> int:
        return 10  # one more than RMS norm

    def __call__(
        self,
        grad_out: Any,
        grad_residual_out: Any,
        residual_out: Any,
        weight: Any,
        rstd: Any,
        *,
        out: Any = None,
    ) -> Any:
        """Take the gradients; see `cunorm.fused_add_rms_norm_backward`."""
        return self._gradients((grad_out, grad_residual_out, residual_out, weight, rstd), out)


class _AdaptiveBwdOp(AdaptiveOp):
    """Gradients of modulating arrays are summed to the shapes that these were passed with."""

    def _output(self, name: str, inputs: Mapping[str, ArraySpec | None], axis: int | None) -> Any:
        if name == "grad_x":
            return super()._output(name, inputs, axis)
        of = name.removeprefix("grad_")
        modulation: Any = inputs[of if of in inputs else "scale"]
        return ArraySpec.contiguous(modulation.shape, modulation.dtype)


class AdaLayerNormBwdOp(_AdaptiveBwdOp):
    """Gradients of adaptive layer normalization with respect to x, scale and shift.

    Parameters
    ----------
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.ada_layer_norm_backward : the same as a function, with every argument explained.
    """

    name = "ada_layer_norm_backward"
    input_names = ("grad_out", "x", "scale", "mean", "rstd")
    output_names = ("grad_x", "grad_scale", "grad_shift")
    required = frozenset(input_names)

    def _flops_per_element(self) -> int:
        return 13  # as layer norm

    def __call__(
        self, grad_out: Any, x: Any, scale: Any, mean: Any, rstd: Any, *, out: Any = None
    ) -> Any:
        """Take the gradients; see `cunorm.ada_layer_norm_backward`."""
        return self._run((grad_out, x, scale, mean, rstd), out, False)


class AdaLayerNormZeroBwdOp(_AdaptiveBwdOp):
    """Gradients of gated adaptive layer normalization: of x, scale, shift and gate.

    Parameters
    ----------
    target : str, optional
        Which kernels serve the op; by default, decided from where x lives.

    See Also
    --------
    cunorm.ada_layer_norm_zero_backward : the same as a function, with every argument explained.
    """

    name = "ada_layer_norm_zero_backward"
    input_names = ("grad_out", "x", "scale", "shift", "gate", "mean", "rstd")
    output_names = ("grad_x", "grad_scale", "grad_shift", "grad_gate")
    required = frozenset(input_names)

    def _flops_per_element(self) -> int:
        return 18  # times gate one more; scale and shift again, times grad_out, their sum four

    def __call__(
        self,
        grad_out: Any,
        x: Any,
        scale: Any,
        shift: Any,
        gate: Any,
        mean: Any,
        rstd: Any,
        *,
        out: Any = None,
    ) -> Any:
        """Take the gradients; see `cunorm.ada_layer_norm_zero_backward`."""
        return self._run((grad_out, x, scale, shift, gate, mean, rstd), out, False)
