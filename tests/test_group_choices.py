"""Launch choices of group and instance norm backward, held to what the kernels require."""

from __future__ import annotations

import pytest

from cunorm.cuda import group_choices as choices
from cunorm.cuda.choices import vector_length

ARCHS = (75, 80, 86, 89, 90, 100, 103, 120)
RESIDENT_THREADS = {75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 120: 1536}
LARGEST_CLUSTER = {90: 16, 100: 16, 103: 8, 120: 8}
REGISTER_FILE = 65536
SHARED_MEMORY = 227 << 10  # of the CTAs of an SM, where sets go on in shared memory
STATIC = 2 << 10  # what a CTA takes besides: exchanges, and a KiB for itself
LENGTHS = (1, 3, 4, 7, 8, 31, 49, 64, 196, 784, 1023, 1024, 3136, 16384, 21609, 65536, 1 << 20)
CHANNELS = (1, 2, 3, 4, 10, 16, 17, 40, 64, 512, 5000)
KINDS = (2, 4, 8)  # bytes of an element


def tiles():
    for arch in ARCHS:
        for itemsize in KINDS:
            for length in LENGTHS:
                vec = vector_length(length, itemsize)
                for channels in CHANNELS:
                    for access in {1, vec}:
                        tile = choices.group_tile(
                            channels, length // vec, vec, access, itemsize, arch
                        )
                        yield arch, itemsize, length, channels, tile


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


def test_units_cover_their_set():
    for _, _, length, channels, tile in tiles():
        vectors = length // tile.vec
        units = channels * tile.units_of_channel(vectors)
        held = tile.threads * tile.cluster // tile.lanes * tile.units * max(tile.segments, 1)
        assert tile.units_of_channel(vectors) * tile.lanes * tile.packs >= vectors
        assert held >= units
        if tile.segments:  # and no share is empty
            assert held // tile.segments * (tile.segments - 1) < units
        else:
            assert units < 1 << 18  # Cycle::kReach


def test_tiles_are_what_the_kernels_take():
    for arch, itemsize, _, _, tile in tiles():
        assert all(is_power_of_two(n) for n in (tile.lanes, tile.threads, tile.sets, tile.cluster))
        assert tile.block % 32 == 0 and tile.lanes <= min(tile.threads, 32)
        assert tile.sets == 1 or tile.threads <= 32
        assert tile.cluster == 1 or (tile.sets == 1 and not tile.segments)
        assert tile.cluster <= LARGEST_CLUSTER.get(arch, 1)
        assert 0 <= tile.shared < tile.packs * tile.units
        assert tile.shared == 0 or tile.vec * itemsize == 16


def test_tiles_fit_an_sm():
    for arch, itemsize, _, _, tile in tiles():
        assert tile.block * tile.ctas <= RESIDENT_THREADS.get(arch, 2048)
        registers = min(REGISTER_FILE // (tile.block * tile.ctas), 255)
        held = tile.packs * tile.units - tile.shared
        assert 2 * held * max(tile.vec * itemsize // 4, 1) + 24 <= registers
        if tile.shared:
            assert (tile.shared_memory(itemsize) + STATIC) * tile.ctas <= SHARED_MEMORY


@pytest.mark.parametrize("itemsize", KINDS)
def test_large_sets_are_cut_and_small_ones_are_not(itemsize):
    def cut(channels, length):
        vec = 16 // itemsize
        return choices.group_tile(channels, length // vec, vec, vec, itemsize, 90).segments > 0

    assert not cut(4, 1024)
    assert not cut(1, 65536)
    assert cut(4, 1 << 20)
    assert cut(16, 65536) == (itemsize > 2)


def test_samples_that_share_a_record():
    tile = choices.group_tile(4, 1, 1, 1, 2, 90)
    assert choices.samples_together(8, 32, tile) == 1
    assert choices.samples_together(1_000_003, 32, tile) > 100
    assert choices.shares_records(1, tile)
    assert not choices.shares_records(65536, tile)


def test_few_samples_take_one_cluster():
    tile = choices.group_tile(4, 128, 8, 8, 2, 90)
    assert all(choices.fits_cluster(n, 32, tile, 90) for n in (1, 2, 7, 8))
    assert not choices.fits_cluster(9, 32, tile, 90)
    assert not choices.fits_cluster(8, 5000, tile, 90)
    assert choices.fits_cluster(1, 5000, tile, 80) and not choices.fits_cluster(2, 32, tile, 80)
    for _, itemsize, _, _, tile in tiles():
        if choices.fits_cluster(8, 32, tile, 90):
            records = 8 * tile.threads // tile.lanes * tile.units
            of_cta = tile.shared_memory(itemsize) + STATIC + records * (32 if itemsize == 8 else 16)
            assert tile.cluster == 1 and not tile.segments and tile.threads >= 32
            assert of_cta <= SHARED_MEMORY // tile.ctas or tile.shared == 0


def test_blocks_of_rows_cover_a_sample():
    for arch in ARCHS:
        for itemsize in KINDS:
            for columns in (1, 3, 6, 24, 64, 320, 1280, 5000):
                vec = vector_length(columns, itemsize)
                for rows in (0, 1, 7, 49, 1024, 16384, 65536, 1 << 21):
                    tile = choices.column_tile(max(rows, 1), columns, vec, vec, itemsize, arch)
                    batches = -(-max(rows, 1) // (tile.ty * tile.packs))
                    assert 1 <= tile.segments <= batches
                    assert tile.grid(1, columns) <= 1024


def test_merges_take_as_many_threads_as_there_are_records():
    assert choices.merge_threads(3) == 32
    assert choices.merge_threads(10**6) == 256
    assert [choices.merge_lanes(n) for n in (1, 2, 3, 16, 1000)] == [1, 2, 4, 16, 32]
