"""Bounds of gradients where statistics go over the last axes: row family, group, instance norm.

``grad_x = rstd * (g - c1 - xhat * c2)`` with the means ``c1`` of ``g`` and ``c2`` of ``g * xhat``
over the n elements of a row. As in a forward pass, arithmetic may add ``4 * eps`` of each term:
``g``, ``c1`` and ``xhat * c2`` are products of two to five numbers, each rounded by at most
``eps / 2``, and so are the difference and its product with ``rstd``. What is more, ``c1`` and
``c2`` are sums over n. In those, errors add up as those of parameters do, to
``8 * eps * sqrt(n) * rms(term)``; divided by n, that reaches ``grad_x`` as ``8 * eps * rms(g) /
sqrt(n)`` from ``c1``, and as ``|xhat|`` times the same of ``g * xhat`` from ``c2``. A gradient
that is added at the end is one more term.

A gradient of a parameter is the sum of its terms over the rows. A term that is a sum itself, as
``grad_out * (scale * xhat + shift)`` is, counts with the sizes of its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cunorm import reference
from cunorm.precision.units import (
    FLUSHED,
    SMALLEST_NORMAL,
    Array,
    Deviation,
    Expected,
    accumulation,
    deviation,
    is_subnormal,
    machine_eps,
    name_of,
    ulp,
)
from cunorm.reference.gradients import PASSES, Block, Pass, through_norm

_OUTPUTS: dict[str, tuple[str, ...]] = {
    op: ("grad_sum" if op.startswith("fused") else "grad_x", "grad_weight", "grad_bias")
    for op in PASSES
}
_OUTPUTS |= {op: names[:2] for op, names in _OUTPUTS.items() if "rms" in op}
_OUTPUTS["ada_layer_norm_backward"] = ("grad_x", "grad_scale", "grad_shift")
_OUTPUTS["ada_layer_norm_zero_backward"] = ("grad_x", "grad_scale", "grad_shift", "grad_gate")


class _Part(NamedTuple):
    """What some rows say: the gradient of x, its error, and what goes into the sums."""

    value: Array
    error: Array  # beyond one unit in the last place
    terms: tuple[Array, ...]
    sizes: tuple[Array, ...]
    lost: tuple[Array, ...]  # what flushed subnormals may take from the terms


def _part(this: Pass, block: Block) -> _Part:
    unit = machine_eps(accumulation(this.x.dtype))
    over, xhat, rstd = this.over, block.xhat, np.abs(block.rstd)
    g, terms = this.chain(block.grad_out, xhat, *block.parameters)
    sizes_of = [np.abs(parameter) for parameter in block.parameters]
    size_g, sizes = this.chain(np.abs(block.grad_out), np.abs(xhat), *sizes_of)

    def mean_and_error(values: Array) -> tuple[Array, Array]:
        length = np.sqrt(np.square(values).sum(axis=over, keepdims=True))
        return np.abs(values.mean(axis=over, keepdims=True)), 8 * unit * length / this.cols

    value = through_norm(g, xhat, block.rstd, over, this.mean is not None)
    c2, error_c2 = mean_and_error(g * xhat)
    inner, error = size_g + np.abs(xhat) * c2, np.abs(xhat) * error_c2
    if this.mean is not None:
        c1, error_c1 = mean_and_error(g)
        inner, error = inner + c1, error + error_c1
    error = 4 * unit * inner + error
    lost = tuple(np.zeros_like(size) for size in sizes)
    flushes = name_of(this.x.dtype) in FLUSHED
    if flushes:
        lost_x, lost = _flushed(this, block, size_g, sizes, c2)
        error = error + lost_x
    error = rstd * error
    if block.added is not None:
        value, error = value + block.added, error + 4 * unit * np.abs(block.added)
        error = error + np.where(flushes & is_subnormal(block.added), SMALLEST_NORMAL, 0)
    return _Part(value, error, terms, sizes, lost)


def _flushed(
    this: Pass, block: Block, size_g: Array, sizes: Sequence[Array], c2: Array
) -> tuple[Array, tuple[Array, ...]]:
    """What flushing takes from the gradient of xhat, and from each term of a sum.

    Inputs that are subnormal count as zero, and so do products that are.
    """
    parameters = [np.abs(parameter) for parameter in block.parameters]
    xhat, grad = np.abs(block.xhat), np.abs(block.grad_out)
    of_grad = np.where(is_subnormal(block.grad_out), SMALLEST_NORMAL, 0)
    of_xhat = np.where(is_subnormal(block.x), SMALLEST_NORMAL * block.rstd, 0)

    # Both are linear in grad_out, and but for what has no xhat in it, in xhat.
    lost_g, lost = this.chain(of_grad, xhat, *parameters)
    through_x = this.chain(grad, of_xhat, *parameters)[1]
    without_x = this.chain(grad, np.zeros_like(xhat), *parameters)[1]
    lost = tuple(
        a + (b - c) + np.where(size < SMALLEST_NORMAL, size, 0)
        for a, b, c, size in zip(lost, through_x, without_x, sizes, strict=True)
    )
    lost_g = lost_g + SMALLEST_NORMAL
    lost_c2 = (lost_g * xhat + size_g * of_xhat + SMALLEST_NORMAL).mean(this.over, keepdims=True)
    lost_c1 = lost_g.mean(axis=this.over, keepdims=True)
    return lost_g + lost_c1 + xhat * lost_c2 + of_xhat * c2 + SMALLEST_NORMAL, lost


class _Sums:
    """The gradients of parameters, and how far from them float arithmetic may end."""

    def __init__(self, this: Pass) -> None:
        self.this = this
        self.values, self.squares, self.lost = this.zeros(), this.zeros(), this.zeros()

    def add(self, part: _Part, at: tuple[Any, ...]) -> None:
        self.this.add(self.values, part.terms, at)
        self.this.add(self.squares, [np.square(size) for size in part.sizes], at)
        self.this.add(self.lost, part.lost, at)

    def expected(self, names: Sequence[str], stored: Mapping[str, Any]) -> dict[str, Expected]:
        """By name; each array has been stored in a dtype of its own."""
        dtype = self.this.x.dtype
        unit = machine_eps(accumulation(dtype))
        floor = SMALLEST_NORMAL if name_of(dtype) in FLUSHED else 0
        found = {}
        for i, name in enumerate(names):
            value = self.values[i]
            # sqrt(count) * rms(term) is the length of the vector of terms.
            error = 8 * unit * np.sqrt(self.squares[i]) + self.lost[i] + floor
            found[name] = Expected(value, ulp(value, stored[name]) + error)
        return found


def _parts(this: Pass, sums: _Sums) -> Iterator[tuple[tuple[Any, ...], _Part]]:
    """All rows, block by block; the sums are those over all of them at the end."""
    for block in this.blocks():
        with np.errstate(all="ignore"):
            part = _part(this, block)
            sums.add(part, block.at)
        yield block.at, part


def backward_bound(op: str, inputs: Mapping[str, Any], **attributes: Any) -> dict[str, Expected]:
    """Expected gradients and the error allowed; see `cunorm.precision.backward_bound`."""
    this = PASSES[op](dict(inputs), **attributes)
    of_x, *of_parameters = _OUTPUTS[op]
    work = reference.working_dtype(this.x.dtype)
    x = inputs["residual_out" if "residual_out" in inputs else "x"]
    whole = Expected(np.empty_like(x, work, subok=False), np.empty_like(x, work, subok=False))
    view = [_seen(op, array, attributes) for array in whole]
    sums = _Sums(this)
    for at, part in _parts(this, sums):
        with np.errstate(all="ignore"):
            view[0][at] = part.value
            view[1][at] = ulp(part.value, this.x.dtype) + part.error
    with np.errstate(all="ignore"):
        totals = sums.expected(of_parameters, _stored(of_parameters, inputs, this.x.dtype))
    found = {of_x: whole}
    for name, one in totals.items():
        if name != "grad_weight" or inputs["weight"] is not None:
            found[name] = Expected(*(_flat(op, array) for array in one))
    return found


def backward_deviation(
    op: str, outputs: Sequence[Array | None], inputs: Mapping[str, Any], **attributes: Any
) -> dict[str, Deviation]:
    """Errors of computed gradients; see `cunorm.precision.backward_deviation`."""
    this = PASSES[op](dict(inputs), **attributes)
    of_x, *of_parameters = _OUTPUTS[op]
    named = dict(zip(_OUTPUTS[op], outputs, strict=True))
    found = {name: array for name, array in named.items() if array is not None}
    x = inputs["residual_out" if "residual_out" in inputs else "x"]
    shapes = {of_x: x.shape}
    for name, total in zip(of_parameters, this.zeros(), strict=True):
        shapes[name] = _flat(op, total).shape
    for name, array in found.items():
        if array.shape != shapes[name]:
            raise ValueError(f"{op}: {name} must have shape {shapes[name]}, got {array.shape}")

    sums = _Sums(this)
    worst = dict.fromkeys(found, Deviation(0.0, 0.0))
    actual = _seen(op, found[of_x], attributes) if of_x in found else None
    for at, part in _parts(this, sums):
        if actual is not None:
            with np.errstate(all="ignore"):
                bound = ulp(part.value, this.x.dtype) + part.error
            found_here = deviation(
                np.asarray(actual[at]), Expected(part.value, bound), this.x.dtype
            )
            worst[of_x] = Deviation(*map(max, worst[of_x], found_here))
    stored = {name: array.dtype for name, array in found.items()}
    names = [name for name in of_parameters if name in found]
    with np.errstate(all="ignore"):
        totals = sums.expected(of_parameters, dict.fromkeys(of_parameters, "float32") | stored)
    for name in names:
        one = Expected(*(_flat(op, array) for array in totals[name]))
        worst[name] = deviation(np.asarray(found[name]), one, stored[name])
    return worst


def _stored(names: Sequence[str], inputs: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """The dtypes that an operator gives gradients of parameters in."""
    found = {}
    for name in names:
        parameter = inputs.get(name.removeprefix("grad_"))
        if parameter is None:  # as the operators have it: a bias or a shift that is not passed
            parameter = inputs.get("weight", inputs.get("scale"))
        found[name] = accumulation(dtype) if parameter is None else parameter.dtype
    return found


def _seen(op: str, array: Array, attributes: Mapping[str, Any]) -> Array:
    """An array of the shape of x as the pass sees x."""
    if op not in reference.group_backward.BACKWARD:
        return array
    axis = attributes.get("channel_axis", 1)
    groups = attributes.get("num_groups", array.shape[axis])
    return reference.group.by_group(array, groups, axis)


def _flat(op: str, total: Array) -> Array:
    """A sum in the shape that the operator gives it in."""
    return total.ravel() if op in reference.group_backward.BACKWARD else total
