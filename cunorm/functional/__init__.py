"""The functions: each finds the op object of its parameters and calls it."""

from __future__ import annotations

from cunorm.functional.batch import (
    batch_norm,
    batch_norm_backward,
    batch_norm_normalize,
    batch_norm_stats,
)
from cunorm.functional.group import group_norm, instance_norm
from cunorm.functional.row import (
    ada_layer_norm,
    ada_layer_norm_zero,
    fused_add_layer_norm,
    fused_add_rms_norm,
    layer_norm,
    rms_norm,
)

__all__ = [
    "ada_layer_norm",
    "ada_layer_norm_zero",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_normalize",
    "batch_norm_stats",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "rms_norm",
]
