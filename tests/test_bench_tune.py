"""The tuning of the row table on a stand-in for CuPy: times are simulated, launches are not."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from bench_fakes import clock, make_fake_cupy, make_peer, small

import cunorm
from bench import __main__ as command
from bench import peers, tune
from bench.candidates import candidates
from bench.propose import Tuned, best, propose
from bench.tables import using
from bench.templates import TEMPLATES
from bench.workloads import WORKLOADS, Workload
from cunorm.cuda import choices, compiler, devices, row_table, run_table
from cunorm.cuda.compiler import Function, Kernel
from cunorm.cuda.tables import Manner

__all__ = ["clock", "small"]  # fixtures

ROWS, RUNS = TEMPLATES["rows"], TEMPLATES["runs"]
TUNED = [w for w in ROWS.workloads() if ROWS.serves(w, 90)]
ODD = [Workload(op, (8, cols), "bfloat16") for op in ROWS.ops for cols in (1, 24, 513, 4095)]
RUNS_TUNED = [w for w in RUNS.workloads() if RUNS.serves(w, 90)]
RUNS_TUNED += [Workload(op, (4, 6, s), "float64") for op in RUNS.ops[2:] for s in (5, 31, 500)]
CLASSES = {
    "layer_norm": lambda cols: cunorm.LayerNormFwdOp(cols),
    "rms_norm": lambda cols: cunorm.RMSNormFwdOp(cols),
    "fused_add_layer_norm": lambda cols: cunorm.FusedAddLayerNormFwdOp(),
    "fused_add_rms_norm": lambda cols: cunorm.FusedAddRMSNormFwdOp(),
    "ada_layer_norm": lambda cols: cunorm.AdaLayerNormFwdOp(),
    "ada_layer_norm_zero": lambda cols: cunorm.AdaLayerNormZeroFwdOp(),
}


# Candidates


@pytest.mark.parametrize("workload", TUNED + ODD, ids=lambda w: w.label)
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_candidates_are_launches_that_kernels_allow(workload, arch):
    found = candidates(ROWS, workload, arch)
    cols, itemsize = workload.shape[-1], workload.itemsize
    assert len({c.tile for c in found}) == len(found)
    for candidate in found:
        tile = candidate.tile
        assert choices.may_be_launched(tile, itemsize, arch)
        assert tile.vec * itemsize <= 16
        assert cols % tile.vec == 0 or tile.access == 1
        assert tile.threads * tile.packs * tile.vec >= cols
        assert (tile.packs - 1) * tile.threads * tile.vec < cols
        if tile.reading == "staged":
            norm_bytes = itemsize * (
                len(workload.spec.operands) - ROWS.row_of(workload, 90).addends
            )
            shared = tile.shared_memory(itemsize, norm_bytes)
            assert 0 < tile.ctas * (shared + 1024) <= (227 if arch == 90 else 163) * 1024
        if tile.brief:
            assert tile.threads <= 32 and cols * itemsize >= 128 and tile.access * itemsize == 16


@pytest.mark.parametrize("workload", TUNED, ids=lambda w: w.label)
def test_the_launch_of_the_table_comes_first_and_others_follow(workload):
    first, *others = candidates(ROWS, workload, 90)
    assert first.tile == ROWS.tile_of(workload, 90)
    assert first.keys[0] == (first.tile.threads, None)
    assert len(others) >= 2
    for candidate in others:
        with using(row_table, candidate.table):
            assert ROWS.tile_of(workload, 90) == candidate.tile


@pytest.mark.parametrize("op", ROWS.ops)
@pytest.mark.parametrize("cols", [256, 1152, 4096, 4095])
def test_candidates_are_what_calls_launch(op, cols):
    workload = Workload(op, (8, cols), "bfloat16")
    for candidate in candidates(ROWS, workload, 90):
        with using(row_table, candidate.table):
            (launch,) = CLASSES[op](cols).plan("bfloat16", (8, cols))
        assert candidate.tile.expression in launch.kernel
        assert launch.kernel.startswith("row_norm_brief<") == candidate.tile.brief
        assert launch.block == candidate.tile.block


def test_local_memory_is_that_of_the_candidates_own_kernel(monkeypatch):
    workload = Workload("rms_norm", (8, 4096), "bfloat16")
    first, second, *_ = candidates(ROWS, workload, 90)
    found = {}
    for candidate, nbytes in ((first, 0), (second, 16)):
        with using(row_table, candidate.table):
            (launch,) = cunorm.RMSNormFwdOp(4096).plan("bfloat16", (8, 4096))
        raw = SimpleNamespace(local_size_bytes=nbytes)
        found[0, Kernel("rms_norm", launch.kernel)] = Function(0, raw)
    monkeypatch.setattr(compiler, "_functions", found)
    assert tune.local_bytes(ROWS, first.tile, workload, 0) == 0
    assert tune.local_bytes(ROWS, second.tile, workload, 0) == 16
    with pytest.raises(LookupError, match="another kernel was launched"):
        tune.local_bytes(ROWS, first.tile, replace(workload, dtype="float16"), 0)


@pytest.mark.parametrize("workload", RUNS_TUNED, ids=lambda w: w.label)
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_candidates_for_runs_are_what_calls_launch(monkeypatch, workload, arch):
    monkeypatch.setattr(devices, "compute_capability", lambda index: arch)
    if not RUNS.serves(workload, arch):
        return
    made = {
        "batch_norm_train": lambda: cunorm.BatchNormFwdOp(training=True),
        "batch_norm_bwd": lambda: cunorm.BatchNormBwdOp(),
        "group_norm": lambda: cunorm.GroupNormFwdOp(workload.groups or 1),
        "instance_norm": lambda: cunorm.InstanceNormFwdOp(),
    }
    workload = replace(workload, groups=workload.groups or (workload.op == "group_norm"))
    first, *others = candidates(RUNS, workload, arch)
    assert first.tile == RUNS.tile_of(workload, arch) and others
    for candidate in (first, *others):
        tile = candidate.tile
        assert tile.block % 32 == 0 and tile.block * tile.ctas <= (1536 if arch == 120 else 2048)
        assert tile.sets == 1 or tile.threads <= 32
        assert RUNS.allows(tile, workload, arch)
        with using(run_table, candidate.table):
            assert RUNS.tile_of(workload, arch) == tile
            launches = made[workload.op]().plan(workload.dtype, workload.shape)
        file = RUNS.file(workload)
        found = [x for x in launches if RUNS.is_of(Kernel(file, x.kernel), tile, workload)]
        assert [x.block for x in found] == [tile.block]


def test_what_other_launches_serve_is_not_tuned_as_runs():
    assert not RUNS.serves(Workload("group_norm", (2, 64, 8, 8), "float32", groups=7), 90)
    assert not RUNS.serves(Workload("instance_norm", (2, 64), "float32"), 90)
    assert not RUNS.serves(Workload("instance_norm", (2, 4, 1 << 20), "float32"), 90)
    last = Workload("instance_norm", (2, 64, 8, 8), "float32", channels_last=True)
    assert not RUNS.serves(last, 90)
    assert not RUNS.serves(Workload("layer_norm", (2, 64), "float32"), 90)


# Judgement


def tuned(shape, times, op="layer_norm", dtype="bfloat16"):
    workload = Workload(op, shape, dtype)
    return Tuned(workload, ROWS.row_of(workload, 90), next(iter(times)), times)


STAGED, LATE = Manner(reading=("staged",)), Manner(reading=("late",))


def test_the_best_is_better_in_the_mean_and_slower_nowhere():
    assert best([{"now": 10.0, "other": 9.9}], "now", 1.02) == "now"
    assert best([{"now": 10.0, "other": 9.7, "third": 9.6}], "now", 1.02) == "third"
    assert best([{"now": 10.0, "other": 9.0}, {"now": 10.0, "other": 10.3}], "now", 1.02) == "now"
    assert best([{"now": 10.0, "other": 9.0}, {"now": 10.0, "other": 10.1}], "now", 1.02) == "other"
    assert best([{"now": 10.0, "other": 9.0}, {"now": 10.0}], "now", 1.02) == "now"
    assert best([{"other": 9.0}], "now", 1.02) == "now"  # the launch of the table was wrong


def test_nothing_changes_within_the_noise():
    same = propose(
        row_table.TABLE, [tuned((2048, 4096), {(128, None): 12.0, (256, None): 11.9})], 1.02, ""
    )
    assert same.table == row_table.TABLE and same.changes == ()


def test_faster_threads_come_with_what_was_measured():
    proposal = propose(
        row_table.TABLE,
        [
            tuned((2048, 4096), {(128, None): 12.0, (256, None): 11.0}),
            tuned((1, 4096), {(128, None): 3.0, (256, None): 3.0}, dtype="float16"),
        ],
        1.02,
        "GPU, day",
    )
    workload = Workload("layer_norm", (2048, 4096), "bfloat16")
    with using(row_table, proposal.table):
        assert ROWS.tile_of(workload, 90).threads == 256
        assert ROWS.tile_of(replace(workload, op="fused_add_layer_norm"), 90).threads == 256
        assert ROWS.tile_of(replace(workload, op="rms_norm"), 90).threads == 256  # as before
        assert ROWS.tile_of(replace(workload, shape=(9, 8192)), 90).threads == 256  # as before
    reason = (
        "layer_norm 2048x4096 bf16 11.0 us, with 128 threads 12.0; layer_norm 1x4096 f16 3.00 us, "
        "with 128 threads 3.00 (GPU, day)"
    )
    changed = [
        s for s in proposal.table.ladder(ROWS.row_of(workload, 90)).steps if s.reason == reason
    ]
    assert [(s.vectors, s.threads) for s in changed] == [(512, 256)]
    assert len(proposal.changes) == 1
    assert proposal.changes[0].startswith(
        "layer, 2 bytes an element, 161 to 512 whole vectors: 256 threads; layer_norm"
    )


def test_a_new_entry_ends_where_another_length_stays():
    found = [
        tuned((9, 2048), {(128, None): 10.0, (64, None): 10.0}),
        tuned((9, 4096), {(128, None): 10.0, (64, None): 9.0}),
    ]
    table = propose(row_table.TABLE, found, 1.02, "").table
    row = ROWS.row_of(found[0].workload, 90)
    by_length = [table.threads(row._replace(vectors=n)) for n in (160, 161, 256, 257, 512, 513)]
    assert by_length == [32, 128, 128, 64, 64, 256]


def test_what_leaves_bits_alone_is_judged_for_each_number_of_addends():
    plain = {(128, None): 10.0, (128, LATE): 9.0, (128, STAGED): 10.0}
    fused = {(128, None): 10.0, (128, LATE): 11.0, (128, STAGED): 9.5}
    proposal = propose(
        row_table.TABLE,
        [tuned((9, 4096), plain), tuned((9, 4096), fused, "fused_add_layer_norm")],
        1.02,
        "",
    )
    first, second = proposal.table.manners[1], proposal.table.manners[0]
    assert (first.addends, first.reading, first.above, first.vectors) == ((1,), ("late",), 160, 512)
    assert (second.addends, second.reading) == ((2,), ("staged",))
    assert proposal.table.manners[2:] == row_table.TABLE.manners
    assert [change.count("residual, ") for change in proposal.changes] == [0, 1]


def test_threads_are_judged_beside_one_manner_for_all_that_share_it():
    """Either workload has a manner in which 256 threads are faster; no manner suits both."""
    slow = {(128, None): 10.0, (256, None): 10.0}
    found = [
        tuned((9, 4096), {**slow, (256, LATE): 9.0, (256, STAGED): 12.0}),
        tuned((1, 4096), {**slow, (256, LATE): 12.0, (256, STAGED): 9.0}),
    ]
    assert propose(row_table.TABLE, found, 1.02, "").changes == ()
    assert len(propose(row_table.TABLE, found[:1], 1.02, "").changes) == 2


# The command


def simulated(clock, microseconds, spoil=lambda tile, outputs: None, template=ROWS):
    """A peer whose time follows from the launch that the table in use chooses."""
    honest = make_peer(clock)

    def bind(workload, arrays, out):
        inner = honest.bind(workload, arrays, out)

        def call():
            tile = template.tile_of(workload, 90)
            clock.enqueue(microseconds(tile) - 3.0)  # the peer's own are three
            result = inner()
            spoil(tile, (result,))
            return result

        return call

    return replace(honest, bind=bind)


def run(
    monkeypatch, tmp_path, clock, peer, local=lambda template, tile, workload, device: 0, more=()
):
    monkeypatch.setitem(sys.modules, "cupy", make_fake_cupy(clock))
    monkeypatch.setitem(peers.PEERS, "cunorm", peer)
    monkeypatch.setattr(tune, "local_bytes", local)
    path, table = tmp_path / "tune.csv", tmp_path / "table.py"
    arguments = ["--op", "rms_norm", "--dtype", "bfloat16", "--shape", "4x2048"]
    arguments += ["--csv", str(path), "--write", str(table), "--samples", "1", *more]
    code = command.main(["tune", *arguments])
    read = {}
    exec(table.read_text(encoding="utf-8"), read)
    with path.open(encoding="utf-8", newline="") as file:
        return code, list(csv.DictReader(file)), read["TABLE"]


def prefers(threads, reading):
    return lambda tile: 10.0 - 2 * (tile.threads == threads) - (tile.reading == reading)


WORKLOAD = Workload("rms_norm", (4, 2048), "bfloat16")


@pytest.mark.parametrize("threads", [64, 128, 256])
@pytest.mark.parametrize("reading", ["early", "staged", "late"])
def test_the_written_table_chooses_the_fastest(
    monkeypatch, tmp_path, capsys, clock, small, threads, reading
):
    shipped = row_table.TABLE
    peer = simulated(clock, prefers(threads, reading))
    code, rows, table = run(monkeypatch, tmp_path, clock, peer)
    assert code == 0 and row_table.TABLE is shipped
    with using(row_table, table):
        tile = ROWS.tile_of(WORKLOAD, 90)
    assert (tile.threads, tile.reading) == (threads, reading)
    assert {row["now"] for row in rows} == {"0", "1"}
    (fastest,) = (row for row in rows if row["best"] == "1")
    assert (fastest["threads"], fastest["reading"]) == (str(threads), reading)
    assert float(fastest["us"]) == pytest.approx(7.0)
    out = capsys.readouterr().out
    assert "rms_norm 4x2048 bf16: 256 vectors, copy 1.0" in out
    assert ("0 changes" in out) == ((threads, reading) == (128, "early"))
    changed = [m.reason for m in table.manners] + [s.reason for s in table.ladders[0].steps]
    assert any("NVIDIA H200, 20" in reason for reason in changed) == ("0 changes" not in out)


def test_less_than_the_noise_changes_nothing(monkeypatch, tmp_path, capsys, clock, small):
    peer = simulated(clock, lambda tile: 10.0 - 0.1 * (tile.threads == 64))
    code, _, table = run(monkeypatch, tmp_path, clock, peer)
    assert code == 0 and table == row_table.TABLE
    assert "0 changes that gain more than a factor of 1.02" in capsys.readouterr().out
    _, _, table = run(monkeypatch, tmp_path, clock, peer, more=["--noise", "1.005"])
    assert table.threads(ROWS.row_of(WORKLOAD, 90)) == 64


def test_wrong_and_spilling_candidates_are_left_out(monkeypatch, tmp_path, capsys, clock, small):
    def spoil(tile, outputs):
        if tile.threads == 64:
            outputs[0][1, 7] += 1

    def local(template, tile, workload, device):
        return 24 if tile.threads == 256 else 0

    peer = simulated(clock, lambda tile: 4.0 + 4 * (tile.threads == 128), spoil)
    code, rows, table = run(monkeypatch, tmp_path, clock, peer, local)
    assert code == 0 and table == row_table.TABLE
    left_out = {row["threads"]: row["left_out"] for row in rows}
    assert left_out["64"].startswith("y is wrong: ")
    assert left_out["256"] == "spills 24 bytes a thread"
    assert left_out["128"] == ""
    assert {row["us"] for row in rows if row["left_out"]} == {""}
    out = capsys.readouterr().out
    assert "left out: y is wrong" in out and "left out: spills 24 bytes a thread" in out


def test_a_candidate_that_fails_leaves_the_others(monkeypatch, tmp_path, clock, small):
    def spoil(tile, outputs):
        if tile.threads == 64:
            raise RuntimeError("no such kernel\nand more")

    code, rows, _ = run(monkeypatch, tmp_path, clock, simulated(clock, lambda t: 5.0, spoil))
    assert code == 0
    problems = {row["left_out"] for row in rows}
    assert problems == {"", "RuntimeError: no such kernel"}


def test_a_wrong_launch_of_the_table_is_told(monkeypatch, tmp_path, clock, small):
    def spoil(tile, outputs):
        outputs[0][...] = 7

    code, rows, table = run(monkeypatch, tmp_path, clock, simulated(clock, lambda t: 5.0, spoil))
    assert code == 1 and table == row_table.TABLE
    assert all(row["left_out"].startswith("y is wrong") for row in rows)


def test_what_does_not_fit_is_told(monkeypatch, tmp_path, clock, small):
    def spoil(tile, outputs):
        raise sys.modules["cupy"].cuda.memory.OutOfMemoryError("out of memory")

    code, rows, _ = run(monkeypatch, tmp_path, clock, simulated(clock, lambda t: 5.0, spoil))
    assert code == 1
    assert {row["left_out"] for row in rows} == {"does not fit the device memory"}


@pytest.mark.parametrize("threads", [64, 128, 256])
def test_runs_have_a_table_of_their_own(monkeypatch, tmp_path, capsys, clock, small, threads):
    monkeypatch.setitem(sys.modules, "cupy", make_fake_cupy(clock))
    peer = simulated(clock, lambda tile: 10.0 - (tile.threads == threads), template=RUNS)
    monkeypatch.setitem(peers.PEERS, "cunorm", peer)
    monkeypatch.setattr(tune, "local_bytes", lambda *of: 0)
    path = tmp_path / "table.py"
    arguments = ["runs", "--op", "group_norm", "--dtype", "bfloat16", "--shape", "2x8x32x32"]
    arguments += ["--groups", "2", "--samples", "1", "--write", str(path)]
    assert command.main(["tune", *arguments]) == 0
    read = {}
    exec(path.read_text(encoding="utf-8"), read)
    workload = Workload("group_norm", (2, 8, 32, 32), "bfloat16", groups=2)
    with using(run_table, read["TABLE"]):
        assert RUNS.tile_of(workload, 90).threads == threads
    assert "group_norm 2x8x32x32 g2 bf16: 512 vectors" in capsys.readouterr().out


def test_without_shapes_it_takes_the_workloads_of_the_benchmark():
    assert {w.op for w in TUNED} == set(ROWS.ops)
    assert all(w in WORKLOADS for w in TUNED)
    long = Workload("rms_norm", (32768, 65536), "bfloat16")  # more than the table goes
    assert long.label in {w.label for w in WORKLOADS}
    assert long.label not in {w.label for w in TUNED}


def test_list_needs_no_gpu(capsys):
    arguments = ["--op", "layer_norm", "--dtype", "float32", "--shape", "8x4095", "--list"]
    assert command.main(["tune", *arguments]) == 0
    assert capsys.readouterr().out == "layer_norm 8x4095 f32  1023 vectors\n"
    assert command.main(["tune", "--op", "rms_norm", "--shape", "8x1000000", "--list"]) == 2
    assert capsys.readouterr().err == "bench: the table chooses for none of these; see --list\n"


@pytest.mark.parametrize("shape", ["4096", "0x8", "ax8", "2x-3"])
def test_bad_shapes_are_refused(capsys, shape):
    with pytest.raises(SystemExit):
        command.main(["tune", "--shape", shape])
    assert f"'{shape}' is not a shape, as 2048x4096" in capsys.readouterr().err


def test_without_cupy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main(["tune"]) == 2
    assert capsys.readouterr().err.startswith("bench: needs CuPy and a CUDA GPU: ")
