"""The launches of long rows by clusters, as measured; what is shorter is in row_table.py.

A CTA holds two to four vectors a thread, in registers, and the parameters wait for the statistics
in shared memory. H200, cold L2, 2026-11-30; us, against one CTA a row or clusters of four with
most of a row in shared memory, which was so before (bench/NOTES.md, "long rows"):

| | copy | before | now |
|---|---|---|---|
| rms_norm 1 x 32768 bfloat16 | 2.2 | 4.0 | 2.1 |
| fused_add_layer_norm 9155 x 32768 bfloat16 | 565 | 983 | 581 |
| layer_norm 9155 x 32768 bfloat16 | 285 | 382 | 314 |
| rms_norm 381 x 65536 bfloat16 | 26.7 | 32.4 | 25.8 |
| rms_norm 1144 x 262144 bfloat16 | 285 | 352 | 301 |
| layer_norm 1144 x 131072 float32 | 287 | 419 | 373 |
| ada_layer_norm 2288 x 131072 bfloat16 | 564 | 709 | 541 |
"""

from __future__ import annotations

from cunorm.cuda.tables import Ladder, Row, Step

_LADDERS = (
    Ladder(
        kinds=("rms",),
        above=1024,
        steps=(
            Step(1536, 256, cluster=2),
            Step(3072, 256, cluster=4),
            Step(
                4096,
                256,
                "9155 x 32768 bfloat16 takes 286 us, by four CTAs 288, 1 row 2.1 and 2.3",
                cluster=8,
            ),
            Step(
                8192,
                256,
                "4577 x 65536 takes 289 us, by sixteen CTAs 300; 1 row 2.4, with 512 threads 3.0",
                cluster=8,
            ),
            Step(16384, 256, cluster=16),
            Step(32768, 512, cluster=16),
            Step(65536, 512, cluster=16),
        ),
    ),
    Ladder(
        kinds=("layer",),
        above=2560,
        steps=(
            Step(
                4096,
                512,
                "762 x 32768 bfloat16 takes 30.2 us, with 256 threads 31.8",
                cluster=2,
            ),
            Step(
                8192,
                256,
                "381 x 65536 takes 32.8 us, with 512 threads 33.5; 1 row 2.8 and 3.4",
                cluster=8,
            ),
            Step(16384, 512, "2288 x 131072 takes 362 us, with 256 threads 387", cluster=8),
            Step(32768, 512, cluster=16),
            Step(65536, 512, cluster=16),
        ),
    ),
    Ladder(
        kinds=("adaptive",),
        above=2048,
        steps=(
            Step(4096, 512, cluster=2),
            Step(
                8192,
                512,
                "with a gate 4577 x 65536 takes 681 us (copy 708), with 256 threads 756",
                cluster=4,
            ),
            Step(16384, 512, cluster=8),
            Step(32768, 512, cluster=16),
            Step(65536, 512, cluster=16),
        ),
    ),
)
# What is shifted takes registers: small CTAs, of which several fit an SM.
_ODD = Ladder(
    above=2560,
    steps=(
        Step(4096, 256, "1249 x 20011 bfloat16 takes 47 us so, by one CTA 42: not them", cluster=4),
        Step(8192, 256, "499 x 50021 bfloat16 takes 50 us, before 56", cluster=8),
        Step(16384, 256, "249 x 50021 float32 takes 46 us, before 64", cluster=16),
        Step(32768, 512, cluster=16),
        Step(65536, 512, cluster=16),
    ),
)


def step(row: Row, odd: bool) -> Step | None:
    """The launch of a row, or None where that is left to others; `odd`: no vector divides it."""
    ladder = _ODD if odd else next(ladder for ladder in _LADDERS if ladder.serves(row))
    return ladder.step(row)
