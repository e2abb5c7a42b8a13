"""How a kernel walks the arrays of batch, group and instance norm: sets, steps and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cunorm import dtypes
from cunorm.arrays import ArraySpec
from cunorm.call import Call
from cunorm.cuda import channel_choices as choices
from cunorm.cuda import channel_layout as layout
from cunorm.cuda import devices
from cunorm.cuda.channel_launch import ARRAYS, SMALL, Numbers
from cunorm.cuda.channel_layout import FIRST, LAST, Steps
from cunorm.cuda.choices import TRANSACTION, vector_length
from cunorm.cuda.layout import access_elements

_MANY_ROWS = 64  # samples that make walking them as rows of a matrix worthwhile
_LARGE = 1 << 23  # bytes of x that do

# Bytes of a sample that are too few for a CTA to take alone: memory gives 32 at once. In strips of
# such rows 29296 x 256 x 2 bfloat16 takes 183 us (copy 17), 14648 x 256 x 2 float32 110; as a
# matrix, in three launches, 37 and 35. As runs of 16 bytes 7324 x 256 x 8 bfloat16 takes 69 us,
# backward 74, as a matrix 37 and 48. Runs of 32 bytes are good: 29.7 for 3662 x 256 x 16.
SHORT = 16
NARROW = 4  # bytes of a vector of a run that are too few
# Elements that do not pay for a second vector: instance norm 19531 x 256 x 3 takes 93 us for 110;
# with 7 for 3 54 for 97.
_FEW = 3
# Bytes of x that batch norm takes so: 16 x 8 x 2049 bfloat16 takes 13.7 us for 4.5, 1 x 256 x 4099
# 5.9 for 10.4, 57 x 256 x 1021 41.7 for 86.6.
_MUCH = 1 << 21


class RunVector(NamedTuple):
    """How runs are read: elements of a vector, and of a transaction.

    `ends`: "Whole" where they divide runs; "Ragged" where the last of a run has fewer elements;
    "Masked" where the first one may lack some, too, so that all are aligned. `crossing`: a vector
    may have elements of several channels.
    """

    vec: int
    access: int
    ends: choices.Ends = "Whole"
    crossing: bool = False


@dataclass(frozen=True)
class NormFile:
    """A norm of the channel family, as its .cu file spells it.

    `per_sample`: statistics are those of each sample.
    """

    file: str
    struct: str
    per_sample: bool
    backward: bool = False

    def takes_statistics(self, call: Call) -> bool:
        """Whether the statistics of x are what the op works with."""
        if call.op == "batch_norm_normalize" or self.backward:
            return False
        return bool(call.attributes.get("training", call.attributes.get("use_input_stats", True)))

    def walks_samples_as_one(self, call: Call) -> bool:
        """Whether positions have to be evenly spaced over all samples, not only within each."""
        return not self.per_sample or not self.takes_statistics(call)


class Walk:
    """What the launches of one call walk; arrays are such that kernels can."""

    def __init__(self, norm: NormFile, call: Call, order: str) -> None:
        self.norm = norm
        self.call = call
        x = call.x
        axis = call.attributes["channel_axis"]
        self.order = order
        self.sizes = layout.sizes_of(x.shape, axis)
        self.takes = norm.takes_statistics(call)
        self.per_sample = norm.per_sample and (self.takes or bool(call.statistics))
        self.groups = call.attributes.get("num_groups", self.sizes.c)
        self.sets = self.groups * (self.sizes.n if self.per_sample else 1)
        self.type = dtypes.FLOATS[x.dtype].c_name
        self.itemsize = dtypes.FLOATS[x.dtype].itemsize
        self.wide = dtypes.accumulation(x.dtype)
        self.arch = devices.compute_capability(call.device.index)
        self.tensors = 2 if norm.backward else 1
        self.output = call.outputs.get("grad_x" if norm.backward else "y")
        self.full: dict[str, ArraySpec] = {"x": x}
        if norm.backward:
            self.full["grad_out"] = call.inputs["grad_out"] or x
        if self.output is not None:
            self.full["y"] = self.output
        self.steps = {name: layout.steps_of(spec, axis) for name, spec in self.full.items()}

    def _running_given(self) -> bool:
        return not self.takes and "running_mean" in self.call.inputs

    def _frozen(self) -> bool:
        """Whether the gradient does not go through the statistics."""
        return self.norm.backward and not self.call.attributes.get("training", True)

    def _updates(self) -> bool:
        return self.takes and self.call.inputs.get("running_mean") is not None

    def _steps(self, which: str) -> tuple[int, int, int]:
        """Steps of x, grad_out and y along N, or from row to row."""
        found = []
        for name in ARRAYS:
            steps: Steps | None = self.steps.get(name)
            if steps is None:
                found.append(0)
            elif which == "n":
                found.append(steps.n if self.sizes.n > 1 else 0)
            else:
                found.append(layout.row_step(self.sizes, steps))
        return found[0], found[1], found[2]

    def _numbers(self, **changes: Any) -> Numbers:
        attributes = self.call.attributes
        n, c, s = self.sizes
        count = c // max(self.groups, 1) * s * (1 if self.per_sample else n)
        given = not self.takes and not self.norm.backward
        return replace(
            Numbers(
                sets=self.sets,
                inner_sets=self.groups,
                channels=c,
                vectors=0,
                count=1 if given else max(count, 1),
                set_channels=c // max(self.groups, 1),
                coefficient_step=c if self.per_sample and self.takes else 0,
                eps=attributes.get("eps", 0.0),
                momentum=attributes.get("momentum", 0.0),
                frozen=self._frozen(),
                running_as_x=self.norm.per_sample,
            ),
            **changes,
        )

    def _sample_steps(self) -> set[int]:
        """From sample to sample, of all arrays."""
        return {each.n for each in self.steps.values() if each} if self.sizes.n > 1 else set()

    def _dense(self) -> bool:
        """Whether all samples follow each other."""
        return self._sample_steps() <= {self.sizes.c * self.sizes.s}

    def _access(self, vec: int, steps: Sequence[int]) -> int:
        present = [(spec, steps) for spec in self.full.values()]
        alignment = min(spec.alignment for spec in self.full.values())
        return access_elements(vec, present, alignment)

    # -- channels first ---------------------------------------------------------------------

    def _run_vector(self) -> RunVector:
        """Wide ones, where runs are not very short and kernels can."""
        s, steps = self.sizes.s, self._steps("n")
        vec = vector_length(s, self.itemsize)
        run = self.sizes.c // self.groups * s if self.per_sample else s
        narrow = vec * self.itemsize <= NARROW < run * self.itemsize
        if not (narrow and (self.takes or self.norm.file == "batch_norm_backward")):
            return RunVector(vec, self._access(vec, steps))
        wide = vector_length(run, self.itemsize)
        if wide * self.itemsize > NARROW:
            return RunVector(wide, self._access(wide, steps), crossing=True)
        widest = TRANSACTION // self.itemsize
        if not self.per_sample:
            worthwhile = run > _FEW and self.call.x.size * self.itemsize >= _MUCH
            # Upwards: the last sample ends the array, and it alone is not read beyond its end.
            apart = self._sample_steps()
            alike = len({step % widest for step in apart}) <= 1 and min(apart, default=1) > 0
            aligned = alike and self._access(widest, ()) == widest
            if aligned and worthwhile and run < choices.BRIEF:  # counted in 32 bits
                return RunVector(widest, widest, "Masked")
            return RunVector(vec, self._access(vec, steps))
        aligned = self.sizes.c * s % widest == 0 and self._access(widest, steps) == widest
        if aligned and run > _FEW:
            return RunVector(widest, widest, "Masked", crossing=run > s)
        return RunVector(widest, 1, "Ragged", crossing=True)

    def _run_numbers(self) -> Numbers:
        n, c, s = self.sizes
        vec, _, ends, crossing = self._run_vector()
        steps = self._steps("n")
        lacking = vec - 1 if ends == "Masked" else 0
        if not self.per_sample:
            return self._numbers(
                run_step=steps,
                inner_step=s,
                length=-(-(s + lacking) // vec),
                channel=-(-(s + lacking) // vec),
                runs=n,
                vectors=n * -(-(s + lacking) // vec),
            )
        run = c // self.groups * s
        return self._numbers(
            outer_step=steps,
            run_step=steps,
            inner_step=run,
            length=run // vec if ends == "Whole" else run,
            channel=s if crossing else -(-s // vec),
            vectors=-(-(run + lacking) // vec),
        )

    def _run_tile(self) -> choices.RunTile:
        vec, access, ends, crossing = self._run_vector()
        vectors = self._run_numbers().vectors
        sets = None if self.per_sample else self.sets
        tile = choices.run_tile(
            vectors, vec, access, self.itemsize, self.arch, self.tensors, sets, ends, crossing
        )
        crossing = crossing and tile.segments == 0
        return replace(tile, one_run=self.per_sample, crossing=crossing)

    # -- channels last, and samples as rows of a matrix ---------------------------------------

    def _as_matrix(self) -> bool:
        """Whether samples are rows, and positions of channels columns: wider than a run allows.

        So are many small images with an odd number of pixels walked by vectors, although none
        of their channels can be; and those of whose pixels each channel has one vector, where
        channels are summed up.
        """
        if self.order == LAST or (self.per_sample and self.takes):
            return self.order == LAST
        n, c, s = self.sizes
        widest = TRANSACTION // self.itemsize
        large = self.call.x.size * self.itemsize >= _LARGE and n >= _MANY_ROWS
        if not large or s == 1 or (c * s) % widest != 0:
            return False
        summed = self.takes or self.norm.backward
        return s % widest != 0 or (summed and s * self.itemsize <= SHORT)

    def _matrix(self) -> tuple[int, int, int]:
        """Planes, rows and columns."""
        n, c, s = self.sizes
        if self.order == FIRST:
            return 1, n, c * s
        return (n, s, c) if self.per_sample and self.takes else (1, n * s, c)

    def _matrix_numbers(self, segments: int = 1, segment_rows: int = 1) -> Numbers:
        planes, rows, columns = self._matrix()
        of_channel = self.sizes.s if self.order == FIRST else 1
        row_steps = self._steps("n" if self.order == FIRST else "row")
        return self._numbers(
            outer_step=self._steps("n") if planes > 1 else (0, 0, 0),
            run_step=row_steps,
            channel=of_channel,
            runs=rows,
            vectors=columns,
            segments=segments,
            segment_rows=segment_rows,
            set_columns=of_channel * (self.sizes.c // self.groups),
        )

    def _matrix_vec(self) -> tuple[int, int]:
        vec = vector_length(self._matrix()[2], self.itemsize)
        numbers = self._matrix_numbers()
        return vec, self._access(vec, (*numbers.outer_step, *numbers.run_step))

    def _brief_runs(self) -> bool:
        """Whether channel_brief.cuh can number what it walks: upwards, and in 32 bits.

        It adds as run_norm does: which of the two it is may depend on the number of samples.
        """
        n, c, s = self.sizes
        steps = self._sample_steps() or {c * s}
        apart = self.per_sample and steps != {c * s}
        alike = len(steps) == 1 and not apart
        return alike and min(steps) >= 0 and n * max(c * s, *steps) < choices.BRIEF

    def _smalls(self) -> str:
        """The small arrays as channel_brief.cuh takes them, or "" where it cannot."""
        if self.output is None:
            return ""
        runs = self.norm.file == "batch_norm" or self._running_given()
        affine = ("weight",) if self.norm.backward else ("weight", "bias")
        running = ("running_mean", "running_var") if runs else ()
        given = {name: self.call.inputs.get(name) for name in SMALL}
        pairs = [[given[name] for name in pair] for pair in (affine, running)]
        return layout.smalls(pairs, given.values())
