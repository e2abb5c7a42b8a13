"""How channels, groups and instances are laid over threads: pure functions of a few integers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cunorm.cuda import run_table
from cunorm.cuda.choices import ROOMY, TRANSACTION, largest_cluster, power_of_two_up, vector_length
from cunorm.cuda.tables import Row

_WORD = 4  # bytes of a register
_WARP = 32
_SMS = 132  # of a large GPU
_FEW = _SMS * 1024  # threads that keep it busy
_WIDE_TILE = 16  # threads a row of a tile of columns: 256 bytes
_REGISTERS = 65536  # of an SM
_ROOM = 24  # registers of data in a thread that may use 64
_BRIEF_ROOM = 32  # and in one that works straight on
_FEWEST_BATCHES = 2  # that are worth a block of rows; of many planes twice as many
# Registers that loads on their way take, each to one of its own; ends of runs that are no whole
# vectors; and channels that change within a vector.
_SHIFTING = 16
_BLOCK = 256
TABLE_BLOCK = 128  # kTableBlock in channel_table.cuh
_WIDE_TABLE = 16384  # columns
_MAP_BLOCK = 128  # of a pass over columns: what little a CTA starts with, the others hide
_MOST_THREADS = 512  # of a CTA that holds a set, or its share of one
# Sets shared out to clusters of small CTAs, several an SM: some are read or written while others
# make up their sums. Group norm of 210 MB, us, for those of CTAs of 512 threads, two an SM; sets of
# 128, 256, 320, 512 KiB and 1 MiB: bfloat16 104.2, 105.4, 106.1, 108.6, 114.5 for 109.9, 113.5,
# 109.5, 112.5, 119.3 (copy 101); float32 104.5, 106.5, 109.1, 111.3, 120.7 for 108.4, 110.9, 120.6,
# 117.5, 137.4; 21 MB of 320 KiB 13.8 for 16.5 (copy 13.0).
_SHARE_THREADS = 256
_SHARE_PACKS = 12
MOST_SHARED_OUT = 16 * 16 * _SHARE_THREADS  # vectors: a larger set is kept by CTAs that wait
# Packs in registers, and CTAs an SM, by bytes of an element and packs; otherwise 5 and 3. 49152
# vectors of float32 take 113.4 us for 117.6, 65536 of bfloat16 114.5 for 119.8.
_SHARE_HELD = {(4, 12): (9, 2), (2, 16): (9, 2)}
# Packs of each array in backward of float32 with masked ends, two CTAs an SM: batch norm 28 x 256 x
# 1021 takes 31.6 us, one CTA 47.6; read twice, 47.2 (copy 26.4). In 16 bits 50.6 and 56.2 for 52.1,
# 8 x 64 x 4099 13.0 for 11.5: they are read twice.
_MASKED_PACKS = 4
BRIEF = (1 << 31) - (1 << 18)  # numbers below it have a place in Brief of channel_args.cuh
_MERGE_HELD = 3  # records in a thread's registers
_LONG_MERGE = 32 * _MERGE_HELD  # records of a set that a warp merges; beyond them a CTA does


Ends = Literal["Whole", "Ragged", "Masked"]  # as in channel_runs.cuh


@dataclass(frozen=True)
class RunTile:
    """The numbers of ``RunShape`` in channel_runs.cuh, and the segments of a set (0: not cut).

    `table`: channels of a set whose weights and biases go to shared memory. `ends`, `crossing`: see
    ``RunVector`` in channel_walk.py.
    """

    vec: int
    access: int
    packs: int
    threads: int
    sets: int = 1
    cluster: int = 1
    shared: int = 0
    ctas: int = 1
    segments: int = 0
    one_run: bool = False
    table: int = 0
    ends: Ends = "Whole"
    crossing: bool = False

    @property
    def block(self) -> int:
        return self.threads * self.sets

    def grid(self, sets: int) -> int:
        return -(-sets // self.sets) * self.cluster * max(self.segments, 1)

    @property
    def expression(self) -> str:
        flags = (self.one_run, self.segments > 0, self.table > 0)
        one_run, cut, table = (str(flag).lower() for flag in flags)
        return (
            f"RunShape<{self.vec}, {self.access}, {self.packs}, {self.shared}, {self.threads}, "
            f"{self.sets}, {self.cluster}, {self.ctas}, {one_run}, {cut}, {table}, "
            f"Ends::k{self.ends}, {str(self.crossing).lower()}>"
        )

    def shared_memory(self, itemsize: int) -> int:
        packs = self.shared * self.block * self.vec * itemsize
        return packs + self.table * 2 * max(itemsize, 4)

    def straight_on(self, itemsize: int, tensors: int = 1) -> bool:
        """Whether registers have room for what channel_brief.cuh keeps beside what is held."""
        held = self.packs * max(self.vec * itemsize // _WORD, 1) * tensors
        room = _BRIEF_ROOM // 2 if self.vec == 8 else _BRIEF_ROOM  # eight at a time are widened
        whole = not (self.segments or self.crossing) and self.ends == "Whole"
        return self.cluster == 1 and whole and self.shared == 0 and held <= room

    def with_table(self, channels: int) -> RunTile:
        """The same for sets of so many channels, where their threads meet at a barrier."""
        several_warps = self.threads > 32 or self.cluster > 1
        fits = several_warps and not self.segments and 1 < channels <= self.block
        return replace(self, table=channels) if fits else self


@dataclass(frozen=True)
class ColumnTile:
    """The numbers of ``ColumnShape`` in channel_tiles.cuh, and the blocks of rows of a plane."""

    vec: int
    access: int
    tx: int
    ty: int
    packs: int
    ctas: int
    segments: int = 1

    @property
    def block(self) -> int:
        return self.tx * self.ty

    @property
    def segment_rows(self) -> int:
        """Rows from one batch of a block to its next."""
        return self.segments * self.ty * self.packs

    def grid(self, planes: int, columns: int) -> int:
        return planes * self.segments * -(-columns // (self.tx * self.vec))

    @property
    def expression(self) -> str:
        return (
            f"ColumnShape<{self.vec}, {self.access}, {self.tx}, {self.ty}, {self.packs}, "
            f"{self.ctas}>"
        )

    def shared_memory(self, itemsize: int) -> int:
        """Two wide sums for every column of every warp."""
        record = 32 if itemsize == 8 else 16
        return self.block // 32 * self.tx * self.vec * record


@dataclass(frozen=True)
class MapTile:
    """The numbers of ``MapShape`` in channel_map.cuh."""

    vec: int
    access: int
    packs: int
    threads: int = _BLOCK
    ctas: int = 2
    crossing: bool = False
    ragged: bool = False
    brief: bool = True

    @property
    def work(self) -> int:
        """Elements of a CTA."""
        return self.threads * self.packs * self.vec

    def grid(self, elements: int) -> int:
        return -(-elements // self.work)

    @property
    def expression(self) -> str:
        flags = (self.crossing, self.ragged, self.brief)
        crossing, ragged, brief = (str(flag).lower() for flag in flags)
        return (
            f"MapShape<{self.vec}, {self.access}, {self.packs}, {self.threads}, {self.ctas}, "
            f"{crossing}, {ragged}, {brief}>"
        )

    def shared_memory(self, itemsize: int, length: int) -> int:
        """Coefficients of the channels, `length` elements in a sample, that a CTA can touch."""
        return self.most_runs(length) * 4 * max(itemsize, 4)

    def most_runs(self, length: int) -> int:
        return (self.work - 1) // length + 2


def run_tile(
    vectors: int,
    vec: int,
    access: int,
    itemsize: int,
    arch: int,
    tensors: int = 1,
    sets: int | None = None,
    ends: Ends = "Whole",
    crossing: bool = False,
) -> RunTile:
    """The launch over sets that are runs of neighbours, by their size alone.

    Parameters
    ----------
    vectors : int
        Vectors of a set.
    vec, access, itemsize : int
        Elements of a vector, elements per memory transaction, bytes of an element.
    arch : int
        Compute capability, 90 for 9.0.
    tensors : int
        Arrays that are held: 2 in backward.
    sets : int, optional
        How many sets there are, where that may decide.
    ends, crossing : Ends, bool
        How runs lie in vectors, see ``RunVector``.
    """
    access = min(access, vec)
    pack_registers = max(vec * itemsize // _WORD, 1)
    held = most_held(pack_registers, itemsize, arch, tensors)
    held = min(held, _SHARE_PACKS) if ends != "Whole" else held
    beside = _SHIFTING * ((access < vec) + (ends != "Whole") + crossing)
    shares = pack_registers == 4 and itemsize < 8 and tensors == 1 and arch in ROOMY
    if vectors <= _MOST_THREADS * (min(held, _ROOM // 4) if shares else held):
        # Masked ends take a vector more, which is no reason for twice the threads.
        plain = max(vectors - (ends == "Masked"), 1)
        row = run_row(plain, vec, itemsize, arch, tensors)
        threads = run_table.TABLE.threads(row) or _MOST_THREADS
        if tensors == 2 and sets is not None and sets <= _SMS and vectors > 512:
            # An SM has one set: 8 x 64 x 32 x 32 backward takes 4.4 us, with 256 threads 4.8.
            threads = _MOST_THREADS
        if (crossing or ends != "Whole") and threads <= 2 * _WARP:
            # Straight on is no way for them, so that every thread costs more: group norm 2604 x 256
            # x 3 takes 7.4 us for 11.5, instance norm 1195 x 256 x 49 37.2 for 45.2.
            each = 4 if crossing or vectors > 8 else 2
            threads = power_of_two_up(-(-plain // each))
        packs = _bucket(-(-vectors // threads))
        manner = run_table.TABLE.manner(row)
        together = max((manner.block or 32) // threads, 1) if threads <= 32 else 1
        block = threads * together
        ctas = _ctas(block, packs * tensors, pack_registers, itemsize, arch, beside)
        ctas = (manner.ctas if ends == "Whole" else 0) or ctas
        return RunTile(vec, access, packs, threads, together, ctas=ctas, ends=ends)
    on_chip = None
    if ends == "Whole" or (shares and ends == "Ragged") or (tensors == 2 and itemsize == 4):
        on_chip = _on_chip(vectors, vec, access, itemsize, arch, tensors, shares, ends)
    # 64 x 256 x 28 x 28 float16 takes 16.6 us with a CTA a channel, 17.5 with clusters.
    at_once = on_chip is not None and sets is not None and on_chip.grid(sets) <= 2 * _SMS
    if shares and not (at_once and on_chip.cluster == 1 and ends == "Whole"):
        on_chip = _shared_out(vectors, vec, access, itemsize, arch, ends) or on_chip
    if on_chip is not None:
        return replace(on_chip, ends=ends)
    held = min(held, 8)
    if ends == "Masked":  # else two CTAs an SM: batch norm 28 x 8 x 65537 bfloat16 37.3 us for 34.5
        held, beside = min(held, 6), 0
    segments = -(-vectors // (_BLOCK * held))
    ctas = _ctas(_BLOCK, held * tensors, pack_registers, itemsize, arch, beside)
    return RunTile(vec, access, held, _BLOCK, ctas=ctas, segments=segments, ends=ends)


def run_row(vectors: int, vec: int, itemsize: int, arch: int, tensors: int) -> Row:
    """What the table is asked about; arguments as for `run_tile`."""
    kind = "forward" if tensors == 1 else "backward"
    if itemsize == 8 and arch >= 100:
        kind = f"tight {kind}"
    return Row(kind, itemsize, vec * itemsize == TRANSACTION, 1, vectors)


def most_held(pack_registers: int, itemsize: int, arch: int, tensors: int) -> int:
    """Packs of an array in a thread's registers."""
    room = 24 if itemsize == 8 and arch >= 100 else 32  # registers of data
    return min(room // pack_registers, 16) // tensors


def _shared_out(
    vectors: int, vec: int, access: int, itemsize: int, arch: int, ends: Ends
) -> RunTile | None:
    """Clusters of small CTAs, for sets of two of them and more; of float32 of three and more."""
    cluster = power_of_two_up(-(-vectors // (_SHARE_THREADS * _SHARE_PACKS)))
    cluster = min(cluster, largest_cluster(arch))
    if cluster * 2 <= itemsize or vectors > MOST_SHARED_OUT // 16 * largest_cluster(arch):
        return None
    packs = _bucket(-(-vectors // (_SHARE_THREADS * cluster)))
    tight = access < vec  # what is shifted takes registers, most of all that of eight packs
    packs = max(packs, _SHARE_PACKS) if tight else packs
    in_registers, ctas = _SHARE_HELD.get((itemsize, packs), (4 if ends == "Masked" else 5, 3))
    if tight or arch != 90:
        ctas = min(ctas, 2)
    shared = max(packs - in_registers, 0)
    return RunTile(vec, access, packs, _SHARE_THREADS, 1, cluster, shared, ctas)


def _on_chip(
    vectors: int,
    vec: int,
    access: int,
    itemsize: int,
    arch: int,
    tensors: int,
    shares: bool,
    ends: Ends,
) -> RunTile | None:
    """Large sets: more in registers, or as much again in shared memory; clusters."""
    pack_registers = max(vec * itemsize // _WORD, 1)
    room = (24 if arch >= 100 else 40) if itemsize == 8 else (48 if arch >= 100 else 64)
    held = (12 if itemsize == 4 else 16) if shares else min(room // pack_registers, 16) // tensors
    if ends == "Masked":
        held = min(held, _MASKED_PACKS)
    cluster = power_of_two_up(-(-vectors // (_MOST_THREADS * held)))
    if cluster > (largest_cluster(arch) if pack_registers == 4 else min(largest_cluster(arch), 8)):
        return None
    packs = _bucket(-(-vectors // (_MOST_THREADS * cluster)))
    packs = min(packs, held)
    # With 64 registers a thread there is room for five packs, and for two such CTAs on an SM.
    in_registers = 4 if (itemsize == 4 and cluster > 1) or access < vec else 5
    shared = max(packs - in_registers, 0) if shares else 0
    tight = access < vec and packs > 8  # what is shifted takes some more
    two = shares or ends == "Masked"
    ctas = 2 if two and arch == 90 and not tight else 1
    return RunTile(vec, access, packs, _MOST_THREADS, 1, cluster, shared, ctas)


def _bucket(packs: int) -> int:
    """A number of packs that does for that many: so that few kernels serve all sizes."""
    return next(n for n in (1, 2, 4, 6, 8, 12, 16) if n >= packs)


def _ctas(
    block: int, packs: int, pack_registers: int, itemsize: int, arch: int, beside: int
) -> int:
    """CTAs an SM has room for: caps the registers that the compiler may take."""
    working = (40 if arch < 100 else 56) + beside
    working += (32 if itemsize == 8 else 0) + 2 * max(packs - 4, 0)
    registers = max(-(-(packs * pack_registers + working) // 8) * 8, 64)
    return max(min(_REGISTERS // (registers * block), 1024 // block, 8), 1)


def column_tile(
    whole: bool,
    rows: int,
    columns: int,
    vec: int,
    access: int,
    itemsize: int,
    arch: int,
    tensors: int = 1,
    single: bool = True,
) -> ColumnTile:
    """The launch over planes of rows by columns.

    `whole`: there is one plane, whose rows may decide; else the bits of a plane would depend on how
    many there are. `single`: whether one CTA may hold all rows of a tile, where they fit.
    """
    access = min(access, vec)
    narrow = power_of_two_up(-(-columns // vec))
    packs = 8 // tensors
    for tx, block in ((8, 128), (8, 256), (8, 512)):
        tx = min(narrow, tx)
        ty = block // tx
        if single and rows <= ty * packs:
            held = -(-rows // ty)
            held = 1 if held == 1 else power_of_two_up(held)
            return ColumnTile(vec, access, tx, ty, held, 512 // block)
    tx = _tile_width(columns, vec)
    # And as many on their way. Alignment decides about registers, not about which rows are added
    # together: their sum keeps its bits.
    packs = _streamed(vec, vec, arch, tensors) // 2
    ctas = 2 if access == vec else 1
    ty = _BLOCK // tx
    batches = -(-rows // (ty * packs))
    most = max(batches // (_FEWEST_BATCHES if whole else 2 * _FEWEST_BATCHES), 1)
    tiles = -(-columns // (tx * vec))
    blocks = min(most, _full_waves(tiles) if whole else max(_SMS // tiles, 1))
    rounds = -(-batches // blocks)  # of the busiest block: no more blocks than that takes
    blocks = -(-batches // rounds)
    return ColumnTile(vec, access, tx, ty, packs, ctas, blocks)


def _tile_width(columns: int, vec: int) -> int:
    """Threads a row of a tile: 256 bytes, or 128 where that leaves fewer threads idle."""
    vectors = -(-columns // vec)
    wide = min(power_of_two_up(vectors), _WIDE_TILE if vec > 1 else 32)
    half = max(wide // 2, 1)
    return half if -(-vectors // half) * half * 1.1 <= -(-vectors // wide) * wide else wide


def _full_waves(tiles: int) -> int:
    """Blocks of so many tiles that fill a large GPU, two CTAs an SM, once or a few times."""
    best, blocks = 0.0, 1
    for room in (2 * _SMS * waves for waves in (1, 2, 3, 4)):
        filled = room // tiles * tiles / room
        if filled > best:
            best, blocks = filled, room // tiles
        if best >= 0.95:
            break
    return blocks


def _streamed(vec: int, access: int, arch: int, tensors: int) -> int:
    """Rows of each array on their way at once: eight columns a thread take many registers."""
    packs = 8 // tensors
    tight = arch >= 100 or access < vec or (tensors == 2 and arch != 90)
    return packs // 2 if vec == 8 and tight else packs


def column_map_tile(
    planes: int,
    rows: int,
    columns: int,
    vec: int,
    access: int,
    arch: int,
    tensors: int = 1,
) -> ColumnTile:
    """The launch of one pass over planes of rows by columns."""
    tx = _tile_width(columns, vec)
    ty = _MAP_BLOCK // tx
    packs = _streamed(vec, access, arch, tensors)
    while packs > 1 and planes * rows * -(-columns // (tx * vec)) < ty * packs * 1024:
        packs //= 2
    ctas = 2 if vec == 8 and arch >= 100 else 4
    return ColumnTile(vec, min(access, vec), tx, ty, packs, ctas, -(-rows // (ty * packs)))


def map_vector(length: int, channels: int, itemsize: int, dense: bool) -> int:
    """Elements of a vector of a pass over channels of `length` elements.

    As wide as a sample allows, or as can be, where samples are `dense`: they follow each other.
    Unless channels are so short that one would have parts of many.
    """
    widest = TRANSACTION // itemsize
    if length < 2 * widest:
        return vector_length(length, itemsize)
    return widest if dense and itemsize < 8 else vector_length(length * channels, itemsize)


def map_tile(elements: int, length: int, vec: int, access: int, tensors: int = 1) -> MapTile:
    """The launch of one pass over channels of `length` elements."""
    vectors = -(-elements // vec)
    packs = 4 if vectors >= 4 * _FEW else 2 if vectors >= _FEW // 2 else 1
    ctas = 2 if tensors == 2 else 4
    crossing, ragged, brief = length % vec != 0, elements % vec != 0, elements < BRIEF
    tile = MapTile(vec, min(access, vec), packs, _BLOCK, ctas, crossing, ragged, brief)
    while tile.most_runs(length) > 2 * tile.threads:
        tile = replace(tile, packs=tile.packs // 2)
    return tile


def straight_map_tile(tile: MapTile, elements: int) -> MapTile:
    """The launch of channel_map_brief.cuh in place of such a one of channel_map.cuh.

    Small CTAs, where there are many: with a pack a thread 4 x 128 x 1024 x 1024 float16 takes 506
    us (copy 506) with 128 threads, 508 with 256, 522 with 512; with two packs 508, 517 and 520.
    4 x 256 x 28 x 28 takes 3.75 with two packs and 256 threads, 3.83 with one.
    """
    many = elements // tile.vec >= 4 * _FEW
    return replace(tile, packs=1, threads=128, ctas=8) if many else tile


def table_rows(rows: int) -> int:
    """Rows of a column that a launch over a short table has room for, or 0: it is not short."""
    return next((room for room in (8, 16, 32) if rows <= room), 0)


def table_lanes(columns: int, itemsize: int) -> int:
    """Lanes that share a column of a short table.

    Four: 32 x 64 float16 takes 2.38 us, with one 3.16, 32 x 4096 3.12 and 3.89. But where a table
    is wide they read 16 bytes of a row at a time: 32 x 65536 7.9 and 6.2; float32 7.9 (copy 7.0).
    """
    return 1 if itemsize == 2 and columns > _WIDE_TABLE else 4


def merge_threads(records: int) -> int:
    """Threads that merge the records of a set."""
    return 32 if records <= _LONG_MERGE else _BLOCK


def merge_held(records: int, threads: int, itemsize: int, arch: int) -> int:
    """Records of a set that each of its threads keeps, or 0: it reads them again and again."""
    room = itemsize < 8 and arch < 100  # elsewhere some would be spilled
    return _MERGE_HELD if room and records <= _MERGE_HELD * threads else 0
