"""Launches that keep large sets on chip: what is held, and who goes on with what."""

from __future__ import annotations

import pytest

import cunorm
from cunorm.cuda.kept_choices import better_kept, kept_tile

SMS = 132
SHARED_MEMORY = 228 << 10  # of an SM
BESIDE = 1024 + 512  # of a CTA: what the system takes, and what the kernel declares
VECTORS = (2, 4095, 131072, 524288, 700_001, 1 << 20)


def tile_of(
    vectors, itemsize=2, tensors=1, arch=90, access=None, scaled=True, sms=SMS, one_run=False
):
    vec = 16 // itemsize
    access = vec if access is None else access
    return kept_tile(vectors, vec, access, itemsize, arch, tensors, one_run, scaled, sms)


def every_tile():
    for vectors in VECTORS:
        for itemsize in (2, 4, 8):
            for tensors in (1, 2):
                for scaled in (True, False):
                    tile = tile_of(vectors, itemsize, tensors, scaled=scaled)
                    if tile is not None:
                        yield vectors, itemsize, tensors, tile


def test_a_set_is_held_whole():
    for vectors, _, _, tile in every_tile():
        held = tile.segments * tile.threads * tile.packs
        assert held - tile.threads * tile.packs < vectors <= held


def test_ctas_fit_an_sm():
    for _, itemsize, tensors, tile in every_tile():
        assert tile.ctas * (tile.shared_memory(itemsize) + BESIDE) <= SHARED_MEMORY
        in_registers = tensors * (tile.packs - tile.shared) * 4  # of 32 bits
        assert tile.ctas * tile.threads * (in_registers + 40) <= 65536


def test_floats_leave_the_compiler_two_more_packs_of_registers():
    in_registers = {}
    for itemsize in (2, 4, 8):
        tile = tile_of(131072, itemsize)
        in_registers[itemsize] = tile.packs - tile.shared
    assert in_registers == {2: 11, 4: 9, 8: 11}


def test_two_sets_fit_the_gpu_or_both_arrays_of_one():
    for _, _, tensors, tile in every_tile():
        assert tile.segments * (1 if tensors == 2 else 2) <= SMS * tile.ctas
        assert tile.segments < 1 << 16  # kLeave in order.cuh


@pytest.mark.parametrize("sets", [1, 2, 5, 64, 128, 1000])
def test_every_set_has_its_turn_and_none_waits_for_room(sets):
    for _, _, _, tile in every_tile():
        groups = tile.groups(sets, SMS)
        assert 1 <= groups <= sets
        assert groups * tile.segments <= SMS * tile.ctas
        # No more rounds than with all that fits.
        fit = SMS * tile.ctas // tile.segments
        assert -(-sets // groups) == -(-sets // min(fit, sets))


@pytest.mark.parametrize(
    ("op", "channels", "side"),
    [
        (cunorm.InstanceNormFwdOp(), 6, 1024),
        (cunorm.InstanceNormFwdOp(), 6, 512),
        (cunorm.GroupNormFwdOp(3), 12, 512),
    ],
    ids=repr,
)
def test_how_a_set_of_a_sample_is_added_up_does_not_depend_on_how_many_there_are(
    op, channels, side
):
    kernels = set()
    for samples in (1, 2, 7, 64, 300):
        plan = op.plan("float16", (samples, channels, side, side))
        kernels.add(plan[-1].kernel)
        if "run_kept" in plan[-1].kernel:
            tile = tile_of(side * side * (channels // getattr(op, "num_groups", channels)) // 8)
            assert plan[-1].grid % tile.segments == 0
    assert len(kernels) == 1


@pytest.mark.parametrize(
    ("vectors", "cluster", "tensors", "nbytes", "expected"),
    [
        (1 << 20, 0, 1, 1 << 20, True),
        (1 << 17, 1, 1, 1 << 30, False),
        (1 << 17, 8, 2, 1 << 30, False),
        (1 << 17, 16, 1, 1 << 30, True),
        (1 << 17, 16, 1, 1 << 26, False),
        (1 << 17, 16, 1, None, True),
        (1 << 17, 16, 2, 1 << 26, True),
        (1 << 16, 16, 1, None, False),
        (1 << 16, 0, 1, None, True),
    ],
)
def test_what_clusters_do_better(vectors, cluster, tensors, nbytes, expected):
    assert better_kept(vectors, cluster, tensors, nbytes) is expected


def test_no_more_than_two_sets_are_read_at_first():
    assert tile_of(524288).lag(64, 4) == 3
    assert tile_of(1 << 20).lag(64, 2) == 2


def test_sets_that_are_all_on_chip_wait_for_none():
    assert tile_of(524288).lag(4, 4) == 0


def test_the_largest_hold_needs_a_register_that_scaled_values_take():
    assert tile_of(524288, scaled=False).packs > tile_of(524288, scaled=True).packs


def test_sets_of_several_channels_do_not_take_the_largest_hold():
    of_channels = tile_of(524288, scaled=False, one_run=True)
    assert of_channels.packs == tile_of(524288, scaled=True).packs


@pytest.mark.parametrize(
    "options",
    [
        {"arch": 80},
        {"arch": 120},
        {"access": 1},
        {"sms": 60},
        {"tensors": 2, "itemsize": 4, "vectors": 1 << 21},
    ],
    ids=str,
)
def test_what_is_not_kept(options):
    assert tile_of(**{"vectors": 1 << 20, **options}) is None
