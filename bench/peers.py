"""Who is measured: cunorm and what its users would write without it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.workloads import CHANNEL_OPS, Workload

Arrays = dict[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    """One way to compute the workloads.

    Attributes
    ----------
    name : str
        As in ``--peers`` and in the column names.
    missing : callable
        ``missing()`` says why the peer cannot run on this machine, or returns ``""``.
    bind : callable
        ``bind(workload, inputs, out)`` returns a call without arguments, or None when the peer
        has no such op. `inputs` maps names to CuPy arrays; `out` is a tuple of arrays to write
        into, or None to allocate. A peer without ``out=`` allocates in both cases.
    launches : int
        The most kernels that one call launches.
    has_out : bool
        Whether `bind` honours `out`.
    to_cupy : callable
        From one output of the call to a CuPy array.
    release : callable
        Gives cached device memory back.
    """

    name: str
    missing: Callable[[], str]
    bind: Callable[[Workload, Arrays, tuple[Any, ...] | None], Call | None]
    launches: int
    has_out: bool = False
    to_cupy: Callable[[Any], Any] = lambda array: array
    release: Callable[[], None] = lambda: None

    def call(self, workload: Workload, inputs: Arrays, out: tuple[Any, ...] | None) -> Call:
        """What `bind` returns, for an op that the peer is known to have."""
        found = self.bind(workload, inputs, out)
        if found is None:
            raise LookupError(f"{self.name} has no {workload.op}")
        return found


# cunorm


def _missing_cunorm() -> str:
    return ""


def _bind_cunorm(workload: Workload, a: Arrays, out: tuple[Any, ...] | None) -> Call | None:
    import cunorm

    function = getattr(cunorm, workload.function, None)
    if function is None:
        return None
    options = workload.options
    if out is None:
        return lambda: function(**a, **options)
    target = out if len(out) > 1 else out[0]
    return lambda: function(**a, **options, out=target)


# CuPy as its users write it today


def _eager_layer_norm(cp: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    wide = cp.promote_types(x.dtype, cp.float32) if x.dtype.kind == "f" else cp.float32
    xw = x.astype(wide, copy=False)
    mean = xw.mean(axis=-1, keepdims=True)
    var = xw.var(axis=-1, keepdims=True)
    y = (xw - mean) / cp.sqrt(var + eps)
    y = y * weight.astype(wide, copy=False) + bias.astype(wide, copy=False)
    return y.astype(x.dtype, copy=False)


def _eager_rms_norm(cp: Any, x: Any, weight: Any, eps: float) -> Any:
    wide = cp.promote_types(x.dtype, cp.float32) if x.dtype.kind == "f" else cp.float32
    xw = x.astype(wide, copy=False)
    y = xw / cp.sqrt((xw * xw).mean(axis=-1, keepdims=True) + eps)
    return (y * weight.astype(wide, copy=False)).astype(x.dtype, copy=False)


def _eager_channel_norm(cp: Any, workload: Workload, a: Arrays) -> Any:
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


def _missing_cupy() -> str:
    return ""


def _bind_cupy(workload: Workload, a: Arrays, out: tuple[Any, ...] | None) -> Call | None:
    import cupy as cp

    if workload.op.endswith("_bwd"):
        return None
    if workload.op in CHANNEL_OPS:
        return lambda: _eager_channel_norm(cp, workload, a)
    x, eps = a["x"], workload.spec.eps
    if eps is None:
        return None

    def fused_add_rms_norm() -> Any:
        total = x + a["residual"]
        return _eager_rms_norm(cp, total, a["weight"], eps), total

    def fused_add_layer_norm() -> Any:
        total = x + a["residual"]
        return _eager_layer_norm(cp, total, a["weight"], a["bias"], eps), total

    calls: dict[str, Call] = {
        "rms_norm": lambda: _eager_rms_norm(cp, x, a["weight"], eps),
        "layer_norm": lambda: _eager_layer_norm(cp, x, a["weight"], a["bias"], eps),
        "fused_add_rms_norm": fused_add_rms_norm,
        "fused_add_layer_norm": fused_add_layer_norm,
        "ada_layer_norm": lambda: _eager_layer_norm(cp, x, a["scale"], a["shift"], eps),
        "ada_layer_norm_zero": lambda: (
            a["gate"] * _eager_layer_norm(cp, x, a["scale"], a["shift"], eps)
        ),
    }
    return calls.get(workload.op)


# torch, eager


def _missing_torch() -> str:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "this torch has no CUDA"


def _bind_torch_channels(workload: Workload, arrays: Arrays) -> Call:
    torch = importlib.import_module("torch")
    a = {name: torch.from_dlpack(array) for name, array in arrays.items()}
    functional, eps, x = torch.nn.functional, workload.spec.eps, a["x"]
    weight, bias = a["weight"], a.get("bias")
    if workload.op == "group_norm":
        return lambda: functional.group_norm(x, workload.groups, weight, bias, eps)
    if workload.op == "instance_norm":
        return lambda: functional.instance_norm(x, None, None, weight, bias, True, 0.1, eps)
    running = a["running_mean"], a["running_var"]
    training = workload.op == "batch_norm_train"
    return lambda: functional.batch_norm(x, *running, weight, bias, training, 0.1, eps)


def _bind_torch_channel_gradients(workload: Workload, arrays: Arrays) -> Call:
    """What autograd calls; group norm's statistics are of the dtype of x on a GPU."""
    torch = importlib.import_module("torch")
    a = {name: torch.from_dlpack(array) for name, array in arrays.items()}
    grad_out, x, weight, wanted = a["grad_out"], a["x"], a["weight"], [True, True, True]
    if workload.op == "batch_norm_bwd":
        backward = torch.ops.aten.native_batch_norm_backward
        given = (weight, None, None, a["mean"], a["rstd"], True, 1e-5, wanted)
        return lambda: backward(grad_out, x, *given)
    backward = torch.ops.aten.native_group_norm_backward
    mean, rstd = (a[n].to(x.dtype) if x.is_cuda else a[n] for n in ("mean", "rstd"))
    samples, channels, *spatial = workload.shape
    groups = workload.groups or channels
    sizes = (samples, channels, math.prod(spatial), groups)
    return lambda: backward(grad_out, x, mean, rstd, weight, *sizes, wanted)


