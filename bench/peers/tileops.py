"""TileOPs, its TileLang kernels."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from bench.peers.base import Arrays, Call, missing_on_torch, tensors, torch_peer
from bench.workloads import Workload

_MODULE = "tileops.norm"
_MOMENTUM = 0.1


@lru_cache(maxsize=1)  # one for all sets of inputs: a shape compiles for a second or two
def _op(workload: Workload) -> Any:
    norm = importlib.import_module(_MODULE)
    cols, eps = workload.shape[-1:], workload.spec.eps
    makers = {
        "rms_norm": lambda: norm.RMSNormFwdOp(cols, eps),
        "layer_norm": lambda: norm.LayerNormFwdOp(cols, eps),
        "fused_add_rms_norm": lambda: norm.FusedAddRMSNormFwdOp(eps),
        "fused_add_layer_norm": lambda: norm.FusedAddLayerNormFwdOp(eps),
        "ada_layer_norm": lambda: norm.AdaLayerNormFwdOp(eps),
        "ada_layer_norm_zero": lambda: norm.AdaLayerNormZeroFwdOp(eps),
        "batch_norm_train": lambda: norm.BatchNormFwdOp(True, _MOMENTUM, eps),
        "batch_norm_infer": lambda: norm.BatchNormFwdOp(False, _MOMENTUM, eps),
        "batch_norm_bwd": lambda: norm.BatchNormBwdOp(),
        "group_norm": lambda: norm.GroupNormFwdOp(workload.groups, eps),
        "instance_norm": lambda: norm.InstanceNormFwdOp(eps=eps),
    }
    return makers[workload.op]() if workload.op in makers else None


def _bind(workload: Workload, arrays: Arrays) -> Call | None:
    op, a = _op(workload), tensors(arrays)
    if op is None:
        return None
    if workload.op.startswith("batch_norm"):  # wants float32 parameters
        a |= {name: a[name].float() for name in ("weight", "bias") if name in a}
    if workload.op == "batch_norm_bwd":
        given = (a["grad_out"], a["x"], a["mean"], a["rstd"])
        return lambda: op(*given, weight=a["weight"])
    if workload.op == "instance_norm":
        return lambda: op(a["x"], None, None, a["weight"], a["bias"])
    given = tuple(a.values())  # its arguments come in the order of the operands
    if workload.op.startswith("batch_norm"):
        return lambda: op(*given)[0]
    return lambda: op(*given)


PEER = torch_peer("tileops", missing_on_torch(_MODULE), _bind, launches=4, package="tileops")
