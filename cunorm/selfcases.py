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
_STATISTICS = ("mean", "rstd")
# Ops that take statistics of each row or sample, not of each channel.
_STATISTICS_OF_ITEMS = (*reference.row_backward.BACKWARD, *reference.group_backward.BACKWARD)


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
    "group_norm_backward": [({"num_groups": _GROUPS}, "")],
    "instance_norm": [({}, ""), ({"use_input_stats": False}, "running statistics")],
}
_ROW_OPS = (*reference.row.FORWARD, *reference.row_backward.BACKWARD)
_TAKE_SHAPE = ("layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward")
_ROW_SHAPES = (Shape((130, 33)), Shape((3, 12_289)))
_CHANNEL_SHAPES = (Shape((6, 24, 7, 9), 1), Shape((5, 7, 13, 24), -1))
_LARGE_ROW, _LARGE_SAMPLE = (4096,), (64, 56, 56)


def variants(op: str) -> list[Variant]:
    return [Variant(op, *rest) for rest in _VARIANTS.get(op, [({}, "")])]


def has_channels(op: str) -> bool:
    return op not in _ROW_OPS


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
    if variant.op in _TAKE_SHAPE:
        options["normalized_shape"] = shape.sizes[-1]
    return CLASSES[variant.op](**options, target=target)


def repeats(op: str, name: str) -> bool:
    """Whether an input has something for each row or sample, or is shared by all of them."""
    if name in _STATISTICS:
        return op in _STATISTICS_OF_ITEMS
    return name in CLASSES[op].like_x


def make_inputs(op: str, shape: Shape, dtype: str) -> dict[str, Any]:
    """Host inputs by name."""
    kind = dtypes.numpy_dtype(dtype)
    wide = dtypes.numpy_dtype(dtypes.accumulation(dtype))
    generator = np.random.default_rng(list(op.encode()))
    sizes, axis = shape
    inputs = {}
    for name in CLASSES[op].input_names:
        size = sizes if name in CLASSES[op].like_x else (sizes[-1 if axis is None else axis],)
        if name in _STATISTICS and op in _STATISTICS_OF_ITEMS:
            size = sizes[:-1] if axis is None else (sizes[0], *size)
            size = (sizes[0], _GROUPS) if op == "group_norm_backward" else size
        values = generator.standard_normal(size)
        values = np.abs(values) if name in _POSITIVE else values
        centre = _CENTRES.get(name, 0.0)
        inputs[name] = (centre + values).astype(wide if name in _STATISTICS else kind)
    return inputs


def judge(
    variant: Variant,
    shape: Shape,
    results: dict[str, Any],
    inputs: dict[str, Any],
    updated: dict[str, Any],
) -> dict[str, precision.Deviation]:
    """Errors of what an op returned for host inputs, and of the running statistics after it.

    Gradients may be some of them.
    """
    options, x = dict(variant.options), inputs[CLASSES[variant.op].x_name]
    if variant.op in _TAKE_SHAPE:
        options["normalized_shape"] = x.shape[-1]
    if shape.channel_axis is not None:
        options["channel_axis"] = shape.channel_axis
    if variant.op == "group_norm_backward":
        options["num_groups"] = inputs["mean"].shape[1]
    if variant.op in reference.BACKWARD:
        some = [results.get(name) for name in CLASSES[variant.op].output_names]
        return precision.backward_deviation(variant.op, some, inputs, **options)
    if updated:
        options["updated"] = updated
    return precision.forward_deviation(variant.op, list(results.values()), inputs, **options)


# ---------------------------------------------------------------------------------------------
# parts of large arrays
# ---------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """Some of what can be judged by itself.

    Items (rows or samples), or all items of some channels, groups of channels or columns.
    """

    of: str
    indices: list[int]
    results: tuple[str, ...] | None = None  # those that it says something of; None: all


def cuts(op: str, shape: Shape, block: int) -> list[Cut]:
    """The parts of a large array that are held against the reference."""
    items = checked_rows(shape.sizes[0], block)
    if op in reference.row_backward.BACKWARD:  # sums go over the rows, the rest along them
        of_x, *sums = CLASSES[op].output_names
        columns = _ends(shape.sizes[-1])
        return [Cut("items", items, (of_x,)), Cut("columns", columns, tuple(sums))]
    if op == "group_norm_backward":
        return [Cut("groups", [0, _GROUPS - 1])]
    if has_channels(op) and op != "group_norm":
        return [Cut("channels", _ends(shape.sizes[shape.channel_axis or 1]))]
    return [Cut("items", items)]


def _ends(count: int) -> list[int]:
    return sorted({0, 1, count // 2, count - 1})


def checked_rows(rows: int, block: int) -> list[int]:
    """Rows of a large array that are held against the reference: its edges and some between."""
    chosen = {0, 1, block - 1, block, rows // 2, rows - 2, rows - 1}
    return sorted(row for row in chosen if 0 <= row < rows)


def part(op: str, cut: Cut, name: str, array: Any, index: int, axis: int | None) -> Any:
    """What belongs to one of a cut, with that axis kept; None for what is shared."""
    one = slice(index, index + 1)
    whole = name in CLASSES[op].like_x or name in ("y", "residual_out", "grad_x", "grad_sum")
    if cut.of == "items":
        return array[one] if whole or name in _STATISTICS else None
    if name in _STATISTICS and op in _STATISTICS_OF_ITEMS:
        return None if cut.of == "columns" else array[:, one]
    if cut.of == "groups":
        width = array.shape[axis if whole and axis is not None else -1] // _GROUPS
        one = slice(index * width, (index + 1) * width)
    return array[:, one] if whole and axis == 1 else array[..., one]


def joined(cut: Cut, parts: Sequence[Any], axis: int | None) -> Any:
    """Host parts put together again."""
    if cut.of == "items":
        return np.concatenate(parts)
    last = axis != 1 or parts[0].ndim == 1
    return np.concatenate(parts, axis=-1 if last else 1)
