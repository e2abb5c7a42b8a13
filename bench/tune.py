"""``python -m bench tune``: launches beside those that a table of cunorm's chooses.

Every launch around the chosen one that the kernel allows is checked and timed as the benchmark
does it. What is faster beyond the noise goes into a table of the form that cunorm reads.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.candidates import Candidate, candidates
from bench.device import gpu_or_say
from bench.inputs import InputSets
from bench.peers import PEERS
from bench.propose import NOISE, Tuned, propose, words
from bench.report import Machine, describe_machine, microseconds
from bench.sweep import Settings, Sweep, bound_calls
from bench.table_text import table_text
from bench.tables import using
from bench.templates import TEMPLATES, Template
from bench.timing import GpuTime
from bench.workloads import SHORT_DTYPES, Workload
from cunorm.cuda import compiler, devices
from cunorm.cuda.tables import Row


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
    row: Row
    trials: list[Trial]
    copy: GpuTime | None = None

    @property
    def times(self) -> dict[Any, float]:
        timed = [(t.candidate, t.time) for t in self.trials if t.time is not None]
        return {key: time.us for candidate, time in timed for key in candidate.keys}

    @property
    def best(self) -> Trial | None:
        timed = [t for t in self.trials if t.time is not None]
        return min(timed, key=lambda t: t.time.us if t.time else 0.0, default=None)


def local_bytes(template: Template, tile: Any, workload: Workload, device: int) -> int:
    """Bytes a thread of the kernel that was launched has in local memory: spilled registers."""
    found = [
        function.raw_kernel.local_size_bytes
        for kernel, function in compiler.loaded(device).items()
        if template.is_of(kernel, tile, workload)
    ]
    if not found:
        raise LookupError("another kernel was launched")
    return max(found)


class Tuner(Sweep):
    """Measures the candidates of a template on the current CUDA device."""

    def __init__(self, cp: Any, template: Template, settings: Settings) -> None:
        self._peer = PEERS["cunorm"]
        super().__init__(cp, [self._peer], settings)
        self._template = template
        self._device = int(cp.cuda.Device().id)
        self._arch = devices.compute_capability(self._device)

    def tune(self, workload: Workload) -> Tuning:
        """Check and time the candidates of a workload, all on the same inputs."""
        found = candidates(self._template, workload, self._arch)
        row = self._template.row_of(workload, self._arch)
        result = Tuning(workload, row, [Trial(candidate) for candidate in found])
        self._release()
        try:
            result.copy = self._time_copy(workload)
            self._release()
            sets = InputSets(self._cp, workload, self._sets(workload.input_bytes), self._noise)
            for trial in result.trials:
                with using(self._template.module, trial.candidate.table):
                    self._try(workload, trial, sets)
        except self._cp.cuda.memory.OutOfMemoryError:
            for trial in result.trials:
                if trial.time is None:
                    trial.problem = trial.problem or "does not fit the device memory"
        self._release()
        return result

    def _try(self, workload: Workload, trial: Trial, sets: InputSets) -> None:
        try:
            trial.problem = self._check(workload, self._peer, sets)
            if trial.problem:
                return
            spilled = local_bytes(self._template, trial.candidate.tile, workload, self._device)
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


def chosen_workloads(template: Template, args: argparse.Namespace, arch: int) -> list[Workload]:
    """These shapes, or those of the benchmark, where the table decides."""
    ops, dtypes = args.op or template.ops, args.dtype or tuple(SHORT_DTYPES)
    if args.shape:
        found = [
            Workload(op, shape, dtype, groups=args.groups if op.startswith("group_norm") else 0)
            for op, shape, dtype in itertools.product(ops, args.shape, dtypes)
        ]
    else:
        found = [w for w in template.workloads() if w.op in ops and w.dtype in dtypes]
    return [w for w in found if template.serves(w, arch)]


def parse_shape(text: str) -> tuple[int, ...]:
    """``2048x4096``."""
    parts = text.split("x")
    if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape, as 2048x4096")
    return tuple(map(int, parts))


# What is said


def table_lines(template: Template, tuning: Tuning) -> list[str]:
    """The candidates of a workload, the fastest first; those left out, last."""
    copy_us = tuning.copy.us if tuning.copy else None
    titles = template.described(tuning.trials[0].candidate.tile)
    lines = [
        f"{tuning.workload.label}: {tuning.row.vectors} vectors, copy {microseconds(copy_us)} us",
        "  ".join(["", *(f"{name:>7}" for name in titles), f"{'us':>7}", "of copy"]),
    ]
    for trial in sorted(tuning.trials, key=lambda t: t.time.us if t.time else float("inf")):
        cells = [f"{v:>7}" for v in template.described(trial.candidate.tile).values()]
        if trial.time is None:
            cells.append(f"left out: {trial.problem}")
        else:
            share = copy_us / trial.time.us if copy_us else float("nan")
            cells += [f"{microseconds(trial.time.us):>7}", f"{share:7.2f}"]
        cells += ["now"] if trial is tuning.trials[0] else []
        cells += ["best"] if trial is tuning.best else []
        lines.append("  ".join(["", *cells]))
    return lines


def csv_rows(template: Template, tuning: Tuning, machine: Machine) -> Iterator[dict[str, Any]]:
    """One line for each candidate; what was not measured is empty."""
    w, copy = tuning.workload, tuning.copy
    for trial in tuning.trials:
        time, tile = trial.time, trial.candidate.tile
        yield {
            "op": w.op,
            "shape": w.shape_text,
            "dtype": w.dtype,
            "bytes": w.bytes_moved,
            "copy_us": f"{copy.us:.4f}" if copy else "",
            "vectors": tuning.row.vectors,
            **template.described(tile),
            "tried": words(trial.candidate.keys[0][1]),
            "us": f"{time.us:.4f}" if time else "",
            "us_low": f"{time.low:.4f}" if time else "",
            "us_high": f"{time.high:.4f}" if time else "",
            "of_copy": f"{copy.us / time.us:.4f}" if time and copy else "",
            "now": int(trial is tuning.trials[0]),
            "best": int(trial is tuning.best),
            "left_out": trial.problem,
            **asdict(machine),
        }


class TuningCsv:
    """Writes workload after workload, so that a run cut short leaves what it had."""

    def __init__(self, path: Path | None, template: Template, machine: Machine) -> None:
        self._file = path.open("w", newline="", encoding="utf-8") if path else None
        self._template, self._machine = template, machine
        self._writer: Any = None

    def add(self, tuning: Tuning) -> None:
        if self._file is None:
            return
        for row in csv_rows(self._template, tuning, self._machine):
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
        description="Time launches around those that a table of cunorm's chooses.",
    )
    add = parser.add_argument
    add(
        "template",
        nargs="?",
        choices=list(TEMPLATES),
        default="rows",
        help="row norms (default), or channel norms whose sets are runs of neighbours",
    )
    ops = [op for template in TEMPLATES.values() for op in template.ops]
    add("--op", action="append", choices=ops, help="may be repeated (default: all it serves)")
    add("--dtype", action="append", choices=list(SHORT_DTYPES), help="may be repeated")
    add(
        "--shape",
        action="append",
        default=[],
        type=parse_shape,
        metavar="NxN",
        help="may be repeated (default: the benchmark's workloads of these ops and dtypes)",
    )
    add("--groups", type=int, default=32, metavar="N", help="of group norm with --shape (32)")
    add("--csv", type=Path, metavar="FILE", help="also write every candidate here")
    add("--write", type=Path, metavar="FILE", help="write the table that is proposed here")
    add("--noise", type=float, default=NOISE, metavar="FACTOR", help=f"default {NOISE}")
    add("--samples", type=int, default=Settings.samples, metavar="N", help="of each time")
    add("--list", action="store_true", help="print the workloads and stop; needs no GPU")
    return parser


def run(cp: Any, args: argparse.Namespace, workloads: Sequence[Workload]) -> int:
    """Tune and tell; 1 where a launch of the table itself was wrong or could not be timed."""
    template, machine = TEMPLATES[args.template], describe_machine(cp)
    print(machine, flush=True)
    tuner, tunings = Tuner(cp, template, Settings(samples=args.samples)), []
    with closing(TuningCsv(args.csv, template, machine)) as file:
        for workload in workloads:
            tuning = tuner.tune(workload)
            tunings.append(tuning)
            file.add(tuning)
            print("\n".join(table_lines(template, tuning)), flush=True)
    tuned = [Tuned(t.workload, t.row, t.trials[0].candidate.keys[0], t.times) for t in tunings]
    origin = f"{machine.gpu}, {machine.date[:10]}"
    proposal = propose(template.table, tuned, args.noise, origin)
    print(f"{len(proposal.changes)} changes that gain more than a factor of {args.noise}")
    print("\n".join(proposal.changes), flush=True)
    if args.write:
        text = table_text(template.module, proposal.table)
        args.write.write_text(text, encoding="utf-8")
    return int(any(tuning.trials[0].time is None for tuning in tunings))


def main(argv: Sequence[str]) -> int:
    """0, or 1 when a launch of the table was not right, or 2 when nothing could be measured."""
    args = make_parser().parse_args(argv)
    template, arch = TEMPLATES[args.template], devices.compute_capability(0)
    workloads = chosen_workloads(template, args, arch)
    if not workloads:
        print("bench: the table chooses for none of these; see --list", file=sys.stderr)
        return 2
    if args.list:
        vectors = [template.row_of(w, arch).vectors for w in workloads]
        print("\n".join(f"{w.label}  {n} vectors" for w, n in zip(workloads, vectors, strict=True)))
        return 0
    cp = gpu_or_say()
    if cp is None:
        return 2
    return run(cp, args, workloads)
