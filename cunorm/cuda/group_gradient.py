"""Plans of group and instance norm backward: from a checked call to launches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from cunorm.arrays import ArraySpec
from cunorm.call import Call
from cunorm.cuda import group_choices as choices
from cunorm.cuda.channel import ChannelNorm, Planner
from cunorm.cuda.channel_launch import ChannelPlan, Numbers, Step
from cunorm.cuda.channel_layout import LAST
from cunorm.cuda.choices import vector_length

_MERGE_BLOCK = 256  # kMergeBlock in channel_merge.cuh
_COEFFICIENTS = 4  # numbers of GroupCoefficients


@dataclass(frozen=True)
class GroupGradient(ChannelNorm):
    """Backward of a norm whose sets belong to one sample."""

    backward: bool = True

    def planner(self, call: Call, order: str) -> Planner:
        return GroupPlanner(self, call, order)

    def walks_samples_as_one(self, call: Call) -> bool:
        return False


class _First(NamedTuple):
    """The launch that reads x first, and what it leaves."""

    step: Step
    rows: int  # of records; 0: none are needed
    units: int  # records of a channel in a row
    writes: bool  # grad_x; otherwise another launch does


class GroupPlanner(Planner):
    """From a call whose arrays kernels can walk to its launches."""

    def __init__(self, norm: ChannelNorm, call: Call, order: str) -> None:
        super().__init__(norm, call, order)
        self.per_sample = True
        self.sets = self.groups * self.sizes.n

    def plan(self, out_given: bool) -> ChannelPlan:
        first = self._columns() if self.order == LAST else self._runs()
        if first.rows == 0:
            return self.made([first.step], {}, out_given)
        of_row = self.sizes.c * (4 if self.itemsize == 8 else 2)  # words of GradientSums
        words = first.rows * first.units * of_row
        workspaces = {"partial": ArraySpec.contiguous((words,), "float64")}
        steps = [first.step]
        if not first.writes:
            of_sets = (self.sets + -(-self.sizes.c // _COEFFICIENTS)) * _COEFFICIENTS  # and weight
            workspaces["coefficients"] = ArraySpec.contiguous((of_sets,), self.wide)
        fold = choices.rows_folded(first.rows, first.units)
        if fold > 1:
            words = -(-first.rows // fold) * of_row
            workspaces["moments"] = ArraySpec.contiguous((words,), "float64")
            steps.append(self._fold_step(first, fold))
        steps.append(self._merge_records(first, fold))
        if not first.writes:
            steps.append(self._map_step("StoredGroupGradient"))
        return self.made(steps, workspaces, out_given)

    def _as_matrix(self) -> bool:
        return self.order == LAST

    def _matrix(self) -> tuple[int, int, int]:
        n, c, s = self.sizes
        return n, s, c

    def _map_step(self, source: str) -> Step:
        # A set's coefficients and a weight take twice the room of the four numbers of others.
        step = super()._map_step(source)
        return step._replace(shared_memory=2 * step.shared_memory)

    def _runs(self) -> _First:
        n, c, s = self.sizes
        vec = vector_length(s, self.itemsize)
        access = self._access(vec, self._steps("n"))
        channels, vectors = c // self.groups, s // vec
        tile = choices.group_tile(channels, vectors, vec, access, self.itemsize, self.arch)
        units = tile.units_of_channel(vectors)
        numbers = self._numbers(
            run_step=self._steps("n"),
            length=vectors,
            channel=units,
            vectors=channels * vectors,
            runs=n,
            segments=max(tile.segments, 1),
            segment_rows=1,
        )
        if tile.segments:
            return _First(self._run_step("_sums", tile, numbers), n, units, False)
        if tile.cluster > 1:
            return _First(self._run_step("_cluster", tile, numbers), n, units, True)
        if choices.fits_cluster(n, self.groups, tile, self.arch):
            return _First(self._few_step(replace(tile, sets=1), numbers), 0, units, True)
        if not choices.shares_records(s, tile):
            return _First(self._run_step("", tile, numbers), n, units, True)
        together = choices.samples_together(n, self.groups, tile)
        rows = -(-n // together)
        numbers = replace(numbers, sets=rows * self.groups, segment_rows=together)
        return _First(self._run_step("_samples", tile, numbers), rows, units, True)

    def _run_step(self, template: str, tile: choices.GroupTile, numbers: Numbers) -> Step:
        return Step(
            f"group_gradient{template}<{self.type}, {tile.expression}>",
            tile.grid(numbers.sets),
            tile.block,
            numbers,
            tile.shared_memory(self.itemsize),
            tile.cluster,
        )

    def _few_step(self, tile: choices.GroupTile, numbers: Numbers) -> Step:
        """All samples of a group by one CTA or cluster."""
        cluster = choices.power_of_two_up(self.sizes.n)
        template, more = ("single", "") if cluster == 1 else ("few", f", {cluster}")
        return Step(
            f"group_gradient_{template}<{self.type}, {tile.expression}{more}>",
            self.groups * cluster,
            tile.block,
            numbers,
            tile.shared_memory(self.itemsize),
            cluster,
        )

    def _columns(self) -> _First:
        planes, rows, columns = self._matrix()
        vec, access = self._matrix_vec()
        tile = choices.column_tile(rows, columns, vec, access, self.itemsize, self.arch)
        step = Step(
            f"column_group_sums<{self.type}, {tile.expression}>",
            tile.grid(planes, columns),
            tile.block,
            self._matrix_numbers(tile.segments, tile.segment_rows),
            tile.shared_memory(self.itemsize),
        )
        return _First(step, planes * tile.segments, 1, False)

    def _fold_step(self, first: _First, fold: int) -> Step:
        lanes = choices.merge_lanes(first.units)
        grid = -(-first.rows // fold) * -(-self.sizes.c // (32 // lanes))
        numbers = self._numbers(channel=first.units, runs=first.rows, segment_rows=fold)
        return Step(f"group_gradient_fold<{self.type}, {lanes}>", grid, _MERGE_BLOCK, numbers)

    def _merge_records(self, first: _First, fold: int) -> Step:
        """Gradients of parameters, and coefficients of sets where grad_x is still to be made."""
        lanes = choices.merge_lanes(1 if fold > 1 else first.units)
        grid = -(-self.sizes.c // (32 // lanes))
        of_sample, threads = 1, 32
        if not first.writes:
            of_sample = first.rows // self.sizes.n
            threads = choices.merge_threads(self.sizes.c // self.groups * first.units * of_sample)
            grid += -(-self.sets // (_MERGE_BLOCK // threads))
        numbers = self._numbers(
            channel=first.units, runs=first.rows, segments=of_sample, segment_rows=fold
        )
        expression = f"group_gradient_merge<{self.type}, {threads}, {lanes}>"
        return Step(expression, grid, _MERGE_BLOCK, numbers)


KERNELS = {
    op: GroupGradient(op, "", per_sample=True)
    for op in ("group_norm_backward", "instance_norm_backward")
}
