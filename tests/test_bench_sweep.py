"""The benchmark's sweep on a stand-in for CuPy: memory is NumPy's and time is simulated."""

from __future__ import annotations

import csv
import dataclasses
import sys
import types

import numpy as np
import pytest

import cunorm
from bench import __main__ as command
from bench import check, inputs, peers, report, sweep, timing
from bench.workloads import CHANNEL_OPS, OPS, Workload
from cunorm import reference
from cunorm.dtypes import numpy_dtype


class Pointer:
    def __init__(self, buffer, offset=0):
        self.buffer, self.offset = buffer, offset
        self.ptr = buffer.ctypes.data + offset

    def __add__(self, offset):
        return Pointer(self.buffer, self.offset + offset)

    def memset_async(self, value, size):
        self.buffer[self.offset : self.offset + size] = value


class Clock:
    """Host and GPU time in microseconds; the stream is a queue that never idles in between."""

    def __init__(self):
        self.host = 0.0
        self.gpu = 0.0
        self.host_lag = 0.0

    def enqueue(self, gpu_us, host_us=0.0):
        self.host += host_us + self.host_lag
        self.gpu = max(self.gpu, self.host) + gpu_us


def make_fake_cupy(clock, name=b"NVIDIA H200"):
    class Event:
        def record(self, stream):
            clock.enqueue(0.0)
            self.at = clock.gpu

        @property
        def done(self):
            return clock.host >= self.at

        def synchronize(self):
            clock.host = max(clock.host, self.at)

    class Stream:
        ptr = 0

        def synchronize(self):
            clock.host = max(clock.host, clock.gpu)

    class OutOfMemoryError(MemoryError):
        pass

    def empty(size, dtype):
        buffer = np.zeros(size, dtype)
        block = types.SimpleNamespace(data=Pointer(buffer), size=size, nbytes=buffer.nbytes)
        block.buffer = buffer
        return block

    def ndarray(shape, dtype, memptr):
        return np.ndarray(shape, dtype, memptr.buffer, memptr.offset)

    def raw_kernel(source, name):
        return lambda grid, block, args: clock.enqueue(args[0] / 1000)

    runtime = types.SimpleNamespace(
        memcpyDeviceToDevice=3,
        memcpyAsync=lambda *args: clock.enqueue(1.0 + args[2] / 2e6),
        getDeviceProperties=lambda device: {"name": name, "l2CacheSize": 1000},
        getDeviceCount=lambda: 1,
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13010,
        CUDARuntimeError=RuntimeError,
    )
    return types.SimpleNamespace(
        __version__="14.2.0",
        uint8=np.uint8,
        float32=np.float32,
        float64=np.float64,
        empty=empty,
        ndarray=ndarray,
        asarray=np.asarray,
        asnumpy=np.asarray,
        moveaxis=np.moveaxis,
        RawKernel=raw_kernel,
        get_default_memory_pool=lambda: types.SimpleNamespace(free_all_blocks=lambda: None),
        cuda=types.SimpleNamespace(
            runtime=runtime,
            Event=Event,
            Device=lambda: types.SimpleNamespace(id=0),
            get_current_stream=Stream,
            get_elapsed_time=lambda begin, end: (end.at - begin.at) / 1000,
            memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        ),
    )


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(timing, "perf_counter", lambda: found.host * 1e-6)
    return found


@pytest.fixture
def small(monkeypatch):
    """Memory and noise of test size."""
    monkeypatch.setattr(inputs, "ROTATE_BYTES", 4000)
    monkeypatch.setattr(inputs, "_CHUNK", 1 << 10)
    monkeypatch.setattr(inputs, "_SPARE", 1 << 6)


def make_peer(clock, name="cunorm", spoil=lambda outputs: None, **options):
    """A peer that computes on the host and takes 3 us on the GPU and 5 us on the host."""

    def bind(workload, arrays, out):
        function = (reference.FORWARD | reference.BACKWARD)[workload.function]
        options = workload.options
        answer = []

        def call():
            clock.enqueue(3.0, host_us=5.0)
            if not answer:  # timing calls again and again what cannot change
                found = function(**arrays, **options)
                found = found if isinstance(found, tuple) else (found,)
                answer.extend(array.astype(numpy_dtype(workload.dtype)) for array in found)
            outputs = answer if out is None else out
            for target, source in zip(outputs, answer, strict=True):
                target[...] = source
            spoil(outputs)
            return tuple(outputs) if len(outputs) > 1 else outputs[0]

        return call

    settings = {"launches": 1, "has_out": name == "cunorm", **options}
    return peers.Peer(name, lambda: "", bind, **settings)


