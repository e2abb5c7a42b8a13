"""PyTorch, eager: its own functions, and expressions where it has none."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from bench.peers.base import Arrays, Call, missing_torch, tensors, torch_peer
from bench.workloads import CHANNEL_OPS, Workload

#: Takes the tensors of a workload by the names of its operands.
Function = Callable[..., Any]


def function(workload: Workload) -> Function | None:
    """What a torch user calls for the op, or None where this torch has no such function."""
    torch = importlib.import_module("torch")
    backward = workload.op.endswith("_bwd")
    if workload.op in CHANNEL_OPS:
        return (_channel_gradients if backward else _channels)(torch, workload)
    if backward:
        return (
            _rms_gradients(torch, workload) if "rms" in workload.op else _gradients(torch, workload)
        )
    return _rows(torch, workload)


def _rows(torch: Any, workload: Workload) -> Function | None:
    eps, shape = workload.spec.eps, workload.shape[-1:]
    functional = torch.nn.functional
    if not hasattr(functional, "rms_norm") and workload.op.endswith("rms_norm"):
        return None  # since torch 2.4

    def rms_norm(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, shape, weight, eps)

    def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
        return functional.layer_norm(x, shape, weight, bias, eps)

    def fused_add_rms_norm(x: Any, residual: Any, weight: Any) -> Any:
        total = x + residual
        return rms_norm(total, weight), total

    def fused_add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
        total = x + residual
        return layer_norm(total, weight, bias), total

    def ada_layer_norm(x: Any, scale: Any, shift: Any) -> Any:
        return scale * functional.layer_norm(x, shape, eps=eps) + shift

    def ada_layer_norm_zero(x: Any, scale: Any, shift: Any, gate: Any) -> Any:
        return gate * ada_layer_norm(x, scale, shift)

    return {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "fused_add_layer_norm": fused_add_layer_norm,
        "ada_layer_norm": ada_layer_norm,
        "ada_layer_norm_zero": ada_layer_norm_zero,
    }.get(workload.op)


def _channels(torch: Any, workload: Workload) -> Function:
    functional, eps, groups = torch.nn.functional, workload.spec.eps, workload.groups
    training = workload.op == "batch_norm_train"

    def group_norm(x: Any, weight: Any, bias: Any) -> Any:
        return functional.group_norm(x, groups, weight, bias, eps)

    def instance_norm(x: Any, weight: Any, bias: Any) -> Any:
        return functional.instance_norm(x, None, None, weight, bias, True, 0.1, eps)

    def batch_norm(x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any) -> Any:
        running = running_mean, running_var
        return functional.batch_norm(x, *running, weight, bias, training, 0.1, eps)

    return {"group_norm": group_norm, "instance_norm": instance_norm}.get(workload.op, batch_norm)


def _channel_gradients(torch: Any, workload: Workload) -> Function:
    """What autograd calls."""
    aten, wanted = torch.ops.aten, [True, True, True]
    samples, channels, *spatial = workload.shape
    sizes = (samples, channels, math.prod(spatial), workload.groups or channels)

    def batch_norm(grad_out: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
        given = (weight, None, None, mean, rstd, True, 1e-5, wanted)
        return aten.native_batch_norm_backward(grad_out, x, *given)

    def group_norm(grad_out: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
        return aten.native_group_norm_backward(grad_out, x, mean, rstd, weight, *sizes, wanted)

    return batch_norm if workload.op == "batch_norm_bwd" else group_norm


def _rms_gradients(torch: Any, workload: Workload) -> Function | None:
    backward: Any = getattr(torch.ops.aten, "_fused_rms_norm_backward", None)
    if backward is None:
        return None
    shape = workload.shape[-1:]

    def rms_norm(grad_out: Any, x: Any, weight: Any, rstd: Any) -> Any:
        return backward(grad_out, x, shape, rstd[:, None], weight, [True, True])

    def fused_add_rms_norm(
        grad_out: Any, grad_residual_out: Any, residual_out: Any, weight: Any, rstd: Any
    ) -> Any:
        of_sum, of_weight = rms_norm(grad_out, residual_out, weight, rstd)
        return of_sum + grad_residual_out, of_weight

    return fused_add_rms_norm if workload.op.startswith("fused") else rms_norm


def _gradients(torch: Any, workload: Workload) -> Function | None:
    """Of layer norms: what autograd calls, and the rest in expressions."""
    backward, shape = torch.ops.aten.native_layer_norm_backward, workload.shape[-1:]

    def layer_norm(grad_out: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
        statistics = mean[:, None], rstd[:, None]
        return backward(grad_out, x, shape, *statistics, weight, weight, [True] * 3)

    def fused_add_layer_norm(
        grad_out: Any, grad_residual_out: Any, residual_out: Any, weight: Any, mean: Any, rstd: Any
    ) -> Any:
        of_sum, *sums = layer_norm(grad_out, residual_out, weight, mean, rstd)
        return of_sum + grad_residual_out, *sums

    def scaled(inner: Any, x: Any, scale: Any, mean: Any, rstd: Any) -> Any:
        """The gradient of x from that of the scaled rows, and the normalized rows."""
        mean, rstd = mean[:, None], rstd[:, None]
        given = (shape, mean, rstd, None, None, [True, False, False])
        of_x, _, _ = backward(inner * scale, x, *given)
        return of_x, ((x - mean) * rstd).to(x.dtype)

    def ada_layer_norm(grad_out: Any, x: Any, scale: Any, mean: Any, rstd: Any) -> Any:
        of_x, xhat = scaled(grad_out, x, scale, mean, rstd)
        return of_x, grad_out * xhat, grad_out

    def ada_layer_norm_zero(
        grad_out: Any, x: Any, scale: Any, shift: Any, gate: Any, mean: Any, rstd: Any
    ) -> Any:
        gated = grad_out * gate
        of_x, xhat = scaled(gated, x, scale, mean, rstd)
        return of_x, gated * xhat, gated, grad_out * (scale * xhat + shift)

    return {
        "layer_norm_bwd": layer_norm,
        "fused_add_layer_norm_bwd": fused_add_layer_norm,
        "ada_layer_norm_bwd": ada_layer_norm,
        "ada_layer_norm_zero_bwd": ada_layer_norm_zero,
    }.get(workload.op)


def prepare(workload: Workload, arrays: Arrays) -> Arrays | None:
    """The tensors that `function` takes; None where this device has no such kernel."""
    a = tensors(arrays)
    full = a["grad_out"] if "grad_out" in a else a["x"]
    if workload.op.endswith("rms_norm_bwd") and not full.is_cuda:
        return None  # torch has it on GPUs alone
    if workload.op in ("group_norm_bwd", "instance_norm_bwd") and full.is_cuda:
        for name in ("mean", "rstd"):  # whose statistics there have the dtype of x
            a[name] = a[name].to(full.dtype)
    return a


def _bind(workload: Workload, arrays: Arrays) -> Call | None:
    called, a = function(workload), prepare(workload, arrays)
    if called is None or a is None:
        return None
    return lambda: called(**a)


PEER = torch_peer("torch", missing_torch, _bind, launches=10, package="torch")
