"""Results of earlier runs: read back, and compared with the noise of both runs in mind."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import __main__ as command
from bench import compare, records
from bench.records import Record, Time
from bench.report import CsvReport, Machine, Result
from bench.timing import GpuTime
from bench.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parent.parent / "bench" / "results"
MACHINE = Machine("2026-11-30", "node", "NVIDIA H200", "580.95", "13.0", "14.2.0", "0.1.0")
WORKLOAD = Workload("rms_norm", (2048, 4096), "bfloat16", 11.0, 10.8, "TileOPs")


def gpu_time(us, low=None, high=None):
    return GpuTime(us, us if low is None else low, us if high is None else high, calls=150)


def write(path, *times, copy=11.0, status="ok", workloads=WORKLOADS, mode="cold"):
    """A file with one workload for each of the `times`."""
    file = CsvReport(path, MACHINE, mode, ["cunorm", "torch"])
    for workload, time in zip(workloads, times, strict=False):
        gpu = {} if time is None else {"cunorm": time}
        file.add(Result(workload, status=status, copy=gpu_time(copy), gpu=gpu))
    file.close()
    return path


def record(time, copy=None, status="ok"):
    times = {} if time is None else {"cunorm": time}
    return Record("rms_norm", "2048x4096", "bfloat16", "cold", status, 0, copy, times)


def verdict(before, after, copy_before=None, copy_after=None):
    copies = [None if us is None else Time(us) for us in (copy_before, copy_after)]
    change = compare.judge(record(before, copies[0]), record(after, copies[1]), "cunorm")
    return change.verdict


# Reading


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "rows.csv"
    file = CsvReport(path, MACHINE, "warm", ["cunorm", "torch"])
    gpu = {"cunorm": gpu_time(10.0, 9.5, 10.25)}
    file.add(Result(WORKLOAD, copy=gpu_time(11.0), gpu=gpu, host_us={"cunorm": 7.0}))
    file.close()
    (found,) = records.read([path]).values()
    assert found.key == ("rms_norm", "2048x4096", "bfloat16", "warm")
    assert found.label == "rms_norm 2048x4096 bf16"
    assert found.bytes_moved == WORKLOAD.bytes_moved
    assert found.copy == Time(11.0, 11.0, 11.0)
    assert found.times == {"cunorm": Time(10.0, 9.5, 10.25)}
    assert found.of_copy("cunorm") == pytest.approx(1.1)
    assert found.of_copy("torch") is None
    assert (found.recorded_peer, found.recorded) == ("TileOPs", pytest.approx(11.0 / 10.8))


def test_a_later_file_replaces_what_an_earlier_one_has(tmp_path):
    first = write(tmp_path / "a.csv", gpu_time(10.0), gpu_time(20.0))
    second = write(tmp_path / "b.csv", gpu_time(9.0))
    found = list(records.read([first, second]).values())
    assert [r.times["cunorm"].us for r in found] == [9.0, 20.0]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_results_that_are_kept_can_be_read(path):
    found = records.read([path]).values()
    assert len(found) > 10
    assert all(r.copy is not None and r.bytes_moved for r in found)
    assert sum("cunorm" in r.times for r in found) >= len(found) - 1


def test_another_csv_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a result"):
        records.read([path])


# Judging


def test_a_change_within_the_least_noise_of_both_runs_is_none():
    exact = Time(10.0, 10.0, 10.0)
    assert verdict(exact, Time(10.2, 10.2, 10.2)) == ""  # 1 % of each
    assert verdict(exact, Time(10.25, 10.25, 10.25)) == "SLOWER"
    assert verdict(exact, Time(9.75, 9.75, 9.75)) == "faster"
    assert verdict(exact, Time(9.85, 9.85, 9.85)) == ""


def test_samples_that_overlap_are_no_change():
    assert verdict(Time(10.0, 9.9, 11.0), Time(10.8, 10.5, 10.9)) == ""
    assert verdict(Time(10.0, 9.9, 10.1), Time(10.8, 10.0, 10.9)) == ""
    assert verdict(Time(10.0, 9.9, 10.1), Time(10.8, 10.5, 10.9)) == "SLOWER"


def test_what_the_copy_gained_or_lost_is_noise():
    old, new = Time(10.0, 10.0, 10.0), Time(10.5, 10.5, 10.5)
    assert verdict(old, new, 11.0, 11.0) == "SLOWER"
    assert verdict(old, new, 11.0, 11.5) == ""
    assert verdict(old, new, 11.5, 11.0) == ""
    assert verdict(new, old, 11.5, 11.0) == ""


def test_files_without_extremes_have_a_stated_noise():
    assert verdict(Time(10.0), Time(10.39)) == ""
    assert verdict(Time(10.0), Time(10.42)) == "SLOWER"
    assert verdict(Time(10.0), Time(9.59)) == "faster"


def test_the_noise_is_the_ratio_that_is_let_pass():
    before = record(Time(10.0, 9.9, 10.3), Time(11.0))
    after = record(Time(10.0, 9.8, 10.1), Time(11.11))
    noise = compare.judge(before, after, "cunorm").noise
    assert noise == pytest.approx(1.03 / 0.98 * 1.01)
    scaled = record(Time(10.0 * noise * 1.001, 9.8 * noise * 1.001, 11.0), Time(11.11))
    assert compare.judge(before, scaled, "cunorm").verdict == "SLOWER"


def test_a_result_that_became_wrong_is_a_regression():
    change = compare.judge(record(Time(10.0)), record(None, status="FAIL"), "cunorm")
    assert (change.verdict, change.regression) == ("FAIL", True)
    assert compare.judge(record(Time(10.0)), record(None, status="skip"), "cunorm") is None
    assert compare.judge(record(None), record(Time(10.0)), "cunorm") is None


# The command


def test_regressions_are_told(tmp_path, capsys):
    before = write(tmp_path / "a.csv", gpu_time(10.0), gpu_time(20.0), gpu_time(40.0))
    after = write(tmp_path / "b.csv", gpu_time(10.1), gpu_time(22.0), gpu_time(36.0))
    assert command.main(["compare", str(before), str(after)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 5
    first, second, third = (line.split()[3:] for line in out[1:4])
    assert first == ["10.0", "10.1", "1.010", "2.0%"]
    assert second == ["20.0", "22.0", "1.100", "2.0%", "SLOWER"]
    assert third[-2:] == ["2.0%", "faster"]
    assert "3 workloads: 1 slower, 1 faster beyond the noise" in out[4]
    assert command.main(["compare", str(before), str(before)]) == 0


def test_a_wrong_result_is_told(tmp_path, capsys):
    before = write(tmp_path / "a.csv", gpu_time(10.0))
    after = write(tmp_path / "b.csv", None, status="FAIL")
    assert command.main(["compare", str(before), str(after)]) == 1
    assert "1 wrong or in error" in capsys.readouterr().out


def test_what_cannot_be_compared(tmp_path, capsys):
    path = write(tmp_path / "a.csv", gpu_time(10.0))
    warm = write(tmp_path / "b.csv", gpu_time(10.0), mode="warm")
    assert command.main(["compare", str(path), str(tmp_path / "none.csv")]) == 2
    assert command.main(["compare", str(path), str(warm)]) == 2
    assert command.main(["compare", str(path), str(path), "--peer", "torch"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert "none.csv" in err[0]
    assert err[1] == "bench: no workload has a time of cunorm in both files"
    assert err[2] == "bench: no workload has a time of torch in both files"


def test_results_of_two_days_can_be_compared(capsys):
    names = ("2026-11-29-h200.csv", "2026-11-30-h200.csv")
    assert command.main(["compare", *(str(RESULTS / name) for name in names)]) in (0, 1)
    assert "49 workloads" in capsys.readouterr().out


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"python -m bench {name}" in out for name in command.COMMANDS)
