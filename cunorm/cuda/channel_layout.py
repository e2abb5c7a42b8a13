"""Arrays as (N, C, S): which memory orders kernels walk, by shapes and strides alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from cunorm import dtypes
from cunorm.arrays import ArraySpec, dense_strides
from cunorm.call import Call
from cunorm.cuda.layout import collapsed

FIRST, LAST = "first", "last"  # channels first or last in memory


class Sizes(NamedTuple):
    """Samples, channels, and positions of a channel in a sample."""

    n: int
    c: int
    s: int


class Steps(NamedTuple):
    """Strides of an array seen as (N, C, S), in elements."""

    n: int
    c: int
    s: int


def sizes_of(shape: tuple[int, ...], channel_axis: int) -> Sizes:
    channels = shape[channel_axis]
    return Sizes(shape[0], channels, prod(shape) // max(shape[0] * channels, 1))


def steps_of(spec: ArraySpec, channel_axis: int) -> Steps | None:
    """None where the spatial axes are not evenly spaced."""
    axes = list(range(1, len(spec.shape)))
    channel = axes.pop(0 if channel_axis == 1 else -1)
    spatial = collapsed([spec.shape[a] for a in axes], [[spec.strides[a] for a in axes]])
    if len(spatial.shape) > 1:
        return None
    step = spatial.strides[0][0] if spatial.shape else 0
    return Steps(spec.strides[0], spec.strides[channel], step)


def is_first(sizes: Sizes, steps: Steps | None) -> bool:
    """Every sample is one run of neighbours, channel after channel."""
    if steps is None:
        return False
    return (sizes.s == 1 or steps.s == 1) and (sizes.c == 1 or steps.c == sizes.s)


def is_last(sizes: Sizes, steps: Steps | None, whole: bool) -> bool:
    """The channels of a position are neighbours, and positions are evenly spaced.

    `whole`: over all samples, not only within each.
    """
    if steps is None or not (sizes.c == 1 or steps.c == 1):
        return False
    return not whole or sizes.n == 1 or sizes.s == 1 or steps.n == sizes.s * steps.s


def order_of(sizes: Sizes, steps: Steps | None, whole: bool) -> str | None:
    """The order in which an array is walked, or None. One position: rows of channels."""
    if sizes.s == 1 and whole and sizes.c > 1 and is_last(sizes, steps, whole):
        return LAST
    if is_first(sizes, steps):
        return FIRST
    return LAST if is_last(sizes, steps, whole) else None


def fits(order: str, sizes: Sizes, steps: Steps | None, whole: bool) -> bool:
    return is_first(sizes, steps) if order == FIRST else is_last(sizes, steps, whole)


def row_step(sizes: Sizes, steps: Steps) -> int:
    """From one position to the next in an array that is channels last."""
    return steps.n if sizes.s == 1 else steps.s


def even_step(spec: ArraySpec) -> int | None:
    """From one value of a small array to the next, over all axes; None where they differ."""
    values = collapsed(spec.shape, [spec.strides])
    if len(values.shape) > 1:
        return None
    return values.strides[0][0] if values.shape else 1


def smalls(pairs: Iterable[Sequence[ArraySpec | None]], given: Iterable[ArraySpec | None]) -> str:
    """``Smalls`` of channel_brief.cuh, or "" where they are not as it says.

    Of each pair both are there, in one dtype, or neither is; all that are given are contiguous.
    """
    if any(spec is not None and even_step(spec) != 1 for spec in given):
        return ""
    types = []
    for pair in pairs:
        dtypes_of_pair = {None if spec is None else spec.dtype for spec in pair} or {None}
        if len(dtypes_of_pair) > 1:
            return ""
        dtype = dtypes_of_pair.pop()
        types.append("void" if dtype is None else dtypes.FLOATS[dtype].c_name)
    return f"Smalls<{', '.join(types)}>"


def readable(call: Call, whole: bool) -> tuple[list[str], Call, str]:
    """Inputs that must be copied before a kernel can walk them, the call that is left, and the
    memory order in which it is walked. `whole` as in `is_last`.

    Copied are: an x that is neither channels-first nor channels-last in memory, and other
    arrays of its shape in another order than x. Small arrays are read with any stride, those of
    two axes where one stride tells both.
    """
    axis = call.attributes["channel_axis"]
    sizes = sizes_of(call.x.shape, axis)
    inputs, outputs = dict(call.inputs), dict(call.outputs)
    order = order_of(sizes, steps_of(call.x, axis), whole)
    plain = ArraySpec.contiguous(call.x.shape, call.x.dtype)
    if order is not None:
        strides = dense_strides(call.x.shape, call.x.strides)
        dense = ArraySpec(call.x.shape, strides, call.x.dtype)
        if fits(order, sizes, steps_of(dense, axis), whole):
            plain = dense
    found = order or order_of(sizes, steps_of(plain, axis), whole)
    if found is None or not fits(found, sizes, steps_of(plain, axis), whole):
        raise AssertionError("a contiguous array has an order")
    copied = []
    for name, spec in inputs.items():
        if spec is None or name not in ("x", "grad_out"):
            if spec is not None and even_step(spec) is None:
                copied.append(name)
                inputs[name] = ArraySpec.contiguous(spec.shape, spec.dtype)
            continue
        if not fits(found, sizes, steps_of(spec, axis), whole):
            copied.append(name)
            inputs[name] = plain
    for name, spec in outputs.items():
        if name in ("y", "grad_x"):
            if not fits(found, sizes, steps_of(spec, axis), whole):
                outputs[name] = plain
        elif spec.strides != ArraySpec.contiguous(spec.shape, spec.dtype).strides:
            outputs[name] = ArraySpec.contiguous(spec.shape, spec.dtype)
    return copied, replace(call, inputs=inputs, outputs=outputs), found
