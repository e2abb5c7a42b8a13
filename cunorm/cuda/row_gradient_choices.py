"""How rows of a backward pass are laid over threads and blocks: pure functions of a few integers.

How a row is laid out follows from its length and the types, never from the number of rows: a row
of grad_x keeps its bits in any company. How many rows make a block follows from their number, and
with it the order in which gradients of parameters are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cunorm.cuda.choices import power_of_two_up, vector_length

_RESIDENT_THREADS = 512  # of an SM: 128 registers each
_MOST_THREADS = 512  # of a CTA
_SEGMENT_THREADS = 256
_SEGMENT_DATA = 32  # bytes of a row in each of them
_WORTH_A_BARRIER = 128  # vectors of a row whose threads are several warps rather than one
_MOST_STAGES = 4
# Of float32, one pack a thread: layer_norm_bwd 32768 x 1024 takes 103.6 us, with four stages 114.0.
_MOST_FLOAT_STAGES = 3
# Registers of data that leave enough for the arithmetic, of 128; and where values are made twice.
_MOST_HELD = 82
_MOST_EARLY = 88  # with parameters of a block
_MOST_EARLY_IN_PARTS = 72  # and where addresses are many
_MOST_HELD_TWICE = 80
# Bytes of shared memory that a CTA may have, less what the kernels declare themselves.
_SHARED_MEMORY = {75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
_SHARED_ELSEWHERE = 99
_STATIC = 1 << 10
_PLAIN_ROWS = 32  # kRecordRows in row_gradient_columns.cuh
# Of a block whose sums lose nothing that matters when they are rounded, by bytes of an element.
_EXACT_ROWS = {2: 64, 4: 4, 8: 4}
# Whether all CTAs go through memory together.
_INTERLEAVED = True
# Warps that add up records: of an SM, where each thread has 64 registers, and of a CTA.
_MERGE_WARPS = 32
_FEWEST_MERGE_WARPS = 4
_MOST_MERGE_WARPS = 16
# In the time of a row: what a CTA takes to start, and a second launch.
_STARTING = 2
_MERGING = 3


@dataclass(frozen=True)
class GradientTile:
    """The numbers of ``GradientShape`` in row_gradient_shape.cuh, and segments (0: not cut)."""

    vec: int
    access: int
    packs: int
    threads: int
    rows: int = 1
    stages: int = 0
    hold: bool = True
    early: bool = True
    combine: bool = False
    ctas: int = 1
    segments: int = 0
    dense: bool = False
    full: bool = False

    @property
    def block(self) -> int:
        return self.threads * self.rows

    @property
    def expression(self) -> str:
        """The shape as a C++ type."""
        flags = (self.hold, self.early, self.combine, self.dense, self.full)
        hold, early, combine, dense, full = (str(flag).lower() for flag in flags)
        return (
            f"GradientShape<{self.vec}, {self.access}, {self.packs}, {self.threads}, {self.rows}, "
            f"{self.stages}, {hold}, {early}, {combine}, {dense}, {full}, {self.ctas}>"
        )

    def stage_bytes(self, streams: Sequence[int]) -> int:
        """Of one row of every team; `streams`: bytes of an element of each array."""
        return sum(streams) * self.packs * self.vec * self.block

    def sum_bytes(self, sums: int, wide: int) -> int:
        """Of sums over rows, two numbers of `wide` bytes each."""
        units = self.block // max(self.threads, 32)
        columns = units * self.threads * self.packs * self.vec
        return 2 * wide * sums * columns if self.combine else 0

    def shared_memory(self, streams: Sequence[int], sums: int, wide: int) -> int:
        """Bytes of dynamic shared memory of a CTA."""
        return self.stages * self.stage_bytes(streams) + self.sum_bytes(sums, wide)

    def adds_in_place(self, block_rows: int) -> bool:
        """Whether a block of rows reads back what it has written of its record."""
        return not self.combine and block_rows > _PLAIN_ROWS


def words(block_rows: int, itemsize: int) -> int:
    """Numbers that a sum of a record takes: with what it rounds off, two."""
    return 2 if block_rows > _EXACT_ROWS[itemsize] else 1


@dataclass(frozen=True)
class Blocks:
    """Blocks of a group of rows, of which a CTA takes `step` at a time."""

    blocks: int
    block_rows: int
    step: int = 1
    interleaved: bool = False  # blocks take turns; else each has rows that follow each other

    def numbers(self, members: int) -> tuple[int, int, int, int]:
        """RowGradientArgs from `reach` to `rest`."""
        if not self.interleaved and self.blocks > 1:
            return 0, self.block_rows, self.step, members
        together = self.blocks * self.step
        whole = members // together
        return whole * self.step, self.step, together, members - whole * together


def shared_memory(arch: int) -> int:
    """Bytes of dynamic shared memory that the kernels may ask for."""
    return (_SHARED_MEMORY.get(arch, _SHARED_ELSEWHERE) << 10) - _STATIC


def gradient_tile(
    cols: int,
    itemsize: int,
    access: int,
    arch: int,
    streams: Sequence[int],
    columns: Sequence[int] = (),
    sums: int = 2,
    written: int = 0,
    adds: bool = False,
    plain: bool = True,
) -> GradientTile:
    """The launch of a row norm's backward pass.

    Parameters
    ----------
    cols, itemsize : int
        Row length and bytes of an element of x.
    access : int
        Elements per memory transaction that all arrays allow; cut to the vector length.
    arch : int
        Compute capability, 90 for 9.0.
    streams : sequence of int
        Bytes of an element of each array that is read row by row: x, grad_out and others.
    columns : sequence of int
        Bytes of an element of each parameter that a block of rows shares.
    sums : int
        Gradients that are summed over rows.
    written : int
        Gradients of parameters that are written row by row.
    adds : bool
        Whether a gradient is added at the end: its place in shared memory is free late.
    plain : bool
        Whether rows of all arrays follow each other.
    """
    vec = vector_length(cols, itemsize)
    access = min(access, vec)
    vectors = cols // vec
    copied = vec * itemsize >= 4  # what the hardware copies past the registers
    work = _Work(
        itemsize,
        copied,
        shared_memory(arch),
        tuple(streams),
        tuple(columns),
        sums,
        written,
        adds,
        plain,
        vectors,
    )
    for data, hold in _levels(itemsize, vectors):
        packs = max(data // (vec * itemsize), 1)
        if vectors > _MOST_THREADS * packs:
            continue
        threads = _whole_warps(max(-(-vectors // packs), min(vectors, 8)))
        tile = GradientTile(vec, access, -(-vectors // threads), threads, hold=hold)
        if work.fits(tile):
            return work.with_memory(tile)
    packs = max(_SEGMENT_DATA // (vec * itemsize), 1)
    tile = GradientTile(vec, access, packs, _SEGMENT_THREADS)
    while not work.sums_fit(tile):
        tile = replace(tile, threads=tile.threads // 2)
    return work.with_memory(replace(tile, segments=-(-vectors // (tile.threads * packs))))


def _whole_warps(threads: int) -> int:
    """So many threads, or a part of a warp that others fill up."""
    return power_of_two_up(threads) if threads < 32 else -(-threads // 32) * 32


def _levels(itemsize: int, vectors: int) -> list[tuple[int, bool]]:
    """Bytes of a row in a thread, and whether it holds what it makes of them.

    One pack where its rows fill a CTA, and are worth a barrier: in 16 bits layer_norm_bwd 32768 x
    1024 takes 58.6 us for 61.0, 32768 x 4096 202 for 227, 1 x 4096 3.6 for 4.2; 2048 x 4096 22.5
    for 22.2. In float32 with fewer stages: 32768 x 1024 103.6 for 114.2 (two packs, three stages:
    113.4).
    """
    longer = [(32, True), (64, itemsize > 2)]
    return [(16, True), *longer] if itemsize <= 4 and _fills(vectors) else longer


def _fills(vectors: int) -> bool:
    """Whether rows of so many threads leave few of a CTA idle, and have several warps each."""
    rows = _MOST_THREADS // max(_whole_warps(vectors), 1)
    return vectors >= _WORTH_A_BARRIER and rows * vectors > 0.85 * _MOST_THREADS


class _Work(NamedTuple):
    """What a CTA reads and adds up, as `gradient_tile` is told it."""

    itemsize: int
    copied: bool
    room: int
    streams: tuple[int, ...]
    columns: tuple[int, ...]
    sums: int
    written: int
    adds: bool
    plain: bool
    vectors: int

    @property
    def wide(self) -> int:
        return max(self.itemsize, 4)

    def held(self, tile: GradientTile) -> int:
        """Registers of a thread that data and addresses take."""
        words = tile.packs * tile.vec * self.wide // 4 * (self.sums + 2 * tile.hold)
        if self.copied:
            words += tile.packs * (len(self.streams) + 2 * self.written)
            words += tile.packs // 2 if 4 < tile.vec * self.itemsize < 16 else 0
            return words + (8 + 8 * self.adds if self.wide == 8 else 0)
        words += tile.packs * max(tile.vec * self.itemsize // 4, 1) * len(self.streams)
        return words - 8 + 24 * bool(tile.segments)  # as many of them share an address

    def most_threads(self, tile: GradientTile) -> int:
        """Of a CTA: 512 with 128 registers each, or 256 with all that there are."""
        return _MOST_THREADS if self.held(tile) <= _MOST_HELD else _MOST_THREADS // 2

    def fits(self, tile: GradientTile) -> bool:
        """Whether a CTA can hold a row so."""
        staged = not self.copied or tile.stage_bytes(self.streams) <= self.room
        if tile.threads > self.most_threads(tile) or not (staged and self.sums_fit(tile)):
            return False
        # Made twice: from shared memory.
        return tile.hold or (
            self.copied and tile.packs <= 8 and self.held(tile) <= _MOST_HELD_TWICE
        )

    def sums_fit(self, tile: GradientTile) -> bool:
        """Whether shared memory has room for sums over rows where plain ones are not enough."""
        if self.itemsize == 2 or not self.sums:
            return True
        whole = replace(tile, rows=max(32 // tile.threads, 1), combine=True)
        stage = whole.stage_bytes(self.streams) if self.copied else 0
        return whole.sum_bytes(self.sums, self.wide) + stage <= self.room

    def with_memory(self, tile: GradientTile) -> GradientTile:
        """The tile with as many rows, stages and sums in shared memory as there is room for."""
        early = sum(self.columns) * tile.packs * tile.vec // 4
        most = _MOST_EARLY if self.plain and tile.access == tile.vec else _MOST_EARLY_IN_PARTS
        early_fits = 0 < early <= 16 and tile.packs <= 4 and self.held(tile) + early <= most
        tile = replace(tile, early=early_fits)
        # Stages that keep memory busy, where sums may be plain.
        least = 1 if self.itemsize > 2 or (tile.hold and not self.adds) else 2
        block = tile.threads if tile.segments else self.most_threads(tile)
        while block >= max(tile.threads, 128):
            wider = replace(tile, rows=self.rows(tile, block), combine=self.sums > 0)
            left = self.room - wider.sum_bytes(self.sums, self.wide)
            stages = self.stages(wider, left)
            if tile.segments:  # rather several CTAs on an SM than many rows on their way
                stages = min(stages, 3)
            if left >= 0 and (stages >= least or not self.copied):
                return self.with_ctas(replace(wider, stages=stages))
            block //= 2
        tile = replace(tile, rows=max(32 // tile.threads, 1))
        return self.with_ctas(replace(tile, stages=self.stages(tile, self.room)))

    def rows(self, tile: GradientTile, block: int) -> int:
        """Rows of a CTA of so many threads at most.

        Where each leaves gradients of its own, four teams of three warps, as many for every
        scheduler: ada_layer_norm_zero_bwd 32768 x 1152 takes 175.4 us for 182.5 with five.
        """
        rows = block // tile.threads
        return rows - rows % 4 if self.written and rows > 4 else rows

    def stages(self, tile: GradientTile, room: int) -> int:
        if not self.copied:
            return 0
        floats = self.itemsize == 4 and tile.packs == 1 and _fills(self.vectors)
        most = _MOST_FLOAT_STAGES if floats else _MOST_STAGES
        return max(min(room // tile.stage_bytes(self.streams), most), 0)

    def with_ctas(self, tile: GradientTile) -> GradientTile:
        light = self.held(tile) <= _MOST_HELD
        ctas = max(_RESIDENT_THREADS // (1 if light else 2) // tile.block, 1)
        shared = tile.shared_memory(self.streams, self.sums, self.wide)
        if shared:
            ctas = max(min(ctas, self.room // (shared + _STATIC)), 1)
        return replace(tile, ctas=ctas, full=self.may_be_full(tile))

    def may_be_full(self, tile: GradientTile) -> bool:
        """Whether no pack lacks its vector, and all may be in work at once for it.

        Without a branch for each the compiler mixes them: doubles, or values that are made twice
        beside two sums, leave it no registers.
        """
        whole = tile.threads * tile.packs == self.vectors and not tile.segments
        return whole and self.wide == 4 and (tile.hold or self.sums < 2)


@dataclass(frozen=True)
class Merge:
    """A launch of row_gradient_merge.cuh: neighbouring columns of a thread, threads of a CTA."""

    vec: int
    block: int


def merge_of(cols: int, wide: int, ctas: int, records: int, multiprocessors: int) -> Merge:
    """How records are added up.

    Parameters
    ----------
    cols, wide : int
        Row length and bytes of a number of a record.
    ctas : int
        CTAs of the launch, for 32 columns of one gradient each.
    records : int
        How many rows of numbers each adds up.
    multiprocessors : int
        Of the GPU, each of which takes `_MERGE_WARPS` at once.
    """
    vec = vector_length(cols, wide)
    room = _MERGE_WARPS * multiprocessors // ctas
    warps = min(-(-records // vec), max(room, _FEWEST_MERGE_WARPS), _MOST_MERGE_WARPS)
    return Merge(vec, 32 * warps)


def row_blocks(groups: int, members: int, segments: int, rows: int, resident: int) -> Blocks:
    """How the rows of each group are cut into blocks.

    Parameters
    ----------
    groups, members : int
        Groups of rows, and rows of each.
    segments : int
        CTAs that share a block of rows.
    rows : int
        Rows that a CTA takes at a time.
    resident : int
        CTAs that the GPU holds at once.
    """
    most = max(-(-4 * resident // (groups * segments)), 1)
    waves = -(-groups * segments // resident)
    best, least = 1, waves * (-(-members // rows) + _STARTING)
    for blocks in range(2, min(most, members) + 1):
        waves = -(-groups * blocks * segments // resident)
        block_rows = -(-members // blocks)
        steps = block_rows / rows if block_rows < rows else -(-block_rows // rows)
        cost = waves * (steps + _STARTING) + _MERGING
        if cost < least:
            best, least = blocks, cost
    block_rows = -(-members // best)
    best = -(-members // block_rows)
    interleaved = _INTERLEAVED and best > 1 and members > best * rows
    return Blocks(best, block_rows, rows, interleaved)
