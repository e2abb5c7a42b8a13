"""Backward passes of row norms on the host: calls of their op objects, run by HostKernels."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

from backward_cases import CLASSES, make_op
from host_channels import placed, spec_of

from cunorm.arrays import Device
from cunorm.cuda import devices, row_gradient_choices
from cunorm.cuda.row_gradient import KERNELS
from cunorm.cuda.row_gradient_choices import Blocks

CHOOSE_TILE = row_gradient_choices.gradient_tile
CHOOSE_MERGE = row_gradient_choices.merge_of


class Path:
    """A way through the kernels: shapes, and launch choices that differ from the package's own.

    `changes`: numbers of the tile; `segmented`: packs of a segment of 32 threads; `block_rows`;
    `turns`: blocks are interleaved; `merge_warps`: of a CTA that adds up records.
    """

    def __init__(
        self, shape, block_rows=None, segmented=0, turns=False, merge_warps=None, **changes
    ):
        self.shape = shape
        self.block_rows = block_rows
        self.segmented = segmented
        self.turns = turns
        self.merge_warps = merge_warps
        self.changes = changes

    def tile(self, cols, itemsize, access, arch, **options):
        tile = CHOOSE_TILE(cols, itemsize, access, arch, **options)
        if self.segmented:
            segments = -(-cols // (32 * self.segmented * tile.vec))
            tile = replace(tile, packs=self.segmented, threads=32, rows=1, segments=segments)
            tile = replace(tile, stages=min(tile.stages, 2), full=False)
        return replace(tile, **self.changes)

    def blocks(self, groups, members, segments, rows, resident):
        block_rows = min(self.block_rows or members, members)
        blocks = -(-members // block_rows)
        return Blocks(blocks, block_rows, rows, self.turns and members > blocks * rows)

    def merge(self, *numbers):
        merge = CHOOSE_MERGE(*numbers)
        return replace(merge, block=32 * self.merge_warps) if self.merge_warps else merge


def plan_of(op, sizes, inputs, path=None, arch=90, out=()):
    """The plan of a call."""
    made = make_op(op, sizes)
    specs = {name: None if a is None else spec_of(a) for name, a in inputs.items()}
    call = made._call(specs, False, None, Device("cuda"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "compute_capability", lambda index: arch))
        stack.enter_context(mock.patch.object(devices, "multiprocessors", lambda index: 4))
        if path:
            for name, stand_in in (
                ("gradient_tile", path.tile),
                ("row_blocks", path.blocks),
                ("merge_of", path.merge),
            ):
                stack.enter_context(mock.patch.object(row_gradient_choices, name, stand_in))
        return KERNELS[op].plan(call, bool(out))


def run(kernels, op, sizes, inputs, path=None, backwards=False):
    """One gradient for each output of the op, None where there is none."""
    read = [placed(array) for array in inputs.values()]
    results = kernels.execute(lambda: plan_of(op, sizes, inputs, path), read, backwards)
    names = CLASSES[op].output_names
    given = iter(results)
    absent = inputs.get("weight", 0) is None
    return tuple(None if absent and name == "grad_weight" else next(given) for name in names)
