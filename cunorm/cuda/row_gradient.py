"""Plans of the row norms' backward passes: from a checked call to launches."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter
from typing import Any

from cunorm import dtypes, errors
from cunorm.arrays import ArraySpec, dense_strides
from cunorm.call import Call
from cunorm.cuda import devices
from cunorm.cuda import row_gradient_choices as choices
from cunorm.cuda import row_gradient_layout as layout
from cunorm.cuda.choices import vector_length
from cunorm.cuda.compiler import Kernel
from cunorm.cuda.launch import Launcher
from cunorm.cuda.layout import LEADING, access_elements, follow_each_other, row_is_contiguous
from cunorm.cuda.plans import EmptyPlan, LaunchPlan, StagedPlan

SLOTS = 3  # of parameters and their gradients in RowGradientArgs
_MERGE_COLUMNS = 32  # kMergeColumns
_ROW_MERGE_ROWS = 8  # of a CTA of row_gradient_row_merge
_ROW_MERGE_BLOCK = 256
_NEVER = 0xFFFFFFFF  # no CTA has this number
_STATISTICS = ("mean", "rstd")
_ABSENT = ("Constant<1>", "Constant<0>", "Constant<1>")  # a weight or scale, a shift, a gate


@dataclass(frozen=True)
class RowGradient:
    """The backward pass of a row norm, as its .cu file spells it.

    `parameters` and `gradients` name the input and the output in each slot, or nothing.
    """

    file: str
    struct: str
    parameters: tuple[str, str, str]
    gradients: tuple[str, str, str]
    adaptive: bool = False  # parameters may have a row for every row of x

    def plan(self, call: Call, out_given: bool) -> Any:
        """A plan for calls like this one; `out_given` says that outputs come with the call."""
        if call.x.size == 0:
            return EmptyPlan(call)
        dims = len(normalized_axes(call))
        copied, direct = _readable(self, call, dims)
        if not copied and direct.outputs == call.outputs:
            return RowGradientPlan(self, direct, dims, out_given)
        return StagedPlan(call, RowGradientPlan(self, direct, dims, True), copied)

    def summed(self, call: Call) -> list[str]:
        """Outputs that are sums over rows."""
        return [
            name
            for name in self.gradients
            if name in call.outputs
            and not (self.adaptive and layout.has_every_row(call.outputs[name], call.x))
        ]


def normalized_axes(call: Call) -> tuple[int, ...]:
    shape = call.attributes.get("normalized_shape")
    return call.x.shape[-1:] if shape is None else tuple(shape)


def x_name(call: Call) -> str:
    return "residual_out" if "residual_out" in call.inputs else "x"


def grad_x_name(call: Call) -> str:
    return "grad_sum" if "grad_sum" in call.outputs else "grad_x"


def arrays_of(norm: RowGradient, call: Call, dims: int) -> list[tuple[ArraySpec, int] | None]:
    """Every array in the order of GradientArray, and how many of its axes make up a row."""
    inputs, outputs = call.inputs, call.outputs
    found: list[tuple[ArraySpec | None, int]] = [
        (call.x, dims),
        (inputs["grad_out"], dims),
        (inputs.get("grad_residual_out"), dims),
        *((inputs.get(name), dims) for name in norm.parameters),
        *((inputs.get(name), 0) for name in _STATISTICS),
        (outputs[grad_x_name(call)], dims),
        *((outputs.get(name), dims) for name in norm.gradients),
    ]
    return [None if spec is None else (spec, own) for spec, own in found]


def walk_of(norm: RowGradient, call: Call, dims: int) -> layout.Walk:
    summed = [call.outputs[name] for name in norm.summed(call)]
    return layout.walk_of(call.x.shape, arrays_of(norm, call, dims), summed, dims)


def _readable(norm: RowGradient, call: Call, dims: int) -> tuple[list[str], Call]:
    """Inputs that must be copied before a kernel can walk them, and the call that is left.

    Copied are: arrays whose rows are not runs of neighbours, and all that have a row for every
    row of x where the leading axes cannot be walked in three steps.
    """
    inputs, outputs = dict(call.inputs), dict(call.outputs)
    copied = []
    for name, spec in inputs.items():
        if spec is None or name in _STATISTICS or row_is_contiguous(spec, dims):
            continue
        copied.append(name)
        inputs[name] = ArraySpec.contiguous(spec.shape, spec.dtype)
    for name, spec in outputs.items():
        if not row_is_contiguous(spec, dims):
            outputs[name] = ArraySpec.contiguous(spec.shape, spec.dtype)
    left = replace(call, inputs=inputs, outputs=outputs)
    if len(walk_of(norm, left, dims).sizes) <= LEADING:
        return copied, left

    # In the order in which they are walked, so that axes merge.
    lead = call.x.shape[: len(call.x.shape) - dims]
    summed = [outputs[name] for name in norm.summed(left)]
    kept, reduced = layout.axis_order(lead, summed, dims)
    ranks = {axis: rank for rank, axis in enumerate((*kept, *reduced))}
    order = [ranks[axis] for axis in range(len(lead))] + [*range(len(lead), len(call.x.shape))]
    for specs, names in ((inputs, copied), (outputs, [])):
        for name, spec in specs.items():
            if spec is None:
                continue
            own = order[len(order) - len(spec.shape) :]
            if name in _STATISTICS:
                own = order[: len(lead)]
            plain = _ordered(spec, own)
            if plain.strides != spec.strides:
                specs[name] = plain
                if name not in names:
                    names.append(name)
    left = replace(call, inputs=inputs, outputs=outputs)
    if len(walk_of(norm, left, dims).sizes) > LEADING:
        raise errors.wrong_value(
            call.op,
            ", ".join(name for name in norm.parameters if name),
            "shapes that broadcast to x along fewer different sets of axes",
            [s.shape for n in norm.parameters if (s := call.inputs.get(n)) is not None],
        )
    return copied, left


def _ordered(spec: ArraySpec, order: Sequence[int]) -> ArraySpec:
    """An array without holes whose axes come in this order in memory."""
    strides = dense_strides(spec.shape, [len(spec.shape) + max(order) - n for n in order])
    return ArraySpec(spec.shape, strides, spec.dtype)


class RowGradientPlan(LaunchPlan):
    """Launches of a row norm's backward pass."""

    def __init__(self, norm: RowGradient, call: Call, dims: int, out_given: bool) -> None:
        self.norm = norm
        x = call.x
        self.cols = prod(normalized_axes(call))
        self.rows = x.size // self.cols
        self.itemsize = dtypes.FLOATS[x.dtype].itemsize
        self.wide = dtypes.accumulation(x.dtype)
        self.summed = norm.summed(call)
        self.walk = walk_of(norm, call, dims)
        self.tile = self._tile(call, dims)
        self.segments = max(self.tile.segments, 1)
        self.multiprocessors = devices.multiprocessors(call.device.index)
        self.blocks = choices.row_blocks(
            self.walk.groups,
            self.walk.members,
            self.segments,
            self.tile.rows,
            self.multiprocessors * self.tile.ctas,
        )
        self.words = choices.words(self.blocks.block_rows, self.itemsize)
        # Written by the launch that reads: not where other CTAs still read statistics, whose array
        # may be the one to write to.
        whole = all(self._keeps_groups(name) for name in self.summed) and not self.tile.segments
        one_block = self.blocks.blocks == 1 and not self.tile.adds_in_place(self.blocks.block_rows)
        self.direct = bool(self.summed) and one_block and whole
        workspaces = self._make_workspaces()
        given, in_order = _places(norm, call, list(workspaces))
        launchers = self._make_launchers(call, given)
        self._of_more_rows = launchers.pop() if self.direct else None
        super().__init__(call, launchers, list(workspaces.values()), out_given, in_order)

    def compile(self) -> None:
        super().compile()
        if self._of_more_rows is not None:  # where a group is more than one block
            with devices.current(self.call.device.index):
                self._of_more_rows.prepare()

    # -- how rows are laid out --------------------------------------------------------------

    def _strides(self, output: str) -> tuple[int, ...]:
        """Steps of the gradient of a parameter along the axes of the walk."""
        slot = self.norm.gradients.index(output)
        return self.walk.strides[-SLOTS + slot] or ()

    def _keeps_groups(self, output: str) -> bool:
        return all(self._strides(output)[: len(self.walk.kept)])

    def _streams(self, call: Call) -> list[ArraySpec]:
        """What is read row by row."""
        read = [call.x, call.inputs["grad_out"], call.inputs.get("grad_residual_out")]
        read += [
            call.inputs.get(name)
            for name, gradient in zip(self.norm.parameters, self.norm.gradients, strict=True)
            if gradient not in self.summed
        ]
        return [spec for spec in read if spec is not None]

    def _tile(self, call: Call, dims: int) -> choices.GradientTile:
        vec = vector_length(self.cols, self.itemsize)
        pairs = zip(arrays_of(self.norm, call, dims), self.walk.strides, strict=True)
        found = [(*a, s) for a, s in pairs if a is not None and s is not None]
        of_rows = [(spec, s) for spec, own, s in found if own]
        alignment = min(spec.alignment for spec, _ in of_rows)
        access = access_elements(vec, of_rows, alignment)

        def sizes(specs: Sequence[ArraySpec]) -> list[int]:
            return [dtypes.FLOATS[spec.dtype].itemsize for spec in specs]

        shared = [
            call.inputs[name]
            for name, gradient in zip(self.norm.parameters, self.norm.gradients, strict=True)
            if call.inputs.get(name) is not None and gradient in self.summed
        ]
        shape = call.x.shape
        dense = all(
            follow_each_other(self.walk.sizes, strides, self.cols if own else 1)
            for spec, own, strides in found
            if not own or spec.shape == shape
        )
        self.streams = sizes(self._streams(call))
        tile = choices.gradient_tile(
            self.cols,
            self.itemsize,
            access,
            devices.compute_capability(call.device.index),
            streams=self.streams,
            columns=sizes([spec for spec in shared if spec is not None]),
            sums=len(self.summed),
            written=sum(n in call.outputs for n in self.norm.gradients) - len(self.summed),
            adds=call.inputs.get("grad_residual_out") is not None,
            plain=dense,
        )
        return replace(tile, dense=dense)

    # -- what is packed ---------------------------------------------------------------------

    def _head(self, blocks: choices.Blocks) -> bytes:
        """RowGradientArgs up to its addresses."""
        members = self.walk.members
        return struct.pack("q6I", members, self.cols, blocks.blocks, *blocks.numbers(members))

    def _tail(self, call: Call) -> bytes:
        """And behind them."""
        inverse = 1.0 / self.cols
        numbers = struct.pack(
            "df3Iq", inverse, inverse, self.segments, self.words, self.direct, self.rows
        )
        wide = struct.pack("3I4x", *self._stored_wide(call))
        return numbers + layout.packed_steps(self.walk) + wide

    def _stored_wide(self, call: Call) -> list[bool]:
        """Of each slot, whether its gradient is a sum that keeps the accumulation type."""
        return [
            n in self.summed and call.outputs[n].dtype == self.wide for n in self.norm.gradients
        ]

    def _merge(self, call: Call, launcher: Callable[..., Launcher]) -> Launcher:
        """The launch that adds up records: RowGradientMergeArgs around the same addresses."""
        maps, first, grid, plain = [], [], 0, True
        tiles = -(-self.cols // _MERGE_COLUMNS)
        for name in self.norm.gradients:
            if name not in self.summed:
                maps.append(layout.NO_MERGE)
                first.append(_NEVER)
                continue
            packed, rows = layout.merge_map(self.walk, self._strides(name))
            maps.append(packed)
            first.append(grid)
            grid += rows * tiles
            plain = plain and self.walk.groups == 1
        records = self.blocks.blocks * self.words
        wide = sum(stored << slot for slot, stored in enumerate(self._stored_wide(call)))
        merge = choices.merge_of(
            self.cols, dtypes.FLOATS[self.wide].itemsize, grid, records, self.multiprocessors
        )
        together = merge.block // (_MERGE_COLUMNS // merge.vec)
        head = struct.pack("8I", self.cols, tiles, records, *first[1:], plain, wide, together)
        x_type = dtypes.FLOATS[call.x.dtype].c_name
        slots = ", ".join(str(int(name in self.summed)) for name in self.norm.gradients)
        expression = f"row_gradient_merge<{x_type}, {slots}, {merge.vec}>"
        return launcher(expression, grid, merge.block, head=head, tail=b"".join(maps))

    def _make_workspaces(self) -> dict[str, ArraySpec]:
        found = {}
        if self.summed and not self.direct:
            records = self.walk.groups * self.blocks.blocks
            size = records * len(self.summed) * self.words * self.cols
            found["partial"] = ArraySpec.contiguous((size,), self.wide)
        if self.tile.segments:
            size = 2 * self.rows * (1 + self.segments)
            found["sums"] = ArraySpec.contiguous((size,), self.wide)
        return found

    # -- launches ---------------------------------------------------------------------------

    def _types(self, call: Call) -> str:
        """GradientTypes of a call."""
        x_type = dtypes.FLOATS[call.x.dtype].c_name
        residual = call.inputs.get("grad_residual_out")
        kinds = [x_type, "Constant<0>" if residual is None else f"Each<{x_type}>"]
        for slot, name in enumerate(self.norm.parameters):
            spec = call.inputs.get(name)
            kind = "Column" if self.norm.gradients[slot] in self.summed else "Each"
            kinds.append(f"{kind}<{dtypes.FLOATS[spec.dtype].c_name}>" if spec else _ABSENT[slot])
        for name in self.norm.gradients:
            spec = call.outputs.get(name)
            each = spec and f"Each<{dtypes.FLOATS[spec.dtype].c_name}>"
            kinds.append("Summed" if name in self.summed else each or "Absent")
        return f"GradientTypes<{', '.join(kinds)}>"

    def _make_launchers(self, call: Call, given: Sequence[bool]) -> list[Launcher]:
        types = self._types(call)
        x_type = dtypes.FLOATS[call.x.dtype].c_name
        of_blocks, rest = self._head(self.blocks), self._tail(call)

        def launcher(
            expression: str,
            grid: int,
            block: int,
            shared: int = 0,
            head: bytes = of_blocks,
            tail: bytes = rest,
        ) -> Launcher:
            kernel = Kernel(self.norm.file, expression, 1, shared)
            return Launcher(kernel, call.device.index, grid, block, given, head, tail)

        def of_rows(template: str, tile: choices.GradientTile) -> str:
            return f"{template}<{self.norm.struct}, {types}, {tile.expression}>"

        tile = self.tile
        wide = dtypes.FLOATS[self.wide].itemsize
        shared = tile.shared_memory(self.streams, len(self.summed), wide)
        grid = self.walk.groups * self.blocks.blocks * self.segments
        steps = []
        if tile.segments:
            bare = replace(tile, stages=0, combine=False, early=False)
            one_row = self._head(choices.Blocks(self.walk.members, 1))
            steps = [
                launcher(
                    of_rows("row_gradient_sums", bare),
                    self.rows * self.segments,
                    tile.block,
                    head=one_row,
                ),
                launcher(
                    f"row_gradient_row_merge<{x_type}>",
                    -(-self.rows // _ROW_MERGE_ROWS),
                    _ROW_MERGE_BLOCK,
                ),
                launcher(of_rows("row_gradient_segment", tile), grid, tile.block, shared),
            ]
        else:
            steps = [launcher(of_rows("row_gradient", tile), grid, tile.block, shared)]
        if self.summed:
            steps.append(self._merge(call, launcher))
        return steps


def _places(
    norm: RowGradient, call: Call, workspaces: Sequence[str]
) -> tuple[list[bool], Callable[[Sequence[int]], Any]]:
    """Which addresses of RowGradientArgs are given, and a function that puts them in its order.

    It takes those of a call's arrays and its workspaces.
    """
    inputs = {name: i for i, name in enumerate(call.inputs) if call.inputs[name] is not None}
    written = [*call.outputs, *workspaces]
    outputs = {name: len(call.inputs) + i for i, name in enumerate(written)}
    slots = [inputs[x_name(call)], inputs["grad_out"]]
    slots += [outputs.get(name) for name in ("partial", *norm.gradients, grad_x_name(call))]
    slots += [inputs.get(name) for name in (*_STATISTICS, *norm.parameters, "grad_residual_out")]
    slots.append(outputs.get("sums"))
    # never one alone, which would come without its tuple: x, and what is written
    return [s is not None for s in slots], itemgetter(*[s for s in slots if s is not None])


_WEIGHT = ("weight", "", "")
KERNELS = {
    "layer_norm_backward": RowGradient(
        "layer_norm_backward", "LayerNormGradient", _WEIGHT, ("grad_weight", "grad_bias", "")
    ),
    "rms_norm_backward": RowGradient(
        "rms_norm_backward", "RMSNormGradient", _WEIGHT, ("grad_weight", "", "")
    ),
    "fused_add_layer_norm_backward": RowGradient(
        "fused_add_layer_norm_backward",
        "FusedAddLayerNormGradient",
        _WEIGHT,
        ("grad_weight", "grad_bias", ""),
    ),
    "fused_add_rms_norm_backward": RowGradient(
        "fused_add_rms_norm_backward", "FusedAddRMSNormGradient", _WEIGHT, ("grad_weight", "", "")
    ),
    "ada_layer_norm_backward": RowGradient(
        "ada_layer_norm_backward",
        "AdaLayerNormGradient",
        ("scale", "", ""),
        ("grad_scale", "grad_shift", ""),
        True,
    ),
    "ada_layer_norm_zero_backward": RowGradient(
        "ada_layer_norm_zero_backward",
        "AdaLayerNormZeroGradient",
        ("scale", "shift", "gate"),
        ("grad_scale", "grad_shift", "grad_gate"),
        True,
    ),
}
