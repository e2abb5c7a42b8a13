"""What each op that is measured reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operand:
    """One input of an op and how it is drawn.

    Attributes
    ----------
    name : str
        The name under which peers find the array.
    extent : {"full", "row", "channel", "rows", "samples"}
        ``"full"``: the shape of ``x``; ``"row"``: the last axis of ``x``; ``"channel"``: its
        second axis; ``"rows"``: all axes but the last; ``"samples"``: the first axis and the
        groups, or the channels where there are none.
    mean, spread : float
        Of the random values.
    wide : bool
        Whether the array has the accumulation dtype, not that of ``x``.
    """

    name: str
    extent: str
    mean: float
    spread: float
    wide: bool = False


@dataclass(frozen=True)
class Op:
    """The arrays and parameters of one op.

    Attributes
    ----------
    operands : tuple of Operand
        The inputs, in the order of the function.
    outputs : tuple of str
        Those of the shape and dtype of ``x``.
    eps : float, optional
        None where the function takes none.
    sums : tuple of str
        Further outputs, one value per channel, or per column of the rows.
    function : str
        Name in `cunorm`; that of the op where empty.
    options : tuple of (str, value)
        Further arguments of the function.
    """

    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]
    eps: float | None
    sums: tuple[str, ...] = ()
    function: str = ""
    options: tuple[tuple[str, Any], ...] = ()


_X = Operand("x", "full", 0.5, 1.0)
_RESIDUAL = Operand("residual", "full", 0.25, 1.0)
_WEIGHT = Operand("weight", "row", 1.0, 0.25)
_BIAS = Operand("bias", "row", 0.1, 0.25)
_SCALE = Operand("scale", "full", 1.0, 0.25)
_SHIFT = Operand("shift", "full", 0.1, 0.25)
_GATE = Operand("gate", "full", 0.5, 0.25)

ROW_OPS: dict[str, Op] = {
    "rms_norm": Op((_X, _WEIGHT), ("y",), 1e-6),
    "layer_norm": Op((_X, _WEIGHT, _BIAS), ("y",), 1e-5),
    "fused_add_rms_norm": Op((_X, _RESIDUAL, _WEIGHT), ("y", "residual_out"), 1e-6),
    "fused_add_layer_norm": Op((_X, _RESIDUAL, _WEIGHT, _BIAS), ("y", "residual_out"), 1e-5),
    "ada_layer_norm": Op((_X, _SCALE, _SHIFT), ("y",), 1e-5),
    "ada_layer_norm_zero": Op((_X, _SCALE, _SHIFT, _GATE), ("y",), 1e-5),
}

_GRAD_OUT = Operand("grad_out", "full", 0.1, 1.0)
_PER_CHANNEL = (
    Operand("weight", "channel", 1.0, 0.25),
    Operand("bias", "channel", 0.1, 0.25),
)
_RUNNING = (
    Operand("running_mean", "channel", 0.5, 0.1, wide=True),
    Operand("running_var", "channel", 1.0, 0.05, wide=True),
)


def _given(extent: str) -> tuple[Operand, Operand]:
    """Statistics that are passed in."""
    return (
        Operand("mean", extent, 0.5, 0.1, wide=True),
        Operand("rstd", extent, 1.0, 0.05, wide=True),
    )


def _gradients(function: str, operands: tuple[Operand, ...], *sums: str) -> Op:
    """A backward op whose gradients of parameters are sums."""
    of_x = "grad_sum" if function.startswith("fused") else "grad_x"
    return Op((_GRAD_OUT, *operands), (of_x,), None, sums, function=function)


CHANNEL_OPS: dict[str, Op] = {
    "batch_norm_train": Op(
        (_X, *_RUNNING, *_PER_CHANNEL),
        ("y",),
        1e-5,
        function="batch_norm",
        options=(("training", True),),
    ),
    "batch_norm_infer": Op((_X, *_RUNNING, *_PER_CHANNEL), ("y",), 1e-5, function="batch_norm"),
    "batch_norm_bwd": _gradients(
        "batch_norm_backward",
        (_X, _PER_CHANNEL[0], *_given("channel")),
        "grad_weight",
        "grad_bias",
    ),
    "group_norm": Op((_X, *_PER_CHANNEL), ("y",), 1e-5),
    "instance_norm": Op((_X, *_PER_CHANNEL), ("y",), 1e-5),
    "group_norm_bwd": _gradients(
        "group_norm_backward",
        (_X, _PER_CHANNEL[0], *_given("samples")),
        "grad_weight",
        "grad_bias",
    ),
    "instance_norm_bwd": _gradients(
        "instance_norm_backward",
        (_X, _PER_CHANNEL[0], *_given("samples")),
        "grad_weight",
        "grad_bias",
    ),
}

_GRAD_RESIDUAL = Operand("grad_residual_out", "full", 0.1, 1.0)
_SUM = Operand("residual_out", "full", 0.5, 1.0)
_MEAN, _RSTD = _given("rows")

ROW_OPS |= {
    "rms_norm_bwd": _gradients("rms_norm_backward", (_X, _WEIGHT, _RSTD), "grad_weight"),
    "layer_norm_bwd": _gradients(
        "layer_norm_backward", (_X, _WEIGHT, _MEAN, _RSTD), "grad_weight", "grad_bias"
    ),
    "fused_add_rms_norm_bwd": _gradients(
        "fused_add_rms_norm_backward", (_GRAD_RESIDUAL, _SUM, _WEIGHT, _RSTD), "grad_weight"
    ),
    "fused_add_layer_norm_bwd": _gradients(
        "fused_add_layer_norm_backward",
        (_GRAD_RESIDUAL, _SUM, _WEIGHT, _MEAN, _RSTD),
        "grad_weight",
        "grad_bias",
    ),
    "ada_layer_norm_bwd": Op(
        (_GRAD_OUT, _X, _SCALE, _MEAN, _RSTD),
        ("grad_x", "grad_scale", "grad_shift"),
        None,
        function="ada_layer_norm_backward",
    ),
    "ada_layer_norm_zero_bwd": Op(
        (_GRAD_OUT, _X, _SCALE, _SHIFT, _GATE, _MEAN, _RSTD),
        ("grad_x", "grad_scale", "grad_shift", "grad_gate"),
        None,
        function="ada_layer_norm_zero_backward",
    ),
}

OPS: dict[str, Op] = {**ROW_OPS, **CHANNEL_OPS}
