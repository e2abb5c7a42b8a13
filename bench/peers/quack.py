"""quack, its CuTe kernels: rows alone."""

from __future__ import annotations

import importlib

from bench.peers.base import Arrays, Call, missing_on_torch, tensors, torch_peer
from bench.workloads import Workload

#: Imported by name: ``quack.rmsnorm`` is the function that hides the module.
_MODULE = "quack.rmsnorm"


def _bind(workload: Workload, arrays: Arrays) -> Call | None:
    quack, a, eps = importlib.import_module(_MODULE), tensors(arrays), workload.spec.eps
    if workload.op.startswith("layer_norm"):  # wants float32 parameters
        a |= {name: a[name].float() for name in ("weight", "bias") if name in a}
    weight = a.get("weight")
    calls: dict[str, Call] = {
        "rms_norm": lambda: quack.rmsnorm_fwd(a["x"], weight, eps=eps)[0],
        "layer_norm": lambda: quack.layernorm_fwd(a["x"], weight, a["bias"], eps),
        "fused_add_rms_norm": lambda: quack.rmsnorm_fwd(
            a["x"], weight, residual=a["residual"], eps=eps
        )[:2],
        "rms_norm_bwd": lambda: quack.rmsnorm_bwd(a["x"], weight, a["grad_out"], a["rstd"])[:2],
        "layer_norm_bwd": lambda: quack.layernorm_bwd(
            a["x"], weight, a["grad_out"], a["rstd"], a["mean"]
        ),
        "fused_add_rms_norm_bwd": lambda: quack.rmsnorm_bwd(
            a["residual_out"], weight, a["grad_out"], a["rstd"], a["grad_residual_out"]
        )[:2],
    }
    return calls.get(workload.op)


PEER = torch_peer("quack", missing_on_torch(_MODULE), _bind, launches=6, package="quack-kernels")
