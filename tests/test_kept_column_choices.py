"""Launches that keep blocks of rows on chip: what has room, and who joins whose records."""

from __future__ import annotations

import pytest
from test_kept_choices import BESIDE, SHARED_MEMORY, SMS

from cunorm.cuda.kept_column_choices import kept_column_tile

ROWS = (1, 63, 64, 65, 128, 1000, 8192, 12544, 50176, 100_003, 802_816, 1 << 27)
COLUMNS = (8, 16, 64, 72, 320, 1000, 2048, 8192, 16896, 100_352)
JOINED = 5  # kJoined


def tile_of(rows, columns, itemsize=2, tensors=1, whole=True, arch=90, access=None, sms=SMS):
    vec = 16 // itemsize
    access = vec if access is None else access
    return kept_column_tile(whole, rows, columns, vec, access, itemsize, arch, tensors, sms)


def every_tile():
    for rows in ROWS:
        for columns in COLUMNS:
            for itemsize in (2, 4):
                for tensors in (1, 2):
                    for whole in (True, False):
                        tile = tile_of(rows, columns, itemsize, tensors, whole)
                        if tile is not None:
                            yield rows, columns, itemsize, tile


def test_there_are_tiles_of_all_kinds():
    tiles = [tile for _, _, _, tile in every_tile()]
    assert {tile.squads > 1 for tile in tiles} == {True, False}
    kept_wholly = {
        tile.batches >= -(-rows // tile.segment_rows) for rows, _, _, tile in every_tile()
    }
    assert kept_wholly == {True, False}


def test_all_ctas_of_a_plane_fit_the_gpu():
    for _, columns, itemsize, tile in every_tile():
        assert tile.segments >= 2 and tile.grid(1, columns) <= SMS * tile.ctas
        declared = 2 * tile.tx * tile.vec * 16  # coefficients of a tile, and what is smaller
        assert tile.ctas * (tile.shared_memory(itemsize) + declared + BESIDE) <= SHARED_MEMORY


def test_no_block_is_idle_and_what_follows_comes_in_pairs():
    for rows, _, _, tile in every_tile():
        batches = -(-rows // (tile.ty * tile.packs))
        assert tile.segments <= batches
        rounds = -(-batches // tile.segments)
        assert 1 <= tile.batches <= rounds
        assert tile.batches == rounds or tile.batches % 2 == 0


def test_lanes_can_join_all_records():
    for _, _, _, tile in every_tile():
        lanes = min(tile.block // (tile.tx * tile.vec), 32)
        assert tile.together <= lanes * JOINED and tile.squads <= lanes * JOINED
        assert tile.signals(3, tile.tx * tile.vec) == 3 * (2 * tile.segments + tile.squads + 1)


@pytest.mark.parametrize(("tensors", "longest"), [(1, 50176), (2, 12544)])
def test_what_has_no_room_is_left_to_three_launches(tensors, longest):
    assert tile_of(longest, 256 if tensors == 1 else 2048, tensors=tensors) is not None
    assert tile_of(802_816, 64, tensors=tensors) is None
    assert tile_of(65536, 512, 4, tensors) is None


def test_other_devices_and_arrays():
    assert tile_of(8192, 64, arch=80) is None
    assert tile_of(8192, 64, itemsize=8) is None
    assert tile_of(8192, 64, access=4) is None
    assert tile_of(8192, 100_352) is None  # tiles are more than CTAs
    assert tile_of(8192, 64, arch=100, sms=148) is not None
