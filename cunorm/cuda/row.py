"""Plans of the row norms: from a checked call to launches."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from cunorm import dtypes
from cunorm.arrays import ArraySpec
from cunorm.call import Call
from cunorm.cuda import choices, devices
from cunorm.cuda.compiler import Kernel
from cunorm.cuda.launch import Launcher
from cunorm.cuda.layout import (
    LEADING,
    access_elements,
    collapsed,
    follow_each_other,
    leading_strides,
    row_is_contiguous,
    row_numbers,
)
from cunorm.cuda.plans import EmptyPlan, LaunchPlan, StagedPlan

_FULL_SIZE = (0, 1, 5, 6)  # of the operands in the order of RowArgs: x, residual, y, residual_out
_MERGE_THREADS = 256  # kMergeThreads in row_segments.cuh
_RECORD_WORDS = 5  # doubles of a SegmentRecord
_ABSENT = ("One", "Zero", "One")  # what stands for a weight, a bias, a gate that is not there


@dataclass(frozen=True)
class RowNorm:
    """A norm of the row family, as its .cu file spells it."""

    file: str
    struct: str
    parameters: tuple[str, ...]
    row_parameters: bool  # each row may have its own
    summary_words: int  # numbers that a row is normalized with (RowSummary in row_segments.cuh)

    def plan(self, call: Call, out_given: bool) -> Any:
        """A plan for calls like this one; `out_given` says that outputs come with the call."""
        if call.x.size == 0:
            return EmptyPlan(call)
        dims = len(call.x.shape) - len(_leading_shape(call))
        copied, direct = _readable(call, dims)
        if not copied and direct.outputs == call.outputs:
            return RowPlan(self, direct, dims, out_given)
        return StagedPlan(call, RowPlan(self, direct, dims, True), copied)


def _leading_shape(call: Call) -> tuple[int, ...]:
    normalized = call.attributes.get("normalized_shape")
    dims = 1 if normalized is None else len(normalized)
    return call.x.shape[: len(call.x.shape) - dims]


def _readable(call: Call, dims: int) -> tuple[list[str], Call]:
    """Inputs that must be copied before a kernel can walk them, and the call that is left.

    Copied are: arrays whose rows are not runs of neighbours, and all that is not contiguous
    where the leading axes cannot be walked in three steps.
    """
    shape = call.x.shape
    inputs, outputs = dict(call.inputs), dict(call.outputs)
    copied = []
    for name, spec in inputs.items():
        if spec is not None and not row_is_contiguous(spec, dims):
            copied.append(name)
            inputs[name] = ArraySpec.contiguous(spec.shape, spec.dtype)
    for name, spec in outputs.items():
        if not row_is_contiguous(spec, dims):
            outputs[name] = ArraySpec.contiguous(spec.shape, spec.dtype)

    present = [s for s in (*inputs.values(), *outputs.values()) if s is not None]
    lead = shape[: len(shape) - dims]
    rows = collapsed(lead, [leading_strides(s, shape, dims) for s in present])
    if len(rows.shape) > LEADING:
        for name, spec in inputs.items():
            plain = spec and ArraySpec.contiguous(spec.shape, spec.dtype)
            if spec is not None and spec.strides != plain.strides:
                inputs[name] = plain
                if name not in copied:
                    copied.append(name)
        outputs = {n: ArraySpec.contiguous(s.shape, s.dtype) for n, s in outputs.items()}
        present = [s for s in (*inputs.values(), *outputs.values()) if s is not None]
        rows = collapsed(lead, [leading_strides(s, shape, dims) for s in present])
    if len(rows.shape) > LEADING:  # parameters broadcast over alternating axes
        for name, spec in inputs.items():
            if spec is not None and spec.shape != shape and len(spec.shape) > dims:
                inputs[name] = ArraySpec.contiguous(shape, spec.dtype)
                if name not in copied:
                    copied.append(name)
    return copied, Call(call.op, call.attributes, inputs, outputs, call.statistics, call.device)


class RowPlan(LaunchPlan):
    """Launches of a row norm."""

    def __init__(self, norm: RowNorm, call: Call, dims: int, out_given: bool) -> None:
        self.norm = norm
        x = call.x
        shape = x.shape
        lead = shape[: len(shape) - dims]
        self.row_count = prod(lead)
        self.cols = prod(shape[len(lead) :])

        names = ["x", "residual", *norm.parameters]
        operands: list[ArraySpec | None] = [call.inputs.get(name) for name in names]
        operands += [None] * (5 - len(operands))
        operands += [call.outputs.get("y"), call.outputs.get("residual_out")]
        present = [s for s in operands if s is not None]
        rows = collapsed(lead, [leading_strides(s, shape, dims) for s in present])
        steps = iter(rows.strides)
        strides = [(0,) * len(rows.shape) if s is None else next(steps) for s in operands]

        itemsize = dtypes.FLOATS[x.dtype].itemsize
        vec = choices.row_vector(self.cols, itemsize)
        access = _access(vec, [(operands[i], strides[i]) for i in _FULL_SIZE])
        of_parameters = _access(vec, zip(operands[2:5], strides[2:5], strict=True))
        parameters = [call.inputs.get(name) for name in norm.parameters]
        self._parameter_bytes = parameter_bytes = sum(
            dtypes.FLOATS[p.dtype].itemsize for p in parameters if p
        )
        arch = devices.compute_capability(call.device.index)
        tile = choices.row_tile(
            self.cols,
            itemsize,
            access,
            arch,
            parameter_words=parameter_bytes / itemsize,
            addends=1 + ("residual" in call.inputs),
            centred=norm.summary_words > 2,
            row_parameters=norm.row_parameters,
            of_parameters=of_parameters,
        )
        arrays = [operands[i] and strides[i] for i in _FULL_SIZE]
        dense = all(a is None or follow_each_other(rows.shape, a, self.cols) for a in arrays)
        self.tile = replace(
            tile, dense=dense, brief=tile.brief and dense and not norm.row_parameters
        )
        self._head = self._numbers(call)
        self._tail = self._steps(rows.shape, strides)
        workspaces = self._make_workspaces(call)
        super().__init__(call, self._make_launchers(call, parameters), workspaces, out_given)

    def _numbers(self, call: Call) -> bytes:
        """RowArgs up to its addresses."""
        eps = call.attributes["eps"]
        if eps is None:  # the machine epsilon of the accumulation type
            wide = dtypes.accumulation(call.x.dtype)
            eps = 2.0 ** -dtypes.FLOATS[wide].mantissa_bits
        return struct.pack(
            "2I3d2f",
            *(self.cols, self.row_count & 0xFFFFFFFF),
            *row_numbers(self.cols, eps),
        )

    def _steps(self, sizes: tuple[int, ...], strides: Sequence[Sequence[int]]) -> bytes:
        """RowArgs behind its addresses: rows, then how arrays step from one to the next."""
        if len(sizes) < 2:  # one step says where a row is
            middle = inner = 0
            steps = [s[0] if s else 0 for s in strides]
            more = [(0, 0)] * len(strides)
        else:
            padding = (0,) * (LEADING - len(sizes))
            _, middle, inner = (1,) * (LEADING - len(sizes)) + tuple(sizes)
            padded = [padding + tuple(s) for s in strides]
            steps = [s[0] for s in padded]
            more = [s[1:] for s in padded]
        flat = [step for pair in more for step in pair]
        segments = max(self.tile.segments, 1)
        return struct.pack("2q7q2q14q", self.row_count, segments, *steps, middle, inner, *flat)

    def _make_launchers(self, call: Call, parameters: Sequence[ArraySpec | None]) -> list[Launcher]:
        x_type = dtypes.FLOATS[call.x.dtype].c_name
        kinds = [
            dtypes.FLOATS[p.dtype].c_name if p else _ABSENT[i] for i, p in enumerate(parameters)
        ]
        kinds += _ABSENT[len(kinds) :]
        types = f"Types<{x_type}, {', '.join(kinds)}>"
        full = f"{self.norm.struct}, {types}, {self.tile.expression}"

        given = _given(call, self.norm, bool(self.tile.segments))
        shared_memory = self.tile.shared_memory(
            dtypes.FLOATS[call.x.dtype].itemsize, self._parameter_bytes
        )

        def launcher(template: str, arguments: str, grid: int, block: int) -> Launcher:
            shared = 0 if template == "row_segment_merge" else shared_memory
            kernel = Kernel(self.norm.file, f"{template}<{arguments}>", self.tile.cluster, shared)
            return Launcher(kernel, call.device.index, grid, block, given, self._head, self._tail)

        grid, block = self.tile.grid(self.row_count), self.tile.block
        if self.tile.segments:
            merged = f"{self.norm.struct}, {types}"
            return [
                launcher("row_segment_statistics", full, grid, block),
                launcher("row_segment_merge", merged, self.row_count, _MERGE_THREADS),
                launcher("row_segment_normalize", full, grid, block),
            ]
        if self.tile.cluster > 1:
            return [launcher("row_norm_cluster", full, grid, block)]
        if self.tile.brief:
            held = self.tile.threads * self.tile.packs * self.tile.vec
            brief = f"{full}, {str(held == self.cols).lower()}"
            return [launcher("row_norm_brief", brief, grid, block)]
        return [launcher("row_norm", full, grid, block)]

    def _make_workspaces(self, call: Call) -> list[ArraySpec]:
        if not self.tile.segments:
            return []
        wide = dtypes.accumulation(call.x.dtype)
        segments = self.row_count * self.tile.segments
        return [
            ArraySpec.contiguous((segments * _RECORD_WORDS,), "float64"),
            ArraySpec.contiguous((self.row_count * self.norm.summary_words,), wide),
        ]


def _access(vec: int, arrays: Iterable[tuple[ArraySpec | None, Sequence[int]]]) -> int:
    """Elements per memory transaction that arrays with such row steps allow; absent ones any."""
    present = [(spec, steps) for spec, steps in arrays if spec is not None]
    alignment = min((spec.alignment for spec, _ in present), default=choices.TRANSACTION)
    return access_elements(vec, present, alignment)


def _given(call: Call, norm: RowNorm, workspaces: bool) -> list[bool]:
    """Which of the addresses of RowArgs a call gives, in its own order."""
    parameters = [*norm.parameters, *[""] * (3 - len(norm.parameters))]
    inputs = [name in call.inputs for name in ("x", "residual", *parameters)]
    outputs = [name in call.outputs for name in ("y", "residual_out")]
    statistics = [name in call.statistics for name in ("mean", "rstd")]
    return [*inputs, *outputs, *statistics, workspaces, workspaces]


KERNELS = {
    "layer_norm": RowNorm("layer_norm", "LayerNorm", ("weight", "bias"), False, 5),
    "rms_norm": RowNorm("rms_norm", "RMSNorm", ("weight",), False, 2),
    "fused_add_layer_norm": RowNorm(
        "fused_add_layer_norm", "FusedAddLayerNorm", ("weight", "bias"), False, 5
    ),
    "fused_add_rms_norm": RowNorm("fused_add_rms_norm", "FusedAddRMSNorm", ("weight",), False, 2),
    "ada_layer_norm": RowNorm("ada_layer_norm", "AdaLayerNorm", ("scale", "shift"), True, 5),
    "ada_layer_norm_zero": RowNorm(
        "ada_layer_norm_zero", "AdaLayerNormZero", ("scale", "shift", "gate"), True, 5
    ),
}
