"""How blocks of rows are kept on chip by CTAs that wait for each other (channel_columns_kept.cuh).

Measured on an H200 beside the three launches of channel_columns.cuh, us (copy): batch norm,
channels last, 256 x 2048 x 7 x 7 bfloat16 49.2 for 52.9 (27.5), backward 69.3 for 72.3 (39.6);
16 x 128 x 56 x 56 22.2 for 25.8 (9.1); 4 x 256 x 28 x 28 float16 14.1 for 15.7 (3.4); 4096 x 1024
float32 21.8 for 24.8 (11.0). Tiles of twice the width take as long, batches of half the rows a
tenth more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt

from cunorm.cuda.channel_choices import ColumnTile
from cunorm.cuda.choices import ROOMY, TRANSACTION, power_of_two_up

_CTAS = 2  # an SM
_SHARED = 108 << 10  # bytes of one of them, beside what the kernel declares
_WIDTH = 8  # threads a row of a tile: 128 bytes
_BLOCK = 256
_PACKS = 2  # of four, some would be spilled
_JOINED = 5  # kJoined
# Where less than this part of a block is kept, what is saved does not pay for one launch that does
# all: 256 x 64 x 56 x 56 (a fourth) takes 94.7 us for 91.8, 65536 x 512 float32 (a fifth) 121 for
# 111; backward, 256 x 2048 x 7 x 7 (a fourth) gains, 256 x 64 x 56 x 56 (an eighth) takes 130.4 for
# 129.4.
_KEPT_PART = {1: 3, 2: 5}


@dataclass(frozen=True)
class KeptColumnTile(ColumnTile):
    """A ``ColumnTile`` whose blocks of rows stay on chip.

    `batches`: how many of each are kept; `together`: blocks whose records are joined first.
    """

    batches: int = 0
    together: int = 1
    tensors: int = 1

    def shared_memory(self, itemsize: int) -> int:
        slots = self.tensors * self.batches * self.packs * self.block * TRANSACTION
        return super().shared_memory(itemsize) + slots

    @property
    def squads(self) -> int:
        return -(-self.segments // self.together)

    def signals(self, planes: int, columns: int) -> int:
        """By which the CTAs of planes wait for each other (Crew)."""
        tiles = -(-columns // (self.tx * self.vec))
        return planes * tiles * (2 * self.segments + self.squads + 1)


def kept_column_tile(
    whole: bool,
    rows: int,
    columns: int,
    vec: int,
    access: int,
    itemsize: int,
    arch: int,
    tensors: int,
    multiprocessors: int,
) -> KeptColumnTile | None:
    """The launch over planes of rows by columns that keeps blocks on chip, or None.

    Parameters
    ----------
    whole : bool
        There is one plane; else its bits must not depend on how many there are.
    rows, columns : int
        Of a plane.
    vec, access, itemsize : int
        Elements of a vector and of a memory transaction, bytes of an element.
    arch, multiprocessors : int
        Of the device; 90 for compute capability 9.0.
    tensors : int
        Arrays that are held: 2 in backward.
    """
    if arch not in ROOMY or itemsize == 8 or vec * itemsize != TRANSACTION or access < vec:
        return None
    tx = min(power_of_two_up(-(-columns // vec)), _WIDTH)
    tile = KeptColumnTile(vec, access, tx, _BLOCK // tx, _PACKS, _CTAS, tensors=tensors)
    batches = -(-rows // (tile.ty * tile.packs))
    bytes_of_batch = tensors * tile.packs * tile.block * TRANSACTION
    room = (_SHARED - tile.shared_memory(itemsize)) // bytes_of_batch
    room -= room % 2  # batches that follow are taken in pairs
    most = multiprocessors * _CTAS // -(-columns // (tx * vec))
    blocks = min(most, batches if whole else -(-batches // room))
    if blocks < 2:
        return None
    rounds = -(-batches // blocks)
    if room * _KEPT_PART[tensors] < rounds:
        return None
    blocks = -(-batches // rounds)
    joined = min(tile.block // (tx * vec), 32) * _JOINED  # records of a column, at once
    together = blocks if blocks <= joined else isqrt(blocks - 1) + 1
    if together > joined:
        return None
    return replace(tile, segments=blocks, batches=min(room, rounds), together=together)
