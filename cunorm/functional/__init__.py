"""The functions: each finds the op object of its parameters and calls it."""

from __future__ import annotations

from cunorm.functional.batch import (
    batch_norm,
    batch_norm_backward,
    batch_norm_normalize,
    batch_norm_stats,
)
from cunorm.functional.group import (
    group_norm,
    group_norm_backward,
    instance_norm,
    instance_norm_backward,
)
from cunorm.functional.row import (
    ada_layer_norm,
    ada_layer_norm_zero,
    fused_add_layer_norm,
    fused_add_rms_norm,
    layer_norm,
    rms_norm,
)
from cunorm.functional.row_backward import (
    ada_layer_norm_backward,
    ada_layer_norm_zero_backward,
    fused_add_layer_norm_backward,
    fused_add_rms_norm_backward,
    layer_norm_backward,
    rms_norm_backward,
)

__all__ = [
    "ada_layer_norm",
    "ada_layer_norm_backward",
    "ada_layer_norm_zero",
    "ada_layer_norm_zero_backward",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_normalize",
    "batch_norm_stats",
    "fused_add_layer_norm",
    "fused_add_layer_norm_backward",
    "fused_add_rms_norm",
    "fused_add_rms_norm_backward",
    "group_norm",
    "group_norm_backward",
    "instance_norm",
    "instance_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]
