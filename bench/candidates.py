"""Launches around those that a table chooses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bench.tables import using
from bench.templates import Key, Template
from bench.workloads import Workload
from cunorm.cuda.tables import Manner, Row, Table


@dataclass(frozen=True)
class Candidate:
    """A launch to be tried, a table that chooses it, and all that would have come to the same."""

    tile: Any
    table: Table
    keys: tuple[Key, ...]


def candidates(template: Template, workload: Workload, arch: int) -> list[Candidate]:
    """The launch of the table in use, then others that the kernel allows, each once."""
    table, row = template.table, template.row_of(workload, arch)
    found: dict[Any, Candidate] = {}
    for threads, manner in template.trials(row, table, template.tile_of(workload, arch)):
        trial = table.with_threads(row, threads, "", row.vectors - 1)
        if manner is not None:
            trial = trial.with_manner(placed(manner, row, row.vectors - 1))
        with using(template.module, trial):
            tile = template.tile_of(workload, arch)
        if not found or template.allows(tile, workload, arch):
            same = found.get(tile) or Candidate(tile, trial, ())
            found[tile] = replace(same, keys=(*same.keys, (threads, manner)))
    return list(found.values())


def placed(manner: Manner, row: Row, above: int, reason: str = "") -> Manner:
    """The entry for such rows, of more than `above` vectors."""
    return replace(
        manner,
        kinds=(row.kind,),
        itemsizes=(row.itemsize,),
        addends=(row.addends,),
        whole=row.whole,
        above=above,
        vectors=row.vectors,
        reason=reason,
    )
