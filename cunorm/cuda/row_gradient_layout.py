"""Which rows share the parameters whose gradients are summed, and where all rows lie.

Rows are walked group by group: a group has in common every row of a parameter whose gradient is
summed over rows. Leading axes that such a parameter is broadcast over, all of them, are inside a
group; the others number the groups.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cunorm.arrays import ArraySpec
from cunorm.cuda.layout import LEADING, collapsed, leading_strides


@dataclass(frozen=True)
class Walk:
    """Leading axes in the order in which rows are walked.

    `strides`: per array; None where there is none.
    """

    kept: tuple[int, ...]  # sizes of axes that number the groups, merged where arrays allow
    reduced: tuple[int, ...]  # and of those inside a group
    strides: tuple[tuple[int, ...] | None, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.kept + self.reduced

    @property
    def groups(self) -> int:
        return prod(self.kept)

    @property
    def members(self) -> int:
        return prod(self.reduced)


def has_every_row(spec: ArraySpec, x: ArraySpec) -> bool:
    """Whether an array has a row for every row of x, and so has its gradient."""
    return spec.shape == x.shape


def keeps(spec: ArraySpec, lead: Sequence[int], dims: int) -> tuple[bool, ...]:
    """Leading axes along which the array differs; `dims` axes make up a row."""
    own = spec.shape[: len(spec.shape) - dims]
    padded = (1,) * (len(lead) - len(own)) + own
    return tuple(n > 1 and m > 1 for n, m in zip(lead, padded, strict=True))


def axis_order(
    lead: Sequence[int], summed: Sequence[ArraySpec], dims: int
) -> tuple[list[int], list[int]]:
    """Leading axes that number the groups, and those inside a group.

    Of the first, those that the same gradients differ along are neighbours: they merge.
    """
    masks = [keeps(spec, lead, dims) for spec in summed]
    kinds = [tuple(mask[axis] for mask in masks) for axis in range(len(lead))]
    kept = [axis for axis in range(len(lead)) if lead[axis] > 1 and any(kinds[axis])]
    kept.sort(key=lambda axis: kinds[axis], reverse=True)
    return kept, [axis for axis in range(len(lead)) if axis not in kept]


def walk_of(
    shape: Sequence[int],
    arrays: Sequence[tuple[ArraySpec, int] | None],
    summed: Sequence[ArraySpec],
    dims: int,
) -> Walk:
    """How rows are walked.

    Parameters
    ----------
    shape : sequence of int
        The shape of x, whose last `dims` axes make up a row.
    arrays : sequence
        Every array, and how many of its last axes make up a row: none of those of statistics.
    summed : sequence of ArraySpec
        Gradients that are summed over rows.
    """
    lead = tuple(shape[: len(shape) - dims])
    present = [a for a in arrays if a is not None]
    strides = [leading_strides(s, (*lead, *shape[len(shape) - own :]), own) for s, own in present]
    parts = []
    for axes in axis_order(lead, summed, dims):
        parts.append(
            collapsed([lead[a] for a in axes], [[steps[a] for a in axes] for steps in strides])
        )
    joined = iter([a + b for a, b in zip(parts[0].strides, parts[1].strides, strict=True)])
    return Walk(
        parts[0].shape, parts[1].shape, tuple(None if a is None else next(joined) for a in arrays)
    )


def packed_steps(walk: Walk) -> bytes:
    """RowGradientArgs from `step` to `more`."""
    sizes = walk.sizes
    strides = [(0,) * len(sizes) if s is None else s for s in walk.strides]
    if len(sizes) < 2:  # one step says where a row is
        return struct.pack("12q2q24q", *[s[0] if s else 0 for s in strides], *[0] * 26)
    padding = LEADING - len(sizes)
    _, middle, inner = (1,) * padding + sizes
    padded = [(0,) * padding + tuple(s) for s in strides]
    more = [step for s in padded for step in s[1:]]
    return struct.pack("12q2q24q", *[s[0] for s in padded], middle, inner, *more)


def merge_map(walk: Walk, strides: Sequence[int]) -> tuple[bytes, int]:
    """MergeMap of a gradient with these strides, and how many rows it has.

    Of a gradient that is not summed (no strides) nothing is read.
    """
    kept = walk.kept
    own = [i for i in range(len(kept)) if strides[i] != 0]
    rest = [i for i in range(len(kept)) if strides[i] == 0]
    group_steps = [prod(kept[i + 1 :]) for i in range(len(kept))]

    def three(values: Sequence[int], filling: int) -> list[int]:
        return [filling] * (LEADING - len(values)) + list(values)

    sizes = [three([kept[i] for i in axes], 1) for axes in (own, rest)]
    steps = [three([group_steps[i] for i in axes], 0) for axes in (own, rest)]
    out = three([strides[i] for i in own], 0)
    packed = struct.pack(
        "6I9q",
        *(prod(sizes[1]), 0),
        *(n for of in sizes for n in of[1:]),
        *(n for of in steps for n in of),
        *out,
    )
    return packed, prod(sizes[0])


NO_MERGE = bytes(struct.calcsize("6I9q"))
