"""How batch norm takes strips of neighbouring channels (channel_strips.cuh), by integers alone.

Measured on an H200 beside samples as rows of a matrix, in three launches, us (copy), bfloat16:
256 x 2048 x 7 x 7 37.9 for 62.5 (27.1), backward 65.5 for 79.4 (39.4); 256 x 1024 x 14 x 14 71.2
for 113.6 (51.0), backward 131.3 for 144.1 (75.1); 64 x 256 x 15 x 15 10.2 for 22.2 (6.4), backward
12.7 for 38.1 (8.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from cunorm.cuda.choices import ROOMY, TRANSACTION

_SHARED_MEMORY = 228 << 10  # of an SM of the GPUs in ROOMY
_BESIDE = (1 << 10) + 256  # of a CTA: what the system takes, and what the kernel declares
# What a CTA asks for, in KiB: four, three, two or one of them an SM. Were it what a strip takes,
# every number of samples would have a kernel of its own.
_SIZES = (16, 46, 55, 74, 112, 226)
_RECORD = 16  # bytes: two sums in double
_REGISTERS = 65536  # of an SM
_MOST_THREADS = 512
# Backward 131.3 us for 134.1, 6.1 for 6.3; few strips forward 5.4 for 5.6. And where several such
# CTAs fit an SM.
_FEWER_THREADS = 256
_SEVERAL = 100 << 10  # bytes of a strip
_MOST_CTAS = 4
_WARP = 32
_STEP = 128  # threads: CTAs of few sizes, so that few kernels serve all
_GROUP = 4  # rows of a thread that are copied together
_AHEAD = 3  # such groups on their way: 100 KB an SM, of the 30 that keep memory busy
_TWO_ROUNDS = 250  # strips that a large GPU takes in two rounds, one an SM
_MANY = 100  # strips that are enough for it
_FEW = 66  # strips that leave half of it idle: worthwhile only where there is little to do,
_SHORT = 8  # rows a thread
_NARROW = 8  # bytes of a vector that are as good as more: half the instructions are an element's
_SMALL = 1024  # values of a channel: 8 x 64 x 7 x 7 takes 4.0 us, otherwise 3.2; 32 samples gain


@dataclass(frozen=True)
class StripTile:
    """The numbers of ``StripShape`` in channel_strips.cuh, and those that it reads in Brief.

    `width`: vectors of a row; `ty`: rows that a CTA takes at a time; `rows`: of a strip; `kib`: of
    shared memory.
    """

    vec: int
    channels: int
    threads: int
    ctas: int
    width: int
    ty: int
    rows: int
    kib: int
    group: int = _GROUP
    ahead: int = _AHEAD

    @property
    def expression(self) -> str:
        return (
            f"StripShape<{self.vec}, {self.channels}, {self.threads}, {self.group}, {self.ahead}, "
            f"{self.ctas}, {self.kib}>"
        )

    @property
    def shared_memory(self) -> int:
        return self.kib << 10


def strip_tile(
    samples: int,
    channels: int,
    positions: int,
    itemsize: int,
    access: int,
    arch: int,
    tensors: int = 1,
) -> StripTile | None:
    """The launch over strips that are held in shared memory; None where another does better.

    Parameters
    ----------
    samples, channels, positions, itemsize : int
        Of x.
    access : int
        Elements of the widest transaction that every row of all arrays allows.
    arch : int
        Compute capability, 90 for 9.0.
    tensors : int
        Arrays that are held: 2 in backward.
    """
    if arch not in ROOMY or itemsize == 8 or samples * positions < _SMALL:
        return None
    tiles = []
    vec = min(access, TRANSACTION // itemsize)
    while vec > 1:
        tile = tile_of(vec, samples, channels, positions, itemsize, tensors)
        if tile is not None:
            tiles.append(tile)
        vec //= 2
    return _best(tiles, channels, itemsize)


def tile_of(
    vec: int, samples: int, channels: int, positions: int, itemsize: int, tensors: int
) -> StripTile | None:
    """The launch with vectors of so many elements, where a strip fits."""
    together = vec // gcd(positions, vec)
    width = positions * together // vec
    if positions < vec or channels % together or width > _MOST_THREADS:
        return None
    strip = samples * width * vec * itemsize * tensors
    few = tensors == 2 or channels // together < _TWO_ROUNDS or strip <= _SEVERAL
    fewer = few and width <= _FEWER_THREADS
    rounds = -(-samples // ((_FEWER_THREADS if fewer else _MOST_THREADS) // width))
    ty = -(-samples // rounds)
    threads = max(-(-ty * width // _STEP) * _STEP, together * _WARP)
    kib = _kib(-(-strip // _RECORD) + threads + ty * together)
    if kib is None:
        return None
    # Sums of float32 are kept in pairs, those of two arrays for each of them.
    registers = 48 + (8 if tensors == 2 else 4) * vec + (8 if itemsize == 4 else 0)
    by_memory = _SHARED_MEMORY // ((kib << 10) + _BESIDE)
    ctas = min(by_memory, _REGISTERS // (registers * threads), _MOST_CTAS)
    return StripTile(vec, together, threads, ctas, width, ty, samples, kib)


def _kib(records: int) -> int | None:
    """What a CTA asks for that needs room for so many records."""
    return next((size for size in _SIZES if records * _RECORD <= size << 10), None)


def _best(tiles: list[StripTile], channels: int, itemsize: int) -> StripTile | None:
    """Of launches with ever narrower vectors.

    The widest where there are strips for two rounds: 37.9 us for 40.7 with half as wide ones, 71.2
    for 79.9. Else the widest with two CTAs an SM: one is read while another is written. Fewer
    channels a strip where there are too few strips.
    """
    if tiles and channels // tiles[0].channels >= _TWO_ROUNDS:
        return tiles[0]
    many = [tile for tile in tiles if channels // tile.channels >= _MANY]
    wide = [tile for tile in many if tile.vec * itemsize >= _NARROW]
    for tile in wide:
        if tile.ctas > 1:
            return tile
    if wide or many:
        return (wide or many)[-1]
    if not tiles:
        return None
    tile = tiles[-1]
    few = channels // tile.channels < _FEW and tile.rows > _SHORT * tile.ty
    return None if few else tile
