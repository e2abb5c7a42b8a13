"""Launch choices of backward passes over rows: pure functions, held to what the kernels require."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cunorm.cuda import row_gradient_choices as choices
from cunorm.cuda.row_gradient_choices import (
    gradient_tile,
    merge_of,
    row_blocks,
    shared_memory,
    words,
)

ARCHS = (75, 80, 86, 89, 90, 100, 120)
ITEMSIZES = (2, 4, 8)
LENGTHS = sorted(
    {
        *range(1, 70),
        *(2**i + d for i in range(6, 21) for d in (-1, 0, 1, 8)),
        *(768, 1152, 3072, 5120, 12288, 50257, 262144, 1000003),
    }
)
# Arrays read row by row besides x and grad_out, parameters of a block, sums, gradients by row.
KINDS = {
    "layer norm": (0, 1, 2, 0),
    "rms norm": (0, 1, 1, 0),
    "fused add": (1, 1, 2, 0),
    "adaptive": (1, 0, 0, 2),
    "gated": (3, 0, 0, 3),
    "gated, one row": (0, 3, 3, 0),
}


def tiles():
    for arch, itemsize, cols, kind in product(ARCHS, ITEMSIZES, LENGTHS, KINDS):
        more, columns, sums, written = KINDS[kind]
        streams = (itemsize,) * (2 + more)
        for access in (16, 1):
            tile = gradient_tile(
                cols,
                itemsize,
                access,
                arch,
                streams=streams,
                columns=(itemsize,) * columns,
                sums=sums,
                written=written,
                adds=kind == "fused add",
            )
            yield arch, itemsize, cols, streams, sums, tile


@pytest.fixture(scope="module")
def all_tiles():
    return list(tiles())


def is_power_of_two(n):
    return n > 0 and n & (n - 1) == 0


def test_packs_divide_the_row(all_tiles):
    for _, itemsize, cols, _, _, tile in all_tiles:
        assert cols % tile.vec == 0
        assert is_power_of_two(tile.vec)
        assert tile.vec * itemsize <= 16
        assert tile.vec % tile.access == 0


def test_the_tile_covers_the_row_and_no_pack_or_segment_is_idle(all_tiles):
    for _, _, cols, _, _, tile in all_tiles:
        step = tile.threads * max(tile.segments, 1) * tile.vec
        assert step * tile.packs >= cols
        if tile.segments:
            assert tile.segments > 1
            assert (tile.segments - 1) * tile.threads * tile.packs * tile.vec < cols
        else:
            assert step * (tile.packs - 1) < cols


def test_threads_and_blocks(all_tiles):
    for _, _, _, _, sums, tile in all_tiles:
        assert is_power_of_two(tile.threads) or tile.threads % 32 == 0
        assert tile.block % 32 == 0
        assert tile.block * tile.ctas <= 512
        if tile.rows > 1:
            assert tile.threads <= 32 or tile.rows <= 15  # a barrier for each team
            assert tile.combine or not sums
        if tile.segments:
            assert tile.rows == 1


def test_shared_memory_suffices_for_the_promised_ctas(all_tiles):
    for arch, itemsize, _, streams, sums, tile in all_tiles:
        shared = tile.shared_memory(streams, sums, max(itemsize, 4))
        assert shared * tile.ctas <= shared_memory(arch)


def test_rows_go_past_the_registers_where_the_hardware_copies(all_tiles):
    for _, itemsize, _, _, _, tile in all_tiles:
        if tile.vec * itemsize < 4:
            assert tile.stages == 0
            assert tile.hold
        elif not tile.segments:
            assert tile.stages >= 1


def test_memory_is_kept_busy_on_the_h200():
    """So many bytes of an SM are on their way, for rows that CTAs can hold: 32 KiB or more."""
    for itemsize, cols in product(ITEMSIZES, (64, 256, 1024, 4096, 8192)):
        streams = (itemsize,) * 2
        tile = gradient_tile(cols, itemsize, 16, 90, streams=streams, columns=(itemsize,))
        assert tile.stages * tile.stage_bytes(streams) * tile.ctas >= 32 << 10, (itemsize, cols)


def test_plain_sums_over_many_rows_are_for_16_bits(all_tiles):
    for _, itemsize, _, _, sums, tile in all_tiles:
        if sums and itemsize > 2:
            assert tile.combine


def test_registers_suffice(all_tiles):
    for _, itemsize, _, streams, sums, tile in all_tiles:
        allowed = min(65536 // (tile.block * tile.ctas), 255)
        wide = max(itemsize, 4) // 4
        data = tile.packs * tile.vec * wide * (sums + 2 * tile.hold)
        if not tile.stages:
            data += tile.packs * max(tile.vec * itemsize // 4, 1) * len(streams)
        assert allowed >= data + 28, tile


def test_alignment_changes_no_order_of_sums():
    for itemsize, cols in product(ITEMSIZES, (64, 1000, 2050, 4096)):
        aligned, not_aligned = (
            gradient_tile(cols, itemsize, access, 90, streams=(itemsize,) * 2) for access in (16, 1)
        )
        assert replace(aligned, access=1) == not_aligned


def test_how_a_row_is_added_up_follows_from_its_length():
    """What else a call reads or writes changes how much is on its way, not the order of sums."""
    for itemsize, cols in product(ITEMSIZES, (33, 64, 1000, 2048)):
        laid_out = set()
        for more, columns, sums, written in KINDS.values():
            tile = gradient_tile(
                cols,
                itemsize,
                16,
                90,
                streams=(itemsize,) * (2 + more),
                columns=(itemsize,) * columns,
                sums=sums,
                written=written,
            )
            laid_out.add((tile.vec, tile.packs, tile.threads))
        assert len(laid_out) == 1


@pytest.mark.parametrize(
    ("itemsize", "cols", "laid_out"),
    [
        (2, 1024, (1, 128, 4, 4)),
        (2, 4096, (1, 512, 1, 4)),
        (4, 256, (2, 32, 16, 4)),  # too short for a barrier
        (4, 512, (1, 128, 4, 3)),
        (4, 1024, (1, 256, 2, 3)),
        (4, 1536, (2, 192, 2, 4)),  # one pack would leave a quarter of a CTA idle
        (4, 2048, (1, 512, 1, 3)),
        (4, 4096, (2, 512, 1, 4)),
        (8, 512, (2, 128, 4, 4)),
    ],
)
def test_one_pack_a_thread_where_rows_fill_a_cta(itemsize, cols, laid_out):
    streams = (itemsize,) * 2
    tile = gradient_tile(cols, itemsize, 16, 90, streams=streams, columns=(itemsize,))
    assert (tile.packs, tile.threads, tile.rows, tile.stages) == laid_out


@pytest.mark.parametrize(
    ("cols", "threads", "rows"), [(1152, 96, 4), (2048, 256, 2), (512, 32, 16)]
)
def test_every_scheduler_has_as_many_warps_where_rows_leave_gradients(cols, threads, rows):
    tile = gradient_tile(cols, 2, 8, 90, streams=(2,) * 5, sums=0, written=3)
    assert (tile.threads, tile.rows) == (threads, rows)


@pytest.mark.parametrize("resident", [1, 4, 132, 264])
@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("segments", [1, 62])
def test_blocks_cover_all_rows_and_none_is_empty(resident, rows, segments):
    for groups, members in product((1, 2, 8, 100, 5000), (1, 2, 31, 32, 33, 1000, 65537)):
        found = row_blocks(groups, members, segments, rows, resident)
        reach, step, row_step, rest = found.numbers(members)
        assert row_step % rows == 0
        sizes = [reach + min(max(rest - block * step, 0), step) for block in range(found.blocks)]
        assert min(sizes) > 0
        assert max(sizes) <= -(-found.block_rows // rows) * rows
        assert sum(sizes) == members


@pytest.mark.parametrize(
    ("members", "rows", "blocks"), [(32768, 2, 132), (32768, 1, 132), (2048, 2, 128), (64, 2, 64)]
)
def test_many_rows_fill_the_gpu_once(members, rows, blocks):
    assert row_blocks(1, members, 1, rows, 132).blocks == blocks


def test_one_row_is_one_block():
    assert row_blocks(1, 1, 1, 64, 132) == choices.Blocks(1, 1, 64)


def test_sums_of_long_blocks_keep_what_they_round_off():
    assert (words(64, 2), words(65, 2)) == (1, 2)
    assert (words(4, 4), words(5, 4)) == (1, 2)
    assert gradient_tile(1024, 2, 8, 90, streams=(2, 2)).combine
    long_row = gradient_tile(16384, 2, 8, 90, streams=(2, 2))
    assert not long_row.combine
    assert (long_row.adds_in_place(32), long_row.adds_in_place(33)) == (False, True)


@pytest.mark.parametrize("cols", [7, 1024, 4096, 16384])
@pytest.mark.parametrize("records", [2, 3, 131, 264])
def test_a_merge_fills_the_gpu_once(cols, records):
    ctas = 2 * -(-cols // 32)
    merge = merge_of(cols, 4, ctas, records, 132)
    warps = merge.block // 32
    assert merge.vec == (4 if cols % 4 == 0 else 1)
    assert 1 <= warps <= 16
    assert (warps - 1) * merge.vec < records  # the last warp has one to read
    assert warps <= 4 or ctas * warps <= 32 * 132


def test_a_tile_is_full_where_every_thread_has_all_its_vectors():
    def full(cols, sums=2):
        return gradient_tile(cols, 2, 8, 90, streams=(2, 2), columns=(2,), sums=sums).full

    assert full(4096) and full(1024) and full(128)
    assert not full(4104) and not full(1032) and not full(1_000_000)
    assert full(16384, sums=1) and not full(16384)
