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
ROOMY = (90, 100)  # 227 KiB of shared memory for the CTAs of an SM: two rows' halves fit
TRANSACTION = 16  # bytes


@dataclass(frozen=True)
class RowTile:
    """The numbers of ``RowShape`` in row_shape.cuh, and the segments of a row (0: not cut)."""

    vec: int
    access: int
    packs: int
    threads: int
    rows: int = 1
    cluster: int = 1
    reading: str = "late"  # of the parameters: or "early", or "staged"
    ctas: int = 1
    shared: int = 0
    segments: int = 0
    dense: bool = False
    brief: bool = False  # by the kernel for short rows (row_brief.cuh), where rows are dense

    @property
    def block(self) -> int:
        return self.threads * self.rows

    def grid(self, rows: int) -> int:
        """CTAs that a launch over so many rows has."""
        return -(-rows // self.rows) * self.cluster * max(self.segments, 1)

    @property
    def expression(self) -> str:
        """The shape as a C++ type."""
        dense, segment = (str(flag).lower() for flag in (self.dense, self.segments > 0))
        return (
            f"RowShape<{self.vec}, {self.access}, {self.packs}, {self.shared}, {self.threads}, "
            f"{self.rows}, {self.cluster}, k{self.reading.capitalize()}, {self.ctas}, {dense}, "
            f"{segment}>"
        )

    def shared_memory(self, itemsize: int, parameter_bytes: int) -> int:
        """Bytes of dynamic shared memory of a CTA; of an element and of its parameters."""
        staged = self.packs * parameter_bytes if self.reading == "staged" else 0
        return (self.shared * itemsize + staged) * self.block * self.vec


def power_of_two_up(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def vector_length(cols: int, itemsize: int) -> int:
    """Neighbours that a thread takes at a time: the most that divides cols, within 16 bytes."""
    vec = TRANSACTION // itemsize
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
    centred: bool = True,
    row_parameters: bool = False,
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
    centred : bool
        Whether the norm takes a mean, which needs more registers than squares alone.
    row_parameters : bool
        Whether each row has parameters of its own.

    Notes
    -----
    What decides the order of additions (vec, packs, threads, cluster, segments) follows from
    `cols`, `itemsize`, `arch` and the kind of norm alone: a row has the same bits in any company,
    and an op and its fused form agree.
    """
    vec = vector_length(cols, itemsize)
    vectors = cols // vec
    pack_registers = max(vec * itemsize // _WORD, 1)
    kind = addends, centred, row_parameters
    threads, cluster, segments = _spread(vectors, pack_registers, itemsize, arch, *kind[1:])
    packs = -(-vectors // (threads * cluster * max(segments, 1)))
    rows = max(_SHORT_BLOCK // threads, 1)

    tile = RowTile(vec, min(access, vec), packs, threads, rows, cluster, segments=segments)
    tile = _brief(tile, vectors, itemsize, centred, row_parameters)
    beyond_registers = cluster > 1 or packs > _most_held(pack_registers)
    if beyond_registers and _shares_memory(arch, pack_registers, itemsize) and not segments:
        return _with_shared_memory(tile, parameter_words, *kind, arch)
    parameter_bytes = int(parameter_words * itemsize)
    tile = replace(tile, reading=_reading(tile, itemsize, parameter_bytes, *kind, arch))
    ctas = _resident_ctas(tile, itemsize, parameter_words, addends, centred, arch)
    shared = tile.shared_memory(itemsize, parameter_bytes)
    if shared:
        ctas = min(ctas, _SHARED_MEMORY[arch] // (shared + _RESERVED))
    return replace(tile, ctas=ctas)


# All thresholds: H200, cold L2, median of five, 2026-11-29 and 30; more in bench/NOTES.md.
#
# Threads of a CTA that serves several rows: bfloat16, 32768 rows of 256, 512 and 1024 take 11.4,
# 19.7, 35.4 us with 64 threads and 11.5, 19.9, 35.7 with 128.
_SHORT_BLOCK = 64
_SHORT_PACKS = 5  # of a layer norm by one warp, where half of 128 threads' packs would be idle
# Of an RMS norm by the kernel for short rows: 32768 x 256 and 512 take 10.98 and 19.18 us with 128
# threads, 12.94 and 19.19 with 64, 11.04 and 19.30 with 256.
_BRIEF_BLOCK = 128
# Bytes of an SM's shared memory, where they are enough for parameters, and what each CTA costs.
_SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
_RESERVED = 1 << 10


def _brief(
    tile: RowTile, vectors: int, itemsize: int, centred: bool, row_parameters: bool
) -> RowTile:
    """The tile, by the kernel for short rows where that is known to be faster.

    RMS norm, bfloat16: 8192 x 128 3.85 us, 32768 x 256 10.98, 32768 x 512 19.18; by the kernel for
    all rows 3.97, 11.14, 19.27. Layer norm, 1024 x 1152 4.57 and 32768 x 1152 43.5, before 4.81 and
    54.7; but 32768 x 1024 37.3 and 35.8.
    """
    if itemsize != 2 or tile.vec != 8 or tile.threads > 32 or vectors <= 8 or row_parameters:
        return tile
    if tile.packs != _SHORT_PACKS if centred else tile.packs > 2:
        return tile
    rows = tile.rows if centred else _BRIEF_BLOCK // tile.threads
    return replace(tile, rows=rows, brief=tile.access == tile.vec)


def _reading(
    tile: RowTile,
    itemsize: int,
    parameter_bytes: int,
    addends: int,
    centred: bool,
    row_parameters: bool,
    arch: int,
) -> str:
    """When the parameters are read.

    In shared memory they wait for the statistics at no register's cost: layer norm, bfloat16, 2048
    x 4096 takes 12.1 us, with them in registers 12.7; 2048 x 16384 38.5, read late 42.0; adaptive
    layer norm, 1024 x 1152, 5.4 and 6.1 in registers. An RMS norm has registers to spare: 32768 x
    4096 takes 130.3 us, through shared memory 132.2, but for its widest CTAs: 1 x 16384 3.48,
    in registers 3.65.
    """
    of_pack = max(tile.vec * itemsize // _WORD, 1)
    bytes_of_thread = tile.packs * tile.vec * parameter_bytes
    # float64, 8192 x 4096: through shared memory 166 us, read late 137.
    staged = (
        arch in _SHARED_MEMORY
        and itemsize < 8
        and tile.access * itemsize == TRANSACTION
        and not tile.segments
        and 0 < bytes_of_thread <= (256 if tile.block <= 128 else 220)
    )
    words = tile.packs * of_pack * max(addends, 1 + parameter_bytes / itemsize)
    early = words <= (64 if tile.block <= 128 else 32)
    if tile.brief and addends == 2 and early:  # layer norm, 1024 x 1152: 5.80 us, staged 5.87
        return "early"
    # float32, 32768 x 1024: in registers 66.2 us, through shared memory 67 to 73.
    roomy = not centred or (itemsize == 4 and not row_parameters)
    if early and roomy and addends == 1 and tile.block < 512:
        return "early"
    return "staged" if staged else "early" if early else "late"


def _most_held(pack_registers: int) -> int:
    """Packs that a thread holds in registers; single elements cost an address besides."""
    return min(32 // pack_registers, 16)


def _shares_memory(arch: int, pack_registers: int, itemsize: int) -> bool:
    """Whether rows beyond the registers go on in shared memory."""
    return arch in ROOMY and pack_registers == 4 and itemsize < 8


def _spread(
    vectors: int,
    pack_registers: int,
    itemsize: int,
    arch: int,
    centred: bool,
    row_parameters: bool,
) -> tuple[int, int, int]:
    """Threads per CTA, CTAs per cluster and segments (0: not cut) of a row."""
    held = _most_held(pack_registers)
    eight = itemsize == 2 and pack_registers == 4  # elements a pack
    few_threads = centred and not row_parameters
    if vectors <= 8:
        return power_of_two_up(vectors), 1, 0
    if eight and not centred and vectors <= 32:  # 32768 x 256: 10.98 us, two packs a thread 11.07
        return power_of_two_up(vectors), 1, 0
    if vectors <= 64:  # two packs a thread, at least 8 threads
        return max(8, power_of_two_up(-(-vectors // 2))), 1, 0
    if eight and few_threads and 128 < vectors <= 32 * _SHORT_PACKS:
        return 32, 1, 0
    # Eight elements a pack are work enough for twice the threads: layer norm, bfloat16, 2048 x 4096
    # takes 12.1 us with 128, 14.1 with 256; but an adaptive layer norm 19.4 and 18.8, an RMS norm
    # 11.2 with either.
    if eight and 128 < vectors <= (512 if few_threads else 256):
        return 128, 1, 0
    if vectors <= 64 * (held // 2):  # up to half of what a thread may hold
        return max(32, power_of_two_up(-(-vectors // (held // 2)))), 1, 0
    # 256 threads, then 512: bfloat16, 2048 x 16384 takes 37.9 us with 512 (RMS norm), 39.5 with
    # 256; float32, 2048 x 5120 31 us and 27; float64, 8192 x 4096 155 us and 140.
    if vectors <= 256 * held and (vectors <= 192 * held or itemsize == 8 or pack_registers < 4):
        return 256, 1, 0
    if vectors <= 512 * held:
        return 512, 1, 0
    most = largest_cluster(arch)
    if _shares_memory(arch, pack_registers, itemsize):
        # As much again in shared memory. bfloat16, 32768 x 65536: four CTAs 2079 us, one 2165;
        # 16384 x 131072: 256 threads 2139 us, 512 threads 2152.
        cluster = max(power_of_two_up(-(-vectors // (256 * 2 * held))), 4)
        if cluster <= most:
            return 256, cluster, 0
    else:
        cluster = power_of_two_up(-(-vectors // (512 * held)))
        if cluster <= (most if pack_registers == 4 else min(most, 8)):
            return 512, cluster, 0
    # Segments of 256 threads' usual load: short enough that one row fills a large GPU.
    return 256, 1, -(-vectors // (256 * (held // 2)))


def _with_shared_memory(
    tile: RowTile,
    parameter_words: float,
    addends: int,
    centred: bool,
    row_parameters: bool,
    arch: int,
) -> RowTile:
    """The tile with the packs beyond some in shared memory.

    Several rows on an SM: one is read or written while another makes up its statistics. Where
    64 registers a thread are enough for four CTAs, RMS norm, bfloat16, takes 2079 us for 32768 x
    65536 with 2 packs of 8 in registers, 2112 with 4; for 16384 x 131072 2139 with 8 of 16, 2184
    with 6.
    """
    light = arch == 90 and addends == 1 and parameter_words <= 2
    light = light and tile.access == tile.vec and tile.cluster <= (8 if tile.vec == 8 else 4)
    light = light and (centred or tile.vec == 8)
    held = 2 if tile.packs <= 8 else 8 if light and not centred else 6
    threads = 1024 if light else 512  # an SM
    if light and centred and (tile.cluster == 8 or row_parameters):
        threads = 768  # exchange and addresses take registers too
    if tile.access < tile.vec:
        threads = 256  # many loads are on their way, each to its register
    return replace(tile, shared=tile.packs - held, ctas=threads // tile.threads)


def _registers(tile: RowTile, itemsize: int, parameter_words: float, addends: int) -> int:
    """Registers that a thread may well use: what it holds, and what it works with."""
    of_pack = max(tile.vec * itemsize // _WORD, 1)
    arrays = addends + (parameter_words if tile.reading == "early" else 0)
    working = (56 if itemsize < 8 else 96) + 2 * max(tile.packs - 6, 0)
    working += 8 if tile.segments or (tile.packs > 8 and parameter_words > 2) else 0
    return -(-int((tile.packs - tile.shared) * of_pack * arrays + working) // 8) * 8


def _resident_ctas(
    tile: RowTile,
    itemsize: int,
    parameter_words: float,
    addends: int,
    centred: bool,
    arch: int,
) -> int:
    """CTAs per SM to leave room for: caps the registers that the compiler may take."""
    registers = _registers(tile, itemsize, parameter_words, addends)
    held = tile.packs * max(tile.vec * itemsize // _WORD, 1)
    if tile.reading == "staged" and held <= (16 if addends == 2 else 20 if centred else 32):
        registers = 64  # suffices, and a CTA more helps: layer norm, 2048 x 8192, 21.5 us
    if tile.brief:  # keeps the row in float, too
        registers = 128 if centred else 64
    by_registers = _REGISTERS_PER_SM // (registers * tile.block)
    by_threads = _MOST_THREADS.get(arch, 2048) // tile.block
    return max(min(by_registers, by_threads, 16), 1)
