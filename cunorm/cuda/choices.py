"""How a row is laid over threads: pure functions of a few integers.

The choice depends on the length of the row and the sizes of the types, never on the number of
rows: a row's sums are then added in the same order in any company, and keep their bits.

Which of the launches that a kernel allows is taken was measured: row_table.py has the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cunorm.cuda import row_clusters, row_table
from cunorm.cuda.tables import Manner, Row

_REGISTERS_PER_SM = 65536
_MOST_REGISTERS = 255  # that a thread can name
_LEAST_WORKING = 24  # of them, beside what it holds
_MOST_OF_CLUSTER = 4  # vectors of a thread, where registers keep them and several CTAs a row
_LEAST_RAGGED = 4  # vectors of a row that may have a last one in part
_SHORT = 1024  # vectors of a row that is not laid out for one of which there is a part
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
    of_parameters: int = 0  # elements of these per transaction; 0: as many as of others

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
            f"{segment}, {self.of_parameters or self.access}>"
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


def row_vector(cols: int, itemsize: int) -> int:
    """As `vector_length`, but 16 bytes for rows that only single words divide, the last in part.

    Such rows start anywhere: their vectors are shifted into place (shift.cuh).
    """
    vec, widest = vector_length(cols, itemsize), TRANSACTION // itemsize
    by_words = vec * itemsize <= _WORD and cols >= _LEAST_RAGGED * widest
    return widest if by_words else vec


def row_access(cols: int, vec: int, access: int, itemsize: int) -> int:
    """Elements per transaction of rows in vectors of `vec`, where all arrays allow `access`.

    1 where vectors are shifted: no matter by how much.
    """
    access = min(access, vec)
    shifted = vec * itemsize == TRANSACTION and access * itemsize <= _WORD and itemsize <= _WORD
    return 1 if shifted or cols % vec else access


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
    of_parameters: int | None = None,
) -> RowTile:
    """The launch of a row norm.

    Parameters
    ----------
    cols, itemsize : int
        Row length and bytes of an element of x.
    access : int
        Elements per memory transaction that x, residual and outputs allow; cut to the vector
        length.
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
    of_parameters : int, optional
        The same of the parameters; as `access` unless said.

    Notes
    -----
    What decides the order of additions (vec, packs, threads, cluster, segments) follows from
    `cols`, `itemsize`, `arch` and the kind of norm alone: a row has the same bits in any company,
    and an op and its fused form agree.
    """
    vec = row_vector(cols, itemsize)
    row = row_of(cols, itemsize, addends, centred, row_parameters)
    pack_registers = _pack_registers(vec, itemsize)
    threads, cluster, segments = _spread(row, cols % vec > 0, pack_registers, arch)
    vectors = -(-cols // vec)
    packs = -(-vectors // (threads * cluster * max(segments, 1)))
    manner = row_table.TABLE.manner(row)

    access = row_access(cols, vec, access, itemsize)
    of_parameters = min(of_parameters or access, vec)
    tile = RowTile(
        *(vec, access, packs, threads, 1, cluster), segments=segments, of_parameters=of_parameters
    )
    tile = _with_company(tile, manner, row)
    parameter_bytes = int(parameter_words * itemsize)
    tile = replace(tile, reading=_reading(tile, manner, itemsize, parameter_bytes, addends, arch))
    many = cluster > 1 and packs > _MOST_OF_CLUSTER and tile.reading != "staged"
    if many and access == vec and _shares_memory(arch, pack_registers, itemsize):
        return _with_shared_memory(tile, parameter_words, addends, arch)
    ctas = _resident_ctas(tile, manner, itemsize, parameter_words, addends, centred, arch)
    shared = tile.shared_memory(itemsize, parameter_bytes)
    if shared:
        ctas = min(ctas, _SHARED_MEMORY[arch] // (shared + _RESERVED))
    return replace(tile, ctas=ctas)


# Bytes of an SM's shared memory, where they are enough for parameters, and what each CTA costs.
_SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
_RESERVED = 1 << 10


def row_of(cols: int, itemsize: int, addends: int, centred: bool, row_parameters: bool) -> Row:
    """What the table is asked about; arguments as for `row_tile`."""
    kind = "adaptive" if row_parameters else "layer" if centred else "rms"
    vec = row_vector(cols, itemsize)
    vectors = -(-cols // vec)
    if cols % vec and vectors <= _SHORT:
        vectors -= 1  # layer norm, 97276 x 257: 16 threads a row, as for 256, 50.6 us, 32 68.4
    return Row(kind, itemsize, vec * itemsize == TRANSACTION, addends, vectors)


def _pack_registers(vec: int, itemsize: int) -> int:
    return max(vec * itemsize // _WORD, 1)


def _with_company(tile: RowTile, manner: Manner, row: Row) -> RowTile:
    """The tile with as many rows a CTA as the table says, by the kernel for short rows or not."""
    if tile.threads > 32:  # rows that share a CTA have no barrier
        return tile
    # Its rows are dense and have no parameters of their own; 32 bits hold the number of a row.
    may_be_brief = row.kind != "adaptive" and tile.vec == 8 and row.vectors > 8
    brief = bool(manner.brief) and may_be_brief and tile.access == tile.vec
    return replace(tile, rows=max((manner.block or 32) // tile.threads, 1), brief=brief)


def _reading(
    tile: RowTile,
    manner: Manner,
    itemsize: int,
    parameter_bytes: int,
    addends: int,
    arch: int,
) -> str:
    """When the parameters are read: as the table would rather have it, where that fits."""
    bytes_of_thread = tile.packs * tile.vec * parameter_bytes
    # float64, 8192 x 4096: through shared memory 166 us, read late 137.
    staged = (
        arch in _SHARED_MEMORY
        and itemsize < 8
        and tile.vec * itemsize == TRANSACTION
        and tile.of_parameters == tile.vec
        and not tile.segments
        and 0 < bytes_of_thread <= (256 if tile.block <= 128 else 220)
    )
    of_pack = _pack_registers(tile.vec, itemsize)
    words = tile.packs * of_pack * max(addends, 1 + parameter_bytes / itemsize)
    early = words <= (64 if tile.block <= 128 else 32)
    fits = {"staged": staged, "early": early, "late": True}
    readings = manner.reading
    if tile.access < tile.vec and itemsize == 2:  # 6105 x 4095: early 35.8 us, staged 36.9
        readings = ("early", *readings)
    return next((reading for reading in readings if fits[reading]), "late")


def most_held(pack_registers: int) -> int:
    """Packs that a thread holds in registers; single elements cost an address besides."""
    return min(32 // pack_registers, 16)


def may_be_launched(tile: RowTile, itemsize: int, arch: int) -> bool:
    """Whether a tile without clusters has the registers and threads that it asks an SM for."""
    of_pack = _pack_registers(tile.vec, itemsize)
    holds = tile.packs <= most_held(of_pack) and tile.shared == 0
    alone = tile.rows == 1 or tile.threads <= 32
    return holds and alone and sm_has_room(tile.block, tile.ctas, tile.packs * of_pack, arch)


def sm_has_room(block: int, ctas: int, held: int, arch: int) -> bool:
    """Whether an SM takes so many CTAs of whole warps, whose threads hold so many registers."""
    allowed = min(_REGISTERS_PER_SM // (ctas * block) // 8 * 8, _MOST_REGISTERS)
    threads = block % 32 == 0 and block <= 1024 and ctas * block <= _MOST_THREADS.get(arch, 2048)
    return threads and allowed >= held + _LEAST_WORKING


def _shares_memory(arch: int, pack_registers: int, itemsize: int) -> bool:
    """Whether rows beyond the registers go on in shared memory."""
    return arch in ROOMY and pack_registers == 4 and itemsize < 8


def _spread(row: Row, odd: bool, pack_registers: int, arch: int) -> tuple[int, int, int]:
    """Threads per CTA, CTAs per cluster and segments (0: not cut) of a row."""
    shares = _shares_memory(arch, pack_registers, row.itemsize)
    step = row_clusters.step(row, odd) if shares else None
    if step is not None:
        return step.threads, step.cluster, 0
    threads = row_table.TABLE.threads(row)
    if threads is not None:
        return threads, 1, 0
    vectors, held = row.vectors, most_held(pack_registers)
    most = largest_cluster(arch)
    cluster = power_of_two_up(-(-vectors // (512 * held)))
    if not shares and cluster <= (most if pack_registers == 4 else min(most, 8)):
        return 512, cluster, 0
    # Segments of 256 threads' usual load: short enough that one row fills a large GPU.
    return 256, 1, -(-vectors // (256 * (held // 2)))


def _with_shared_memory(tile: RowTile, parameter_words: float, addends: int, arch: int) -> RowTile:
    """The tile with the packs beyond two in shared memory, for the longest rows.

    Several rows on an SM: one is read or written while another makes up its statistics. layer_norm
    572 x 262144 float32 takes 450 us so, 479 with all in registers and one CTA an SM.
    """
    light = arch == 90 and addends == 1 and parameter_words <= 2
    return replace(tile, reading="late", shared=tile.packs - 2, ctas=2 if light else 1)


def _registers(tile: RowTile, itemsize: int, parameter_words: float, addends: int) -> int:
    """Registers that a thread may well use: what it holds, and what it works with."""
    of_pack = _pack_registers(tile.vec, itemsize)
    arrays = addends + (parameter_words if tile.reading == "early" else 0)
    working = (56 if itemsize < 8 else 96) + 2 * max(tile.packs - 6, 0)
    working += 8 if tile.segments or (tile.packs > 8 and parameter_words > 2) else 0
    return -(-int((tile.packs - tile.shared) * of_pack * arrays + working) // 8) * 8


def _resident_ctas(
    tile: RowTile,
    manner: Manner,
    itemsize: int,
    parameter_words: float,
    addends: int,
    centred: bool,
    arch: int,
) -> int:
    """CTAs per SM to leave room for: caps the registers that the compiler may take."""
    registers = _registers(tile, itemsize, parameter_words, addends)
    held = tile.packs * max(tile.vec * itemsize // _WORD, 1)
    shifted_sum = tile.access < tile.vec and addends == 2  # needs some more
    most = 0 if shifted_sum else 16 if addends == 2 else 20 if centred else 32
    if tile.reading == "staged" and held <= most:
        registers = 64  # suffices, and a CTA more helps: layer norm, 2048 x 8192, 21.5 us
    if tile.brief:  # keeps the row in float, too
        registers = 128 if centred else 64
    by_registers = _REGISTERS_PER_SM // (registers * tile.block)
    by_threads = _MOST_THREADS.get(arch, 2048) // tile.block
    return max(min(manner.ctas or by_registers, by_threads, 16), 1)
