"""The "cuda" target: which planner serves which op."""

from __future__ import annotations

from cunorm.cuda import channel, group_gradient, row

KERNELS = {**row.KERNELS, **channel.KERNELS, **group_gradient.KERNELS}
