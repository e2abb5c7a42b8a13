"""``python -m bench tune``: launches of row norms beside those that the table chooses.

Every launch around the chosen one that the kernel allows is checked and timed as the benchmark
does it. What is faster beyond the noise goes into a table of the form that cunorm reads.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.candidates import OPS, Candidate, candidates, row_of
from bench.device import find_gpu
from bench.inputs import InputSets
from bench.peers import PEERS
from bench.propose import NOISE, Tuned, propose, words
from bench.report import Machine, describe_machine, microseconds
from bench.sweep import Settings, Sweep, bound_calls
from bench.table_text import row_table_text
from bench.timing import GpuTime
from bench.workloads import SHORT_DTYPES, WORKLOADS, Workload
from cunorm.cuda import compiler, devices, row_table
from cunorm.cuda.tables import using
from cunorm.dtypes import FLOATS


@dataclass
class Trial:
    """What came of a candidate: a time, or why it was left out."""

    candidate: Candidate
    time: GpuTime | None = None
    problem: str = ""


@dataclass
class Tuning:
    """The candidates of a workload, the launch of the table first."""

    workload: Workload
    copy: GpuTime | None = None
    trials: list[Trial] = field(default_factory=list)

    @property
    def times(self) -> dict[Any, float]:
        timed = [(t.candidate, t.time) for t in self.trials if t.time is not None]
        return {key: time.us for candidate, time in timed for key in candidate.keys}

    @property
    def best(self) -> Trial | None:
        timed = [t for t in self.trials if t.time is not None]
        return min(timed, key=lambda t: t.time.us if t.time else 0.0, default=None)


def local_bytes(candidate: Candidate, workload: Workload, device: int) -> int:
    """Bytes a thread of the candidate's kernel has in local memory: spilled registers."""
    template = "row_norm_brief<" if candidate.tile.brief else "row_norm<"
    element = f"Types<{FLOATS[workload.dtype].c_name},"
    found = [
        function.raw_kernel.local_size_bytes
        for kernel, function in compiler.loaded(device).items()
        if kernel.file == workload.op
        and kernel.expression.startswith(template)
        and element in kernel.expression
        and candidate.tile.expression in kernel.expression
    ]
    if not found:
        raise LookupError("another kernel was launched")
    return max(found)


class Tuner(Sweep):
    """Measures candidates on the current CUDA device."""

    def __init__(self, cp: Any, settings: Settings) -> None:
        self._peer = PEERS["cunorm"]
        super().__init__(cp, [self._peer], settings)
        self._device = int(cp.cuda.Device().id)
        self.arch = devices.compute_capability(self._device)

    def tune(self, workload: Workload) -> Tuning:
        """Check and time the candidates of a workload, all on the same inputs."""
        result = Tuning(workload)
        result.trials = [Trial(candidate) for candidate in candidates(workload, self.arch)]
        self._release()
        try:
            result.copy = self._time_copy(workload)
            self._release()
            sets = InputSets(self._cp, workload, self._sets(workload.input_bytes), self._noise)
            for trial in result.trials:
                with using(row_table, trial.candidate.table):
                    self._try(workload, trial, sets)
        except self._cp.cuda.memory.OutOfMemoryError:
            for trial in result.trials:
                trial.problem = trial.problem or "does not fit the device memory"
        self._release()
        return result

    def _try(self, workload: Workload, trial: Trial, sets: InputSets) -> None:
        try:
            trial.problem = self._check(workload, self._peer, sets)
            if trial.problem:
                return
            spilled = local_bytes(trial.candidate, workload, self._device)
        except self._cp.cuda.memory.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind: the others go on
            trial.problem = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        if spilled:
            trial.problem = f"spills {spilled} bytes a thread"
            return
        calls = bound_calls(workload, self._peer, sets)
        trial.time = self._timer.time_gpu(calls, self._peer.launches)


# What is tuned


def chosen_workloads(ops: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Any]) -> list[Any]:
    """These shapes, or those of the benchmark, where the table goes so far."""
    if shapes:
        found = [Workload(*one) for one in itertools.product(ops, shapes, dtypes)]
    else:
        found = [w for w in WORKLOADS if w.op in ops and w.dtype in dtypes]
    return [w for w in found if row_table.TABLE.threads(row_of(w)) is not None]


def parse_shape(text: str) -> tuple[int, int]:
    try:
        rows, cols = (int(part) for part in text.split("x"))
    except ValueError:
        rows = cols = 0
    if rows < 1 or cols < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not rows x columns, as 2048x4096")
    return rows, cols


# What is said


