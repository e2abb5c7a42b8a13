"""How a row is laid over threads: pure functions of a few integers.

The choice depends on the length of the row and the sizes of the types, never on the number of
rows: a row's sums are then added in the same order in any company, and keep their bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_REGISTERS_PER_SM = 65536
_WORD = 4  # bytes of a register
_MOST_THREADS = {75: 1024, 86: 1536, 89: 1536, 120: 1536}  # resident per SM; 2048 elsewhere
_LARGEST_CLUSTER = {90: 16, 100: 16}  # 8 on other parts from 9.0 on: more is not portable
_SHARED_PER_SM = {90: 227, 100: 227, 80: 163}  # KiB for CTAs; 99 or less elsewhere
_TRANSACTION = 16  # bytes


@dataclass(frozen=True)
class RowTile:
    """The numbers of ``RowShape`` in row_shape.cuh, and the segments of a row (0: not cut)."""

    vec: int
    access: int
    packs: int
    threads: int
    rows: int = 1
    cluster: int = 1
    early: bool = False
    ctas: int = 1
    shared: int = 0
    segments: int = 0

    @property
    def block(self) -> int:
        return self.threads * self.rows

    def grid(self, rows: int) -> int:
        """CTAs that a launch over so many rows has."""
        return -(-rows // self.rows) * self.cluster * max(self.segments, 1)

    @property
    def expression(self) -> str:
        """The shape as a C++ type."""
        early = str(self.early).lower()
        segment = str(self.segments > 0).lower()
        return (
            f"RowShape<{self.vec}, {self.access}, {self.packs}, {self.shared}, {self.threads}, "
            f"{self.rows}, {self.cluster}, {early}, {self.ctas}, {segment}>"
        )

    def shared_memory(self, itemsize: int) -> int:
        """Bytes of dynamic shared memory of a CTA."""
        return self.shared * self.block * self.vec * itemsize


def power_of_two_up(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def vector_length(cols: int, itemsize: int) -> int:
    """Neighbours that a thread takes at a time: the most that divides cols, within 16 bytes."""
    vec = _TRANSACTION // itemsize
    while cols % vec:
        vec //= 2
    return vec


def largest_cluster(arch: int) -> int:
    return 1 if arch < 90 else _LARGEST_CLUSTER.get(arch, 8)


def row_tile(
    cols: int,
    itemsize: int,
    access: int,
    arch: int,
    parameter_words: float = 1.0,
    addends: int = 1,
) -> RowTile:
    """The launch of a row norm.

    Parameters
    ----------
    cols, itemsize : int
        Row length and bytes of an element of x.
    access : int
        Elements per memory transaction that all arrays allow; cut to the vector length.
    arch : int
        Compute capability, 90 for 9.0.
    parameter_words : float
        Bytes of all parameters of an element over the bytes of the element.
    addends : int
        Arrays that make up the row: 2 where a residual is added.
    """
    vec = vector_length(cols, itemsize)
    vectors = cols // vec
    pack_registers = max(vec * itemsize // _WORD, 1)
    most_packs = 32 // pack_registers
    usual_packs = max(most_packs // 2, 1)

    if vectors <= 8:
        threads = power_of_two_up(vectors)
    else:
        threads = max(8, power_of_two_up(-(-vectors // usual_packs)))
    cluster = segments = 1
    if threads > 512:
        threads, cluster, segments = _spread(vectors, most_packs, arch)
    packs = -(-vectors // (threads * cluster * segments))
    rows = max(128 // threads, 1) if threads <= 32 else 1

    tile = RowTile(vec, min(access, vec), packs, threads, rows, cluster)
    early = replace(tile, early=True)
    if tile.block <= 256 and _registers(early, itemsize, parameter_words, addends) <= 96:
        tile = early
    ctas = resident_ctas(tile, itemsize, parameter_words, addends, arch)
    return replace(tile, ctas=ctas, segments=segments if segments > 1 else 0)


def _spread(vectors: int, most_packs: int, arch: int) -> tuple[int, int, int]:
    """Threads per CTA, CTAs per cluster and segments of a row beyond 512 threads' usual load."""
    if vectors <= 512 * most_packs:
        return 512, 1, 1
    cluster = power_of_two_up(-(-vectors // (512 * most_packs)))
    if cluster <= largest_cluster(arch):
        return 512, cluster, 1
    # Segments of 256 threads' usual load: short enough that one row fills a large GPU.
    return 256, 1, -(-vectors // (256 * max(most_packs // 2, 1)))


def _registers(tile: RowTile, itemsize: int, parameter_words: float, addends: int) -> int:
    """Registers that a thread may well use: what it holds, and what it works with."""
    of_pack = max(tile.vec * itemsize // _WORD, 1)
    arrays = max(1 + parameter_words if tile.early else 1, addends)
    working = 56 if itemsize < 8 else 96
    return -(-int((tile.packs - tile.shared) * of_pack * arrays + working) // 8) * 8


def resident_ctas(
    tile: RowTile, itemsize: int, parameter_words: float, addends: int, arch: int
) -> int:
    """CTAs per SM to leave room for: caps the registers that the compiler may take."""
    registers = _registers(tile, itemsize, parameter_words, addends)
    by_registers = _REGISTERS_PER_SM // (registers * tile.block)
    by_threads = _MOST_THREADS.get(arch, 2048) // tile.block
    return max(min(by_registers, by_threads, 16), 1)
