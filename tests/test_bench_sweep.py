"""The benchmark's sweep on a stand-in for CuPy: memory is NumPy's and time is simulated."""

from __future__ import annotations

import csv
import dataclasses
import sys

import numpy as np
import pytest
from bench_fakes import clock, make_fake_cupy, make_peer, small, small_workload

import cunorm
from bench import __main__ as command
from bench import check, choice, inputs, peers, report, sweep, timing
from bench.workloads import CHANNEL_OPS, OPS, Workload

__all__ = ["clock", "small"]  # fixtures


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
    assert result.pooled.us == pytest.approx(3.0)
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


def test_a_peer_that_writes_over_its_inputs_spoils_nobody_elses(clock, small):
    """Judged on copies; afterwards the inputs are drawn again."""
    honest = make_peer(clock, "torch")
    workload = Workload("fused_add_rms_norm", (6, 32), "float32")

    def bind(workload, arrays, out):
        call = honest.bind(workload, arrays, None)

        def write_over():
            y, total = call()
            arrays["x"][...], arrays["residual"][...] = y, total
            return arrays["x"], arrays["residual"]

        return write_over

    greedy = dataclasses.replace(
        honest, name="flashinfer", bind=bind, overwrites=frozenset({workload.op})
    )
    result = run_sweep(clock, workload, [make_peer(clock), greedy, honest])
    assert (result.status, result.detail) == ("ok", "")
    assert set(result.gpu_us) == {"cunorm", "flashinfer", "torch"}


def test_samples_give_the_noise(clock, small):
    result = run_sweep(clock, Workload("rms_norm", (6, 32), "float32"), [make_peer(clock)])
    for time in (result.copy, result.gpu["cunorm"]):
        assert time.low <= time.us <= time.high


def test_what_does_not_fit_is_skipped(clock, small):
    def spoil(outputs):
        raise cp.cuda.memory.OutOfMemoryError("out of memory")

    cp = make_fake_cupy(clock)
    found = sweep.Sweep(cp, [make_peer(clock, spoil=spoil)], sweep.Settings())
    result = found.measure(Workload("rms_norm", (6, 32), "float32"))
    assert (result.status, result.detail) == ("skip", "does not fit the device memory")


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
    monkeypatch.setattr(choice, "WORKLOADS", (Workload("rms_norm", (6, 32), "float32", 1.0, 3.0),))
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
