"""Normalization operators for CuPy arrays.

One call, one pass over memory, right to the last bit or so, on any CUDA GPU; on NumPy arrays
where there is no GPU. Importing cunorm imports neither CuPy nor torch and touches no device.
"""

from __future__ import annotations

from cunorm import reference
from cunorm.functional import (
    ada_layer_norm,
    ada_layer_norm_zero,
    batch_norm,
    batch_norm_backward,
    batch_norm_normalize,
    batch_norm_stats,
    fused_add_layer_norm,
    fused_add_rms_norm,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)
from cunorm.ops import (
    AdaLayerNormFwdOp,
    AdaLayerNormZeroFwdOp,
    BatchNormBwdOp,
    BatchNormFwdOp,
    BatchNormNormalizeOp,
    BatchNormStatsOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    GroupNormFwdOp,
    InstanceNormFwdOp,
    LayerNormFwdOp,
    RMSNormFwdOp,
)
from cunorm.targets import BUILTIN, register_target, set_default_target, unregister_target

__version__ = "0.1.0"

__all__ = [
    "BUILTIN",
    "AdaLayerNormFwdOp",
    "AdaLayerNormZeroFwdOp",
    "BatchNormBwdOp",
    "BatchNormFwdOp",
    "BatchNormNormalizeOp",
    "BatchNormStatsOp",
    "FusedAddLayerNormFwdOp",
    "FusedAddRMSNormFwdOp",
    "GroupNormFwdOp",
    "InstanceNormFwdOp",
    "LayerNormFwdOp",
    "RMSNormFwdOp",
    "__version__",
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
    "reference",
    "register_target",
    "rms_norm",
    "set_default_target",
    "unregister_target",
]