def test_gpu_time_is_that_of_the_gpu_however_slow_the_host(clock):
    timer = timing.GpuTimer(make_fake_cupy(clock))
    time = timer.time_gpu(lambda count: [lambda: clock.enqueue(3.0, host_us=40.0)] * count)
    assert time.us == pytest.approx(3.0)
    assert time.calls == 150
    assert not time.host_bound


def test_a_sample_that_the_host_missed_is_taken_again(clock):
    """The host gets five times slower after the warm-up: the first spin is too short."""
    timer = timing.GpuTimer(make_fake_cupy(clock))
    taken = []

    def take(count):
        taken.append(count)
        slow = 100.0 if len(taken) > 3 else 20.0
        return [lambda: clock.enqueue(3.0, host_us=slow)] * count

    time = timer.time_gpu(take)
    assert time.us == pytest.approx(3.0)
    assert not time.host_bound
    assert len(taken) > 3 + 6


def test_a_host_that_cannot_keep_ahead_is_told(clock):
    timer = timing.GpuTimer(make_fake_cupy(clock))
    time = timer.time_gpu(lambda count: [lambda: clock.enqueue(3.0, host_us=60_000.0)] * count)
    assert time.host_bound
    assert time.us > 3.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_inputs_are_aligned_random_and_apart(clock, small, dtype):
    cp = make_fake_cupy(clock)
    workload = Workload("layer_norm", (7, 33), dtype)
    sets = inputs.InputSets(cp, workload, 5, inputs.make_noise(cp))
    first, second = sets.inputs(0), sets.inputs(4)
    assert list(first) == ["x", "weight", "bias"]
    assert first["x"].shape == (7, 33) and first["bias"].shape == (33,)
    x = first["x"].astype(np.float64)
    assert 0.2 < x.mean() < 0.8 and x.std() > 0.5
    assert not np.array_equal(first["x"], second["x"])
    starts = {
        array.ctypes.data - sets.inputs(0)[name].ctypes.data for name, array in second.items()
    }
    assert all(start > 0 and start % 512 == 0 for start in starts)


def test_poison_is_found_where_nothing_was_written(clock, small):
    cp = make_fake_cupy(clock)
    sets = inputs.InputSets(cp, Workload("rms_norm", (4, 8), "bfloat16"), 2, inputs.make_noise(cp))
    sets.poison_outputs()
    outputs = sets.outputs(1)
    assert np.isnan(outputs[0].astype(np.float32)).all()
    outputs[0].reshape(-1)[:-1] = 1
    assert check.check_written(cp, outputs) == "output 0 was not written in full"
    outputs[0][...] = np.nan
    assert check.check_written(cp, outputs) == ""


# Correctness before timing


def small_workload(op, dtype, **options):
    if op in CHANNEL_OPS:
        groups = 2 if op.startswith("group_norm") else 0
        return Workload(op, (6, 8, 4, 3), dtype, groups=groups, **options)
    return Workload(op, (6, 32), dtype)


SMALL = [small_workload(op, dtype) for op in OPS for dtype in ("bfloat16", "float64")]
SMALL += [small_workload(op, "float16", channels_last=True) for op in CHANNEL_OPS]


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.label)
def test_right_output_passes_the_check(clock, small, workload):
    cp = make_fake_cupy(clock)
    sets = inputs.InputSets(cp, workload, 1, inputs.make_noise(cp))
    outputs = make_peer(clock).bind(workload, sets.inputs(0), None)()
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    assert check.check_outputs(cp, workload, sets.inputs(0), several, strict=True) == ""
    assert check.check_outputs(cp, workload, sets.inputs(0), several, strict=False) == ""


BACKWARD_SMALL = [w for w in SMALL if w.op.endswith("_bwd") and w.dtype == "bfloat16"]


