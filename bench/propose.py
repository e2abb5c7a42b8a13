"""What the times of launches say about the table that chooses them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.candidates import placed
from bench.report import microseconds
from bench.templates import Key
from bench.workloads import Workload
from cunorm.cuda.tables import Manner, Row, Table

#: How many times faster a launch must be to take the place of another.
NOISE = 1.02

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Tuned:
    """Microseconds of the launches of a workload that were right; `now`: that of the table."""

    workload: Workload
    row: Row
    now: Key
    times: Mapping[Key, float]

    def by_manner(self, threads: int) -> dict[Manner | None, float]:
        return {manner: us for (count, manner), us in self.times.items() if count == threads}


@dataclass(frozen=True)
class Proposal:
    """A table, and in words what is other than in the one before."""

    table: Table
    changes: tuple[str, ...]


def best(times: Sequence[Mapping[K, float]], now: K, noise: float) -> K:
    """What is faster than `now` by more than `noise` in the geometric mean of several workloads,
    and slower by more than that in none; `now` where nothing is.
    """
    found, least = now, 1 / noise
    for key in times[0]:
        if not all(key in one and now in one for one in times):
            continue
        ratios = [one[key] / one[now] for one in times]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        if mean < least and max(ratios) <= noise:
            found, least = key, mean
    return found


def propose(table: Table, tuned: Iterable[Tuned], noise: float, origin: str) -> Proposal:
    """The table with the launches that were faster by more than `noise`.

    Workloads of rows of one length and kind are judged together. An entry reaches from the length
    that was measured down to the next that was, or to where the table changes anyway. `origin`:
    where and when it was measured.
    """
    groups: dict[Row, list[Tuned]] = {}
    for one in tuned:
        groups.setdefault(one.row._replace(addends=1), []).append(one)
    changes: list[str] = []
    below: dict[tuple[str, int, bool], int] = {}
    for row in sorted(groups):
        above = max(below.get(row[:3], 0), table.step_start(row))
        below[row[:3]] = row.vectors
        table, said = _with_group(table, groups[row], above, noise, origin)
        changes += said
    return Proposal(table, tuple(changes))


def _with_group(
    table: Table, group: Sequence[Tuned], above: int, noise: float, origin: str
) -> tuple[Table, list[str]]:
    """The table with what is better for rows of one length and kind; what that is."""
    row, (now, _) = group[0].row, group[0].now
    counts = sorted({threads for one in group for threads, _ in one.times} | {now})
    manners = {threads: _manners(group, threads, noise) for threads in counts}
    by_threads = [
        {
            threads: one.times[key]
            for threads in counts
            if (key := (threads, manners[threads].get(one.row.addends))) in one.times
        }
        for one in group
    ]
    changes = []
    threads = best(by_threads, now, noise)
    if threads != now:
        reason = _reason(group, by_threads, threads, f"with {now} threads", now, origin)
        table = table.with_threads(row, threads, reason, above)
        changes.append(f"{_rows(row, above)}: {threads} threads; {reason}")
    for addends, manner in manners[threads].items():
        some = [one for one in group if one.row.addends == addends]
        by_manner = [one.by_manner(threads) for one in some]
        reason = _reason(some, by_manner, manner, "otherwise", None, origin)
        table = table.with_manner(placed(manner, some[0].row, above, reason))
        changes.append(f"{_rows(some[0].row, above)}: {words(manner)}; {reason}")
    return table, changes


def _manners(group: Sequence[Tuned], threads: int, noise: float) -> dict[int, Manner]:
    """What is better beside so many threads than what the table says, by the number of addends."""
    found = {}
    for addends in sorted({one.row.addends for one in group}):
        some = [one.by_manner(threads) for one in group if one.row.addends == addends]
        manner = best(some, None, noise)
        if manner is not None:
            found[addends] = manner
    return found


def _reason(
    tuned: Sequence[Tuned],
    times: Sequence[Mapping[K, float]],
    key: K,
    otherwise: str,
    now: K,
    origin: str,
) -> str:
    pairs = [
        f"{one.workload.label} {microseconds(of[key])} us, {otherwise} {microseconds(of[now])}"
        for one, of in zip(tuned, times, strict=True)
    ]
    return f"{'; '.join(pairs)} ({origin})"


def _rows(row: Row, above: int) -> str:
    width = "whole" if row.whole else "narrow"
    several = " with a residual" if row.addends == 2 else ""
    return (
        f"{row.kind}{several}, {row.itemsize} bytes an element, "
        f"{above + 1} to {row.vectors} {width} vectors"
    )


def words(manner: Manner | None) -> str:
    """What a candidate has other than the table says."""
    if manner is None:
        return ""
    said = [f"read {' or '.join(manner.reading)}"] if manner.reading else []
    said += [f"block {manner.block}"] if manner.block is not None else []
    if manner.brief is not None:
        said.append("brief" if manner.brief else "not brief")
    said += [f"{manner.ctas} CTAs"] if manner.ctas is not None else []
    return ", ".join(said)
