"""Where the rows of arrays lie: pure functions of shapes and strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cunorm.arrays import ArraySpec
from cunorm.dtypes import FLOATS

_LARGEST_FLOAT = 3.4028234663852886e38  # an eps beyond it is one in float32
LEADING = 3  # leading dimensions that a kernel walks (RowArgs in row_shape.cuh)


class Rows(NamedTuple):
    """Leading dimensions common to several arrays, as few as their strides allow."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]  # per array


def row_is_contiguous(spec: ArraySpec, dims: int) -> bool:
    """Whether the last `dims` axes are one run of neighbours."""
    step = 1
    axes = list(zip(spec.shape, spec.strides, strict=True))[len(spec.shape) - dims :]
    for n, stride in reversed(axes):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def leading_strides(spec: ArraySpec, shape: Sequence[int], dims: int) -> tuple[int, ...]:
    """Strides over the leading axes of `shape`; 0 along those the array is broadcast over."""
    lead = len(shape) - dims
    own = len(spec.shape) - dims
    padded = [(1, 0)] * (lead - own) + list(zip(spec.shape, spec.strides, strict=True))[:own]
    return tuple(0 if n == 1 else stride for n, stride in padded)


def collapsed(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Rows:
    """Drop axes of one element and merge neighbours that every array steps through evenly."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis, n in enumerate(shape):
        if n == 1:
            continue
        merges = bool(sizes) and all(
            mine[-1] == theirs[axis] * n for mine, theirs in zip(steps, strides, strict=True)
        )
        if merges:
            sizes[-1] *= n
            for mine, theirs in zip(steps, strides, strict=True):
                mine[-1] = theirs[axis]
        else:
            sizes.append(n)
            for mine, theirs in zip(steps, strides, strict=True):
                mine.append(theirs[axis])
    return Rows(tuple(sizes), tuple(tuple(mine) for mine in steps))


def follow_each_other(rows: Sequence[int], strides: Sequence[int], cols: int) -> bool:
    """Whether row r starts r * cols elements in, for leading dimensions `rows`."""
    step = cols
    for n, stride in zip(reversed(rows), reversed(strides), strict=True):
        if stride != step:
            return False
        step *= n
    return True


def access_elements(
    vec: int, specs: Sequence[tuple[ArraySpec, Sequence[int]]], alignment: int
) -> int:
    """Elements per memory transaction that addresses and row steps of all arrays allow.

    A transaction moves at most 16 bytes, so a wide parameter asks for no more alignment than
    that however many elements of it make a pack.
    """
    access = vec
    while access > 1:
        fits = True
        for spec, steps in specs:
            itemsize = FLOATS[spec.dtype].itemsize
            unit = min(access * itemsize, 16)
            fits = fits and alignment % unit == 0 and all(s * itemsize % unit == 0 for s in steps)
        if fits:
            return access
        access //= 2
    return access


def row_numbers(count: int, eps: float) -> tuple[float, ...]:
    """RowNumbers of statistics.cuh, to be packed as "3d2f"."""
    inverse = 1.0 / count
    return count, inverse, eps, inverse, min(eps, _LARGEST_FLOAT)
