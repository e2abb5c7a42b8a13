"""The "cuda" target: which planner serves which op."""

from __future__ import annotations

from cunorm.cuda import channel, row

KERNELS = {**row.KERNELS, **channel.KERNELS}
