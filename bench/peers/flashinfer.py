"""FlashInfer: the norms of inference."""

from __future__ import annotations

import importlib
from typing import Any

from bench.peers.base import Arrays, Call, missing_on_torch, tensors, torch_peer
from bench.workloads import Workload

_MODULE = "flashinfer.norm"


def _bind(workload: Workload, arrays: Arrays) -> Call | None:
    norm, a, eps = importlib.import_module(_MODULE), tensors(arrays), workload.spec.eps
    if workload.op == "rms_norm":
        return lambda: norm.rmsnorm(a["x"], a["weight"], eps)
    if workload.op == "layer_norm":
        weight, bias = a["weight"].float(), a["bias"].float()
        return lambda: norm.layernorm(a["x"], weight, bias, eps)
    if workload.op != "fused_add_rms_norm":
        return None

    def fused_add_rms_norm() -> Any:
        norm.fused_add_rmsnorm(a["x"], a["residual"], a["weight"], eps)
        return a["x"], a["residual"]

    return fused_add_rms_norm


PEER = torch_peer(
    "flashinfer",
    missing_on_torch(_MODULE),
    _bind,
    launches=2,
    package="flashinfer-python",
    overwrites=frozenset({"fused_add_rms_norm"}),
)
