"""The launches of long rows by clusters, as measured; what is shorter is in row_table.py.

A CTA holds two to four vectors a thread, in registers, and the parameters wait for the statistics
in shared memory. H200, cold L2, 2026-11-30; us, against one CTA a row or clusters of four with
most of a row in shared memory, which was so before (bench/NOTES.md, "long rows"):

| | copy | before | now |
|---|---|---|---|
| rms_norm 1 x 32768 bfloat16 | 2.2 | 4.0 | 2.1 |
| fused_add_layer_norm 9155 x 32768 bfloat16 | 565 | 983 | 581 |
| layer_norm 9155 x 32768 bfloat16 | 285 | 382 | 314 |
| rms_norm 381 x 65536 bfloat16 | 26.5 | 32.4 | 25.6 |
| rms_norm 1144 x 262144 bfloat16 | 285 | 352 | 298 |
| layer_norm 1144 x 131072 float32 | 285 | 419 | 371 |
| ada_layer_norm 2288 x 131072 bfloat16 | 564 | 709 | 541 |
"""

from __future__ import annotations

from typing import NamedTuple

from cunorm.cuda.tables import Row


class Step(NamedTuple):
    """Rows of up to so many vectors of 16 bytes, by so many threads in each of so many CTAs."""

    vectors: int
    threads: int
    cluster: int


class Ladder(NamedTuple):
    """Rows of more than `above` vectors."""

    above: int
    steps: tuple[Step, ...]

    def step(self, vectors: int) -> Step | None:
        if vectors <= self.above:
            return None
        return next((step for step in self.steps if vectors <= step.vectors), None)


# Few vectors a thread: 9155 x 32768 bfloat16 takes 286 us with two, 288 with four, 1 row 2.1 and
# 2.3; but 4577 x 65536 300 and 289. By 512 threads 1 x 65536 takes 3.0 us, by 256 2.4.
_RMS = Ladder(
    1024,
    (
        Step(1536, 256, 2),
        Step(3072, 256, 4),
        Step(4096, 256, 8),
        Step(8192, 256, 8),
        Step(16384, 256, 16),
        Step(32768, 512, 16),
        Step(65536, 512, 16),
    ),
)
# 762 x 32768 bfloat16 takes 30.2 us, by 256 threads 31.8; 2288 x 131072 362 and 387; but 1 x 65536
# 3.4 us and 2.8, 381 x 65536 33.5 and 32.8.
_LAYER = Ladder(
    2560,
    (
        Step(4096, 512, 2),
        Step(8192, 256, 8),
        Step(16384, 512, 8),
        Step(32768, 512, 16),
        Step(65536, 512, 16),
    ),
)
# With a gate 4577 x 65536 bfloat16 takes 681 us (copy 708), by CTAs of 256 threads 756.
_ADAPTIVE = Ladder(
    2048,
    (
        Step(4096, 512, 2),
        Step(8192, 512, 4),
        Step(16384, 512, 8),
        Step(32768, 512, 16),
        Step(65536, 512, 16),
    ),
)
# What is shifted takes registers: small CTAs, of which several fit an SM. layer_norm 499 x 50021
# bfloat16 takes 50 us (before 56), 249 x 50021 float32 46 (before 64). But 1249 x 20011 bfloat16 42
# by one CTA, 47 by four.
_ODD = Ladder(
    2560,
    (
        Step(4096, 256, 4),
        Step(8192, 256, 8),
        Step(16384, 256, 16),
        Step(32768, 512, 16),
        Step(65536, 512, 16),
    ),
)
_OF_KIND = {"rms": _RMS, "layer": _LAYER, "adaptive": _ADAPTIVE}


def step(row: Row, odd: bool) -> Step | None:
    """The launch of a row, or None where that is left to others; `odd`: no vector divides it."""
    return (_ODD if odd else _OF_KIND[row.kind]).step(row.vectors)
