"""Op objects: a normalization with its parameters, called with arrays."""

from __future__ import annotations

from cunorm.ops.base import Op
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
    "FusedAddLayerNormFwdOp",
    "FusedAddRMSNormFwdOp",
    "LayerNormFwdOp",
    "Op",
    "RMSNormFwdOp",
]
