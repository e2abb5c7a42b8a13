"""The templates of kernels whose launches are tuned: what a table says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from bench.workloads import WORKLOADS, Workload
from cunorm.cuda import channel_choices, choices, row, row_table, run_table
from cunorm.cuda.channel_choices import RunTile
from cunorm.cuda.choices import RowTile, power_of_two_up
from cunorm.cuda.compiler import Kernel
from cunorm.cuda.tables import Manner, Row, Table
from cunorm.dtypes import FLOATS

#: Threads of a row, and what else is to be other than the table says.
Key = tuple[int, Manner | None]

_READINGS = (("early", "staged"), ("staged", "early"), ("late",))
_BLOCKS = (32, 64, 128, 256)
_MOST_THREADS = 512
_MOST_PACKS = 16


class Template:
    """Kernels that are launched by a table.

    Attributes
    ----------
    module : module
        Its ``TABLE`` is read.
    ops : tuple of str
        The ops whose workloads it may serve.
    """

    module: ModuleType
    ops: tuple[str, ...]

    def serves(self, workload: Workload, arch: int) -> bool:
        """Whether the table decides how the workload is launched."""
        raise NotImplementedError

    def row_of(self, workload: Workload, arch: int) -> Row:
        """What the table is asked about."""
        raise NotImplementedError

    def tile_of(self, workload: Workload, arch: int) -> Any:
        """The launch by the table in use; arrays are aligned, and lie densely."""
        raise NotImplementedError

    def trials(self, row: Row, table: Table, tile: Any) -> Iterator[Key]:
        """One thing other than now, or the threads and when parameters are read."""
        raise NotImplementedError

    def allows(self, tile: Any, workload: Workload, arch: int) -> bool:
        """Whether the kernel can be launched so."""
        raise NotImplementedError

    def is_of(self, kernel: Kernel, tile: Any, workload: Workload) -> bool:
        """Whether a kernel is what a workload launches by such a tile."""
        raise NotImplementedError

    def described(self, tile: Any) -> dict[str, Any]:
        """Columns of the tables that are printed and written."""
        raise NotImplementedError

    @property
    def table(self) -> Table:
        table: Table = self.module.TABLE
        return table

    def workloads(self) -> list[Workload]:
        """Those of the benchmark that may be served."""
        return [w for w in WORKLOADS if w.op in self.ops]


def _around(row: Row, now: int) -> list[int]:
    most = min(power_of_two_up(row.vectors), _MOST_THREADS)
    return [count for count in (now // 2, now * 2) if 1 <= count <= most]


def _other_ctas(now: int, ctas: int) -> Iterator[Key]:
    for other in (ctas // 2, ctas - 1, ctas + 1, ctas * 2):
        if other > 0:
            yield now, Manner(ctas=other)


class Rows(Template):
    """Row norms that one CTA holds in registers (row_norm.cuh, row_brief.cuh)."""

    module = row_table
    ops = tuple(row.KERNELS)

    def serves(self, workload: Workload, arch: int) -> bool:
        if workload.op not in self.ops or len(workload.shape) < 2:
            return False
        tile = self.tile_of(workload, arch)
        return tile.cluster == 1 and not tile.segments

    def row_of(self, workload: Workload, arch: int) -> Row:
        norm = row.KERNELS[workload.op]
        return choices.row_of(
            workload.shape[-1],
            workload.itemsize,
            _addends(workload),
            norm.summary_words > 2,
            norm.row_parameters,
        )

    def tile_of(self, workload: Workload, arch: int) -> RowTile:
        norm = row.KERNELS[workload.op]
        cols, itemsize = workload.shape[-1], workload.itemsize
        vec = choices.row_vector(cols, itemsize)
        tile = choices.row_tile(
            cols,
            itemsize,
            vec,
            arch,
            parameter_words=len(norm.parameters),
            addends=_addends(workload),
            centred=norm.summary_words > 2,
            row_parameters=norm.row_parameters,
            of_parameters=1 if norm.row_parameters and cols % vec else vec,
        )
        return replace(tile, dense=True)

    def trials(self, row: Row, table: Table, tile: RowTile) -> Iterator[Key]:
        now = tile.threads
        for count in (now, *_around(row, now)):
            yield count, None
            for reading in _READINGS:
                yield count, Manner(reading=reading)
        for block in _BLOCKS if now <= 32 else ():
            for brief in (False, True):
                yield now, Manner(block=block, brief=brief)
        yield from _other_ctas(now, tile.ctas)

    def allows(self, tile: RowTile, workload: Workload, arch: int) -> bool:
        return choices.may_be_launched(tile, workload.itemsize, arch)

    def is_of(self, kernel: Kernel, tile: RowTile, workload: Workload) -> bool:
        template = "row_norm_brief<" if tile.brief else "row_norm<"
        return (
            kernel.file == row.KERNELS[workload.op].file
            and kernel.expression.startswith(template)
            and f"Types<{FLOATS[workload.dtype].c_name}," in kernel.expression
            and tile.expression in kernel.expression
        )

    def described(self, tile: RowTile) -> dict[str, Any]:
        return {
            "threads": tile.threads,
            "packs": tile.packs,
            "rows": tile.rows,
            "reading": tile.reading,
            "ctas": tile.ctas,
            "kernel": "brief" if tile.brief else "all",
        }


def _addends(workload: Workload) -> int:
    return 1 + any(operand.name == "residual" for operand in workload.spec.operands)


_RUNS = {  # op to file, and whether sets are of a sample
    "batch_norm_train": ("batch_norm", False),
    "batch_norm_bwd": ("batch_norm_backward", False),
    "group_norm": ("group_norm", True),
    "instance_norm": ("instance_norm", True),
}


class Runs(Template):
    """Channel norms whose sets are runs of neighbours, held by one CTA (channel_norm.cuh)."""

    module = run_table
    ops = tuple(_RUNS)

    def serves(self, workload: Workload, arch: int) -> bool:
        shape, groups = workload.shape, workload.groups
        if workload.op not in self.ops or workload.channels_last or len(shape) < 3:
            return False
        if groups and shape[1] % groups:
            return False
        tile = self.tile_of(workload, arch)
        return not tile.segments and tile.cluster == 1 and tile.shared == 0

    def row_of(self, workload: Workload, arch: int) -> Row:
        vectors, vec = self._vectors(workload)
        tensors = self._tensors(workload)
        return channel_choices.run_row(vectors, vec, workload.itemsize, arch, tensors)

    def tile_of(self, workload: Workload, arch: int) -> RunTile:
        vectors, vec = self._vectors(workload)
        tensors = self._tensors(workload)
        _, per_sample = _RUNS[workload.op]
        sets = None if per_sample else workload.shape[1]
        return channel_choices.run_tile(vectors, vec, vec, workload.itemsize, arch, tensors, sets)

    def _vectors(self, workload: Workload) -> tuple[int, int]:
        """Vectors of a set, and elements of one."""
        n, c, *spatial = workload.shape
        positions = math.prod(spatial)
        _, per_sample = _RUNS[workload.op]
        runs = c // (workload.groups or c) if per_sample else n
        vec = choices.vector_length(positions, workload.itemsize)
        return runs * positions // vec, vec

    def _tensors(self, workload: Workload) -> int:
        return 2 if workload.op.endswith("_bwd") else 1

    def trials(self, row: Row, table: Table, tile: RunTile) -> Iterator[Key]:
        now = table.threads(row) or _MOST_THREADS
        for count in (now, *_around(row, now)):
            if row.vectors <= count * _MOST_PACKS:
                yield count, None
        for block in _BLOCKS if now <= 32 else ():
            yield now, Manner(block=block)
        yield from _other_ctas(now, tile.ctas)

    def allows(self, tile: RunTile, workload: Workload, arch: int) -> bool:
        tensors, registers = self._tensors(workload), max(tile.vec * workload.itemsize // 4, 1)
        most = channel_choices.most_held(registers, workload.itemsize, arch, tensors)
        held = tile.packs * registers * tensors
        return tile.packs <= most and choices.sm_has_room(tile.block, tile.ctas, held, arch)

    def file(self, workload: Workload) -> str:
        return _RUNS[workload.op][0]

    def is_of(self, kernel: Kernel, tile: RunTile, workload: Workload) -> bool:
        numbers = tile.expression.partition("false")[0]  # whose flags follow from the call
        return (
            kernel.file == self.file(workload)
            and f"{FLOATS[workload.dtype].c_name}," in kernel.expression
            and numbers in kernel.expression
        )

    def described(self, tile: RunTile) -> dict[str, Any]:
        return {
            "threads": tile.threads,
            "packs": tile.packs,
            "sets": tile.sets,
            "ctas": tile.ctas,
        }


TEMPLATES: dict[str, Template] = {"rows": Rows(), "runs": Runs()}
