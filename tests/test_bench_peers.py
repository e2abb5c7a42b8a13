"""The benchmark's peers: called as their users call them, and right before they are timed."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from bench_fakes import clock, make_fake_cupy, small, small_workload

from bench import check, inputs, peers
from bench.peers import base
from bench.workloads import OPS, Workload
from cunorm.dtypes import numpy_dtype

__all__ = ["clock", "small"]  # fixtures

SMALL = [small_workload(op, dtype) for op in OPS for dtype in ("bfloat16", "float64")]


def several_of(returned):
    return returned if isinstance(returned, tuple) else (returned,)


def wrong_with(clock, workload, bind, sets=2):
    """What the check says of a peer on each of `sets` sets of inputs; None where it has no op."""
    cp = make_fake_cupy(clock)
    found = inputs.InputSets(cp, workload, sets, inputs.make_noise(cp))
    wrong = ""
    for i in range(sets):
        bound = bind(workload, found.inputs(i), None)
        if bound is None:
            return None
        given = {name: array.copy() for name, array in found.inputs(i).items()}
        arrays = tuple(tensor.numpy() for tensor in several_of(bound()))
        wrong += check.check_outputs(cp, workload, given, arrays, strict=False)
    return wrong


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.label)
def test_cunorm_is_called_as_its_users_do(clock, small, workload):
    """On host arrays: the numpy target serves them, and the check judges it like any other."""
    cp = make_fake_cupy(clock)
    sets = inputs.InputSets(cp, workload, 1, inputs.make_noise(cp))
    given, out = sets.inputs(0), sets.outputs(0)
    peer = peers.PEERS["cunorm"]
    several = several_of(peer.bind(workload, given, None)())
    assert check.check_outputs(cp, workload, given, several, strict=True) == ""
    peer.bind(workload, given, out)()
    for array, expected in zip(out, several, strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_a_cupy_user_writes_is_right(clock, small, monkeypatch, op, dtype):
    """NumPy stands in for CuPy: the formulas are the same."""
    monkeypatch.setitem(sys.modules, "cupy", np)
    cp = make_fake_cupy(clock)
    workload = small_workload(op, dtype)
    sets = inputs.InputSets(cp, workload, 1, inputs.make_noise(cp))
    bound = peers.PEERS["cupy"].bind(workload, sets.inputs(0), None)
    if op.endswith("_bwd"):
        assert bound is None
        return
    returned = bound()
    several = several_of(returned)
    assert all(array.dtype == numpy_dtype(dtype) for array in several)
    assert check.check_outputs(cp, workload, sets.inputs(0), several, strict=False) == ""


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_what_a_torch_user_writes_is_right(clock, small, op):
    workload = small_workload(op, "float32")
    wrong = wrong_with(clock, workload, peers.PEERS["torch"].bind)
    # torch has the gradient of RMS norm on GPUs alone
    assert wrong == (None if op.endswith("rms_norm_bwd") else "")


@pytest.fixture
def compiling(monkeypatch):
    """torch.compile as far as the graph, which is then run as it is; counts what is compiled."""
    import torch

    compile_for_gpu, compiled = torch.compile, []

    def compile_the_graph(function, **options):
        compiled.append((function.__name__, dict(options)))
        del options["options"]  # which are of the backend that compiles for GPUs
        return compile_for_gpu(function, **options, backend="eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", compile_the_graph)
    peers.compile._compiled.cache_clear()
    yield compiled
    peers.compile._compiled.cache_clear()
    torch.compiler.reset()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of torch's own
@pytest.mark.parametrize("op", OPS)
def test_torch_compile_has_what_torch_has(clock, small, compiling, op):
    workload = small_workload(op, "float32")
    wrong = wrong_with(clock, workload, peers.PEERS["compile"].bind)
    assert wrong == (None if op.endswith("rms_norm_bwd") else "")
    expected = {"dynamic": False, "options": {"autotune_local_cache": False}}
    assert [options for _, options in compiling] == [expected]  # for both sets


def test_missing_torch_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("torch", "compile", "liger", "quack", "tileops", "flashinfer"):
        assert peers.PEERS[name].missing() == "torch is not installed"
    monkeypatch.setitem(sys.modules, "torch", torch_with_cuda(False))
    for name in ("torch", "compile", "tileops"):
        assert peers.PEERS[name].missing() == "this torch has no CUDA"


def torch_with_cuda(available):
    return types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: available))


def test_what_a_peer_lacks_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", torch_with_cuda(True))
    assert peers.PEERS["torch"].missing() == ""
    monkeypatch.syspath_prepend(tmp_path)
    bodies = {"needy": "import no_such_module", "broken": "raise OSError('no driver\\nat all')"}
    for name, body in bodies.items():
        (tmp_path / f"peer_{name}.py").write_text(body, encoding="utf-8")
    reasons = [base.missing_on_torch(f"peer_{name}")() for name in ("absent", *bodies)]
    assert reasons == [
        "peer_absent is not installed",
        "peer_needy needs no_such_module",
        "peer_broken cannot be imported: OSError: no driver",
    ]


def test_versions_are_those_of_the_packages():
    peer = base.Peer("x", lambda: "", lambda workload, arrays, out: None, 1, package="numpy")
    assert peer.version == np.__version__
    assert base.Peer("x", lambda: "", peer.bind, 1, package="no-such-package").version == ""
    assert peers.PEERS["cunorm"].version == ""  # in a column of its own


# Peers that are not installed here: stand-ins with their signatures


def rms_gradients(x, weight, grad_out, rstd, of_sum=0):
    """On the CPU, where torch has no function for it."""
    x, weight, grad_out = (t.double() for t in (x, weight, grad_out))
    xhat, scaled = x * rstd.double()[:, None], grad_out * weight
    of_x = rstd.double()[:, None] * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True))
    return of_x + of_sum, (grad_out * xhat).sum(0)


def make_tileops(torch):
    """Ops that count how often they are made."""
    functional, made = torch.nn.functional, []

    def op(forward):
        class Op:
            def __init__(self, *args, **options):
                made.append(forward.__name__)
                self.options = args, options

            def __call__(self, *tensors, **named):
                args, options = self.options
                return forward(*args, **options)(*tensors, **named)

        return Op

    def rms_norm(normalized_shape, eps):
        return lambda x, weight: functional.rms_norm(x, normalized_shape, weight, eps)

    def layer_norm(normalized_shape, eps):
        return lambda x, w=None, b=None: functional.layer_norm(x, normalized_shape, w, b, eps)

    def fused_add_rms_norm(eps):
        return lambda x, r, w: (rms_norm(x.shape[-1:], eps)(x + r, w), x + r)

    def fused_add_layer_norm(eps):
        return lambda x, r, w, b: (layer_norm(x.shape[-1:], eps)(x + r, w, b), x + r)

    def ada_layer_norm(eps):
        return lambda x, scale, shift: scale * layer_norm(x.shape[-1:], eps)(x) + shift

    def ada_layer_norm_zero(eps):
        return lambda x, scale, shift, gate: gate * ada_layer_norm(eps)(x, scale, shift)

    def batch_norm(training, momentum, eps):
        def forward(x, running_mean, running_var, weight, bias):
            assert all(t.dtype == torch.float32 for t in (running_mean, running_var, weight, bias))
            running = running_mean, running_var
            y = functional.batch_norm(x.float(), *running, weight, bias, training, momentum, eps)
            return y, None, None

        return forward

    def batch_norm_bwd():
        def backward(grad_out, x, mean, rstd, *, weight):
            assert all(t.dtype == torch.float32 for t in (mean, rstd, weight))
            given = (weight, None, None, mean, rstd, True, 1e-5, [True] * 3)
            return torch.ops.aten.native_batch_norm_backward(grad_out.float(), x.float(), *given)

        return backward

    def group_norm(num_groups, eps):
        return lambda x, weight, bias: functional.group_norm(x, num_groups, weight, bias, eps)

    def instance_norm(use_input_stats=True, momentum=0.1, eps=1e-5):
        return lambda x, *given: functional.instance_norm(x, *given, use_input_stats, momentum, eps)

    return made, types.SimpleNamespace(
        RMSNormFwdOp=op(rms_norm),
        LayerNormFwdOp=op(layer_norm),
        FusedAddRMSNormFwdOp=op(fused_add_rms_norm),
        FusedAddLayerNormFwdOp=op(fused_add_layer_norm),
        AdaLayerNormFwdOp=op(ada_layer_norm),
        AdaLayerNormZeroFwdOp=op(ada_layer_norm_zero),
        BatchNormFwdOp=op(batch_norm),
        BatchNormBwdOp=op(batch_norm_bwd),
        GroupNormFwdOp=op(group_norm),
        InstanceNormFwdOp=op(instance_norm),
    )


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_tileops_makes_one_op_for_all_sets(clock, small, monkeypatch, op):
    import torch

    made, norm = make_tileops(torch)
    monkeypatch.setitem(sys.modules, "tileops.norm", norm)
    peers.tileops._op.cache_clear()
    wrong = wrong_with(clock, small_workload(op, "float32"), peers.PEERS["tileops"].bind)
    peers.tileops._op.cache_clear()
    if op.endswith("_bwd") and op != "batch_norm_bwd":
        assert (wrong, made) == (None, [])
    else:
        assert wrong == "" and len(made) == 1


def make_quack(torch):
    functional = torch.nn.functional

    def rmsnorm_fwd(
        x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6
    ):
        total = x if residual is None else x + residual
        return functional.rms_norm(total, x.shape[-1:], weight, eps), total, None

    def layernorm_fwd(x, weight, bias=None, eps=1e-6):
        assert weight.dtype == bias.dtype == torch.float32
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def rmsnorm_bwd(x, weight, dout, rstd, dresidual_out=None):
        of_sum = 0 if dresidual_out is None else dresidual_out
        return *rms_gradients(x, weight, dout, rstd, of_sum), None, None

    def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
        given = (x.shape[-1:], mean[:, None], rstd[:, None], weight, weight, [True] * 3)
        return torch.ops.aten.native_layer_norm_backward(dout, x, *given)

    functions = (rmsnorm_fwd, layernorm_fwd, rmsnorm_bwd, layernorm_bwd)
    return types.SimpleNamespace(**{f.__name__: f for f in functions})


ROWS = {"rms_norm", "layer_norm", "fused_add_rms_norm"}
ROW_GRADIENTS = {f"{op}_bwd" for op in ROWS}


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_quack(clock, small, monkeypatch, op):
    import torch

    monkeypatch.setitem(sys.modules, "quack.rmsnorm", make_quack(torch))
    wrong = wrong_with(clock, small_workload(op, "float32"), peers.PEERS["quack"].bind)
    assert wrong == ("" if op in ROWS | ROW_GRADIENTS else None)


def make_liger(torch):
    """The modules of ``liger_kernel.ops``, by op."""
    functional = torch.nn.functional

    def function(apply):
        return types.SimpleNamespace(apply=apply)

    def rms_norm(x, weight, eps, offset, casting_mode, in_place):
        assert (offset, casting_mode, in_place) == (0.0, "llama", False)
        return functional.rms_norm(x, x.shape[-1:], weight, eps)

    def layer_norm(x, weight, bias, eps):
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def group_norm(x, weight, bias, num_channels, num_groups, eps):
        assert num_channels == x.shape[1]
        return functional.group_norm(x, num_groups, weight, bias, eps)

    def rms_norm_backward(
        dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode
    ):
        assert (offset, casting_mode, in_place, row_mode) == (0.0, 0, False, None)
        assert (BLOCK_SIZE, num_warps) == (32, 4)
        return rms_gradients(X, W, dY, RSTD)

    def fused_backward(
        dY, dS, S, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, num_stages, in_place
    ):
        assert (casting_mode, BLOCK_SIZE, num_warps, num_stages, in_place) == (0, 32, 4, 2, False)
        of_sum, of_weight = rms_gradients(S, W, dY, RSTD, dS)
        return of_sum, of_sum, of_weight

    def layer_norm_backward(dY, X, W, B, Mean, RSTD):
        given = (X.shape[-1:], Mean[:, None], RSTD[:, None], W, B, [True] * 3)
        return torch.ops.aten.native_layer_norm_backward(dY, X, *given)

    def group_norm_backward(dY, X, W, B, Mean, RSTD, num_channels, num_groups):
        sizes = (X.shape[0], num_channels, X[0, 0].numel(), num_groups, [True] * 3)
        return torch.ops.aten.native_group_norm_backward(dY, X, Mean, RSTD, W, *sizes)

    def settings(n):
        return n, 4

    return {
        "rms_norm": types.SimpleNamespace(
            LigerRMSNormFunction=function(rms_norm),
            rms_norm_backward=rms_norm_backward,
            calculate_settings=settings,
        ),
        "layer_norm": types.SimpleNamespace(
            LigerLayerNormFunction=function(layer_norm), layer_norm_backward=layer_norm_backward
        ),
        "fused_add_rms_norm": types.SimpleNamespace(
            LigerFusedAddRMSNormFunction=function(
                lambda x, r, *given: (rms_norm(x + r, *given), x + r)
            ),
            fused_add_rms_norm_backward=fused_backward,
            calculate_settings=settings,
        ),
        "group_norm": types.SimpleNamespace(
            LigerGroupNormFunction=function(group_norm), group_norm_backward=group_norm_backward
        ),
    }


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_liger(clock, small, monkeypatch, op):
    import torch

    for name, module in make_liger(torch).items():
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{name}", module)
    wrong = wrong_with(clock, small_workload(op, "float32"), peers.PEERS["liger"].bind)
    has = ROWS | ROW_GRADIENTS | {"group_norm", "group_norm_bwd"}
    assert wrong == ("" if op in has else None)


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_flashinfer(clock, small, monkeypatch, op):
    import torch

    def rmsnorm(x, weight, eps):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    def layernorm(x, gamma, beta, eps):
        assert gamma.dtype == beta.dtype == torch.float32
        return torch.nn.functional.layer_norm(x, x.shape[-1:], gamma, beta, eps)

    def fused_add_rmsnorm(x, residual, weight, eps):
        residual += x
        x.copy_(rmsnorm(residual, weight, eps))

    functions = (rmsnorm, layernorm, fused_add_rmsnorm)
    norm = types.SimpleNamespace(**{f.__name__: f for f in functions})
    monkeypatch.setitem(sys.modules, "flashinfer.norm", norm)
    wrong = wrong_with(clock, small_workload(op, "float32"), peers.PEERS["flashinfer"].bind)
    assert wrong == ("" if op in ROWS else None)


def test_a_peer_is_asked_for_an_op_that_it_has():
    workload = Workload("instance_norm_bwd", (2, 3, 4), "float32")
    with pytest.raises(LookupError, match="cupy has no instance_norm_bwd"):
        peers.PEERS["cupy"].call(workload, {}, None)
