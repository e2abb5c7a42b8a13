"""The launches of channel norms that hold a set in registers, as measured.

`python -m bench tune runs` writes such a file; what each entry means is in tables.py. The sets are
runs of neighbours: channels, groups, instances. What every warp does beside its packs costs as
much as four of them, as for row norms. Kinds: "forward" holds one array, "backward" two; "tight"
are float64 on compute capability 10.0 and later, where fewer registers are left for them.
"""

from __future__ import annotations

from cunorm.cuda.tables import Ladder, Manner, Step, Table

TABLE = Table(
    ladders=(
        Ladder(
            kinds=("forward",),
            itemsizes=(2,),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(128, 32),
                Step(256, 64),
                Step(512, 128),
                Step(2048, 256),
                Step(4096, 512),
            ),
        ),
        Ladder(
            kinds=("forward",),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(128, 32),
                Step(256, 64),
                Step(2048, 256),
                Step(4096, 512),
            ),
        ),
        Ladder(
            kinds=("forward",),
            whole=False,
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(128, 32),
                Step(256, 64),
                Step(4096, 256),
                Step(8192, 512),
            ),
        ),
        Ladder(
            kinds=("tight forward",),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(96, 32),
                Step(192, 64),
                Step(1536, 256),
                Step(3072, 512),
            ),
        ),
        Ladder(
            kinds=("tight forward",),
            whole=False,
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(128, 32),
                Step(256, 64),
                Step(3072, 256),
                Step(6144, 512),
            ),
        ),
        Ladder(
            kinds=("backward",),
            itemsizes=(2,),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(64, 32),
                Step(128, 64),
                Step(256, 128),
                Step(1024, 256),
                Step(2048, 512),
            ),
        ),
        Ladder(
            kinds=("backward",),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(64, 32),
                Step(128, 64),
                Step(1024, 256),
                Step(2048, 512),
            ),
        ),
        Ladder(
            kinds=("backward",),
            whole=False,
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(128, 32),
                Step(256, 64),
                Step(2048, 256),
                Step(4096, 512),
            ),
        ),
        Ladder(
            kinds=("tight backward",),
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(64, 32),
                Step(768, 256),
                Step(1536, 512),
            ),
        ),
        Ladder(
            kinds=("tight backward",),
            whole=False,
            steps=(
                Step(1, 1),
                Step(2, 2),
                Step(4, 4),
                Step(8, 8),
                Step(16, 8),
                Step(32, 16),
                Step(96, 32),
                Step(192, 64),
                Step(1536, 256),
                Step(3072, 512),
            ),
        ),
    ),
    manners=(
        Manner(
            block=128,
        ),
    ),
)
