"""The "cuda" target: which planner serves which op."""

from __future__ import annotations

from cunorm.cuda import channel, group_gradient, row, row_gradient

KERNELS = {
    **row.KERNELS,
    **row_gradient.KERNELS,
    **channel.KERNELS,
    **group_gradient.KERNELS,
}
