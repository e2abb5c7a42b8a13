"""``python -m bench compare``: what became slower or faster between two runs."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.records import Record, Time, read
from bench.report import FAIL, microseconds

#: The samples of one run differ less than runs do: copies of the same bytes, in runs of two days on
#: one card, by 0.6 % in the median of 136 pairs, 1.8 % in 95 of 100 of them and 2.2 % at most.
LEAST_NOISE = 0.01
#: Of a file that does not hold the extremes of the samples.
UNKNOWN_NOISE = 0.02

SLOWER, FASTER, SAME = "SLOWER", "faster", ""


@dataclass(frozen=True)
class Change:
    """One workload in two runs.

    Attributes
    ----------
    before, after : Record
    ratio : float, optional
        Time after over time before; None where the result was wrong afterwards.
    noise : float
        By how much a time may grow, as a factor, before it counts.
    verdict : {"SLOWER", "faster", "FAIL", ""}
    """

    before: Record
    after: Record
    ratio: float | None
    noise: float
    verdict: str

    @property
    def regression(self) -> bool:
        return self.verdict in (SLOWER, FAIL)


def extremes(time: Time) -> tuple[float, float]:
    """Within what the time lies: its samples, and the least noise around their median."""
    if time.low is None or time.high is None:
        return time.us * (1 - UNKNOWN_NOISE), time.us * (1 + UNKNOWN_NOISE)
    low, high = time.us * (1 - LEAST_NOISE), time.us * (1 + LEAST_NOISE)
    return min(time.low, low), max(time.high, high)


def drift(before: Record, after: Record) -> float:
    """By which factor the copies of the two runs differ: at least 1."""
    if before.copy is None or after.copy is None:
        return 1.0
    ratio = after.copy.us / before.copy.us
    return max(ratio, 1 / ratio)


def judge(before: Record, after: Record, peer: str) -> Change | None:
    """How the time of `peer` changed; None where there is nothing to compare."""
    if peer not in before.times:
        return None
    if peer not in after.times:
        return Change(before, after, None, 1.0, FAIL) if after.status == FAIL else None
    old, new, drifted = before.times[peer], after.times[peer], drift(before, after)
    (old_low, old_high), (new_low, new_high) = extremes(old), extremes(new)
    verdict = SAME
    if new_low > old_high * drifted:
        verdict = SLOWER
    elif new_high * drifted < old_low:
        verdict = FASTER
    noise = old_high / old.us * new.us / new_low * drifted
    return Change(before, after, new.us / old.us, noise, verdict)


def compare(before: Path, after: Path, peer: str) -> list[Change]:
    """The workloads of both files, in the order of the first."""
    old, new = read([before]), read([after])
    changes = [judge(old[key], new[key], peer) for key in old if key in new]
    return [change for change in changes if change is not None]


def lines(changes: Sequence[Change], peer: str) -> list[str]:
    """The table and what is below it."""
    width = max(len(change.before.label) for change in changes)
    found = [f"{'workload':{width}} {'before':>8} {'after':>8} {'ratio':>6} {'noise':>6}"]
    for change in changes:
        times = [record.times.get(peer) for record in (change.before, change.after)]
        old, new = (microseconds(None if time is None else time.us) for time in times)
        ratio = "-" if change.ratio is None else f"{change.ratio:.3f}"
        noise = f"{change.noise - 1:.1%}"
        text = f"{change.before.label:{width}} {old:>8} {new:>8} {ratio:>6} {noise:>6}"
        found.append(f"{text} {change.verdict}".rstrip())
    ratios = [change.ratio for change in changes if change.ratio is not None]
    slower = sum(change.verdict == SLOWER for change in changes)
    faster = sum(change.verdict == FASTER for change in changes)
    failed = sum(change.verdict == FAIL for change in changes)
    text = f"{len(changes)} workloads: {slower} slower, {faster} faster beyond the noise"
    if failed:
        text += f", {failed} wrong or in error"
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text += f"; geometric mean of the ratios {mean:.3f}"
    return [*found, text]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench compare",
        description="Compare the GPU times of two runs; exit code 1 where one became slower.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE.csv")
    parser.add_argument("after", type=Path, metavar="AFTER.csv")
    parser.add_argument("--peer", default="cunorm", metavar="NAME", help="whose (default: cunorm)")
    return parser


def main(argv: Sequence[str]) -> int:
    """0, or 1 on a regression, or 2 when nothing could be compared."""
    args = make_parser().parse_args(argv)
    try:
        changes = compare(args.before, args.after, args.peer)
    except (OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if not changes:
        print(f"bench: no workload has a time of {args.peer} in both files", file=sys.stderr)
        return 2
    print("\n".join(lines(changes, args.peer)))
    return int(any(change.regression for change in changes))