@pytest.mark.parametrize("workload", BACKWARD_SMALL, ids=lambda w: w.label)
def test_one_wrong_element_of_any_gradient_fails_the_check(clock, small, workload):
    cp = make_fake_cupy(clock)
    sets = inputs.InputSets(cp, workload, 1, inputs.make_noise(cp))
    right = make_peer(clock).bind(workload, sets.inputs(0), None)()
    names = (*workload.spec.outputs, *workload.spec.sums)
    for i, name in enumerate(names):
        outputs = [array.copy() for array in right]
        outputs[i][(-1,) * outputs[i].ndim] += 3
        wrong = check.check_outputs(cp, workload, sets.inputs(0), tuple(outputs), strict=True)
        assert wrong.startswith(f"{name} is wrong")
        assert check.check_outputs(cp, workload, sets.inputs(0), tuple(outputs), strict=False)


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("value", [np.nan, 3.0])
def test_one_wrong_element_fails_the_check(clock, small, output, value):
    cp = make_fake_cupy(clock)
    workload = Workload("fused_add_rms_norm", (6, 32), "bfloat16")
    sets = inputs.InputSets(cp, workload, 1, inputs.make_noise(cp))
    outputs = make_peer(clock).bind(workload, sets.inputs(0), None)()
    outputs[output][5, 31] += value
    wrong = check.check_outputs(cp, workload, sets.inputs(0), outputs, strict=True)
    assert wrong.startswith(f"{workload.spec.outputs[output]} is wrong")


def test_a_peer_may_round_more_often_but_not_differ(clock, small):
    cp = make_fake_cupy(clock)
    workload = Workload("layer_norm", (6, 32), "bfloat16")
    sets = inputs.InputSets(cp, workload, 1, inputs.make_noise(cp))
    y = make_peer(clock).bind(workload, sets.inputs(0), None)()
    rounded = (y.astype(np.float32) * 1.008).astype(y.dtype)
    given = sets.inputs(0)
    assert check.check_outputs(cp, workload, given, (rounded,), strict=False) == ""
    assert check.check_outputs(cp, workload, given, (rounded,), strict=True) != ""
    assert check.check_outputs(cp, workload, given, (y + y,), strict=False) != ""
    y[0, 0] = np.nan
    assert check.check_outputs(cp, workload, given, (y,), strict=False) != ""


# The sweep


def run_sweep(clock, workload, peer_list, **settings):
    found = sweep.Sweep(make_fake_cupy(clock), peer_list, sweep.Settings(**settings))
    return found.measure(workload)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("warm", [False, True])
def test_sweep_measures_every_column(clock, small, op, warm):
    workload = small_workload(op, "float32")
    result = run_sweep(clock, workload, [make_peer(clock), make_peer(clock, "cupy")], warm=warm)
    assert (result.status, result.detail) == ("ok", "")
    assert result.copy_us == pytest.approx(1.0 + workload.bytes_moved / 2 / 2e6)
    assert result.gpu_us == {"cunorm": pytest.approx(3.0), "cupy": pytest.approx(3.0)}
    assert result.host_us == {"cunorm": pytest.approx(5.0), "cupy": pytest.approx(5.0)}
    assert result.host_out_us == pytest.approx(5.0)
    assert result.gb_per_s == pytest.approx(workload.bytes_moved / 3.0 / 1e3)


def test_host_only_takes_no_gpu_time(clock, small):
    workload = Workload("rms_norm", (6, 32), "float32")
    result = run_sweep(clock, workload, [make_peer(clock)], host_only=True)
    assert result.copy_us is None and result.gpu_us == {}
    assert result.host_us["cunorm"] == pytest.approx(5.0)


def test_a_wrong_result_is_reported_and_not_timed(clock, small):
    def spoil(outputs):
        outputs[0][2, 7] += 1

    workload = Workload("layer_norm", (6, 32), "float32")
    result = run_sweep(clock, workload, [make_peer(clock, spoil=spoil), make_peer(clock, "cupy")])
    assert result.status == "FAIL"
    assert "cunorm: y is wrong" in result.detail
    assert list(result.gpu_us) == ["cupy"] and result.host_out_us is None


def test_a_peer_that_fails_leaves_the_others(clock, small):
    def spoil(outputs):
        raise TypeError("no such loop\nand more")

    workload = Workload("layer_norm", (6, 32), "float32")
    result = run_sweep(clock, workload, [make_peer(clock), make_peer(clock, "torch", spoil=spoil)])
    assert result.status == "ok"
    assert result.detail == "torch: TypeError: no such loop"
    assert list(result.gpu_us) == ["cunorm"]


def test_a_peer_without_the_op_is_left_out(clock, small):
    peer = dataclasses.replace(make_peer(clock, "torch"), bind=lambda workload, inputs, out: None)
    result = run_sweep(clock, Workload("rms_norm", (6, 32), "float32"), [make_peer(clock), peer])
    assert result.detail == "torch has no rms_norm"
    assert list(result.gpu_us) == ["cunorm"]


