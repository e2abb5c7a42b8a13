"""What the definitions share: dtypes, blocks of rows, and the statistics of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Result = Array | tuple[Array, ...]
# Takes the normalized values of one block and where the block lies; gives the finished output.
Finish = Callable[[Array, tuple[Any, ...]], Array]

# Elements handled at once: a few long double temporaries of this size stay in a CPU's cache.
BLOCK_ELEMENTS = 1 << 17


def accumulation_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype of the statistics: float64 for float64 input, else float32."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def working_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype the definitions compute in: long double for float64 input, else float64."""
    return np.dtype(np.longdouble if np.dtype(dtype) == np.float64 else np.float64)


def row_blocks(lead: Sequence[int], cols: int) -> Iterator[tuple[Any, ...]]:
    """Indices into the leading axes that together cover every row once.

    Each selects about ``BLOCK_ELEMENTS`` elements (at least one row) of an array shaped
    ``(*lead, cols)``. Without elements there are no blocks.
    """
    if cols == 0 or 0 in lead:
        return
    axis, below = len(lead), cols
    while axis > 0 and below * lead[axis - 1] <= BLOCK_ELEMENTS:
        axis -= 1
        below *= lead[axis]
    if axis == 0:
        yield ()
        return
    step = max(1, BLOCK_ELEMENTS // below)
    for outer in np.ndindex(*lead[: axis - 1]):
        for start in range(0, lead[axis - 1], step):
            yield (*outer, slice(start, start + step))


# ---------------------------------------------------------------------------------------------
# statistics along the last axis
# ---------------------------------------------------------------------------------------------


def _mean(rows: Array, lowest: Array, highest: Array, peak: Array) -> tuple[Array, Array]:
    """Row means as an unrounded sum ``high + low``.

    One number of the working precision would not do: next to the mean, ``x - mean`` is as
    wrong as the mean is. ``rows`` is cut into multiples of one coarse unit, whose sum is exact,
    and a rest. ``high`` has so few bits that ``cols * high`` is exact as well, and ``x - high``
    is exact wherever ``x`` lies close to it.
    """
    cols = rows.shape[-1]
    unit = rows.dtype.type(1)
    bound = np.ldexp(unit, np.frexp(peak)[1] + (cols - 1).bit_length())[..., None]
    coarse = (rows + bound) - bound
    rest = (rows - coarse).sum(axis=-1)
    total = coarse.sum(axis=-1)

    bits = np.finfo(rows.dtype).nmant + 1 - cols.bit_length()
    mantissa, exponent = np.frexp(total / cols)
    high = np.ldexp(np.rint(np.ldexp(mantissa, bits)), exponent - bits)
    low = ((total - cols * high) + rest) / cols

    # The mean of equal values is that value, and a mean with an infinity in it needs no rest.
    constant = lowest == highest
    high = np.where(constant, lowest, high)
    low = np.where(constant | ~np.isfinite(high), 0, low)
    return high, low


def _range_scale(peak: Array) -> Array:
    """A power of two per row: 1, or small enough for squares of the scaled row to be finite.

    Only float64 input computed in float64 ever needs it, where long double is no wider.
    """
    half = np.finfo(peak.dtype).maxexp // 2
    unit = peak.dtype.type(1)
    small: Array = np.ldexp(unit, -half - 48)
    return np.where(peak > np.ldexp(unit, half - 72), small, unit)


class Statistics(NamedTuple):
    """One value per row, in the working dtype; NaN for rows without elements."""

    mean: Array
    rstd: Array  # 1 / sqrt(variance + eps)
    variance: Array  # the biased one; of values that are not centred, the mean square


def _standardize(rows: Array, eps: float, centred: bool) -> tuple[Array, Statistics]:
    """Normalize along the last axis; ``mean`` is NaN if not centred."""
    lowest, highest = rows.min(axis=-1), rows.max(axis=-1)
    peak = np.maximum(highest, -lowest)
    scale = _range_scale(peak)
    mean = np.full(peak.shape, np.nan, rows.dtype)
    if np.any(scale != 1):
        rows = rows * scale[..., None]
        lowest, highest, peak = lowest * scale, highest * scale, peak * scale
    if centred:
        high, low = _mean(rows, lowest, highest, peak)
        rows = (rows - high[..., None]) - low[..., None]
        mean = (high + low) / scale
    mean_square = np.square(rows).mean(axis=-1)
    # scale * sqrt(mean_square / scale**2 + eps), with no square of the scale to underflow.
    root = np.hypot(np.sqrt(mean_square), scale * np.sqrt(rows.dtype.type(eps)))
    # A root of zero (eps = 0) leaves a row of zeros: its normalized values are zero.
    xhat = rows / np.where(root == 0, 1, root)[..., None]
    rstd = np.where(root == 0, 0, scale / root)
    return xhat, Statistics(mean, rstd, mean_square / np.square(scale))


# ---------------------------------------------------------------------------------------------
# all rows of an array
# ---------------------------------------------------------------------------------------------


def output_dtypes(x: Array, dtype: npt.DTypeLike | None) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """dtypes of an output and of statistics where the caller asked for ``dtype``."""
    output = x.dtype if dtype is None else np.dtype(dtype)
    statistics = accumulation_dtype(x.dtype)
    return output, output if output.itemsize > statistics.itemsize else statistics


def normalize_rows(
    x: Array, y: Array | None, axes: int, eps: float, finish: Finish, *, centred: bool = True
) -> Statistics:
    """Normalize the last ``axes`` axes of ``x`` block by block and let ``finish`` do the rest.

    What ``finish`` gives goes into ``y``, of the shape of ``x``; None if only the statistics are
    wanted.
    """
    lead, cols = x.shape[: x.ndim - axes], math.prod(x.shape[x.ndim - axes :])
    work = working_dtype(x.dtype)
    statistics = Statistics(*(np.full(lead, np.nan, work) for _ in Statistics._fields))
    with np.errstate(all="ignore"):
        for at in row_blocks(lead, cols):
            block = x[at].astype(work, order="C")
            rows = block.reshape(*block.shape[: block.ndim - axes], cols)
            xhat, found = _standardize(rows, eps, centred)
            for whole, part in zip(statistics, found, strict=True):
                whole[at] = part
            if y is not None:
                y[at] = finish(xhat.reshape(block.shape), at).astype(y.dtype)
    return statistics


def blocks_of(x: Array, *parameters: Array) -> Callable[[tuple[Any, ...]], list[Array]]:
    """Blocks of parameters that broadcast to the shape of ``x``, widened."""
    views = [np.broadcast_to(parameter, x.shape) for parameter in parameters]
    return lambda at: [view[at].astype(working_dtype(x.dtype)) for view in views]


def rounded(values: Array, dtype: npt.DTypeLike) -> Array:
    """``values`` in a narrower dtype; too large is infinite, too small is zero."""
    with np.errstate(all="ignore"):
        return values.astype(dtype, order="C")
