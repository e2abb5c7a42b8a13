"""How the sets of a sample are laid over threads in backward: pure functions of a few integers.

The choice depends on the shape of a sample and the sizes of the types, never on the number of
samples: the gradient of a sample has the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt
from typing import NamedTuple

from cunorm.cuda import channel_choices
from cunorm.cuda.channel_choices import ColumnTile
from cunorm.cuda.choices import ROOMY, largest_cluster, power_of_two_up

_WORD = 4  # bytes of a register
_SHORT_BLOCK = 64  # threads of a CTA that serves several sets
_BLOCK = 256
_WIDE_BLOCK = 512
_REGISTERS = 65536  # of an SM
_THREADS = 132 * 1024  # that keep a large GPU busy
_MOST_UNITS = 4  # of a thread: each takes a dozen registers beside its packs
_SHORT = 512  # elements of a channel whose record, 16 bytes, is better shared by samples
_FEW_SAMPLES = 8  # a portable cluster
_MOST_RECORDS = 512  # of a cluster, in the shared memory of one CTA
_LONG_FOLD = 1024  # records of a channel that eight warps add; beyond them many CTAs do
_LONG_MERGE = 512  # records that a warp adds; beyond them a CTA does


@dataclass(frozen=True)
class GroupTile:
    """The numbers of ``GroupShape`` in group_gradient.cuh, and the shares of a set (0: not cut)."""

    vec: int
    access: int
    lanes: int
    packs: int
    units: int
    shared: int
    threads: int
    sets: int = 1
    cluster: int = 1
    ctas: int = 1
    segments: int = 0

    @property
    def block(self) -> int:
        return self.threads * self.sets

    def units_of_channel(self, vectors: int) -> int:
        return -(-vectors // (self.lanes * self.packs))

    def grid(self, sets: int) -> int:
        return -(-sets // self.sets) * self.cluster * max(self.segments, 1)

    @property
    def expression(self) -> str:
        segment = str(self.segments > 0).lower()
        return (
            f"GroupShape<{self.vec}, {self.access}, {self.lanes}, {self.packs}, {self.units}, "
            f"{self.shared}, {self.threads}, {self.sets}, {self.cluster}, {self.ctas}, {segment}>"
        )

    def shared_memory(self, itemsize: int) -> int:
        return 2 * self.shared * self.block * self.vec * itemsize


class _Level(NamedTuple):
    """So many threads, and packs of an array that each of them may have, some in registers."""

    threads: int
    cluster: int
    most: int
    held: int
    ctas: int


def _levels(pack_registers: int, itemsize: int, arch: int) -> Iterator[_Level]:
    """From the smallest sets to the largest that are kept on chip."""
    wide = itemsize == 8
    for log in range(9):
        threads = 1 << log
        block = max(threads, _SHORT_BLOCK)
        yield _Level(threads, 1, 2, 2, (512 if wide else 1024) // block)
    clusters = [c for c in (2, 4, 8, 16) if c <= largest_cluster(arch)]
    roomy = pack_registers == 4 and arch in ROOMY
    if roomy and not wide:
        # Several sets on an SM: one is read or written while another makes up its sums.
        yield _Level(_BLOCK, 1, 4, 4, 4)
        yield _Level(_BLOCK, 1, 8, 3, 4)
        yield _Level(_WIDE_BLOCK, 1, 9, 3, 2)
        # Small CTAs, as channel_choices has them. Group norm backward, us, for those of clusters of
        # half as many CTAs of 512 threads: 2 x 320 x 128 x 128 23.4 for 25.3 (copy 17.9); sets of
        # 128, 256 and 512 KiB, 105 MB, bfloat16 81.7, 82.2, 84.3 for 85.5, 93.2, 92.1 (76.7).
        in_registers = 4 if arch == 90 else 3  # else compute capability 10.0 would spill one
        for cluster in clusters[1:]:
            yield _Level(_BLOCK, cluster, 9, in_registers, 4)
        yield _Level(_WIDE_BLOCK, clusters[-1], 9, 3, 2)
        yield _Level(_WIDE_BLOCK, clusters[-1], 16, 8, 1)
        yield _Level(_WIDE_BLOCK, clusters[-1], 20, 8, 1)
        return
    most = 4 if pack_registers == 4 else 8
    yield _Level(_BLOCK, 1, 4, 4, 2)
    if roomy:
        yield _Level(_WIDE_BLOCK, 1, most, most, 1)
        for cluster in (1, *clusters):
            yield _Level(_WIDE_BLOCK, cluster, 2 * most, most, 1)
        return
    for cluster in (1, *(c for c in clusters if c <= 8)):
        yield _Level(_WIDE_BLOCK, cluster, most, most, 1)


def _bucket(packs: int) -> int:
    """A number of packs that does for that many: so that few kernels serve all sizes."""
    return next(n for n in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 20, packs) if n >= packs)


def group_tile(
    channels: int, vectors: int, vec: int, access: int, itemsize: int, arch: int
) -> GroupTile:
    """The launch over sets whose channels are runs of neighbours.

    Parameters
    ----------
    channels, vectors : int
        Channels of a set, and vectors in each.
    vec, access, itemsize : int
        Elements of a vector, elements per memory transaction, bytes of an element.
    arch : int
        Compute capability, 90 for 9.0.
    """
    access = min(access, vec)
    pack_registers = max(vec * itemsize // _WORD, 1)
    for level in _levels(pack_registers, itemsize, arch):
        fitting = [
            tile
            for lanes in _lanes(vectors)
            if (tile := _on_chip(channels, vectors, lanes, level)) is not None
        ]
        if fitting:
            tile = min(fitting, key=lambda t: (t.packs * t.units, t.units, -t.lanes))
            return _with_room(replace(tile, vec=vec, access=access), itemsize)
    lanes = 32 if vectors >= 32 else power_of_two_up(vectors)
    packs = min(_bucket(-(-vectors // lanes)), 4)
    units = 4 // power_of_two_up(packs)
    tile = GroupTile(vec, access, lanes, packs, units, 0, _BLOCK, ctas=2 if units > 1 else 3)
    share = _BLOCK // lanes * units
    tile = replace(tile, segments=-(-channels * tile.units_of_channel(vectors) // share))
    return tile if access == vec and itemsize < 8 else replace(tile, ctas=2)


def _lanes(vectors: int) -> list[int]:
    """How many threads may share a unit; fewer where many of 32 would have nothing to do."""
    most = min(power_of_two_up(vectors), 32)
    return [most] if vectors <= 32 else [32, 16, 8]


def _on_chip(channels: int, vectors: int, lanes: int, level: _Level) -> GroupTile | None:
    """Units for that many threads; None where they would have too much."""
    if lanes > level.threads:
        return None
    teams = level.threads * level.cluster // lanes
    each = min(max(teams // channels, 1), -(-vectors // lanes))  # units of a channel
    packs = _bucket(-(-vectors // (each * lanes)))
    each = -(-vectors // (packs * lanes))
    units = -(-channels * each // teams)
    if units > _MOST_UNITS or packs * units > level.most:
        return None
    shared = max(packs * units - level.held, 0)
    sets = max(_SHORT_BLOCK // level.threads, 1)
    return GroupTile(
        1, 1, lanes, packs, units, shared, level.threads, sets, level.cluster, level.ctas
    )


def _with_room(tile: GroupTile, itemsize: int) -> GroupTile:
    """Fewer CTAs an SM where their threads need more registers than a few packs take."""
    registers = 64
    if tile.units > 1 or itemsize == 8:
        registers = 192 if tile.units > 2 and itemsize == 8 else 128
    if tile.access < tile.vec:  # many loads are on their way, each to its register
        registers = 128 if tile.packs * tile.units > 2 else 80
        held = 6 if tile.packs > 16 else 5  # of the most there is no room to share more
        tile = replace(tile, shared=max(tile.shared, tile.packs - held) if tile.shared else 0)
    return replace(tile, ctas=max(min(tile.ctas, _REGISTERS // (registers * tile.block)), 1))


def fits_cluster(samples: int, groups: int, tile: GroupTile, arch: int) -> bool:
    """Whether all samples of a group go into one cluster, a CTA each.

    It saves the second launch, about 2 us; where there is more to do than a GPU holds at a time,
    CTAs that need not wait for places side by side are worth more.
    """
    if tile.threads < 32 or tile.cluster > 1 or tile.segments:
        return False
    few = samples <= _FEW_SAMPLES and samples * groups * tile.threads <= 2 * _THREADS
    records = power_of_two_up(samples) * tile.threads // tile.lanes * tile.units
    return records <= _MOST_RECORDS and (samples == 1 or (few and arch >= 90))


def samples_together(samples: int, groups: int, tile: GroupTile) -> int:
    """How many samples of short channels share a record: more where there are enough of them."""
    return max(samples * groups * tile.threads // (4 * _THREADS), 1)


def shares_records(length: int, tile: GroupTile) -> bool:
    """Whether samples may share records, for channels of so many elements."""
    return length <= _SHORT and tile.cluster == 1 and not tile.segments


def column_tile(
    rows: int, columns: int, vec: int, access: int, itemsize: int, arch: int
) -> ColumnTile:
    """The launch over the positions of a sample whose channels are columns."""
    return channel_choices.column_tile(
        False, rows, columns, vec, access, itemsize, arch, 2, single=False
    )


def rows_folded(rows: int, units: int) -> int:
    """How many rows of records become one before they are merged; 1 where they are few."""
    turns = -(-units // merge_lanes(units))
    return 1 if rows * turns <= _LONG_FOLD else power_of_two_up(isqrt(rows))


def merge_threads(records: int) -> int:
    """Threads that add up the records of a set."""
    return 32 if records <= _LONG_MERGE else _BLOCK


def merge_lanes(units: int) -> int:
    """Threads of a warp that add up the records of a channel."""
    return min(power_of_two_up(units), 32)