def test_what_does_not_fit_is_skipped(clock, small):
    def spoil(outputs):
        raise cp.cuda.memory.OutOfMemoryError("out of memory")

    cp = make_fake_cupy(clock)
    found = sweep.Sweep(cp, [make_peer(clock, spoil=spoil)], sweep.Settings())
    result = found.measure(Workload("rms_norm", (6, 32), "float32"))
    assert (result.status, result.detail) == ("skip", "does not fit the device memory")


# Peers


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.label)
def test_cunorm_is_called_as_its_users_do(clock, small, workload):
    """On host arrays: the numpy target serves them, and the check judges it like any other."""
    cp = make_fake_cupy(clock)
    sets = inputs.InputSets(cp, workload, 1, inputs.make_noise(cp))
    given, out = sets.inputs(0), sets.outputs(0)
    peer = peers.PEERS["cunorm"]
    allocated = peer.bind(workload, given, None)()
    several = allocated if isinstance(allocated, tuple) else (allocated,)
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
    several = returned if isinstance(returned, tuple) else (returned,)
    assert all(array.dtype == numpy_dtype(dtype) for array in several)
    assert check.check_outputs(cp, workload, sets.inputs(0), several, strict=False) == ""


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_what_a_torch_user_writes_is_right(clock, small, op):
    import torch

    cp = make_fake_cupy(clock)
    workload = small_workload(op, "float32")
    sets = inputs.InputSets(cp, workload, 1, inputs.make_noise(cp))
    bound = peers.PEERS["torch"].bind(workload, sets.inputs(0), None)
    if bound is None:
        assert op.endswith("rms_norm_bwd")  # torch has that of a GPU alone
        return
    returned = bound()
    several = returned if isinstance(returned, tuple) else (returned,)
    assert all(isinstance(tensor, torch.Tensor) for tensor in several)
    arrays = tuple(tensor.numpy() for tensor in several)
    assert check.check_outputs(cp, workload, sets.inputs(0), arrays, strict=False) == ""


def test_missing_torch_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert peers.PEERS["torch"].missing() == "torch is not installed"
    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert peers.PEERS["torch"].missing() == "this torch has no CUDA"


# The command, with a device


def test_machine_of_a_cuda_device(clock):
    machine = report.describe_machine(make_fake_cupy(clock))
    assert (machine.gpu, machine.cuda, machine.cupy) == ("NVIDIA H200", "13.0", "14.2.0")
    assert machine.cunorm == cunorm.__version__
    assert str(machine).startswith("NVIDIA H200, driver ")


def test_without_a_gpu(monkeypatch, capsys, clock):
    cp = make_fake_cupy(clock)
    monkeypatch.setitem(sys.modules, "cupy", cp)
    cp.cuda.runtime.getDeviceCount = lambda: 0
    assert command.main([]) == 2
    assert capsys.readouterr().err == "bench: needs a CUDA GPU: CuPy finds none\n"

    def broken():
        raise RuntimeError("cudaErrorInsufficientDriver: too old\nfor this")

    cp.cuda.runtime.getDeviceCount = broken
    assert command.main([]) == 2
    assert capsys.readouterr().err == (
        "bench: needs a CUDA GPU: cudaErrorInsufficientDriver: too old\n"
    )


@pytest.mark.parametrize("right", [True, False])
def test_the_whole_command(monkeypatch, capsys, tmp_path, clock, small, right):
    def spoil(outputs):
        if not right:
            outputs[0][...] = 7

    monkeypatch.setitem(sys.modules, "cupy", make_fake_cupy(clock))
    monkeypatch.setitem(peers.PEERS, "cunorm", make_peer(clock, spoil=spoil))
    absent = dataclasses.replace(
        make_peer(clock, "torch"), missing=lambda: "torch is not installed"
    )
    monkeypatch.setitem(peers.PEERS, "torch", absent)
    monkeypatch.setattr(command, "WORKLOADS", (Workload("rms_norm", (6, 32), "float32", 1.0, 3.0),))
    path = tmp_path / "rows.csv"
    code = command.main(["--peers", "cunorm,torch", "--csv", str(path), "--warm"])
    assert code == (0 if right else 1)
    out = capsys.readouterr().out
    assert "torch left out: torch is not installed" in out
    assert ("1 FAILED" in out) is not right
    with path.open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["status"], row["mode"]) == ("ok" if right else "FAIL", "warm")
    assert row["cunorm_us"] == ("3.0000" if right else "")
