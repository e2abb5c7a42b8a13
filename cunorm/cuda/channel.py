"""Plans of batch, group and instance norm: from a checked call to launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cunorm.arrays import ArraySpec
from cunorm.call import Call
from cunorm.cuda import channel_choices as choices
from cunorm.cuda import channel_layout as layout
from cunorm.cuda import devices, kept_choices, kept_column_choices, strip_choices
from cunorm.cuda.channel_launch import ChannelPlan, Numbers, Step
from cunorm.cuda.channel_layout import FIRST, LAST
from cunorm.cuda.channel_walk import NARROW, SHORT, NormFile, Walk
from cunorm.cuda.choices import TRANSACTION, vector_length
from cunorm.cuda.kept_choices import KeptTile
from cunorm.cuda.kept_column_choices import KeptColumnTile
from cunorm.cuda.plans import EmptyPlan, StagedPlan

_MERGE_BLOCK = 256  # kMergeBlock in channel_merge.cuh
_RECORD_WORDS = 5  # doubles of a SegmentRecord
_COLUMN_RECORD_WORDS = 3  # of a ColumnRecord
_COEFFICIENTS = 4  # numbers of Coefficients, GradientCoefficients
_MOMENTS = 2  # doubles of SetMoments
_KEPT_REACH = 1 << 31  # what channel_kept.cuh counts in 32 bits


@dataclass(frozen=True)
class ChannelNorm(NormFile):
    """A norm of the channel family and its plans."""

    def plan(self, call: Call, out_given: bool) -> Any:
        """A plan for calls like this one; `out_given` says that outputs come with the call."""
        if call.x.size == 0:
            return self._empty_plan(call, out_given)
        copied, direct, order = layout.readable(call, self.walks_samples_as_one(call))
        if not copied and direct.outputs == call.outputs:
            return self.planner(direct, order).plan(out_given)
        return StagedPlan(call, self.planner(direct, order).plan(True), copied)

    def planner(self, call: Call, order: str) -> Planner:
        return Planner(self, call, order)

    def _empty_plan(self, call: Call, out_given: bool) -> EmptyPlan:
        if not call.statistics or self.takes_statistics(call):
            return EmptyPlan(call)
        planner = Planner(self, call, FIRST)
        if planner.sets == 0:
            return EmptyPlan(call)
        return EmptyPlan(call, planner.made([planner.given_statistics()], {}, out_given))


class Planner(Walk):
    """From a call whose arrays kernels can walk to its launches."""

    def plan(self, out_given: bool) -> ChannelPlan:
        if self.norm.backward:
            return self._backward(out_given)
        if self.takes:
            return self._forward(out_given)
        steps = [self._map_step("GivenVariance" if self._running_given() else "Given")]
        if self.call.statistics:
            steps.append(self.given_statistics())
        return self.made(steps, {}, out_given)

    def made(
        self, steps: Sequence[Step], workspaces: dict[str, ArraySpec], out_given: bool
    ) -> ChannelPlan:
        return ChannelPlan(self.call, self.norm.file, steps, self._roles(), workspaces, out_given)

    def _roles(self) -> dict[str, str]:
        roles = {"mean_out": "mean", "rstd_out": "rstd"}
        if self.norm.backward:
            roles = {"y": "grad_x", "mean_out": "grad_weight", "rstd_out": "grad_bias"}
        return roles

    # -- launches ---------------------------------------------------------------------------

    def _map_step(self, source: str) -> Step:
        kind = f"{source}<{self.type}>, {self.type}"
        n, c, s = self.sizes
        dense = self._dense()
        vec = choices.map_vector(s, c, self.itemsize, dense)
        if self.order == LAST or (self._as_matrix() and s % vec == 0):
            planes, rows, columns = self._matrix()
            tile = choices.column_map_tile(
                planes, rows, columns, *self._matrix_vec(), self.arch, self.tensors
            )
            return Step(
                f"column_map<{kind}, {tile.expression}>",
                tile.grid(planes, columns),
                tile.block,
                self._matrix_numbers(tile.segments, tile.segment_rows),
            )
        steps = self._steps("n")
        access = self._access(vec, () if dense else steps)
        flat = choices.map_tile(n * c * s, s, vec, access, self.tensors)
        numbers = self._numbers(
            sets=n * c,
            inner_sets=c,
            run_step=steps,
            length=s,
            channel=c,
            vectors=n * c * s,
        )
        straight = source == "GivenVariance" and not flat.crossing and flat.brief
        if straight and self._brief_runs() and (smalls := self._smalls()):
            flat = choices.straight_map_tile(flat, n * c * s)
            expression = f"run_map_brief<{self.type}, {smalls}, {flat.expression}>"
            return Step(expression, flat.grid(n * c * s), flat.threads, numbers)
        return Step(
            f"run_map<{kind}, {flat.expression}>",
            flat.grid(n * c * s),
            flat.threads,
            numbers,
            flat.shared_memory(self.itemsize, s),
        )

    def given_statistics(self) -> Step:
        return Step(f"given_statistics<{self.type}>", -(-self.sets // 256), 256, self._numbers())

    def _merge_step(self, numbers: Numbers) -> Step:
        records = max(numbers.set_columns, 1) * numbers.segments
        threads = choices.merge_threads(records)
        held = choices.merge_held(records, threads, self.itemsize, self.arch)
        template = f"channel_merge<{self.norm.struct}, {self.type}, {threads}, {held}>"
        if self.norm.backward:
            template = f"gradient_merge<{self.type}, {threads}>"
        return Step(template, -(-self.sets // (_MERGE_BLOCK // threads)), _MERGE_BLOCK, numbers)

    def _whole_step(self, single: str, sums: str, kind: str) -> tuple[Step, bool]:
        """The launch that reads x: the whole op, or the sums of segments."""
        if self._as_matrix():
            table = self._table_step(single)
            if table is not None:
                return table, True
            planes, rows, columns = self._matrix()
            allowed = self._matrix_numbers().set_columns == 1
            tile = choices.column_tile(
                not (self.per_sample and self.takes),
                rows,
                columns,
                *self._matrix_vec(),
                self.itemsize,
                self.arch,
                self.tensors,
                single=allowed,
            )
            whole = allowed and tile.segments == 1 and rows <= tile.ty * tile.packs
            template = f"column_{single}<{kind}" if whole else f"column_{sums}<"
            return Step(
                f"{template}{self.type}, {tile.expression}>",
                tile.grid(planes, columns),
                tile.block,
                self._matrix_numbers(tile.segments, tile.segment_rows),
                tile.shared_memory(self.itemsize),
            ), whole
        run = self._run_tile()
        if single == "norm" and self.per_sample:
            run = run.with_table(self.sizes.c // self.groups)
        whole = run.segments == 0
        template = f"run_{single}<{kind}{self.type}" if whole else f"run_{sums}<{self.type}"
        straight = run.straight_on(self.itemsize, self.tensors) and self._brief_runs()
        if run.cluster > 1:
            template = f"run_{single}_cluster<{kind}{self.type}"
        elif straight and (smalls := self._smalls()):
            template = f"run_{single}_brief<{kind}{self.type}, {smalls}"
        return Step(
            f"{template}, {run.expression}>",
            run.grid(self.sets),
            run.block,
            replace(self._run_numbers(), segments=max(run.segments, 1)),
            run.shared_memory(self.itemsize),
            run.cluster,
        ), whole

    def _table_step(self, single: str) -> Step | None:
        """A launch over a table of so few rows that a few lanes have a column, or None."""
        planes, rows, columns = self._matrix()
        room = choices.table_rows(rows) if self.itemsize < 8 and not self.per_sample else 0
        numbers = replace(self._matrix_numbers(), length=rows)
        steps = {layout.row_step(self.sizes, each) for each in self.steps.values() if each}
        upwards = len(steps) == 1 and min(steps) >= 0
        brief = upwards and rows * max(columns, *steps) < choices.BRIEF
        if not (room and planes == 1 and numbers.set_columns == 1 and brief):
            return None
        smalls = self._smalls()
        lanes, block = choices.table_lanes(columns, self.itemsize), choices.TABLE_BLOCK
        grid = -(-columns * lanes // block)
        full = str(rows == room).lower()
        expression = f"table_{single}<{self.type}, {smalls}, {room}, {full}, {lanes}>"
        return Step(expression, grid, block, numbers) if smalls else None

    def _strip_step(self, kernel: str) -> Step | None:
        """A launch over strips of channels, where runs of one are read by single elements."""
        if self.order == LAST or self.per_sample or self.output is None or self._frozen():
            return None
        n, c, s = self.sizes
        if vector_length(s, self.itemsize) * self.itemsize > NARROW and not self._as_matrix():
            return None
        steps = self._steps("n")
        access = self._access(TRANSACTION // self.itemsize, steps)
        size = n, c, s, self.itemsize
        tile = strip_choices.strip_tile(*size, access, self.arch, self.tensors)
        if tile is None:
            return None
        if self._as_matrix() and tile.width * tile.vec * self.itemsize <= SHORT:
            return None
        numbers = self._numbers(
            run_step=steps, length=tile.width, inner_sets=s, vectors=n, sets=tile.ty
        )
        return Step(
            f"{kernel}{self.type}, {tile.expression}>",
            c // tile.channels,
            tile.threads,
            numbers,
            tile.shared_memory,
        )

    def _records(self, numbers: Numbers) -> int:
        if numbers.set_columns:
            return self._matrix()[0] * numbers.segments * numbers.vectors
        return self.sets * numbers.segments

    def _coefficients(self) -> ArraySpec:
        outer = self.sizes.n if self.per_sample else 1
        return ArraySpec.contiguous((outer * self.sizes.c * _COEFFICIENTS,), self.wide)

    def _kept_tile(self) -> KeptTile | None:
        """Where the parts of large sets are kept on chip by CTAs that wait for each other."""
        if self._as_matrix() or self.output is None or self._frozen():
            return None
        run = self._run_tile()
        cluster = 0 if run.segments else run.cluster
        # How a set of one sample is added up must not depend on how many there are.
        nbytes = None if self.per_sample else self.call.x.size * self.itemsize
        numbers = self._run_numbers()
        if not kept_choices.better_kept(numbers.vectors, cluster, self.tensors, nbytes):
            return None
        vec, access, ends, crossing = self._run_vector()
        steps = numbers.run_step if numbers.runs > 1 else (0,)
        most = max(max(steps) // vec * numbers.runs, numbers.vectors, self.sets)
        if min(steps) < 0 or most >= _KEPT_REACH or self.sizes.s // vec < 2:
            return None
        if crossing or ends != "Whole":
            return None
        return kept_choices.kept_tile(
            numbers.vectors,
            vec,
            access,
            self.itemsize,
            self.arch,
            self.tensors,
            numbers.runs == 1,
            self.call.x.dtype != "float16",
            devices.multiprocessors(self.call.device.index),
        )

    def _kept(
        self, tile: KeptTile, work: str, record_words: int
    ) -> tuple[list[Step], dict[str, ArraySpec]]:
        groups = tile.groups(self.sets, devices.multiprocessors(self.call.device.index))
        numbers = replace(
            self._run_numbers(),
            segments=tile.segments,
            groups=groups,
            lag=tile.lag(self.sets, groups),
        )
        words = self.sets * (1 + tile.segments)
        kept = Step(
            f"run_kept<{work}, {tile.expression}>",
            groups * tile.segments,
            tile.threads,
            numbers,
            tile.shared_memory(self.itemsize),
        )
        return self._attended(kept, words, self._records(numbers) * record_words)

    def _attended(
        self, kept: Step, words: int, record_words: int, for_replay: bool = False
    ) -> tuple[list[Step], dict[str, ArraySpec]]:
        """A launch that clears what CTAs wait for before the one that does the rest."""
        clear = Step(
            f"clear_attendance<{_MERGE_BLOCK}>",
            -(-words // _MERGE_BLOCK),
            _MERGE_BLOCK,
            replace(kept.numbers, words=words),
            for_replay=for_replay,
        )
        return [clear, kept], {
            "partial": ArraySpec.contiguous((record_words,), "float64"),
            "progress": ArraySpec.contiguous((words,), "float32"),
        }

    def _kept_column_tile(self) -> KeptColumnTile | None:
        """Where blocks of rows are kept on chip by CTAs that wait for each other."""
        sets_of_one_column = self._matrix_numbers().set_columns == 1
        if not sets_of_one_column or self.output is None or self._frozen():
            return None
        _, rows, columns = self._matrix()
        return kept_column_choices.kept_column_tile(
            not (self.per_sample and self.takes),
            rows,
            columns,
            *self._matrix_vec(),
            self.itemsize,
            self.arch,
            self.tensors,
            devices.multiprocessors(self.call.device.index),
        )

    def _kept_columns(
        self, tile: KeptColumnTile, work: str, record_words: int
    ) -> tuple[list[Step], dict[str, ArraySpec]]:
        planes, _, columns = self._matrix()
        numbers = replace(
            self._matrix_numbers(tile.segments, tile.segment_rows),
            batches=tile.batches,
            together=tile.together,
        )
        kept = Step(
            f"column_kept<{work}, {tile.expression}>",
            tile.grid(planes, columns),
            tile.block,
            numbers,
            tile.shared_memory(self.itemsize),
        )
        records = planes * (tile.segments + tile.squads) * columns
        words = 2 * tile.signals(planes, columns)
        return self._attended(kept, words, records * record_words, for_replay=True)

    def _forward(self, out_given: bool) -> ChannelPlan:
        workspaces: dict[str, ArraySpec] = {}
        strips = self._strip_step(f"strip_norm<{self.norm.struct}, ")
        if strips is not None:
            return self.made([strips], workspaces, out_given)
        kept = self._kept_tile()
        if kept is not None:
            work = f"KeptNorm<{self.norm.struct}, {self.type}>"
            steps, workspaces = self._kept(kept, work, _RECORD_WORDS)
        else:
            step, whole = self._whole_step("norm", "statistics", f"{self.norm.struct}, ")
            steps = [step]
            columns = None if whole or self.order != LAST else self._kept_column_tile()
            if columns is not None:
                work = f"KeptColumns<{self.norm.struct}, {self.type}>"
                steps, workspaces = self._kept_columns(columns, work, _COLUMN_RECORD_WORDS)
            elif not whole:
                words = self._records(step.numbers) * _RECORD_WORDS
                workspaces["partial"] = ArraySpec.contiguous((words,), "float64")
                steps.append(self._merge_step(step.numbers))
                if self.output is not None:
                    workspaces["coefficients"] = self._coefficients()
                    steps.append(self._map_step("Stored"))
        steps += self._running_step(workspaces)
        return self.made(steps, workspaces, out_given)

    def _running_step(self, workspaces: dict[str, ArraySpec]) -> list[Step]:
        """Where running statistics take averages over samples; its workspace is added."""
        if not (self.norm.per_sample and self._updates()):
            return []
        workspaces["moments"] = ArraySpec.contiguous((self.sets * _MOMENTS,), "float64")
        grid = -(-self.sizes.c // (_MERGE_BLOCK // 32))
        return [Step(f"average_running<{self.type}>", grid, _MERGE_BLOCK, self._numbers())]

    def _backward(self, out_given: bool) -> ChannelPlan:
        strips = self._strip_step("strip_gradient<")
        if strips is not None:
            return self.made([strips], {}, out_given)
        record_words = 4 if self.itemsize == 8 else 2
        kept = self._kept_tile()
        if kept is not None:
            work = f"KeptGradient<{self.type}>"
            return self.made(*self._kept(kept, work, record_words), out_given)
        step, whole = self._whole_step("gradient", "gradient_sums", "")
        if whole:
            return self.made([step], {}, out_given)
        columns = self._kept_column_tile() if self.order == LAST else None
        if columns is not None:
            work = f"KeptColumnGradients<{self.type}>"
            steps, workspaces = self._kept_columns(columns, work, record_words)
            workspaces["coefficients"] = self._coefficients()
            return self.made(steps, workspaces, out_given)
        words = self._records(step.numbers) * record_words
        workspaces = {"partial": ArraySpec.contiguous((words,), "float64")}
        steps = [step, self._merge_step(step.numbers)]
        if not step.numbers.frozen:
            workspaces["coefficients"] = self._coefficients()
            steps.append(self._map_step("StoredGradient"))
        return self.made(steps, workspaces, out_given)


_BATCH = ChannelNorm("batch_norm", "BatchNorm", per_sample=False)

KERNELS = {
    "batch_norm": _BATCH,
    "batch_norm_stats": _BATCH,
    "batch_norm_normalize": _BATCH,
    "batch_norm_backward": ChannelNorm("batch_norm_backward", "", per_sample=False, backward=True),
    "group_norm": ChannelNorm("group_norm", "GroupNorm", per_sample=True),
    "instance_norm": ChannelNorm("instance_norm", "InstanceNorm", per_sample=True),
}
