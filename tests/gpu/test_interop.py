"""Arrays of torch and JAX, by themselves and beside CuPy's."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
from cases import DTYPES, FUSED, OPS, as_tuple, assert_same_bits, call, noise, random_inputs
from on_gpu import Allocations, assert_same, cupy, down, spin, up

import cunorm
from cunorm import dtypes

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a torch that sees the GPU")
        torch.zeros(1, device="cuda")
    return torch


@pytest.fixture(scope="module")
def jax():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jax = pytest.importorskip("jax")
        try:
            jax.devices()
        except RuntimeError as error:
            pytest.skip(f"needs a JAX that works: {error}")
    return jax


def to_torch(torch, values, device="cuda"):
    if isinstance(values, dict):
        return {name: to_torch(torch, value, device) for name, value in values.items()}
    if values is None:
        return None
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(values.copy()).to(device)


def from_torch(torch, values):
    if isinstance(values, tuple):
        return tuple(from_torch(torch, value) for value in values)
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(dtypes.numpy_dtype("bfloat16"))
    return values.numpy()


def assert_same_as(torch, got, want):
    got = from_torch(torch, as_tuple(got))
    for mine, theirs in zip(got, down(as_tuple(want)), strict=True):
        assert_same_bits(mine, theirs)


# -- torch ----------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_torch_tensors_in_and_out(torch, op, dtype):
    inputs = random_inputs(op, (5, 640), dtype)
    want = call(op, up(inputs), return_stats=True)
    for _ in range(2):
        got = call(op, to_torch(torch, inputs), return_stats=True)
        assert all(type(y) is torch.Tensor and y.is_cuda for y in got)
        assert_same_as(torch, got, want)


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_torch_memory_is_used_as_it_is(torch, op):
    """A call asks torch for its outputs and nothing else, and CuPy for nothing."""
    given = to_torch(torch, random_inputs(op, (1024, 1024), "bfloat16"))
    results = as_tuple(call(op, given))
    out = results if op in FUSED else results[0]
    torch.cuda.synchronize()
    hook = Allocations()
    with hook:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert call(op, given, out=out) is not None
        assert torch.cuda.max_memory_allocated() == before
        more = call(op, given)
        grown = torch.cuda.max_memory_allocated() - before
        assert grown == sum(y.numel() * y.element_size() for y in as_tuple(more))
    assert hook.sizes == []


@pytest.mark.torch
def test_torchs_current_stream_is_used(torch):
    """A slow producer, the op and a consumer on one torch stream, without synchronizing."""
    old, new = (random_inputs("layer_norm", (256, 768), "float32", seed=s) for s in (1, 70))
    want = call("layer_norm", up(new))
    given, fresh, stale = (to_torch(torch, values) for values in (new, new, old))
    call("layer_norm", given)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    kept = []
    with torch.cuda.stream(stream):
        for _ in range(50):
            given["x"].copy_(stale["x"])
            torch.cuda._sleep(2_000_000)
            given["x"].copy_(fresh["x"])
            y = call("layer_norm", given)
            kept.append(y.clone())
            y.zero_()
    stream.synchronize()
    for y in kept:
        assert_same_as(torch, y, want)


@pytest.mark.torch
def test_torch_work_runs_on_torchs_stream_and_not_on_cupys(torch):
    given = to_torch(torch, random_inputs("rms_norm", (64, 768), "float32"))
    want = call("rms_norm", given)
    torch.cuda.synchronize()
    busy = cupy.cuda.Stream(non_blocking=True)
    stream = torch.cuda.Stream()
    with busy:
        spin(500)
        spinning = busy.record()
        with torch.cuda.stream(stream):
            got = call("rms_norm", given)
        stream.synchronize()
        assert not spinning.done
    busy.synchronize()
    assert torch.equal(got, want)


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_a_gradient_is_never_lost(torch, op):
    inputs = random_inputs(op, (4, 96), "float32")
    want = call(op, up(inputs))
    for name in inputs:
        given = to_torch(torch, inputs)
        call(op, given)  # the plan is there: it must not be a way around the check
        given[name].requires_grad_(True)
        with pytest.raises(ValueError, match=rf"{name} requires grad.*{name}\.detach\(\)"):
            call(op, given)
        with torch.no_grad():
            assert_same_as(torch, call(op, given), want)
        given[name] = given[name].detach()
        assert_same_as(torch, call(op, given), want)


@pytest.mark.torch
def test_torch_parameters_as_weights(torch):
    inputs = random_inputs("layer_norm", (4, 96), "float16")
    given = to_torch(torch, inputs)
    for name in ("weight", "bias"):
        given[name] = torch.nn.Parameter(given[name])
    want = call("layer_norm", up(inputs))
    for _ in range(2):
        with torch.no_grad():
            got = call("layer_norm", given)
        assert not got.requires_grad
        assert_same_as(torch, got, want)
    with pytest.raises(ValueError, match="weight requires grad"):
        call("layer_norm", given)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_torch_tensors_of_any_strides(torch, op, dtype):
    wide = noise((96, 3 * 96)).astype(dtypes.numpy_dtype(dtype))
    tensor = to_torch(torch, wide)
    views = {
        "slice": (lambda a: a[:, 96:192], lambda t: t[:, 96:192]),
        "every third": (lambda a: a[:, ::3], lambda t: t[:, ::3]),
        "transposed": (lambda a: a[:, :96].T, lambda t: t[:, :96].t()),
        "permuted": (
            lambda a: a.reshape(8, 12, 3, 96).transpose(2, 0, 1, 3),
            lambda t: t.reshape(8, 12, 3, 96).permute(2, 0, 1, 3),
        ),
        "expanded": (
            lambda a: np.broadcast_to(a[:1, :96], (5, 96)),
            lambda t: t[:1, :96].expand(5, 96),
        ),
    }
    for name, (on_host, on_gpu) in views.items():
        values = np.ascontiguousarray(on_host(wide))
        inputs = random_inputs(op, values.shape, dtype) | {"x": values}
        given = to_torch(torch, inputs) | {"x": on_gpu(tensor)}
        for _ in range(2):
            got = call(op, given)
            assert_same_as(torch, got, call(op, up(inputs)))
            if name in ("transposed", "permuted"):
                assert as_tuple(got)[0].stride() == torch.empty_like(given["x"]).stride()


@pytest.mark.torch
def test_torch_on_the_host(torch):
    inputs = random_inputs("layer_norm", (4, 96), "bfloat16")
    got = call("layer_norm", to_torch(torch, inputs, "cpu"))
    assert got.device.type == "cpu"
    assert_same_bits(from_torch(torch, got), call("layer_norm", inputs))


# -- arrays of several libraries ------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_cupy_and_torch_in_one_call(torch, op, dtype):
    inputs = random_inputs(op, (5, 640), dtype)
    cupys, torchs = up(inputs), to_torch(torch, inputs)
    torch.cuda.synchronize()
    want = call(op, cupys)
    for name in inputs:
        if name == "x":
            continue
        got = call(op, cupys | {name: torchs[name]})
        assert isinstance(as_tuple(got)[0], cupy.ndarray)
        assert_same(got, want)
        cupy.cuda.Device().synchronize()
        got = call(op, torchs | {name: cupys[name]})
        assert isinstance(as_tuple(got)[0], torch.Tensor)
        assert_same_as(torch, got, want)


@pytest.mark.torch
def test_a_cupy_out_for_a_torch_x_and_the_reverse(torch):
    inputs = random_inputs("rms_norm", (5, 640), "float32")
    cupys, torchs = up(inputs), to_torch(torch, inputs)
    want = call("rms_norm", cupys)
    out = cupy.zeros((5, 640), np.float32)
    cupy.cuda.Device().synchronize()
    call("rms_norm", torchs, out=out)
    torch.cuda.synchronize()
    assert_same(out, want)
    out = torch.zeros((5, 640), device="cuda")
    torch.cuda.synchronize()
    call("rms_norm", cupys, out=out)
    cupy.cuda.Device().synchronize()
    assert_same_as(torch, out, want)


@pytest.mark.parametrize("op", OPS)
def test_arrays_on_host_and_gpu_are_refused(op):
    inputs = random_inputs(op, (4, 32), "float32")
    given = up(inputs)
    for name in inputs.keys() - {"x"}:
        with pytest.raises(ValueError, match=f"{op}: {name} must be on cuda:0 like x, got cpu"):
            call(op, given | {name: inputs[name]})
        with pytest.raises(ValueError, match=f"{op}: {name} must be on cpu like x, got cuda:0"):
            call(op, inputs | {name: given[name]})
    out = np.zeros((4, 32), np.float32)
    with pytest.raises(ValueError, match="out.* must be on cuda:0"):
        call(op, given, out=(out, out) if op in FUSED else out)
    assert not out.any()


@pytest.mark.parametrize("target", ["numpy", "cuda"])
def test_a_target_that_cannot_reach_the_array_is_refused(target):
    x = np.ones((2, 3), np.float32)
    if target == "numpy":
        x = up(x)
    with pytest.raises(ValueError, match=f"target '{target}' needs arrays"):
        cunorm.layer_norm(x, 3, target=target)


def test_integers_and_complex_are_refused():
    for dtype in (np.int32, np.bool_, np.complex64):
        with pytest.raises(TypeError, match=np.dtype(dtype).name):
            cunorm.layer_norm(cupy.ones((2, 3), dtype), 3)


# -- JAX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_jax_arrays_in_and_out(jax, op, dtype):
    inputs = random_inputs(op, (5, 640), dtype)
    given = {name: jax.numpy.asarray(array) for name, array in inputs.items()}
    for array in given.values():
        array.block_until_ready()
    on_gpu = next(iter(given["x"].devices())).platform == "gpu"
    want = call(op, up(inputs) if on_gpu else inputs)
    got = as_tuple(call(op, given))
    cupy.cuda.Device().synchronize()
    for mine, theirs in zip(got, as_tuple(want), strict=True):
        assert isinstance(mine, jax.Array)
        assert mine.devices() == given["x"].devices()
        assert_same_bits(np.asarray(mine), down(theirs) if on_gpu else theirs)
    for name, array in given.items():
        assert_same_bits(np.asarray(array), inputs[name], name)


def test_a_jax_array_is_not_written(jax):
    x = jax.numpy.asarray(noise((4, 32)).astype(np.float32))
    before = np.array(x)
    with pytest.raises(TypeError, match="out must be a CuPy, NumPy or torch array"):
        cunorm.layer_norm(x, 32, out=x)
    assert_same_bits(np.array(x), before)
