"""Definitions of the gradients of the norms whose statistics go over the last axes of a view.

Group and instance norm are such norms too, of ``x`` seen as ``(N, groups, channels, ...)``. Every
one of them ends in ``y = f(xhat, parameters)``, elementwise, with ``xhat = (x - mean) * rstd``.
What an operator adds is the chain rule through its ``f``; the way back through ``xhat`` and both
statistics is the same for all of them:

.. math:: grad\\_x = rstd \\cdot (g - \\overline{g} - \\hat x \\cdot \\overline{g \\hat x})

with ``g`` the gradient of ``xhat`` and means over the row. Without a mean that is taken off, as
in RMS norm, the term in the middle is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cunorm.reference import common
from cunorm.reference.common import Array
from cunorm.reference.group import by_group, spread

# Takes grad_out, xhat and the parameters of one block; gives the gradient of xhat, and for each
# parameter the terms that its gradient is the sum of. Sums of products, all of them: of absolute
# values they give how large the parts of a term are together.
Chain = Callable[..., tuple[Array, tuple[Array, ...]]]


class Block(NamedTuple):
    """Some rows, widened."""

    at: tuple[Any, ...]
    x: Array
    grad_out: Array
    mean: Array  # zero where none is taken off
    rstd: Array
    parameters: list[Array]
    added: Array | None

    @property
    def xhat(self) -> Array:
        return (self.x - self.mean) * self.rstd


class Pass(NamedTuple):
    """A backward pass, its arrays seen so that statistics go over the last ``axes`` axes."""

    x: Array
    grad_out: Array
    mean: Array | None  # shape of the other axes
    rstd: Array
    axes: int
    chain: Chain
    parameters: Sequence[Array]  # what `chain` takes, broadcasting to x
    totals: Sequence[tuple[int, ...]]  # shapes, broadcasting to x, that terms are summed to
    added: Array | None = None  # a gradient that reaches x past the norm

    @property
    def over(self) -> tuple[int, ...]:
        """The axes that statistics go over."""
        return tuple(range(-self.axes, 0))

    @property
    def cols(self) -> int:
        return math.prod(self.x.shape[self.x.ndim - self.axes :])

    def blocks(self) -> Iterator[Block]:
        spread = (*self.rstd.shape, *(1,) * self.axes)
        rstd = self.rstd.reshape(spread)
        mean = np.zeros_like(rstd) if self.mean is None else self.mean.reshape(spread)
        widened = common.blocks_of(self.x, *self.parameters)
        work = common.working_dtype(self.x.dtype)
        for at in common.row_blocks(self.rstd.shape, self.cols):
            whole = (self.x, self.grad_out, mean, rstd)
            # In one memory order, or sums would depend on that of the arrays.
            x, grad_out, centre, scale = (array[at].astype(work, order="C") for array in whole)
            added = None if self.added is None else self.added[at].astype(work)
            yield Block(at, x, grad_out, centre, scale, widened(at), added)

    def zeros(self) -> list[Array]:
        """Sums of nothing, one for each parameter."""
        work = common.working_dtype(self.x.dtype)
        return [np.zeros(shape, work) for shape in self.totals]

    def add(self, totals: Sequence[Array], terms: Sequence[Array], at: tuple[Any, ...]) -> None:
        """Add the terms of the block at ``at`` to arrays of the shapes that they are summed to."""
        for total, term in zip(totals, terms, strict=True):
            # Broadcast, an axis that is summed over has stride 0: its first element stands for all.
            whole = np.broadcast_to(total, self.x.shape)
            steps = whole[at].strides
            over = tuple(i for i, step in enumerate(steps) if step == 0)
            part = np.lib.stride_tricks.as_strided(
                total, self.x.shape, whole.strides, writeable=True
            )[at]
            part = part[tuple(slice(0, 1) if i in over else slice(None) for i in range(part.ndim))]
            part += term.sum(axis=over, keepdims=True)


def through_norm(g: Array, xhat: Array, rstd: Array, over: tuple[int, ...], centred: bool) -> Array:
    """The gradient of x where ``g`` is that of xhat."""
    inner = g - xhat * (g * xhat).mean(axis=over, keepdims=True)
    if centred:
        inner = inner - g.mean(axis=over, keepdims=True)
    result: Array = rstd * inner
    return result


def gradients(this: Pass, grad_x: Array) -> list[Array]:
    """Fill ``grad_x``, seen as ``x`` is, and give the unrounded gradients of the parameters."""
    totals = this.zeros()
    with np.errstate(all="ignore"):
        for block in this.blocks():
            xhat = block.xhat
            g, terms = this.chain(block.grad_out, xhat, *block.parameters)
            result = through_norm(g, xhat, block.rstd, this.over, this.mean is not None)
            if block.added is not None:
                result = result + block.added
            grad_x[block.at] = result.astype(grad_x.dtype)
            this.add(totals, terms, block.at)
    return totals


# ---------------------------------------------------------------------------------------------
# the chain rule through what each operator does to xhat
# ---------------------------------------------------------------------------------------------


def _affine(grad: Array, xhat: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
    """``y = weight * xhat + bias``."""
    return weight * grad, (grad * xhat, grad)


def _scaled(grad: Array, xhat: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
    """``y = weight * xhat``."""
    return weight * grad, (grad * xhat,)


def _gated(
    grad: Array, xhat: Array, scale: Array, shift: Array, gate: Array
) -> tuple[Array, tuple[Array, ...]]:
    """``y = gate * (scale * xhat + shift)``."""
    gated = gate * grad
    return scale * gated, (gated * xhat, gated, grad * (scale * xhat + shift))


# ---------------------------------------------------------------------------------------------
# the passes
# ---------------------------------------------------------------------------------------------


def _row_pass(inputs: dict[str, Any], normalized_shape: int | Sequence[int] | None = None) -> Pass:
    """Layer norm and RMS norm, alone or after an addition; without a weight, it is one."""
    x = inputs["residual_out" if "residual_out" in inputs else "x"]
    axes = 1 if normalized_shape is None else np.size(normalized_shape)
    row = x.shape[x.ndim - axes :]
    weight = np.ones(row, x.dtype) if inputs["weight"] is None else inputs["weight"]
    chain, count = (_affine, 2) if "mean" in inputs else (_scaled, 1)
    return Pass(
        x,
        inputs["grad_out"],
        inputs.get("mean"),
        inputs["rstd"],
        axes,
        chain,
        [weight],
        [row] * count,
        inputs.get("grad_residual_out"),
    )


def _adaptive_pass(inputs: dict[str, Any]) -> Pass:
    scale = inputs["scale"]
    chain: Chain = _affine
    parameters, totals = [scale], [scale.shape] * 2
    if "gate" in inputs:
        chain, parameters = _gated, [inputs[name] for name in ("scale", "shift", "gate")]
        totals = [parameter.shape for parameter in parameters]
    statistics = inputs["mean"], inputs["rstd"]
    return Pass(inputs["x"], inputs["grad_out"], *statistics, 1, chain, parameters, totals)


def _group_pass(
    inputs: dict[str, Any], num_groups: int | None = None, channel_axis: int = 1
) -> Pass:
    """Group norm, and instance norm: a group for each channel. Without a weight, it is one."""
    channels = inputs["x"].shape[channel_axis]
    groups = channels if num_groups is None else num_groups
    x, grad_out = (by_group(inputs[name], groups, channel_axis) for name in ("x", "grad_out"))
    given = inputs["weight"]
    weight: Any = spread(np.ones(channels, x.dtype) if given is None else given, x)
    statistics = inputs["mean"], inputs["rstd"]
    return Pass(x, grad_out, *statistics, x.ndim - 2, _affine, [weight], [weight.shape] * 2)


PASSES: dict[str, Callable[..., Pass]] = {
    "layer_norm_backward": _row_pass,
    "rms_norm_backward": _row_pass,
    "fused_add_layer_norm_backward": _row_pass,
    "fused_add_rms_norm_backward": _row_pass,
    "ada_layer_norm_backward": _adaptive_pass,
    "ada_layer_norm_zero_backward": _adaptive_pass,
    "group_norm_backward": _group_pass,
    "instance_norm_backward": _group_pass,
}
