"""What the self-check runs: for each op its variants, shapes and inputs, and what it looks at."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cunorm import dtypes, ops, precision, reference

OPS = (*reference.FORWARD, *reference.BACKWARD)
CLASSES: dict[str, Any] = {
    kind.name: kind for kind in vars(ops).values() if hasattr(kind, "input_names")
}
BLOCK = 1 << 20  # elements made on the host; larger arrays repeat them
_GROUPS = 8
# An offset that a careless variance would not survive, and what multiplies is about one.
_CENTRES = {"x": 10.0, "mean": 10.0, "running_mean": 10.0}
_CENTRES |= {"weight": 1.0, "scale": 1.0, "gate": 1.0, "rstd": 0.5, "running_var": 0.5}
_POSITIVE = ("rstd", "running_var")


class Variant(NamedTuple):
    """An op with some of its parameters."""

    op: str
    options: dict[str, Any] = {}
    note: str = ""


class Shape(NamedTuple):
    """The shape of x, and where the channels are for ops that have any."""

    sizes: tuple[int, ...]
    channel_axis: int | None = None


_VARIANTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "batch_norm": [({"training": True}, "training"), ({"training": False}, "inference")],
    "batch_norm_backward": [({"training": True}, "training"), ({"training": False}, "frozen")],
    "group_norm": [({"num_groups": _GROUPS}, "")],
    "instance_norm": [({}, ""), ({"use_input_stats": False}, "running statistics")],
}
_ROW_SHAPES = (Shape((130, 33)), Shape((3, 12_289)))
_CHANNEL_SHAPES = (Shape((6, 24, 7, 9), 1), Shape((5, 7, 13, 24), -1))
_LARGE_ROW, _LARGE_SAMPLE = (4096,), (64, 56, 56)


def variants(op: str) -> list[Variant]:
    return [Variant(op, *rest) for rest in _VARIANTS.get(op, [({}, "")])]


def has_channels(op: str) -> bool:
    return op not in reference.row.FORWARD


def shapes(op: str, dtype: str, large_bytes: int, quick: bool) -> list[Shape]:
    """Two odd shapes and one of so many bytes; the first alone for a quick check."""
    small = _CHANNEL_SHAPES if has_channels(op) else _ROW_SHAPES
    if quick:
        return [small[0]]
    item = _LARGE_SAMPLE if has_channels(op) else _LARGE_ROW
    count = large_bytes // (prod(item) * dtypes.FLOATS[dtype].itemsize)
    return [*small, Shape((count, *item), small[0].channel_axis)]


def make_op(variant: Variant, shape: Shape, target: str | None) -> Any:
    options = dict(variant.options)
    if variant.op in ("layer_norm", "rms_norm"):
        options["normalized_shape"] = shape.sizes[-1]
    return CLASSES[variant.op](**options, target=target)


def make_inputs(op: str, shape: Shape, dtype: str) -> dict[str, Any]:
    """Host inputs by name."""
    kind = dtypes.numpy_dtype(dtype)
    wide = dtypes.numpy_dtype(dtypes.accumulation(dtype))
    generator = np.random.default_rng(list(op.encode()))
    sizes, axis = shape
    inputs = {}
    for name in CLASSES[op].input_names:
        like_x = name in CLASSES[op].like_x
        values = generator.standard_normal(sizes if like_x else sizes[-1 if axis is None else axis])
        values = np.abs(values) if name in _POSITIVE else values
        centre = _CENTRES.get(name, 0.0)
        inputs[name] = (centre + values).astype(wide if name in ("mean", "rstd") else kind)
    return inputs


def judge(
    variant: Variant,
    shape: Shape,
    results: Sequence[Any],
    inputs: dict[str, Any],
    updated: dict[str, Any],
) -> dict[str, precision.Deviation]:
    """Errors of what an op returned for host inputs, and of the running statistics after it."""
    options = dict(variant.options)
    if variant.op in ("layer_norm", "rms_norm"):
        options["normalized_shape"] = shape.sizes[-1]
    if shape.channel_axis is not None:
        options["channel_axis"] = shape.channel_axis
    if variant.op in reference.BACKWARD:
        return precision.backward_deviation(variant.op, results, inputs, **options)
    if updated:
        options["updated"] = updated
    return precision.forward_deviation(variant.op, results, inputs, **options)


# ---------------------------------------------------------------------------------------------
# parts of large arrays
# ---------------------------------------------------------------------------------------------


def by_channel(op: str) -> bool:
    """Whether channels are what can be judged one by one; else rows or samples."""
    return has_channels(op) and op != "group_norm"


def picked(op: str, shape: Shape, block: int) -> list[int]:
    """Which rows, samples or channels of a large array are held against the reference."""
    if by_channel(op):
        channels = shape.sizes[shape.channel_axis or 1]
        return sorted({0, 1, channels // 2, channels - 1})
    return checked_rows(shape.sizes[0], block)


def checked_rows(rows: int, block: int) -> list[int]:
    """Rows of a large array that are held against the reference: its edges and some between."""
    chosen = {0, 1, block - 1, block, rows // 2, rows - 2, rows - 1}
    return sorted(row for row in chosen if 0 <= row < rows)


def part(op: str, name: str, array: Any, index: int, axis: int | None) -> Any:
    """What belongs to one row, sample or channel, with that axis kept; None for what is shared."""
    one = slice(index, index + 1)
    per_item = name in CLASSES[op].like_x or name in ("y", "residual_out", "grad_x")
    if not by_channel(op):
        return array[one] if per_item or name in ("mean", "rstd") else None
    if per_item:
        return array[:, one] if axis == 1 else array[..., one]
    return array[..., one]


def joined(op: str, name: str, parts: Sequence[Any], axis: int | None) -> Any:
    """Host parts put together again."""
    if not by_channel(op):
        return np.concatenate(parts)
    last = axis == -1 or parts[0].ndim == 1
    return np.concatenate(parts, axis=-1 if last else 1)
