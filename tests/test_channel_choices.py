"""Launch choices of batch, group and instance norm, held to what the kernels require."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cunorm.cuda import channel_choices as choices
from cunorm.cuda import channel_launch
from cunorm.cuda.choices import vector_length

ARCHS = (75, 80, 86, 89, 90, 100, 103, 120)
RESIDENT_THREADS = {75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 120: 1536}
LARGEST_CLUSTER = {90: 16, 100: 16, 103: 8, 120: 8}
REGISTER_FILE = 65536
SHARED_MEMORY = {90: 227 << 10, 100: 227 << 10}  # of the CTAs of an SM; 64 KiB and more elsewhere
SIZES = sorted({*range(1, 70), *(2**i + d for i in range(6, 24) for d in (-1, 0, 1, 3)), 784, 3136})
VECTORS = ((2, 8), (2, 4), (2, 1), (4, 4), (4, 2), (4, 1), (8, 2), (8, 1))  # itemsize, vec


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


def run_tiles():
    for arch in ARCHS:
        for itemsize, vec in VECTORS:
            for vectors in SIZES:
                for tensors in (1, 2):
                    tile = choices.run_tile(vectors, vec, vec, itemsize, arch, tensors)
                    yield arch, itemsize, vectors, tensors, tile
                if vec * itemsize < 16:
                    continue
                for ends, access in (("Masked", vec), ("Ragged", 1)):
                    tile = choices.run_tile(
                        vectors, vec, access, itemsize, arch, ends=ends, crossing=True
                    )
                    yield arch, itemsize, vectors, 1, tile


def column_tiles():
    for arch in ARCHS:
        for itemsize, vec in VECTORS:
            for columns in (vec, 3 * vec, 64 * vec, 1000 * vec):
                for rows in SIZES:
                    for tensors in (1, 2):
                        for single, whole in ((True, True), (False, True), (False, False)):
                            tile = choices.column_tile(
                                whole, rows, columns, vec, vec, itemsize, arch, tensors, single
                            )
                            yield arch, itemsize, rows, columns, tensors, single, tile


def test_tiles_of_runs_cover_their_set():
    for _, _, vectors, _, tile in run_tiles():
        held = tile.threads * tile.cluster * tile.packs * max(tile.segments, 1)
        assert held >= vectors
        if tile.segments:  # and no segment is empty
            assert (tile.segments - 1) * tile.threads * tile.packs < vectors


def test_tiles_of_runs_are_what_the_kernels_take():
    for arch, itemsize, _, tensors, tile in run_tiles():
        assert is_power_of_two(tile.threads) and is_power_of_two(tile.cluster)
        assert tile.block % 32 == 0
        assert tile.sets == 1 or tile.threads <= 32
        assert tile.cluster == 1 or (tile.sets == 1 and not tile.segments)
        assert tile.cluster <= LARGEST_CLUSTER.get(arch, 1)
        assert tile.shared < tile.packs
        assert tile.shared == 0 or (tensors == 1 and tile.vec * itemsize == 16)
        # Vectors counted from the start of a run: as Cycle::kReach allows.
        assert tile.threads * tile.cluster * tile.packs <= 1 << 18
        for sets in (1, 64, 100_001):
            assert tile.grid(sets) * tile.sets >= sets


def test_tiles_of_runs_fit_an_sm():
    for arch, itemsize, _, tensors, tile in run_tiles():
        assert tile.block * tile.ctas <= RESIDENT_THREADS.get(arch, 2048)
        registers = REGISTER_FILE // (tile.block * tile.ctas)
        of_pack = max(tile.vec * itemsize // 4, 1)
        data = (tile.packs - tile.shared) * of_pack * tensors
        assert data + 24 <= min(registers, 255)
        limit = SHARED_MEMORY.get(arch, 0)
        assert tile.shared_memory(itemsize) * tile.ctas <= limit or tile.shared == 0


def test_tiles_of_columns_cover_their_plane():
    for _, _, rows, columns, _, _, tile in column_tiles():
        assert rows > (tile.segments - 1) * tile.ty * tile.packs  # no block is empty
        assert tile.grid(3, columns) * tile.tx * tile.vec >= 3 * columns * tile.segments


def test_tiles_of_columns_are_what_the_kernels_take():
    for arch, itemsize, rows, columns, _, single, tile in column_tiles():
        assert is_power_of_two(tile.tx) and tile.tx <= 32
        assert tile.block % 32 == 0
        assert tile.tx * tile.vec <= tile.block
        assert tile.block * tile.ctas <= RESIDENT_THREADS.get(arch, 2048)
        assert tile.shared_memory(itemsize) * tile.ctas <= 64 << 10
        assert columns % tile.vec == 0
        if single and rows <= 128:
            assert tile.ty * tile.packs >= rows


@pytest.mark.parametrize("arch", ARCHS)
def test_alignment_does_not_decide_which_rows_of_a_column_are_added_together(arch):
    def rows_of(access, rows, columns, tensors):
        tile = choices.column_tile(True, rows, columns, 8, access, 2, arch, tensors)
        return tile.tx, tile.ty, tile.packs, tile.segments

    for rows in SIZES:
        for columns in (8, 24, 512):
            for tensors in (1, 2):
                sizes = rows, columns, tensors
                assert rows_of(1, *sizes) == rows_of(8, *sizes)


def test_a_pass_covers_its_rows():
    for arch in ARCHS:
        for rows in SIZES:
            for vec in (1, 2, 4, 8):
                for tensors in (1, 2):
                    tile = choices.column_map_tile(2, rows, 24 * vec, vec, vec, arch, tensors)
                    assert tile.segment_rows >= rows > tile.segment_rows - tile.ty * tile.packs


def test_a_pass_covers_its_elements():
    for itemsize in (2, 4, 8):
        for length in (*range(1, 40), 49, 784, 2**20, 2**20 + 1):
            for channels in (1, 3, 8, 2**11):
                vec = choices.map_vector(length, channels, itemsize, dense=False)
                assert vec * itemsize <= 16 and length * channels % vec == 0
                dense = choices.map_vector(length, channels, itemsize, dense=True)
                assert vec <= dense and dense * itemsize <= 16
                # write_elements in shift.cuh takes words of at most 4 bytes
                assert dense == vec or itemsize < 8
                for each, samples in product((vec, dense), (1, 100, 2**12)):
                    elements = samples * channels * length
                    for tensors in (1, 2):
                        tile = choices.map_tile(elements, length, each, 2, tensors)
                        assert tile.ragged == (elements % each != 0)
                        assert tile.grid(elements) * tile.work >= elements
                        assert tile.crossing == (length % each != 0)
                        assert length >= 2 * each or not tile.crossing
                        # MapShape::kMostRuns; from the last element of a channel on
                        runs = -(-(tile.work - 1) // length) + 1
                        assert runs <= tile.most_runs(length) <= 2 * tile.threads
                        assert tile.shared_memory(itemsize, length) <= 48 << 10
                        assert tile.brief == (elements < choices.BRIEF)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_vectors_divide_a_run(itemsize):
    for run in range(1, 200):
        vec = vector_length(run, itemsize)
        assert run % vec == 0 and vec * itemsize <= 16
        assert 2 * vec * itemsize > 16 or run % (2 * vec)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31))
def test_divisors_divide(size, value, times):
    """As Divisor::quotient, next to multiples of the size above all."""
    found, multiplier, shift = channel_launch._divisor(size)
    assert found == size and multiplier < 2**32 and shift < 64
    near = times * size % 2**31 // size * size
    for each in (value, near, near - 1, near + 1, 2**31 - 1):
        if 0 <= each < 2**31:
            assert (each * multiplier) >> shift == each // size


def test_what_no_divisor_divides():
    assert channel_launch._divisor(2**31) == channel_launch._divisor(0) == (0, 0, 0)


def test_long_merges_take_a_cta():
    assert choices.merge_threads(3) == 32
    assert choices.merge_threads(10**6) == 256


@pytest.mark.parametrize("arch", ARCHS)
def test_merges_keep_all_records_or_none(arch):
    for itemsize in (2, 4, 8):
        for records in SIZES:
            threads = choices.merge_threads(records)
            held = choices.merge_held(records, threads, itemsize, arch)
            assert held == 0 or held * threads >= records
        assert choices.merge_held(10**6, 256, itemsize, arch) == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_few_tiles_serve_all_sizes(arch):
    """A kernel is compiled for each of them."""
    tiles = {choices.run_tile(vectors, 8, 8, 2, arch).expression for vectors in range(1, 1 << 14)}
    assert len(tiles) <= 64


@pytest.mark.parametrize(("rows", "room"), [(1, 8), (8, 8), (9, 16), (32, 32), (33, 0), (65536, 0)])
def test_a_few_lanes_have_a_column_of_short_tables_alone(rows, room):
    assert choices.table_rows(rows) == room


@pytest.mark.parametrize(
    ("columns", "itemsize", "lanes"),
    [(64, 2, 4), (16384, 2, 4), (16385, 2, 1), (262144, 2, 1), (64, 4, 4), (262144, 4, 4)],
)
def test_lanes_of_a_column(columns, itemsize, lanes):
    assert choices.table_lanes(columns, itemsize) == lanes


def test_what_works_straight_on_holds_little():
    for arch, itemsize, vectors, tensors, tile in run_tiles():
        if tile.straight_on(itemsize, tensors):
            assert tile.cluster == 1 and tile.segments == 0 and tile.shared == 0
            assert tile.packs * max(tile.vec * itemsize // 4, 1) * tensors <= 32, (arch, vectors)
        elif tile.ends == "Whole" and tile.cluster == 1 and not tile.segments and tile.packs == 1:
            raise AssertionError(f"{tile} holds little")


def test_inference_of_much_has_small_blocks():
    small, large = (choices.map_tile(size, 4096, 8, 8) for size in (1 << 18, 1 << 27))
    assert choices.straight_map_tile(small, 1 << 18) == small
    found = choices.straight_map_tile(large, 1 << 27)
    assert (found.packs, found.threads) == (1, 128)
    assert found.grid(1 << 27) == (1 << 27) // (128 * 8)


def test_few_large_channels_backward_have_a_block_of_many_threads():
    few, many = (choices.run_tile(1024, 8, 8, 2, 90, 2, sets) for sets in (64, 300))
    assert (few.threads, few.packs) == (512, 2)
    assert (many.threads, many.packs) == (256, 4)
    assert choices.run_tile(1024, 8, 8, 2, 90, 2) == many


@pytest.mark.parametrize(("itemsize", "smallest"), [(2, 3073), (4, 6145)])
def test_sets_are_shared_out_to_small_ctas(itemsize, smallest):
    vec = 16 // itemsize
    for vectors in (smallest, 8192, 20480, 49152, choices.MOST_SHARED_OUT):
        for access in (vec, 1):
            tile = choices.run_tile(vectors, vec, access, itemsize, 90)
            assert tile.threads == 256 and tile.cluster > 1 and tile.segments == 0
            assert tile.ctas >= 2
            assert tile.packs <= 12 or tile.cluster == LARGEST_CLUSTER[90]
    for vectors in (smallest - 1, choices.MOST_SHARED_OUT + 1):
        assert choices.run_tile(vectors, vec, vec, itemsize, 90).threads == 512


def test_channels_that_all_have_a_cta_at_once_are_not_shared_out():
    few, many = (choices.run_tile(6272, 8, 8, 2, 90, sets=sets) for sets in (264, 265))
    assert few.cluster == 1 and few.threads == 512
    assert many.cluster == 4 and many.threads == 256
