"""Liger-Kernel, its Triton kernels."""

from __future__ import annotations

import importlib
from typing import Any

from bench.peers.base import Arrays, Call, missing_on_torch, tensors, torch_peer
from bench.workloads import Workload

_OFFSET = 0.0
_ROUNDING = "llama"  # of its RMS norms: rounded before the weight is multiplied in
_ROUNDING_NUMBER = 0  # the same, for its backward functions
_STAGES = 2  # of the software pipeline, what its fused forward chooses
_KEEP = False  # grad_out is not written over


def _bind(workload: Workload, arrays: Arrays) -> Call | None:
    name = workload.op.removesuffix("_bwd")
    if name not in ("rms_norm", "layer_norm", "fused_add_rms_norm", "group_norm"):
        return None
    module, a = importlib.import_module(f"liger_kernel.ops.{name}"), tensors(arrays)
    if workload.op.endswith("_bwd"):
        return _gradients(module, workload, a)
    return _forward(module, workload, a)


def _forward(module: Any, workload: Workload, a: Arrays) -> Call:
    x, weight, eps = a["x"], a["weight"], workload.spec.eps
    if workload.op == "layer_norm":
        apply = module.LigerLayerNormFunction.apply
        return lambda: apply(x, weight, a["bias"], eps)
    if workload.op == "group_norm":
        apply = module.LigerGroupNormFunction.apply
        return lambda: apply(x, weight, a["bias"], workload.shape[1], workload.groups, eps)
    options = (eps, _OFFSET, _ROUNDING, _KEEP)
    if workload.op == "fused_add_rms_norm":
        apply = module.LigerFusedAddRMSNormFunction.apply
        return lambda: apply(x, a["residual"], weight, *options)
    apply = module.LigerRMSNormFunction.apply
    return lambda: apply(x, weight, *options)


def _gradients(module: Any, workload: Workload, a: Arrays) -> Call:
    grad_out, weight, rstd = a["grad_out"], a["weight"], a["rstd"]
    if workload.op == "layer_norm_bwd":
        backward = module.layer_norm_backward
        return lambda: backward(grad_out, a["x"], weight, weight, a["mean"], rstd)
    if workload.op == "group_norm_bwd":
        backward, x = module.group_norm_backward, a["x"]
        mean, rstd = a["mean"].to(x.dtype), rstd.to(x.dtype)  # as its forward leaves them
        sizes = (workload.shape[1], workload.groups)
        return lambda: backward(grad_out, x, weight, weight, mean, rstd, *sizes)
    block = module.calculate_settings(workload.shape[-1])
    options = (_OFFSET, _ROUNDING_NUMBER, *block)
    if workload.op == "rms_norm_bwd":
        backward = module.rms_norm_backward
        return lambda: backward(grad_out, a["x"], weight, rstd, *options, _KEEP, None)
    backward, of_sum = module.fused_add_rms_norm_backward, a["grad_residual_out"]

    def fused_add() -> Any:
        given = (grad_out, of_sum, a["residual_out"], weight, rstd)
        grad_sum, _, grad_weight = backward(*given, *options, _STAGES, _KEEP)
        return grad_sum, grad_weight

    return fused_add


PEER = torch_peer(
    "liger", missing_on_torch("liger_kernel.ops"), _bind, launches=6, package="liger-kernel"
)
