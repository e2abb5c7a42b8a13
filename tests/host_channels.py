"""Batch, group and instance norm on the host: calls of their op objects, run by HostKernels."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
from channel_cases import make_inputs, make_op
from host_kernels import Guarded

from cunorm import dtypes
from cunorm.arrays import ArraySpec, Device
from cunorm.cuda import (
    channel,
    channel_choices,
    channel_walk,
    devices,
    kept_choices,
    kept_column_choices,
    strip_choices,
)


def spec_of(array):
    strides = tuple(s // array.itemsize for s in array.strides)
    address = array.ctypes.data | 16
    return ArraySpec(array.shape, strides, dtypes.name_of(array.dtype), address & -address)


def placed(array):
    """A copy at a multiple of 16 bytes, in the same memory order, with a guard around it.

    What has gaps keeps them, and what runs backwards runs backwards.
    """
    if array is None:
        return None
    spec = spec_of(array)
    low = sum(min((n - 1) * s, 0) for n, s in zip(spec.shape, spec.strides, strict=True))
    reach = spec.extent[1] // array.itemsize - low
    whole = Guarded(ArraySpec.contiguous((reach,), spec.dtype)).array
    copy = np.ndarray(array.shape, array.dtype, whole, -low * array.itemsize, array.strides)
    copy[...] = array
    return copy


def not_kept(*args):
    return None


class Path:
    """A way through the kernels: launch choices that take the place of the package's own."""

    def __init__(self, shape, order="first", **stand_ins):
        self.shape = shape
        self.order = order
        self.stand_ins = {"strip_tile": not_kept, **stand_ins}
        self.columns = order == "last" or "_MANY_ROWS" in stand_ins
        self.per_sample = not {"_MANY_ROWS", "strip_tile"} & stand_ins.keys()

    def inputs(self, inputs):
        """Inputs in the path's memory order."""
        if self.order == "first":
            return inputs
        return {
            name: array
            if array is None or array.ndim == 1
            else np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
            for name, array in inputs.items()
        }