def table_lines(tuning: Tuning) -> list[str]:
    """The candidates of a workload, the fastest first; those left out, last."""
    copy_us = tuning.copy.us if tuning.copy else None
    row = row_of(tuning.workload)
    lines = [
        f"{tuning.workload.label}: {row.vectors} vectors, copy {microseconds(copy_us)} us",
        "  threads packs rows reading ctas kernel       us of copy",
    ]
    first = tuning.trials[0] if tuning.trials else None
    for trial in sorted(tuning.trials, key=lambda t: t.time.us if t.time else float("inf")):
        tile = trial.candidate.tile
        kernel = "brief" if tile.brief else "all"
        text = (
            f"  {tile.threads:7} {tile.packs:5} {tile.rows:4} {tile.reading:7} {tile.ctas:4} "
            f"{kernel:6} "
        )
        if trial.time is None:
            text += f"left out: {trial.problem}"
        else:
            share = copy_us / trial.time.us if copy_us else float("nan")
            text += f"{microseconds(trial.time.us):>8} {share:7.2f}"
        marks = ["now"] if trial is first else []
        marks += ["best"] if trial is tuning.best else []
        lines.append(" ".join([text, *marks]))
    return lines


_TILE = ("vec", "packs", "threads", "rows", "reading", "ctas", "brief")


def csv_rows(tuning: Tuning, machine: Machine) -> Iterator[dict[str, Any]]:
    """One line for each candidate; what was not measured is empty."""
    w, copy = tuning.workload, tuning.copy
    for number, trial in enumerate(tuning.trials):
        time, tile = trial.time, trial.candidate.tile
        yield {
            "op": w.op,
            "shape": w.shape_text,
            "dtype": w.dtype,
            "bytes": w.bytes_moved,
            "copy_us": f"{copy.us:.4f}" if copy else "",
            "vectors": row_of(w).vectors,
            **{name: getattr(tile, name) for name in _TILE},
            "tried": words(trial.candidate.keys[0][1]),
            "us": f"{time.us:.4f}" if time else "",
            "us_low": f"{time.low:.4f}" if time else "",
            "us_high": f"{time.high:.4f}" if time else "",
            "of_copy": f"{copy.us / time.us:.4f}" if time and copy else "",
            "now": int(number == 0),
            "best": int(trial is tuning.best),
            "left_out": trial.problem,
            **asdict(machine),
        }


class TuningCsv:
    """Writes workload after workload, so that a run cut short leaves what it had."""

    def __init__(self, path: Path | None, machine: Machine) -> None:
        self._file = path.open("w", newline="", encoding="utf-8") if path else None
        self._machine = machine
        self._writer: Any = None

    def add(self, tuning: Tuning) -> None:
        if self._file is None:
            return
        for row in csv_rows(tuning, self._machine):
            if self._writer is None:
                self._writer = csv.DictWriter(self._file, list(row))
                self._writer.writeheader()
            self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


# The command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench tune",
        description="Time launches of row norms around those that the table chooses.",
    )
    add = parser.add_argument
    add("--op", action="append", choices=OPS, help="may be repeated (default: all of these)")
    add("--dtype", action="append", choices=list(SHORT_DTYPES), help="may be repeated")
    add(
        "--shape",
        action="append",
        default=[],
        type=parse_shape,
        metavar="ROWSxCOLS",
        help="may be repeated (default: the benchmark's workloads of these ops and dtypes)",
    )
    add("--csv", type=Path, metavar="FILE", help="also write every candidate here")
    add("--write", type=Path, metavar="FILE", help="write the table that is proposed here")
    add("--noise", type=float, default=NOISE, help=f"factor (default {NOISE})")
    add("--samples", type=int, default=Settings.samples, help="of each time")
    add("--list", action="store_true", help="print the workloads and stop; needs no GPU")
    return parser


def run(cp: Any, args: argparse.Namespace, workloads: Sequence[Workload]) -> int:
    """Tune and tell; 1 where a launch of the table itself was wrong or could not be timed."""
    machine = describe_machine(cp)
    print(machine, flush=True)
    tuner, tunings = Tuner(cp, Settings(samples=args.samples)), []
    with _closing(TuningCsv(args.csv, machine)) as file:
        for workload in workloads:
            tuning = tuner.tune(workload)
            tunings.append(tuning)
            file.add(tuning)
            print("\n".join(table_lines(tuning)), flush=True)
    tuned = [
        Tuned(t.workload, row_of(t.workload), t.trials[0].candidate.keys[0], t.times)
        for t in tunings
    ]
    origin = f"{machine.gpu}, {machine.date[:10]}"
    proposal = propose(row_table.TABLE, tuned, args.noise, origin)
    print(f"{len(proposal.changes)} changes that gain more than a factor of {args.noise}")
    print("\n".join(proposal.changes), flush=True)
    if args.write:
        args.write.write_text(row_table_text(proposal.table), encoding="utf-8")
    return int(any(tuning.trials[0].time is None for tuning in tunings))


@contextmanager
def _closing(file: TuningCsv) -> Iterator[TuningCsv]:
    try:
        yield file
    finally:
        file.close()


def main(argv: Sequence[str]) -> int:
    """0, or 1 when a launch of the table was not right, or 2 when nothing could be measured."""
    args = make_parser().parse_args(argv)
    workloads = chosen_workloads(args.op or OPS, args.dtype or tuple(SHORT_DTYPES), args.shape)
    if not workloads:
        print("bench: the table chooses for none of these; see --list", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{w.label}  {row_of(w).vectors} vectors" for w in workloads))
        return 0
    cp, problem = find_gpu()
    if cp is None:
        print(f"bench: {problem}", file=sys.stderr)
        return 2
    return run(cp, args, workloads)
