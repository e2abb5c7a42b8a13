"""What a table of launches is made of; row_table.py and run_table.py hold one each.

A table says what was measured to be fast; what a kernel requires stays in the functions that read
it. So any table gives launches that are right, and `python -m bench tune` may try many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

ENDLESS = 1 << 62  # vectors


class Row(NamedTuple):
    """What a table is asked about: a row, or a set that is walked as one.

    `kind`: what is made of it, in the words of the table; `whole`: whether its vectors have 16
    bytes; `addends`: arrays that make it up, 2 where a residual is added.
    """

    kind: str
    itemsize: int
    whole: bool
    addends: int
    vectors: int


def _among(value: Any, several: tuple[Any, ...]) -> bool:
    return not several or value in several


@dataclass(frozen=True)
class Step:
    """Rows of up to so many vectors, so many threads of each CTA for each; what was measured."""

    vectors: int
    threads: int
    reason: str = ""
    cluster: int = 1  # CTAs that share a row


@dataclass(frozen=True)
class Ladder:
    """Threads of a row by its vectors: they decide the order of additions, hence bits.

    Without kinds, or item sizes, it serves all. It starts with rows of more than `above` vectors.
    """

    steps: tuple[Step, ...]
    kinds: tuple[str, ...] = ()
    itemsizes: tuple[int, ...] = ()
    whole: bool = True
    above: int = -1

    def serves(self, row: Row) -> bool:
        alike = _among(row.kind, self.kinds) and _among(row.itemsize, self.itemsizes)
        return alike and row.whole == self.whole

    def step(self, row: Row) -> Step | None:
        """That of the row; None where it is shorter or longer than the ladder goes."""
        if row.vectors <= self.above:
            return None
        return next((step for step in self.steps if row.vectors <= step.vectors), None)


@dataclass(frozen=True)
class Manner:
    """What of a launch leaves bits alone, for rows of more than `above` and at most `vectors`.

    Without kinds, item sizes, addends or `whole` it serves all. What it does not say is left to
    the entries that follow.

    `reading`: when parameters are read, by preference, where that fits; `block`: threads of a CTA
    that serves several rows; `brief`: by the kernel for short rows; `ctas`: for how many on an SM
    there must be registers.
    """

    kinds: tuple[str, ...] = ()
    itemsizes: tuple[int, ...] = ()
    addends: tuple[int, ...] = ()
    whole: bool | None = None
    above: int = 0
    vectors: int = ENDLESS
    reading: tuple[str, ...] = ()
    block: int | None = None
    brief: bool | None = None
    ctas: int | None = None
    reason: str = ""

    def serves(self, row: Row) -> bool:
        alike = _among(row.kind, self.kinds) and _among(row.itemsize, self.itemsizes)
        alike = alike and _among(row.addends, self.addends) and self.whole in (None, row.whole)
        return alike and self.above < row.vectors <= self.vectors

    def before(self, other: Manner) -> Manner:
        """This one, with what `other` says where it says nothing."""
        return replace(
            self,
            reading=self.reading or other.reading,
            block=other.block if self.block is None else self.block,
            brief=other.brief if self.brief is None else self.brief,
            ctas=other.ctas if self.ctas is None else self.ctas,
        )


@dataclass(frozen=True)
class Table:
    """How rows are launched: of each kind of entries the first that serves a row counts."""

    ladders: tuple[Ladder, ...]
    manners: tuple[Manner, ...]

    def ladder(self, row: Row) -> Ladder:
        return next(ladder for ladder in self.ladders if ladder.serves(row))

    def threads(self, row: Row) -> int | None:
        """Threads for the row; None where it is longer than the table goes."""
        step = self.ladder(row).step(row)
        return None if step is None else step.threads

    def manner(self, row: Row) -> Manner:
        found = Manner()
        for manner in self.manners:
            if manner.serves(row):
                found = found.before(manner)
        return found

    def step_start(self, row: Row) -> int:
        """How many vectors are too few for the step that serves the row."""
        below = [s.vectors for s in self.ladder(row).steps if s.vectors < row.vectors]
        return max(below, default=0)

    def with_threads(self, row: Row, threads: int, reason: str, above: int = 0) -> Table:
        """So many threads for such rows, from more than `above` vectors or where the step that
        served them starts, up to those of `row`.
        """
        ladder = self.ladder(row)
        start = self.step_start(row)
        below = [s for s in ladder.steps if s.vectors <= start]
        old, *rest = (s for s in ladder.steps if s.vectors >= row.vectors)
        if above > start:
            below.append(replace(old, vectors=above))
        if old.vectors > row.vectors:
            rest = [old, *rest]
        steps = (*below, Step(row.vectors, threads, reason), *rest)
        own = Ladder(steps, (row.kind,), (row.itemsize,), row.whole)
        alone = (ladder.kinds, ladder.itemsizes) == (own.kinds, own.itemsizes)
        at = self.ladders.index(ladder)
        kept = self.ladders[at + 1 :] if alone else self.ladders[at:]
        return replace(self, ladders=(*self.ladders[:at], own, *kept))

    def with_manner(self, manner: Manner) -> Table:
        """With an entry that goes before the others."""
        return replace(self, manners=(manner, *self.manners))