def cluster(
    vectors, vec, access, itemsize, arch, tensors=1, sets=None, ends="Whole", crossing=False
):
    """Four CTAs, and where one array is held, a pack a thread in shared memory."""
    packs = -(-vectors // (64 * 4))
    return channel_choices.RunTile(
        vec, min(access, vec), packs, 64, cluster=4, shared=int(tensors == 1), ends=ends
    )


def segments(
    vectors, vec, access, itemsize, arch, tensors=1, sets=None, ends="Whole", crossing=False
):
    """Segments of 64 threads with two packs each."""
    segments = -(-vectors // 128)
    return channel_choices.RunTile(vec, min(access, vec), 2, 64, segments=segments, ends=ends)


def blocks(whole, rows, columns, vec, access, itemsize, arch, tensors=1, single=True):
    """Blocks of rows that a CTA takes two at a time, three blocks in turns."""
    tx = min(channel_choices.power_of_two_up(-(-columns // vec)), 4)
    return channel_choices.ColumnTile(vec, min(access, vec), tx, 64 // tx, 2, 1, 3)


def block_segments(
    vectors, vec, access, itemsize, arch, tensors=1, sets=None, ends="Whole", crossing=False
):
    """Segments of a CTA of 256 threads with one pack each."""
    segments = -(-vectors // 256)
    return channel_choices.RunTile(vec, min(access, vec), 1, 256, segments=segments, ends=ends)


class KeptOfThree(kept_choices.KeptTile):
    """Every third set is held by the same CTAs."""

    def groups(self, sets, multiprocessors):
        return -(-sets // 3)


def kept(vectors, vec, access, itemsize, arch, tensors, one_run, scaled, multiprocessors):
    """Segments of a CTA of 256 threads: a pack in a register, one in shared memory."""
    if access < vec:
        return None
    return KeptOfThree(vec, 2, 1, 256, 1, one_run, tensors, -(-vectors // 512))


def kept_blocks(whole, rows, columns, vec, access, itemsize, arch, tensors, multiprocessors):
    """Three blocks of rows, two of which are joined first; four batches of each are kept."""
    if access < vec or itemsize == 8 or vec * itemsize < 16:
        return None
    tile = blocks(whole, rows, columns, vec, access, itemsize, arch)
    return kept_column_choices.KeptColumnTile(**vars(tile), batches=4, together=2, tensors=tensors)


def kept_block(*args):
    """The same with all records joined at once, and all of a block on chip."""
    tile = kept_blocks(*args)
    return tile and replace(tile, batches=16, together=3)


def strips(vectors, ty):
    """Strips with the widest vectors, or narrower ones, and so many rows at a time."""

    def strip_tile(samples, channels, positions, itemsize, access, arch, tensors=1):
        if itemsize == 8:
            return None
        vec = access // vectors
        tile = strip_choices.tile_of(vec, samples, channels, positions, itemsize, tensors)
        return replace(tile, ty=ty, threads=256)

    return strip_tile


def short_maps(elements, length, vec, access, tensors=1):
    """Four packs of 64 threads, or one where channels are short."""
    crossing, ragged = length % vec != 0, elements % vec != 0
    tile = channel_choices.MapTile(vec, min(access, vec), 4, 64, crossing=crossing, ragged=ragged)
    return replace(tile, packs=4 if tile.most_runs(length) <= 2 * tile.threads else 1)


def long_maps(elements, length, vec, access, tensors=1):
    """As if 32 bits could not number the elements."""
    return replace(short_maps(elements, length, vec, access, tensors), brief=False)


def short_column_maps(planes, rows, columns, vec, access, arch, tensors=1):
    tile = blocks(True, rows, columns, vec, access, 0, arch)
    return replace(tile, segments=-(-rows // (tile.ty * tile.packs)))


COLUMNS = {"column_tile": blocks, "column_map_tile": short_column_maps}
ROWS = {**COLUMNS, "_MANY_ROWS": 1, "_LARGE": 0}
PATHS = {
    "several sets a warp": Path((5, 6, 4, 3)),
    "one CTA a set": Path((3, 6, 20, 36)),
    "several sets a warp, at length": Path((5, 6, 4, 3), BRIEF=0),
    "one CTA a set, at length": Path((3, 6, 20, 36), BRIEF=0),
    "a cluster a set": Path((2, 6, 64, 36), run_tile=cluster, kept_tile=not_kept),
    "segments of a set": Path(
        (2, 6, 64, 32),
        run_tile=segments,
        map_tile=short_maps,
        merge_threads=lambda records: 256,
        kept_tile=not_kept,
    ),
    "several sets a warp, of any length": Path((5, 6, 7, 3)),
    "one CTA a set, of any length": Path((3, 6, 37, 53)),
    "one CTA a set, masked ends": Path((2, 24, 19, 53), _MUCH=0),
    "segments with masked ends": Path(
        (2, 24, 61, 37), run_tile=segments, map_tile=long_maps, kept_tile=not_kept, _MUCH=0
    ),
    # Some runs end before the last vector of their set, which is a segment of its own.
    "a last segment without elements": Path(
        (2, 24, 23, 89), run_tile=segments, map_tile=long_maps, kept_tile=not_kept, _MUCH=0
    ),
    "samples that start anywhere": Path((3, 9, 19, 53), _MUCH=0),
    "segments of samples that start anywhere": Path(
        (3, 9, 61, 37), run_tile=segments, map_tile=long_maps, kept_tile=not_kept, _MUCH=0
    ),
    "a cluster a set, of any length": Path((2, 6, 61, 37), run_tile=cluster, kept_tile=not_kept),
    "segments of sets of any length": Path(
        (2, 6, 61, 37), run_tile=segments, map_tile=long_maps, kept_tile=not_kept
    ),
    "vectors of several channels": Path((3, 24, 5, 3), _MUCH=0),
    "a cluster with vectors of several channels": Path(
        (2, 24, 37, 11), run_tile=cluster, kept_tile=not_kept, _MUCH=0
    ),
    "segments of short runs": Path(
        (7, 24, 7, 5), run_tile=segments, map_tile=long_maps, kept_tile=not_kept
    ),
    "segments kept on chip": Path((2, 6, 70, 36), run_tile=block_segments, kept_tile=kept),
    "strips": Path((53, 24, 3, 3), strip_tile=strips(1, 2)),
    "narrow strips": Path((19, 12, 7, 5), strip_tile=strips(2, 3)),
    "a short table": Path((5, 6, 2, 3), "last"),
    "a tile of columns": Path((3, 6, 7, 5), "last"),
    "blocks of rows": Path((2, 24, 40, 31), "last", **COLUMNS, kept_column_tile=not_kept),
    "blocks kept on chip": Path((2, 24, 40, 31), "last", **COLUMNS, kept_column_tile=kept_blocks),
    "blocks kept wholly on chip": Path(
        (2, 48, 5, 31), "last", **COLUMNS, kept_column_tile=kept_block
    ),
    "samples as rows": Path((170, 24, 3, 1), **ROWS),
    "samples of pairs as rows": Path((170, 24, 2, 1), **ROWS),
    "samples of fours as rows": Path((90, 24, 2, 2), **ROWS),
}


def plan_of(mode, inputs, path=None, axis=1, return_stats=True, arch=90, out=()):
    """The plan of a call in a mode of an op; the first outputs may be given."""
    op = make_op(mode)
    specs = {name: None if a is None else spec_of(a) for name, a in inputs.items()}
    call = op._call(specs, return_stats and bool(op.statistic_names), axis, Device("cuda"))
    given = {name: spec_of(a) for name, a in zip(call.outputs, out, strict=False)}
    call = replace(call, outputs={**call.outputs, **given})
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "compute_capability", lambda index: arch))
        for name, stand_in in (path.stand_ins if path else {}).items():
            owners = (
                *(channel_choices, kept_choices, kept_column_choices),
                *(strip_choices, channel_walk),
            )
            owner = next(o for o in owners if hasattr(o, name))
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        return channel.KERNELS[op.name].plan(call, bool(out))


def inputs_on(path, mode, dtype, **options):
    """Inputs of a path's shape, in its memory order."""
    return PATHS[path].inputs(make_inputs(mode, PATHS[path].shape, dtype, **options))


def run(kernels, mode, inputs, path=None, backwards=False, together=1, **options):
    """Results of a call, and its inputs as it leaves them."""
    after = {name: placed(array) for name, array in inputs.items()}
    results = kernels.execute(
        lambda: plan_of(mode, after, path, **options),
        list(after.values()),
        backwards,
        together=together,
    )
    if mode.startswith("batch_norm_backward") and len(results) == 2:
        results = (results[0], None, results[1])
    return results, after
