"""Op objects: a normalization with its parameters, called with arrays."""

from __future__ import annotations

from cunorm.ops.base import Op
from cunorm.ops.batch import (
    BatchNormBwdOp,
    BatchNormFwdOp,
    BatchNormNormalizeOp,
    BatchNormStatsOp,
)
from cunorm.ops.group import (
    GroupNormBwdOp,
    GroupNormFwdOp,
    InstanceNormBwdOp,
    InstanceNormFwdOp,
)
from cunorm.ops.row import (
    AdaLayerNormFwdOp,
    AdaLayerNormZeroFwdOp,
    FusedAddLayerNormFwdOp,
    FusedAddRMSNormFwdOp,
    LayerNormFwdOp,
    RMSNormFwdOp,
)
from cunorm.ops.row_backward import (
    AdaLayerNormBwdOp,
    AdaLayerNormZeroBwdOp,
    FusedAddLayerNormBwdOp,
    FusedAddRMSNormBwdOp,
    LayerNormBwdOp,
    RMSNormBwdOp,
)

__all__ = [
    "AdaLayerNormBwdOp",
    "AdaLayerNormFwdOp",
    "AdaLayerNormZeroBwdOp",
    "AdaLayerNormZeroFwdOp",
    "BatchNormBwdOp",
    "BatchNormFwdOp",
    "BatchNormNormalizeOp",
    "BatchNormStatsOp",
    "FusedAddLayerNormBwdOp",
    "FusedAddLayerNormFwdOp",
    "FusedAddRMSNormBwdOp",
    "FusedAddRMSNormFwdOp",
    "GroupNormBwdOp",
    "GroupNormFwdOp",
    "InstanceNormBwdOp",
    "InstanceNormFwdOp",
    "LayerNormBwdOp",
    "LayerNormFwdOp",
    "Op",
    "RMSNormBwdOp",
    "RMSNormFwdOp",
]
