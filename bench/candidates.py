"""Launches of row norms around those that the table chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.workloads import Workload
from cunorm.cuda import choices, row_table
from cunorm.cuda.choices import RowTile
from cunorm.cuda.row import KERNELS
from cunorm.cuda.tables import Manner, Row, RowTable, using

OPS = tuple(KERNELS)

_THREAD_FACTORS = (1 / 2, 2)
_READINGS = (("early", "staged"), ("staged", "early"), ("late",))
_BLOCKS = (32, 64, 128, 256)
_MOST_THREADS = 512


def row_of(workload: Workload) -> Row:
    """What the table is asked for the rows of a workload."""
    norm = KERNELS[workload.op]
    centred, addends = norm.summary_words > 2, _addends(workload)
    cols = workload.shape[-1]
    return choices.row_of(cols, workload.itemsize, addends, centred, norm.row_parameters)


def tile_of(workload: Workload, arch: int) -> RowTile:
    """The launch of a workload by the table in use; its arrays are aligned and its rows dense."""
    norm = KERNELS[workload.op]
    cols, itemsize = workload.shape[-1], workload.itemsize
    tile = choices.row_tile(
        cols,
        itemsize,
        choices.vector_length(cols, itemsize),
        arch,
        parameter_words=len(norm.parameters),
        addends=_addends(workload),
        centred=norm.summary_words > 2,
        row_parameters=norm.row_parameters,
    )
    return replace(tile, dense=True)


def _addends(workload: Workload) -> int:
    return 1 + any(operand.name == "residual" for operand in workload.spec.operands)


#: Threads of a row, and what else is to be other than the table says.
Key = tuple[int, Manner | None]


@dataclass(frozen=True)
class Candidate:
    """A launch to be tried, a table that chooses it, and all that would have come to the same."""

    tile: RowTile
    table: RowTable
    keys: tuple[Key, ...]


Key = tuple[int, Manner | None]


def candidates(workload: Workload, arch: int) -> list[Candidate]:
    """The launch of the table in use, then others that a kernel allows, each once."""
    table, row = row_table.TABLE, row_of(workload)
    found: dict[RowTile, Candidate] = {}
    for threads, manner in _trials(row, table, tile_of(workload, arch)):
        trial = table.with_threads(row, threads, "", row.vectors - 1)
        if manner is not None:
            trial = trial.with_manner(placed(manner, row, row.vectors - 1))
        with using(row_table, trial):
            tile = tile_of(workload, arch)
        if not found or choices.may_be_launched(tile, workload.itemsize, arch):
            same = found.get(tile) or Candidate(tile, trial, ())
            found[tile] = replace(same, keys=(*same.keys, (threads, manner)))
    return list(found.values())


def placed(manner: Manner, row: Row, above: int, reason: str = "") -> Manner:
    """The entry for such rows, of more than `above` vectors."""
    return replace(
        manner,
        norms=(row.norm,),
        itemsizes=(row.itemsize,),
        addends=(row.addends,),
        whole=row.whole,
        above=above,
        vectors=row.vectors,
        reason=reason,
    )


def _trials(row: Row, table: RowTable, tile: RowTile) -> Iterator[Key]:
    """One thing other than now, or the threads and when parameters are read."""
    now = tile.threads
    yield now, None
    threads = [int(now * factor) for factor in _THREAD_FACTORS]
    most = min(choices.power_of_two_up(row.vectors), _MOST_THREADS)
    others = [count for count in threads if 1 <= count <= most]
    for count in (now, *others):
        yield count, None
        for reading in _READINGS:
            yield count, Manner(reading=reading)
    for block in _BLOCKS if now <= 32 else ():
        for brief in (False, True):
            yield now, Manner(block=block, brief=brief)
    for ctas in (tile.ctas // 2, tile.ctas - 1, tile.ctas + 1, tile.ctas * 2):
        if ctas > 0:
            yield now, Manner(ctas=ctas)