def _bind_torch_row_gradients(workload: Workload, arrays: Arrays) -> Call | None:
    """What autograd calls, and the rest in expressions; of RMS norm torch has it on GPUs alone."""
    torch = importlib.import_module("torch")
    a = {name: torch.from_dlpack(array) for name, array in arrays.items()}
    grad_out, x, shape = a["grad_out"], a.get("residual_out", a.get("x")), workload.shape[-1:]
    layer_norm = torch.ops.aten.native_layer_norm_backward
    rstd = a["rstd"][:, None]
    if "rms" in workload.op:
        rms_norm: Any = getattr(torch.ops.aten, "_fused_rms_norm_backward", None)
        if rms_norm is None or not x.is_cuda:
            return None
        given = (x, shape, rstd, a["weight"], [True, True])

        def rms_gradients() -> Any:
            of_x, of_weight = rms_norm(grad_out, *given)
            return (of_x + a["grad_residual_out"] if "residual_out" in a else of_x), of_weight

        return rms_gradients
    mean = a["mean"][:, None]

    def gradients() -> Any:
        weight = a["weight"]
        of_x, *sums = layer_norm(grad_out, x, shape, mean, rstd, weight, weight, [True] * 3)
        return (of_x + a["grad_residual_out"] if "residual_out" in a else of_x), *sums

    def adaptive_gradients() -> Any:
        xhat = ((x - mean) * rstd).to(x.dtype)
        gated = grad_out * a["gate"] if "gate" in a else grad_out
        inner = gated * a["scale"]
        of_x, _, _ = layer_norm(inner, x, shape, mean, rstd, None, None, [True, False, False])
        found = of_x, gated * xhat, gated
        return (*found, grad_out * (a["scale"] * xhat + a["shift"])) if "gate" in a else found

    return adaptive_gradients if "scale" in a else gradients


def _bind_torch(workload: Workload, arrays: Arrays, out: tuple[Any, ...] | None) -> Call | None:
    if workload.op.endswith("_bwd"):
        if workload.op in CHANNEL_OPS:
            return _bind_torch_channel_gradients(workload, arrays)
        return _bind_torch_row_gradients(workload, arrays)
    if workload.op in CHANNEL_OPS:
        return _bind_torch_channels(workload, arrays)
    torch = importlib.import_module("torch")
    layer_norm = torch.nn.functional.layer_norm
    rms_norm: Any = getattr(torch.nn.functional, "rms_norm", None)  # since torch 2.4
    if rms_norm is None and workload.op.endswith("rms_norm"):
        return None
    a = {name: torch.from_dlpack(array) for name, array in arrays.items()}
    x, eps, shape = a["x"], workload.spec.eps, workload.shape[-1:]

    def fused_add_rms_norm() -> Any:
        total = x + a["residual"]
        return rms_norm(total, shape, a["weight"], eps), total

    def fused_add_layer_norm() -> Any:
        total = x + a["residual"]
        return layer_norm(total, shape, a["weight"], a["bias"], eps), total

    calls: dict[str, Call] = {
        "rms_norm": lambda: rms_norm(x, shape, a["weight"], eps),
        "layer_norm": lambda: layer_norm(x, shape, a["weight"], a["bias"], eps),
        "fused_add_rms_norm": fused_add_rms_norm,
        "fused_add_layer_norm": fused_add_layer_norm,
        "ada_layer_norm": lambda: a["scale"] * layer_norm(x, shape, eps=eps) + a["shift"],
        "ada_layer_norm_zero": lambda: (
            a["gate"] * (a["scale"] * layer_norm(x, shape, eps=eps) + a["shift"])
        ),
    }
    return calls.get(workload.op)


def _torch_to_cupy(tensor: Any) -> Any:
    import cupy

    return cupy.from_dlpack(tensor)


def _release_torch() -> None:
    importlib.import_module("torch").cuda.empty_cache()


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("cunorm", _missing_cunorm, _bind_cunorm, launches=4, has_out=True),
        Peer("cupy", _missing_cupy, _bind_cupy, launches=24),
        Peer(
            "torch",
            _missing_torch,
            _bind_torch,
            launches=10,
            to_cupy=_torch_to_cupy,
            release=_release_torch,
        ),
    )
}
