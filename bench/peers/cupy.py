"""CuPy as its users write it today."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Arrays, Call, Peer
from bench.workloads import CHANNEL_OPS, Workload


def _layer_norm(cp: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    wide = cp.promote_types(x.dtype, cp.float32) if x.dtype.kind == "f" else cp.float32
    xw = x.astype(wide, copy=False)
    mean = xw.mean(axis=-1, keepdims=True)
    var = xw.var(axis=-1, keepdims=True)
    y = (xw - mean) / cp.sqrt(var + eps)
    y = y * weight.astype(wide, copy=False) + bias.astype(wide, copy=False)
    return y.astype(x.dtype, copy=False)


def _rms_norm(cp: Any, x: Any, weight: Any, eps: float) -> Any:
    wide = cp.promote_types(x.dtype, cp.float32) if x.dtype.kind == "f" else cp.float32
    xw = x.astype(wide, copy=False)
    y = xw / cp.sqrt((xw * xw).mean(axis=-1, keepdims=True) + eps)
    return (y * weight.astype(wide, copy=False)).astype(x.dtype, copy=False)


def _channel_norm(cp: Any, workload: Workload, a: Arrays) -> Any:
    x = a["x"]
    wide = cp.promote_types(x.dtype, cp.float32) if x.dtype.kind == "f" else cp.float32
    spread = (-1, *(1,) * (x.ndim - 2))
    xw = x.astype(wide, copy=False)
    if workload.op == "batch_norm_infer":
        mean, var = a["running_mean"].reshape(spread), a["running_var"].reshape(spread)
    else:
        groups = workload.groups or x.shape[1]
        parts = xw.reshape(x.shape[0], groups, -1)
        axes = (0, 2) if workload.op == "batch_norm_train" else 2
        each = x.shape[1] // groups
        mean, var = (
            cp.repeat(s(axis=axes, keepdims=True), each, axis=1).reshape(
                -1, *(x.shape[1], *spread[1:])
            )
            for s in (parts.mean, parts.var)
        )
        if workload.op == "batch_norm_train":
            count = x.size // x.shape[1]
            for running, new in (
                ("running_mean", mean),
                ("running_var", var * count / (count - 1)),
            ):
                a[running] *= 0.9
                a[running] += 0.1 * new.reshape(-1)
    y = (xw - mean) / cp.sqrt(var + workload.spec.eps)
    y = y * a["weight"].reshape(spread).astype(wide, copy=False)
    return (y + a["bias"].reshape(spread).astype(wide, copy=False)).astype(x.dtype, copy=False)


def _bind(workload: Workload, a: Arrays, out: tuple[Any, ...] | None) -> Call | None:
    if workload.op.endswith("_bwd"):
        return None
    import cupy as cp

    if workload.op in CHANNEL_OPS:
        return lambda: _channel_norm(cp, workload, a)
    x, eps = a["x"], workload.spec.eps
    if eps is None:
        return None

    def fused_add_rms_norm() -> Any:
        total = x + a["residual"]
        return _rms_norm(cp, total, a["weight"], eps), total

    def fused_add_layer_norm() -> Any:
        total = x + a["residual"]
        return _layer_norm(cp, total, a["weight"], a["bias"], eps), total

    calls: dict[str, Call] = {
        "rms_norm": lambda: _rms_norm(cp, x, a["weight"], eps),
        "layer_norm": lambda: _layer_norm(cp, x, a["weight"], a["bias"], eps),
        "fused_add_rms_norm": fused_add_rms_norm,
        "fused_add_layer_norm": fused_add_layer_norm,
        "ada_layer_norm": lambda: _layer_norm(cp, x, a["scale"], a["shift"], eps),
        "ada_layer_norm_zero": lambda: a["gate"] * _layer_norm(cp, x, a["scale"], a["shift"], eps),
    }
    return calls.get(workload.op)


#: Its temporaries are float32, whatever the inputs are.
PEER = Peer("cupy", lambda: "", _bind, launches=24, memory=6)
