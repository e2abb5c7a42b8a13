"""Launch choices: pure functions of a few integers, held to what the kernels require."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace

import pytest

from cunorm.cuda import choices
from cunorm.cuda.choices import row_tile

ARCHS = (75, 80, 86, 89, 90, 100, 103, 120)
ITEMSIZES = (2, 4, 8)
PARAMETER_WORDS = (0.0, 1.0, 2.0, 4.0, 6.0)  # none; up to three of twice the size of x
RESIDENT_THREADS = {75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 120: 1536}
REGISTER_FILE = 65536
MOST_REGISTERS = 255  # a thread can name

PRIMES = [p for p in range(2, 1200) if all(p % d for d in range(2, int(p**0.5) + 1))]
LENGTHS = sorted(
    {
        *range(1, 301),
        *PRIMES,
        *(2**i + d for i in range(4, 25) for d in (-1, 0, 1, 8)),
        *(768, 1536, 3072, 5120, 6144, 10240, 12288, 14336, 18432, 28672, 50257, 151936),
        *(7919, 65537, 104729, 1000003, 2000006, 15485863),
        *(2**31 - 1, 2**31 - 2, 2**31 - 8),
    }
)


def tiles():
    for arch in ARCHS:
        for itemsize in ITEMSIZES:
            for cols in LENGTHS:
                for words in PARAMETER_WORDS:
                    addends = 1 + (words in (1.0, 2.0))  # with and without a residual
                    yield arch, itemsize, cols, row_tile(cols, itemsize, 16, arch, words, addends)


@pytest.fixture(scope="module")
def all_tiles():
    return list(tiles())


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


def test_packs_fit_a_transaction_and_divide_the_row_or_are_shifted(all_tiles):
    shifted = 0
    for _, itemsize, cols, tile in all_tiles:
        assert is_power_of_two(tile.vec)
        assert tile.vec * itemsize <= 16
        wider = 2 * tile.vec
        assert wider * itemsize > 16 or cols % wider  # as wide as may be
        if cols % tile.vec == 0:
            continue
        shifted += 1
        assert tile.access == 1
        assert tile.vec * itemsize == 16  # what shift.cuh takes
        assert itemsize <= 4
        assert cols * itemsize % 8  # else vectors of 8 bytes would do
        assert cols >= 4 * tile.vec
    assert shifted


def test_the_tile_covers_the_row(all_tiles):
    for _, _, cols, tile in all_tiles:
        held = tile.threads * tile.cluster * tile.packs * max(tile.segments, 1) * tile.vec
        assert held >= cols


def test_no_pack_and_no_segment_is_idle(all_tiles):
    """One pack less, or one segment less, would not do."""
    for _, _, cols, tile in all_tiles:
        step = tile.threads * tile.cluster * max(tile.segments, 1) * tile.vec
        assert step * (tile.packs - 1) < cols
        if tile.segments:
            assert (tile.segments - 1) * tile.threads * tile.packs * tile.vec < cols


def test_threads_and_blocks(all_tiles):
    for arch, _, _, tile in all_tiles:
        assert is_power_of_two(tile.threads)
        assert is_power_of_two(tile.rows)
        assert tile.block == tile.threads * tile.rows
        assert tile.block <= 1024
        assert tile.block % 32 == 0  # whole warps: shuffles name all their lanes
        assert tile.rows == 1 or tile.threads <= 32  # rows that share a CTA have no barrier
        assert tile.ctas * tile.block <= RESIDENT_THREADS.get(arch, 2048)


def test_registers_suffice_for_the_promised_ctas(all_tiles):
    """Launch bounds leave each thread room for its part of the row and the arithmetic on it."""
    for _, itemsize, cols, tile in all_tiles:
        allowed = min(REGISTER_FILE // (tile.ctas * tile.block) // 8 * 8, MOST_REGISTERS)
        data = (tile.packs - tile.shared) * max(tile.vec * itemsize // 4, 1)
        working = 32 if tile.shared else 40  # shared memory: loops over fewer packs at once
        assert allowed >= data + working, (cols, tile)


def test_short_rows_that_have_a_kernel_of_their_own():
    found = set()
    for arch in ARCHS:
        for cols in LENGTHS:
            for itemsize in ITEMSIZES:
                for kind in itertools.product((1, 2), (True, False), (True, False)):
                    tile = row_tile(cols, itemsize, 16 // itemsize, arch, 2.0, *kind)
                    if not tile.brief:
                        continue
                    found.add((kind, tile.packs))
                    assert tile.threads <= 32  # in registers of one warp
                    assert (tile.cluster, tile.segments, tile.shared) == (1, 0, 0)
                    assert tile.access * itemsize == 16
                    assert cols * itemsize >= 128  # 32 bits hold the number of a row
                    _, _, row_parameters = kind
                    assert not row_parameters
    assert len(found) >= 6  # both kinds of norm, with and without a residual


def test_clusters(all_tiles):
    for arch, _, _, tile in all_tiles:
        assert is_power_of_two(tile.cluster)
        assert tile.cluster <= (1 if arch < 90 else 16 if arch in (90, 100) else 8)
        if tile.cluster > 1:
            assert tile.rows == 1
            assert not tile.segments


def test_segments_are_two_or_more_and_alone(all_tiles):
    for _, _, _, tile in all_tiles:
        assert tile.segments != 1
        if tile.segments:
            assert (tile.cluster, tile.rows) == (1, 1)


def test_a_row_is_cut_only_where_it_must_be(all_tiles):
    """Short rows in one CTA; clusters where they exist; segments past those."""
    for arch, itemsize, cols, tile in all_tiles:
        if cols * itemsize <= 8192:
            assert tile.cluster == 1
            assert not tile.segments
        if tile.segments and arch >= 90:
            smallest = choices.largest_cluster(arch) * 512 * 8 * tile.vec
            assert cols > smallest


def test_parameters_are_read_early_only_where_they_fit(all_tiles):
    for _, itemsize, _, tile in all_tiles:
        if tile.reading == "early":
            assert tile.packs * max(tile.vec * itemsize // 4, 1) <= 32
            assert tile.block <= 512
            assert tile.shared == 0


def test_parameters_in_shared_memory_leave_room_for_the_promised_ctas():
    staged = 0
    for arch in ARCHS:
        for itemsize in ITEMSIZES:
            for cols in LENGTHS:
                for words in PARAMETER_WORDS:
                    for kind in ((1, True, True), (1, True, False), (2, False, False)):
                        tile = row_tile(cols, itemsize, 16, arch, words, *kind)
                        if tile.reading != "staged":
                            continue
                        staged += 1
                        assert arch in (80, 90, 100)
                        assert tile.of_parameters * itemsize == 16  # whole transactions
                        assert (tile.shared, tile.segments) == (0, 0)
                        used = tile.shared_memory(itemsize, int(words * itemsize))
                        assert used == int(words * itemsize) * tile.vec * tile.packs * tile.block
                        assert 0 < tile.ctas * (used + 1024) <= 1024 * (163 if arch == 80 else 227)
    assert staged


def test_the_kind_of_norm_may_change_the_order_of_sums_but_fusing_does_not():
    for cols in LENGTHS:
        for itemsize in ITEMSIZES:
            for centred in (True, False):
                alone = row_tile(cols, itemsize, 16, 90, 2.0, 1, centred)
                fused = row_tile(cols, itemsize, 16, 90, 2.0, 2, centred)
                assert order_of_sums(alone) == order_of_sums(fused)


def test_access_is_cut_to_the_pack():
    for access in (1, 2, 4, 8):
        for cols, vec in ((4096, 8), (4100, 4), (30, 2), (31, 1)):
            tile = row_tile(cols, 2, access, 90)
            shifted = vec == 8 and access < 4
            assert (tile.vec, tile.access) == (vec, 1 if shifted else min(access, vec))
        for cols in (4098, 4097):
            tile = row_tile(cols, 2, access, 90, of_parameters=8)
            assert (tile.vec, tile.access, tile.of_parameters) == (8, 1, 8)


def order_of_sums(tile):
    """All that says which thread adds which element; the rest is how it gets at them."""
    return tile.vec, tile.packs, tile.threads, tile.rows, tile.cluster, tile.segments


def test_alignment_does_not_change_the_order_of_sums():
    """Which thread adds which element does not depend on where an array lies."""
    for cols in LENGTHS:
        for itemsize in ITEMSIZES:
            best = row_tile(cols, itemsize, 16 // itemsize, 90)
            for access in (1, 2, 4):
                tile = row_tile(cols, itemsize, access, 90)
                assert order_of_sums(tile) == order_of_sums(best)


def test_which_parameters_there_are_does_not_change_the_order_of_sums():
    """Statistics have the same bits whatever is applied afterwards and was added before."""
    for arch in ARCHS:
        for cols in LENGTHS:
            for itemsize in ITEMSIZES:
                kinds = {
                    order_of_sums(t)
                    for w in PARAMETER_WORDS
                    for t in (row_tile(cols, itemsize, 1, arch, w, addends) for addends in (1, 2))
                }
                assert len(kinds) == 1


def test_shared_memory_suffices_for_the_promised_ctas(all_tiles):
    kilobytes = {75: 64, 80: 163, 86: 99, 89: 99, 120: 99}
    for arch, itemsize, _, tile in all_tiles:
        assert 0 <= tile.shared <= tile.packs
        used = tile.shared_memory(itemsize, 0)
        assert used == tile.shared * tile.block * tile.vec * itemsize
        assert used * tile.ctas <= 1024 * kilobytes.get(arch, 227)


def test_the_number_of_rows_is_not_asked_for():
    assert not {"rows", "row_count"} & set(inspect.signature(row_tile).parameters)
    assert "rows" in inspect.signature(choices.RowTile.grid).parameters


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 65536, 1000003, 2**31])
def test_the_grid_has_a_place_for_every_row(all_tiles, rows):
    for _, _, _, tile in all_tiles[::7]:
        per_row = tile.cluster * max(tile.segments, 1)
        grid = tile.grid(rows)
        assert grid % per_row == 0
        groups = grid // per_row
        assert (groups - 1) * tile.rows < rows <= groups * tile.rows


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("arch", [80, 90])
def test_there_are_few_kernels_for_all_lengths(arch, itemsize):
    """Each is compiled once and kept on disk; a program meets a handful."""
    shapes = {row_tile(cols, itemsize, 16, arch, 2.0).expression for cols in range(1, 65537)}
    assert len(shapes) <= 320, f"{len(shapes)} kernels for rows of up to 65536"


def test_the_expression_spells_out_the_tile():
    tile = choices.RowTile(8, 4, 3, 128, rows=1, cluster=2, reading="early", ctas=5)
    assert tile.expression == "RowShape<8, 4, 3, 0, 128, 1, 2, kEarly, 5, false, false, 4>"
    cut = replace(tile, reading="late", segments=3, shared=1, of_parameters=8)
    assert cut.expression == "RowShape<8, 4, 3, 1, 128, 1, 2, kLate, 5, false, true, 8>"


@pytest.mark.parametrize(
    ("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1023, 1024), (1025, 2048)]
)
def test_power_of_two_up(n, power):
    assert choices.power_of_two_up(n) == power


@pytest.mark.parametrize(
    ("cols", "itemsize", "vec"),
    [(1, 2, 1), (2, 2, 2), (12, 2, 4), (16, 2, 8), (24, 4, 4), (6, 4, 2), (7, 8, 1), (8, 8, 2)],
)
def test_vector_length(cols, itemsize, vec):
    assert choices.vector_length(cols, itemsize) == vec


@pytest.mark.parametrize(
    ("arch", "largest"), [(75, 1), (80, 1), (89, 1), (90, 16), (100, 16), (103, 8), (120, 8)]
)
def test_largest_cluster(arch, largest):
    assert choices.largest_cluster(arch) == largest
