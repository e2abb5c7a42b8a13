"""The benchmark without a GPU: its table, its arithmetic, its reports and its command line."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import io
import math
import sys
from collections import Counter

import pytest

import cunorm
from bench import __main__ as command
from bench import check, choice, inputs, peers, report, timing
from bench.workloads import (
    CHANNEL_WORKLOADS,
    OPS,
    ROW_WORKLOADS,
    UNRECORDED,
    WORKLOADS,
    Workload,
    select,
)

# The MB column of the recorded table, in its order.
RECORDED_MB = """
33.6 67.1 134 0.0164 0.0655 4.19 33.6 67.1 134 268 537 1.07e+03 2.15e+03 4.29e+03 8.59e+03
8.59e+03 8.59e+03 1.07e+03 537 33.6 67.1 134 0.0164 83.9 4.72 134 268 1.07e+03 4.29e+03 512 537
67.1 134 0.0328 1.07e+03 268 67.1 134 0.0328 1.07e+03 268 9.44 67.1 0.0328 302 11.8 83.9 0.041 377
50.3 50.3 201 201 805 805 805 805 403
"""

MACHINE = report.Machine(
    date="2026-11-29T12:00:00Z",
    machine="node",
    gpu="NVIDIA H200",
    driver="580.95",
    cuda="13.0",
    cupy="14.2.0",
    cunorm="0.1.0",
)


NAMES = ["cunorm", "cupy", "torch"]


def timed(us: float, low: float | None = None, high: float | None = None) -> timing.GpuTime:
    return timing.GpuTime(us, us if low is None else low, us if high is None else high, calls=150)


def measured() -> report.Result:
    return report.Result(
        Workload("layer_norm", (2048, 4096), "bfloat16", 11.0, 11.2, "TileOPs"),
        copy=timed(11.0, 10.5, 11.5),
        gpu={"cunorm": timed(10.0, 9.75, 12.0), "cupy": timed(431.25)},
        pooled=timed(8.4),
        host_us={"cunorm": 7.125, "cupy": 90.0},
        host_out_us=4.5,
    )


# The table of workloads


def test_every_recorded_row_workload_is_there():
    assert Counter(w.op for w in ROW_WORKLOADS) == {
        "rms_norm": 19,
        "layer_norm": 12,
        "fused_add_rms_norm": 5,
        "fused_add_layer_norm": 5,
        "ada_layer_norm": 4,
        "ada_layer_norm_zero": 4,
        "rms_norm_bwd": 4,
        "layer_norm_bwd": 5,
    }
    assert len({w.label for w in ROW_WORKLOADS}) == 58


def test_every_recorded_channel_workload_is_there():
    assert Counter(w.op for w in CHANNEL_WORKLOADS) == {
        "batch_norm_train": 12,
        "batch_norm_bwd": 12,
        "batch_norm_infer": 10,
        "group_norm": 9,
        "group_norm_bwd": 3,
        "instance_norm": 8,
    }
    assert len({w.label for w in WORKLOADS}) == len(WORKLOADS) == 138


def test_other_backward_workloads_are_those_of_the_forward():
    assert Counter(w.op for w in UNRECORDED) == {
        "fused_add_rms_norm_bwd": 5,
        "fused_add_layer_norm_bwd": 5,
        "ada_layer_norm_bwd": 4,
        "ada_layer_norm_zero_bwd": 4,
        "instance_norm_bwd": 8,
    }
    moved = {"fused_add": 4, "ada_layer_norm_bwd": 6, "ada_layer_norm_zero": 9, "instance": 3}
    for w in UNRECORDED:
        assert w.peer_us is w.copy_us is None
        arrays = next(count for name, count in moved.items() if w.op.startswith(name))
        assert w.bytes_moved == arrays * math.prod(w.shape) * w.itemsize, w.label


def test_bytes_are_those_of_the_recorded_table():
    assert [f"{w.bytes_moved / 1e6:.3g}" for w in ROW_WORKLOADS] == RECORDED_MB.split()


def test_recorded_times_are_those_of_memory_traffic():
    for w in (*ROW_WORKLOADS, *CHANNEL_WORKLOADS):
        assert w.peer and w.copy_us is not None and w.peer_us is not None
        assert w.bytes_moved / (w.copy_us * 1e-6) < 4.8e12, w.label
        assert 0.8 < w.peer_us / w.copy_us < _most_over_copy(w), w.label


def _most_over_copy(w):
    if w in CHANNEL_WORKLOADS:
        return 5
    return 2.5 if w.op.endswith("_bwd") else 1.7


def test_input_bytes_count_parameters():
    assert Workload("layer_norm", (3, 8), "float32").input_bytes == (24 + 8 + 8) * 4
    assert Workload("fused_add_rms_norm", (3, 8), "float16").input_bytes == (24 + 24 + 8) * 2
    assert Workload("ada_layer_norm_zero", (3, 8), "float64").input_bytes == 4 * 24 * 8


@pytest.mark.parametrize("op", OPS)
def test_operands_come_in_the_order_of_the_function(op):
    names = [
        name
        for name, parameter in inspect.signature(
            getattr(cunorm, OPS[op].function or op)
        ).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in ("normalized_shape", "eps", "training", "momentum", "num_groups")
        and name != "use_input_stats"
    ]
    operands = [operand.name for operand in OPS[op].operands]
    if op == "instance_norm":  # measured without running statistics
        operands[1:1] = ["running_mean", "running_var"]
    assert operands == names


def test_select():
    assert len(select([])) == 138
    assert {w.op for w in select(["layer_norm"])} == {"layer_norm"}
    assert {w.op for w in select(["ada f32"])} == set()
    assert {w.op for w in select(["ada bwd"])} == {"ada_layer_norm_bwd", "ada_layer_norm_zero_bwd"}
    assert {w.op for w in select(["rms_norm_bwd"])} == {"rms_norm_bwd"}
    assert [w.label for w in select(["float64"])] == ["layer_norm 8192x4096 f64"]
    assert [w.label for w in select(["rms_norm F32"])] == ["rms_norm 32768x4096 f32"]
    assert len(select(["batch_norm nhwc"])) == 9
    assert [w.label for w in select(["g16"])] == ["group_norm 4x128x30x30 g16 f16"]
    assert len(select(["float64", "1x16384 bf16"])) == 1 + len(select(["1x16384 bf16"]))
    assert select(["softmax"]) == []


# Arithmetic of the method


@pytest.mark.parametrize(
    ("set_bytes", "l2_bytes", "sets"),
    [
        (16_384, 0, 13_428),
        (110_000_000, 0, 3),
        (219_999_999, 0, 2),
        (220_000_000, 0, 2),
        (220_000_001, 0, 1),
        (4_300_000_000, 60_000_000, 1),
        (100_000_000, 126_000_000, 3),
        (0, 0, 220_000_001),
    ],
)
def test_rotation_covers_more_than_the_cache(set_bytes, l2_bytes, sets):
    assert inputs.rotation_sets(set_bytes, l2_bytes) == sets


def test_rotation_goes_on_where_it_stopped():
    rotation = inputs.Rotation(3)
    assert rotation.take(2) == [0, 1]
    assert rotation.take(5) == [2, 0, 1, 2, 0]
    assert rotation.take(1) == [1]


@pytest.mark.parametrize(
    ("gpu_us", "host_us", "launches", "calls"),
    [
        (2.0, 5.0, 1, 150),  # the most calls
        (1000.0, 5.0, 1, 30),  # a sample of 30 ms
        (20_000.0, 5.0, 1, 3),  # the least calls
        (2.0, 5.0, 24, 37),  # the launch queue
        (2.0, 1000.0, 1, 66),  # the longest spin
    ],
)
def test_calls_per_sample(gpu_us, host_us, launches, calls):
    assert timing.calls_per_sample(gpu_us, host_us, launches) == calls


@pytest.mark.parametrize("host_us", [1.0, 8.0, 60.0, 600.0, 5000.0])
def test_spinning_outlasts_the_queueing(host_us):
    calls = timing.calls_per_sample(2.0, host_us)
    assert calls * host_us < timing.spin_us(host_us, calls) <= timing.MAX_SPIN_US


@pytest.mark.parametrize(
    ("gpu_us", "launches", "calls", "chunks"),
    [
        (2.0, 1, 20, 10),  # 200 calls
        (2000.0, 1, 15, 6),  # 200 ms in all
        (50_000.0, 1, 3, 5),  # the least
        (2.0, 90, 10, 20),  # the launch queue
    ],
)
def test_host_chunks_leave_the_queue_room(gpu_us, launches, calls, chunks):
    assert timing.host_chunks(gpu_us, launches) == (calls, chunks)


def test_host_time_is_the_median_of_chunks(monkeypatch):
    now = 0.0
    calls = 0

    def call():
        nonlocal now, calls
        calls += 1
        now += 1.0 if calls == 5 else 7e-6  # one hiccup

    monkeypatch.setattr(timing, "perf_counter", lambda: now)
    us = timing.time_host(call, lambda: None, gpu_us=2.0)
    assert us == pytest.approx(7.0)
    assert calls == timing.HOST_CALLS


@pytest.mark.parametrize(
    ("rows", "columns", "slices"),
    [
        (1, 4096, [slice(0, 1)]),
        (8, 10, [slice(0, 8)]),
        (100, 10, [slice(0, 4), slice(96, 100)]),
        (5, 1000, [slice(0, 1), slice(4, 5)]),
    ],
)
def test_edge_rows(rows, columns, slices):
    assert check.edge_rows(rows, columns, elements=40) == slices


# Reports


def test_a_row_of_the_table():
    row = report.cells(measured(), NAMES, recorded=True)
    titles = [column.title for column in report.columns(NAMES, recorded=True)]
    assert dict(zip(titles, row, strict=True)) == {
        "op": "layer_norm",
        "shape": "2048x4096",
        "dtype": "bfloat16",
        "MB": "33.6",
        "copy us": "11.0",
        "cunorm us": "10.0",
        "pool us": "8.40",
        "GB/s": "3355",
        "of copy": "1.10",
        "host us": "7.12",
        "out= us": "4.50",
        "cupy us": "431.2",
        "torch us": "-",
        "peer us": "11.2",
        "to peer": "0.75",
        "status": "ok",
    }


def test_recorded_columns_are_for_the_recorded_card():
    titles = [column.title for column in report.columns(["cunorm"], recorded=False)]
    assert "peer us" not in titles
    other = dataclasses.replace(MACHINE, gpu="NVIDIA A100")
    row = report.csv_row(measured(), other, "cold", NAMES)
    assert MACHINE.keeps_record and not other.keeps_record
    assert row["recorded_peer_us"] == row["to_recorded_peer"] == ""


def test_a_row_without_measurements():
    result = report.Result(WORKLOADS[0], status="skip", detail="does not fit the device memory")
    row = report.cells(result, ["cunorm"], recorded=True)
    assert row[3:10] == ["33.6", "-", "-", "-", "-", "-", "-"]
    assert row[-1] == "skip"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.label)
def test_every_row_fits_its_columns(workload):
    result = dataclasses.replace(measured(), workload=workload, copy=timed(1994.8))
    result.gpu = {"cunorm": timed(1978.04), "cupy": timed(66390.4)}
    names = ["cunorm", "cupy"]
    shape = report.columns(names, recorded=True)
    row = report.cells(result, names, recorded=True)
    assert all(len(t) <= c.width for t, c in zip(row, shape, strict=True))
    assert all(len(c.title) <= c.width for c in shape)


@pytest.mark.parametrize(
    ("us", "text"),
    [(None, "-"), (1.6, "1.60"), (9.994, "9.99"), (11.04, "11.0"), (1994.8, "1994.8")],
)
def test_microseconds(us, text):
    assert report.microseconds(us) == text


def test_lines_come_as_they_are_measured():
    file = io.StringIO()
    with report.TableReport(["cunorm"], recorded=True, file=file) as table:
        table.add(measured())
        after_one = file.getvalue().splitlines()
    assert len(after_one) == 2
    assert after_one[0].split()[:3] == ["op", "shape", "dtype"]
    assert after_one[1].split()[:4] == ["layer_norm", "2048x4096", "bfloat16", "33.6"]
    assert len(after_one[0]) == len(after_one[1])


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [80, 200])
def test_live_table_on_a_wide_terminal(monkeypatch, width):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with report.TableReport(["cunorm"], recorded=True, file=file) as table:
        table.add(measured())
    assert "2048x4096" in file.getvalue()
    assert ("\u2502" in file.getvalue()) is (width == 200)  # the frame of the table


def test_terminal_without_rich_gets_lines(monkeypatch):
    for module in ("rich", "rich.console", "rich.live", "rich.table"):
        monkeypatch.setitem(sys.modules, module, None)
    file = Terminal()
    with report.TableReport(["cunorm"], recorded=True, file=file) as table:
        table.add(measured())
    assert len(file.getvalue().splitlines()) == 2


def test_csv(tmp_path):
    path = tmp_path / "rows.csv"
    writer = report.CsvReport(path, MACHINE, "cold", NAMES)
    writer.add(measured())
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))  # before the writer is closed
    writer.close()
    assert list(rows[0]) == report.csv_fields(NAMES)
    assert rows[0] == {
        "op": "layer_norm",
        "shape": "2048x4096",
        "dtype": "bfloat16",
        "bytes": "33554432",
        "status": "ok",
        "copy_us": "11.0000",
        "cunorm_us": "10.0000",
        "cupy_us": "431.2500",
        "torch_us": "",
        "copy_us_low": "10.5000",
        "copy_us_high": "11.5000",
        "cunorm_us_low": "9.7500",
        "cunorm_us_high": "12.0000",
        "cupy_us_low": "431.2500",
        "cupy_us_high": "431.2500",
        "torch_us_low": "",
        "torch_us_high": "",
        "cunorm_pool_us": "8.4000",
        "gb_per_s": "3355.4432",
        "of_copy": "1.1000",
        "cunorm_host_us": "7.1250",
        "cupy_host_us": "90.0000",
        "torch_host_us": "",
        "cunorm_host_out_us": "4.5000",
        "recorded_copy_us": "11.0000",
        "recorded_peer_us": "11.2000",
        "recorded_peer": "TileOPs",
        "to_recorded_peer": "0.7500",
        "mode": "cold",
        "detail": "",
        **dataclasses.asdict(MACHINE),
    }


def test_csv_has_columns_for_every_peer():
    fields = report.csv_fields(list(peers.PEERS))
    assert len(set(fields)) == len(fields)
    for name in peers.PEERS:
        assert {f"{name}{end}" for end in ("_us", "_us_low", "_us_high", "_host_us")} < set(fields)


def test_machine_names_the_versions_of_peers():
    machine = dataclasses.replace(MACHINE, peers="torch 2.11.0, tileops 0.1.0")
    assert "cunorm 0.1.0, torch 2.11.0, tileops 0.1.0, 2026-11-29" in str(machine)
    assert "cunorm 0.1.0, 2026-11-29" in str(MACHINE)


def test_summary_names_the_worst_and_the_failed():
    slow = measured()
    slow.workload = WORKLOADS[3]
    slow.gpu, slow.pooled = {"cunorm": timed(4.4)}, timed(4.2)
    failed = report.Result(WORKLOADS[0], status="FAIL", detail="cunorm: y is wrong")
    text = "\n".join(report.summary([measured(), slow, failed], recorded=True))
    assert "rms_norm 2048x4096 bf16: cunorm: y is wrong" in text
    assert "1 of 2 within 1.10, worst 2.00 (rms_norm 1x4096 bf16)" in text
    assert f"geometric mean {(8.4 / 11.2 * 2) ** 0.5:.3f}, 1 of 2" in text
    assert "1 FAILED" in text
    assert report.summary([], recorded=True) == []


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 2025",
    ],
)
def test_driver_version(tmp_path, text):
    path = tmp_path / "version"
    path.write_text(text + "\nGCC version: 12.2.0\n", encoding="utf-8")
    assert report._driver_version(str(path)) == "580.95.05"
    assert report._driver_version(str(tmp_path / "none")) == ""


@pytest.mark.parametrize(("number", "text"), [(12020, "12.2"), (13000, "13.0"), (13010, "13.1")])
def test_cuda_version(number, text):
    assert report.cuda_version(number) == text


# Command line


def names(text):
    return [peer.name for peer in choice.parse_peers(text)]


def test_peers_argument():
    assert names("cupy, cunorm,cupy") == ["cunorm", "cupy"]
    assert names("") == ["cunorm"]
    args = command.make_parser().parse_args([])
    assert [peer.name for peer in args.peers] == list(peers.PEERS)


def test_unknown_peer_is_an_error(capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(["--peers", "cunorm,quick"])
    assert caught.value.code == 2
    assert "no peer quick; there are cunorm, cupy, torch" in capsys.readouterr().err


def test_arguments(tmp_path):
    path = str(tmp_path / "rows.csv")
    args = command.make_parser().parse_args(
        ["--filter", "layer_norm", "--filter", "1x4096", "--csv", path, "--warm", "--host-only"]
    )
    assert args.filter == ["layer_norm", "1x4096"]
    assert str(args.csv) == path
    assert args.warm and args.host_only and not args.quick


def test_quick_leaves_the_large_ones_out():
    args = command.make_parser().parse_args(["--quick"])
    chosen = choice.chosen_workloads(args)
    assert {w.op for w in chosen} == set(OPS)
    assert max(w.bytes_moved for w in chosen) <= choice.QUICK_BYTES
    assert 20 < len(chosen) < 100


def test_list_needs_no_gpu(capsys):
    assert command.main(["--list", "--filter", "float64"]) == 0
    assert capsys.readouterr().out == "layer_norm 8192x4096 f64  536870912 bytes\n"


def test_no_workload(capsys):
    assert command.main(["--filter", "nothing"]) == 2
    assert capsys.readouterr().err == "bench: no workload matches; see --list\n"


def test_without_cupy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bench: needs CuPy and a CUDA GPU: ")
    assert err.count("\n") == 1
