"""The sweep of sizes: what it covers, its limits, and what it says of those that miss."""

from __future__ import annotations

import csv
import math
import sys

import numpy as np
import pytest
from bench_fakes import clock, make_fake_cupy, make_peer, small

from bench import __main__ as command
from bench import inputs, peers, sizes
from bench.report import Result
from bench.timing import GpuTime
from bench.workloads import Workload
from cunorm.dtypes import numpy_dtype

__all__ = ["clock", "small"]  # fixtures

POINTS = sizes.make_points()


def test_points_cover_what_is_promised():
    labels = [point.workload.label for point in POINTS]
    assert len(set(labels)) == len(labels)
    assert {(p.workload.op, p.workload.dtype) for p in POINTS} == {
        (op, dtype)
        for op in ("layer_norm", "rms_norm", "batch_norm_train", "instance_norm", "group_norm")
        for dtype in ("bfloat16", "float32")
    }
    rows = [p.workload.shape for p in POINTS if p.workload.op == "layer_norm"]
    lengths = {cols for _, cols in rows}
    assert min(lengths) == 64 and max(lengths) == 262_144
    assert sum(cols % 2 for cols in lengths) >= 12
    assert {1, 1_000_000} <= {count for count, _ in rows}
    spatial = {
        math.prod(p.workload.shape[2:]) for p in POINTS if p.workload.op == "batch_norm_train"
    }
    assert min(spatial) == 1 and max(spatial) == 1_000_000
    assert {p.workload.op for p in POINTS if p.workload.start == 1} == {
        p.workload.op for p in POINTS
    }


def test_points_are_few_and_small_enough_for_two_minutes():
    assert len(POINTS) < 500
    moved = [point.workload.bytes_moved for point in POINTS]
    assert sorted(moved)[-3] <= sizes.MOST_BYTES
    assert max(moved) == 2 * 1_000_000 * 64 * 2
    large = sum(nbytes > sizes.LARGE_BYTES for nbytes in moved)
    assert large > len(POINTS) / 3


def test_points_are_what_the_ops_take():
    for point in POINTS:
        w = point.workload
        if w.groups:
            assert w.shape[1] % w.groups == 0, w.label
        if w.op == "batch_norm_train":
            assert w.shape[0] * math.prod(w.shape[2:]) > 1, w.label


def test_unaligned_rows_have_a_limit_of_their_own():
    strict = [p.workload for p in POINTS if p.limit == sizes.UNALIGNED_LIMIT]
    assert {w.op for w in strict} == {"layer_norm", "rms_norm"}
    assert all(w.start == 1 or w.shape[1] == 4095 for w in strict)
    assert any(w.start == 1 and w.bytes_moved > sizes.LARGE_BYTES for w in strict)


@pytest.mark.parametrize(
    ("shape", "limit", "copy_us", "most"),
    [
        ((6000, 4096), sizes.LARGE_LIMIT, 30.0, 40.5),
        ((6000, 4095), sizes.UNALIGNED_LIMIT, 30.0, 34.5),
        ((1, 4095), sizes.UNALIGNED_LIMIT, 2.0, 4.0),
        ((1000, 4096), sizes.LARGE_LIMIT, 6.0, 8.0),
    ],
)
def test_limits(shape, limit, copy_us, most):
    point = sizes.Point(Workload("rms_norm", shape, "bfloat16"), limit)
    assert point.limit_us(copy_us) == pytest.approx(most)
    for us, good in ((most - 0.01, True), (most + 0.01, False)):
        times = [GpuTime(value, value, value, 150) for value in (copy_us, us)]
        result = Result(point.workload, copy=times[0], gpu={"cunorm": times[1]})
        assert (sizes.missed(point, result) == "") is good


def test_what_was_not_timed_misses():
    point = POINTS[0]
    wrong = Result(point.workload, status="FAIL", detail="cunorm: y is wrong")
    assert sizes.missed(point, wrong) == "cunorm: y is wrong"
    assert sizes.missed(point, Result(point.workload)) == "not timed"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_views_start_at_element_1(clock, small, dtype):
    cp = make_fake_cupy(clock)
    workload = Workload("layer_norm", (7, 33), dtype, start=1)
    assert workload.shape_text == "7x33 from 1"
    found = inputs.InputSets(cp, workload, 3, inputs.make_noise(cp))
    x, weight = found._inputs["x"], found._inputs["weight"]
    itemsize = numpy_dtype(dtype).itemsize
    for i in range(3):
        assert (x.address(i) - int(x._block.data.ptr)) % 512 == itemsize
        assert (weight.address(i) - int(weight._block.data.ptr)) % 512 == 0
        assert x[i].ctypes.data == x.address(i)
        assert np.isfinite(x[i].astype(np.float64)).all()
    assert x.address(1) - x.address(0) >= 7 * 33 * itemsize


# The command


def run(monkeypatch, tmp_path, clock, spoil=lambda outputs: None, cost=3.0):
    chosen = [
        sizes.Point(Workload("rms_norm", (6, 32), "float32")),
        sizes.Point(Workload("layer_norm", (6, 31), "float32", start=1)),
    ]
    monkeypatch.setitem(sys.modules, "cupy", make_fake_cupy(clock))
    monkeypatch.setitem(peers.PEERS, "cunorm", make_peer(clock, spoil=spoil))
    monkeypatch.setattr(sizes, "make_points", lambda: chosen)
    monkeypatch.setattr(sizes, "SMALL_LIMIT_US", cost)
    path = tmp_path / "sizes.csv"
    code = command.main(["sizes", "--csv", str(path)])
    with path.open(encoding="utf-8", newline="") as file:
        return code, list(csv.DictReader(file))


def test_sizes_within_their_limit(monkeypatch, tmp_path, capsys, clock, small):
    code, rows = run(monkeypatch, tmp_path, clock)
    assert code == 0
    assert "0 of 2 sizes miss" in capsys.readouterr().out
    assert [row["shape"] for row in rows] == ["6x32", "6x31 from 1"]
    assert [row["detail"] for row in rows] == ["", ""]
    assert rows[0]["cunorm_us"] == "3.0000"


def test_sizes_that_miss_are_told(monkeypatch, tmp_path, capsys, clock, small):
    code, rows = run(monkeypatch, tmp_path, clock, cost=1.5)
    assert code == 1
    out = capsys.readouterr().out
    assert "rms_norm 6x32 f32: 3.00 us, 3.00 x copy (1.00 us); at most 2.50 us" in out
    assert "2 of 2 sizes miss" in out
    assert all(row["detail"].startswith("over its limit: 3.00 us") for row in rows)


def test_wrong_results_are_told(monkeypatch, tmp_path, capsys, clock, small):
    def spoil(outputs):
        outputs[0][...] = 7

    code, rows = run(monkeypatch, tmp_path, clock, spoil)
    assert code == 1
    assert "layer_norm 6x31 from 1 f32: cunorm: y is wrong" in capsys.readouterr().out
    assert [row["status"] for row in rows] == ["FAIL", "FAIL"]


def test_list_needs_no_gpu(capsys):
    assert command.main(["sizes", "--list", "--filter", "rms_norm f32 4095"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rms_norm 1x4095 f32  32760 bytes",
        "rms_norm 3052x4095 f32  99983520 bytes",
    ]
    assert command.main(["sizes", "--filter", "nothing"]) == 2


def test_without_cupy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main(["sizes"]) == 2
    assert capsys.readouterr().err.startswith("bench: needs CuPy and a CUDA GPU: ")
