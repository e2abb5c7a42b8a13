"""Plans of group and instance norm backward: from a checked call to launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


class GroupPlanner(Planner):
    """From a call whose arrays kernels can walk to its launches."""

    def __init__(self, norm: ChannelNorm, call: Call, order: str) -> None:
        super().__init__(norm, call, order)
        self.per_sample = True
        self.sets = self.groups * self.sizes.n

    def plan(self, out_given: bool) -> ChannelPlan:
        step, rows, units, whole = self._columns() if self.order == LAST else self._runs()
        if rows == 0:  # no records
            return self.made([step], {}, out_given)
        word = 4 if self.itemsize == 8 else 2
        of_row = self.sizes.c * word
        workspaces = {"partial": ArraySpec.contiguous((rows * units * of_row,), "float64")}
        steps = [step]
        fold = choices.rows_folded(rows, units)
        if fold > 1:
            workspaces["moments"] = ArraySpec.contiguous((-(-rows // fold) * of_row,), "float64")
            steps.append(self._fold_records(rows, units, fold))
        steps.append(self._merge_records(rows, units, fold, wanted=not whole))
        if not whole:
            of_sets = (self.sets * _COEFFICIENTS,)
            workspaces["coefficients"] = ArraySpec.contiguous(of_sets, self.wide)
            steps.append(self._map_step("StoredGroupGradient"))
        return self.made(steps, workspaces, out_given)

    def _as_matrix(self) -> bool:
        return self.order == LAST

    def _matrix(self) -> tuple[int, int, int]:
        n, c, s = self.sizes
        return n, s, c

    def _runs(self) -> tuple[Step, int, int, bool]:
        """The launch that reads; rows of records that it leaves, and how many a channel has there;
        whether it writes grad_x.
        """
        n, c, s = self.sizes
        vec = vector_length(s, self.itemsize)
        access = self._access(vec, self._steps("n"))
        channels, vectors = c // self.groups, s // vec
        tile = choices.group_tile(channels, vectors, vec, access, self.itemsize, self.arch)
        units = tile.units_of_channel(vectors)
        numbers = self._numbers(
            outer_step=self._steps("n"),
            inner_step=channels * s,
            length=vectors,
            channel=units,
            vectors=channels * units,
            runs=n,
            segments=max(tile.segments, 1),
            segment_rows=1,
        )
        template, rows, sets, cluster, more = "group_gradient", n, self.sets, tile.cluster, ""
        if tile.segments:
            template += "_sums"
        elif tile.cluster > 1:
            template += "_cluster"
        elif choices.fits_cluster(n, tile, self.arch):
            tile = replace(tile, sets=1)
            cluster, rows = choices.power_of_two_up(n), 0
            sets = self.groups * cluster
            template += "_single" if cluster == 1 else "_few"
            more = "" if cluster == 1 else f", {cluster}"
        elif choices.shares_records(s, tile):
            template += "_samples"
            together = choices.samples_together(n, self.groups, tile)
            rows = -(-n // together)
            sets = rows * self.groups
            numbers = replace(numbers, sets=sets, segment_rows=together)
        step = Step(
            f"{template}<{self.type}, {tile.expression}{more}>",
            tile.grid(sets),
            tile.block,
            numbers,
            tile.shared_memory(self.itemsize),
            cluster,
        )
        return step, rows, units, not tile.segments

    def _columns(self) -> tuple[Step, int, int, bool]:
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
        return step, planes * tile.segments, 1, False

    def _fold_records(self, rows: int, units: int, fold: int) -> Step:
        lanes = choices.merge_lanes(units)
        grid = -(-rows // fold) * -(-self.sizes.c // (32 // lanes))
        numbers = self._numbers(channel=units, runs=rows, segment_rows=fold)
        return Step(f"group_gradient_fold<{self.type}, {lanes}>", grid, _MERGE_BLOCK, numbers)

    def _merge_records(self, rows: int, units: int, fold: int, wanted: bool) -> Step:
        """Parameter gradients, and where they are wanted coefficients of the sets."""
        of_sample = rows // self.sizes.n if wanted else 1
        numbers: Numbers = self._numbers(
            channel=units, runs=rows, segments=of_sample, segment_rows=fold
        )
        lanes = choices.merge_lanes(1 if fold > 1 else units)
        threads = choices.merge_threads(self.sizes.c // self.groups * units * of_sample)
        grid = -(-self.sizes.c // (32 // lanes))
        if wanted:
            grid += -(-self.sets // (_MERGE_BLOCK // threads))
        else:
            threads = 32
        expression = f"group_gradient_merge<{self.type}, {threads}, {lanes}>"
        return Step(expression, grid, _MERGE_BLOCK, numbers)


KERNELS = {
    op: GroupGradient(op, "", per_sample=True)
    for op in ("group_norm_backward", "instance_norm_backward")
}
