"""Op objects: a normalization with its parameters, called with arrays."""

from __future__ import annotations

from cunorm.ops.base import Op
from cunorm.ops.batch import (
    BatchNormBwdOp,
    BatchNormFwdOp,
    BatchNormNormalizeOp,
    BatchNormStatsOp,
)
from cunorm.ops.group import GroupNormFwdOp, InstanceNormFwdOp
from cunorm.ops.row import (
    AdaLayerNormFwdOp,
    AdaLayerNormZeroFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    LayerNormFwdOp,
    RMSNormFwdOp,
)

__all__ = [
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
    "Op",
    "RMSNormFwdOp",
]
