"""The operators as plain NumPy definitions.

Every function here says what an operator means, in wide arithmetic and without a thought for
speed beyond cutting large arrays into blocks. They serve host arrays (target ``"numpy"``) and
are the oracle of the tests and of the self-check.

Arithmetic is float64 for 16- and 32-bit input and ``np.longdouble`` for float64 input, so that
the value before the last rounding is known well enough to judge float64 results too (64 bits of
mantissa on x86; where long double is no wider than double, float64 results are as good as
float64 arithmetic allows). Arguments are taken to be valid: the op objects check them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cunorm.reference import batch, common, gradients, group, group_backward, row, row_backward
from cunorm.reference.batch import (
    batch_norm,
    batch_norm_backward,
    batch_norm_normalize,
    batch_norm_stats,
)
from cunorm.reference.common import accumulation_dtype, row_blocks, working_dtype
from cunorm.reference.group import group_norm, instance_norm
from cunorm.reference.group_backward import group_norm_backward, instance_norm_backward
from cunorm.reference.row import (
    ada_layer_norm,
    ada_layer_norm_zero,
    fused_add_layer_norm,
    fused_add_rms_norm,
    layer_norm,
    rms_norm,
)
from cunorm.reference.row_backward import (
    ada_layer_norm_backward,
    ada_layer_norm_zero_backward,
    fused_add_layer_norm_backward,
    fused_add_rms_norm_backward,
    layer_norm_backward,
    rms_norm_backward,
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "accumulation_dtype",
    "ada_layer_norm",
    "ada_layer_norm_backward",
    "ada_layer_norm_zero",
    "ada_layer_norm_zero_backward",
    "batch",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_normalize",
    "batch_norm_stats",
    "common",
    "fused_add_layer_norm",
    "fused_add_layer_norm_backward",
    "fused_add_rms_norm",
    "fused_add_rms_norm_backward",
    "gradients",
    "group",
    "group_backward",
    "group_norm",
    "group_norm_backward",
    "instance_norm",
    "instance_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "row",
    "row_backward",
    "row_blocks",
    "working_dtype",
]

FORWARD: dict[str, Callable[..., Any]] = {**row.FORWARD, **batch.FORWARD, **group.FORWARD}
BACKWARD: dict[str, Callable[..., Any]] = {
    **row_backward.BACKWARD,
    **batch.BACKWARD,
    **group_backward.BACKWARD,
}
