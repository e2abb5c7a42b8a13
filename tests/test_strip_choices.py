"""Launches over strips of neighbouring channels: what fits, and how wide a vector is."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
from channel_cases import make_inputs
from host_channels import plan_of

from cunorm.cuda.strip_choices import strip_tile, tile_of

SHARED_MEMORY = 228 << 10  # of an SM
MOST = 227 << 10  # of a CTA
BESIDE = 1024 + 256  # of a CTA: what the system takes, and what the kernel declares
BATCHES = (1, 2, 5, 8, 37, 64, 256, 1000)
CHANNELS = (8, 64, 500, 2048)
POSITIONS = (3, 9, 14, 35, 49, 121, 196, 225, 441, 961)


def every_tile():
    for n in BATCHES:
        for c in CHANNELS:
            for s in POSITIONS:
                for itemsize in (2, 4):
                    for tensors in (1, 2):
                        tile = strip_tile(n, c, s, itemsize, 16 // itemsize, 90, tensors)
                        if tile is not None:
                            yield (n, c, s, itemsize, tensors), tile


def test_vectors_walk_strips_of_whole_channels():
    for (n, c, s, _, _), tile in every_tile():
        assert c % tile.channels == 0
        assert tile.width * tile.vec == tile.channels * s
        assert tile.channels == tile.vec // gcd(s, tile.vec)
        assert tile.vec <= s  # a vector has elements of two channels at most
        assert tile.rows == n


def test_threads_cover_whole_rows_and_channels():
    for (n, *_), tile in every_tile():
        assert tile.threads % 32 == 0
        assert tile.ty * tile.width <= tile.threads <= 512
        assert tile.ty <= n
        assert tile.channels <= tile.threads // 32  # a warp for each
        # Fewer rows at a time would take more rounds.
        rounds = -(-n // tile.ty)
        assert tile.ty == 1 or -(-n // (tile.ty - 1)) > rounds


def test_ctas_fit_an_sm():
    for (_, _, _, itemsize, tensors), tile in every_tile():
        strip = -(-(tile.rows * tile.width * tile.vec * itemsize * tensors) // 16) * 16
        records = 16 * (tile.threads + tile.ty * tile.channels)
        assert strip + records <= tile.shared_memory <= MOST - 256
        assert tile.ctas * (tile.shared_memory + BESIDE) <= SHARED_MEMORY
        assert tile.ctas >= 1
        assert tile.ctas * tile.threads * (48 + 4 * tensors * tile.vec) <= 65536


@pytest.mark.parametrize(
    ("size", "tensors", "vec", "ctas"),
    [
        # The widest vectors, where there are many strips.
        ((256, 2048, 49, 2), 1, 8, 1),
        ((256, 2048, 49, 2), 2, 4, 1),
        ((64, 2048, 49, 2), 1, 8, 3),
        ((64, 2048, 49, 2), 2, 8, 2),
        ((128, 512, 169, 2), 2, 2, 1),
        # Narrower strips, where there are few.
        ((64, 256, 225, 2), 1, 2, 3),
        ((32, 512, 49, 2), 1, 4, 4),
    ],
)
def test_examples(size, tensors, vec, ctas):
    tile = strip_tile(*size, 16 // size[-1], 90, tensors)
    assert (tile.vec, tile.ctas) == (vec, ctas)


@pytest.mark.parametrize(
    ("size", "access", "arch"),
    [
        ((256, 2048, 49, 2), 8, 80),
        ((256, 2048, 49, 2), 8, 120),
        ((256, 2048, 49, 8), 2, 90),
        ((256, 2048, 49, 2), 1, 90),  # rows that start anywhere
        ((256, 2049, 49, 2), 1, 90),
        ((2000, 2048, 49, 4), 4, 90),  # too many samples
        ((8, 64, 961, 2), 8, 90),  # more vectors than threads
        ((256, 8, 49, 2), 8, 90),  # too few strips
        ((8, 64, 49, 2), 8, 90),  # too small a channel
    ],
)
def test_where_another_launch_does_better(size, access, arch):
    assert strip_tile(*size, access, arch) is None


def test_few_kernels_for_any_number_of_samples():
    """What a launch asks for follows from its kernel."""
    tiles = [strip_tile(n, 2048, 49, 2, 8, 90) for n in range(1, 500)]
    kernels = {(tile.expression, tile.shared_memory) for tile in tiles if tile}
    assert len({expression for expression, _ in kernels}) == len(kernels) <= 16


def test_rows_that_do_not_fit():
    assert tile_of(8, 289, 2048, 49, 2, 1) is None
    assert tile_of(4, 289, 2048, 49, 2, 1) is not None


def launched(shape, dtype="float16", mode="batch_norm-training", change=lambda x: x):
    inputs = {n: a if a is None else change(a) for n, a in make_inputs(mode, shape, dtype).items()}
    return plan_of(mode, inputs).launches[0].kernel.partition("<")[0]


def every_other_sample(array):
    return array if array.ndim == 1 else np.repeat(array, 2, axis=0)[::2]


def some_channels(array):
    return array if array.ndim == 1 else np.concatenate([array, array[:, :3]], 1)[:, :-3]


def test_which_calls_take_strips():
    assert launched((24, 64, 7, 7)) == "strip_norm"
    assert launched((24, 64, 7, 7), change=every_other_sample) == "strip_norm"
    assert launched((24, 64, 7, 7), mode="batch_norm_backward-training") == "strip_gradient"
    for other in (
        launched((24, 64, 7, 7), "float64"),
        launched((24, 64, 7, 7), mode="batch_norm_backward-frozen"),
        launched((24, 64, 7, 7), mode="batch_norm_stats"),  # nothing is written
        launched((24, 64, 7, 7), change=some_channels),  # rows that start anywhere
        launched((24, 64, 14, 14)),  # runs of a channel by eight bytes
        launched((24, 64, 16, 16)),
    ):
        assert not other.startswith("strip")
