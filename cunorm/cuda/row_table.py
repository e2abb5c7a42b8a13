"""The launches of row norms, as measured; `python -m bench tune` writes such a file.

Times without a date: H200, cold L2, median of five, bfloat16 unless said, 2026-11-29 and 30; more
in bench/NOTES.md. What each entry means is in tables.py.
"""

from __future__ import annotations

from cunorm.cuda.tables import Ladder, Manner, Step, Table

TABLE = Table(
    ladders=(
        Ladder(
            kinds=("rms",),
            itemsizes=(2,),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 16),
                Step(32, 32, "one pack a thread: 32768 x 256 takes 10.98 us, with two packs 11.07"),
                Step(128, 32),
                Step(256, 128),
                Step(1536, 256, "2048 x 4096 takes 11.2 us, with 128 threads as well"),
                Step(4096, 512, "2048 x 16384 takes 37.9 us, with 256 threads 39.5"),
            ),
        ),
        Ladder(
            kinds=("layer",),
            itemsizes=(2,),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(
                    160,
                    32,
                    "1024 x 1152 takes 4.57 us by one warp a row, with 128 threads 4.81; 32768 x "
                    "1152 43.5 and 54.7",
                ),
                Step(
                    512,
                    128,
                    "eight elements a pack are work enough: 2048 x 4096 takes 12.1 us, with 256 "
                    "threads 14.1",
                ),
                Step(1536, 256),
                Step(4096, 512),
            ),
        ),
        Ladder(
            kinds=("adaptive",),
            itemsizes=(2,),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(128, 32),
                Step(256, 128),
                Step(1536, 256, "2048 x 4096 takes 18.8 us, with 128 threads 19.4"),
                Step(4096, 512),
            ),
        ),
        Ladder(
            itemsizes=(4,),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(128, 32),
                Step(256, 64),
                Step(1536, 256, "2048 x 5120 takes 27 us, with 512 threads 31"),
                Step(4096, 512),
            ),
        ),
        Ladder(
            itemsizes=(8,),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(128, 32),
                Step(256, 64),
                Step(2048, 256, "8192 x 4096 takes 140 us, with 512 threads 155"),
                Step(4096, 512),
            ),
        ),
        Ladder(
            whole=False,
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(256, 32),
                Step(512, 64),
                Step(4096, 256),
                Step(8192, 512),
            ),
        ),
    ),
    manners=(
        Manner(
            kinds=("rms",),
            itemsizes=(2,),
            whole=True,
            above=8,
            vectors=64,
            block=128,
            brief=True,
            reason=(
                "8192 x 128 takes 3.85 us, 32768 x 256 10.98, 32768 x 512 19.18; by the kernel "
                "for all rows 3.97, 11.14, 19.27; with 64 threads a CTA 32768 x 256 and 512 take "
                "12.94 and 19.19, with 256 11.04 and 19.30"
            ),
        ),
        Manner(
            kinds=("layer",),
            itemsizes=(2,),
            whole=True,
            above=128,
            vectors=160,
            brief=True,
            reason=(
                "1024 x 1152 takes 4.57 us, 32768 x 1152 43.5, by the kernel for all rows, half "
                "of whose packs would be idle, 4.81 and 54.7; but 32768 x 1024 37.3 and 35.8"
            ),
        ),
        Manner(
            kinds=("rms",),
            itemsizes=(2,),
            addends=(2,),
            whole=True,
            above=8,
            vectors=64,
            reading=("early", "staged"),
            reason="as layer norm",
        ),
        Manner(
            kinds=("layer",),
            itemsizes=(2,),
            addends=(2,),
            whole=True,
            above=128,
            vectors=160,
            reading=("early", "staged"),
            reason="1024 x 1152 takes 5.80 us, through shared memory 5.87",
        ),
        Manner(
            kinds=("rms",),
            itemsizes=(2, 4),
            addends=(1,),
            whole=True,
            vectors=1536,
            reading=("early", "staged"),
            reason=(
                "registers to spare: 32768 x 4096 takes 130.3 us, through shared memory 132.2; "
                "but by 512 threads 1 x 16384 3.65, through shared memory 3.48"
            ),
        ),
        Manner(
            kinds=("layer",),
            itemsizes=(4,),
            addends=(1,),
            whole=True,
            vectors=1536,
            reading=("early", "staged"),
            reason="32768 x 1024 takes 66.2 us, through shared memory 67 to 73",
        ),
        Manner(
            reading=("staged", "early"),
            block=64,
            brief=False,
            reason=(
                "parameters in shared memory wait for the statistics at no register's cost: layer "
                "norm, 2048 x 4096, takes 12.1 us, with them in registers 12.7; 2048 x 16384 "
                "38.5, read late 42.0; adaptive layer norm, 1024 x 1152, 5.4 and 6.1 in "
                "registers; rows of 256, 512 and 1024, 32768 of them, take 11.4, 19.7, 35.4 us "
                "with 64 threads a CTA and 11.5, 19.9, 35.7 with 128"
            ),
        ),
    ),
)
