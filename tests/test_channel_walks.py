"""Which way batch norm walks planes of few elements, channels first: by the plans of calls."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import cunorm
from cunorm.arrays import Device
from cunorm.cuda import devices
from cunorm.cuda.channel import KERNELS

OPS = {
    "train": cunorm.BatchNormFwdOp(training=True),
    "infer": cunorm.BatchNormFwdOp(),
    "stats": cunorm.BatchNormStatsOp(),
    "backward": cunorm.BatchNormBwdOp(),
    "frozen": cunorm.BatchNormBwdOp(training=False),
    "group": cunorm.GroupNormFwdOp(32),
    "instance": cunorm.InstanceNormFwdOp(),
}
AS_MATRIX = {
    "train": ("column_statistics", "channel_merge", "column_map"),
    "stats": ("column_statistics", "channel_merge"),
    "backward": ("column_gradient_sums", "gradient_merge", "column_map"),
    "frozen": ("column_gradient_sums", "gradient_merge"),
}


@pytest.fixture(autouse=True)
def an_h100(monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda index: 90)
    monkeypatch.setattr(devices, "multiprocessors", lambda index: 132)


def launched(op, dtype, shape, **options):
    launches = OPS[op].plan(dtype, shape, **options)
    return tuple(launch.kernel.partition("<")[0] for launch in launches)


@pytest.mark.parametrize("op", AS_MATRIX)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("bfloat16", (29296, 256, 2)),
        ("bfloat16", (5000, 512, 2)),
        ("bfloat16", (5500, 256, 3)),  # strips would have rows of two channels: 12 bytes
        ("bfloat16", (19531, 256, 3)),
        ("bfloat16", (14648, 256, 4)),
        ("bfloat16", (7324, 256, 8)),
        ("float32", (14648, 256, 2)),
        ("float32", (7324, 256, 4)),
        ("float64", (7324, 256, 2)),
        ("float32", (9765, 256, 3)),
    ],
)
def test_short_planes_of_many_samples_are_a_matrix(op, dtype, shape):
    assert launched(op, dtype, shape) == AS_MATRIX[op]


@pytest.mark.parametrize(
    ("dtype", "shape", "forward", "backward"),
    [
        ("bfloat16", (500, 256, 8), "run_norm_brief", "run_gradient_brief"),
        ("bfloat16", (3662, 256, 16), "run_norm", "run_gradient_cluster"),
        ("float32", (1831, 256, 16), "run_norm_cluster", "run_gradient_cluster"),
        ("bfloat16", (2000, 1024, 6), "strip_norm", "strip_gradient"),  # rows of 24 bytes
        ("bfloat16", (2604, 256, 3), "strip_norm", "strip_gradient"),  # of little: one launch
        ("bfloat16", (256, 2048, 2, 2), "run_norm_brief", "run_gradient_brief"),
        ("bfloat16", (60, 40000, 2), "run_norm_brief", "run_gradient_brief"),  # few samples
        ("bfloat16", (29296, 255, 2), "strip_norm", "run_gradient_cluster"),  # rows of no vectors
    ],
)
def test_other_planes_are_not(dtype, shape, forward, backward):
    assert launched("train", dtype, shape) == (forward,)
    assert launched("backward", dtype, shape) == (backward,)


@pytest.mark.parametrize(
    ("positions", "inference", "group"),
    [
        (2, "column_map", "run_norm"),  # by vectors of several channels
        (4, "column_map", "run_norm_brief"),
        (8, "run_map_brief", "run_norm_brief"),
    ],
)
def test_what_sums_no_channel_over_samples(positions, inference, group):
    shape = (58592 // positions, 256, positions)
    assert launched("infer", "bfloat16", shape) == (inference,)
    assert launched("group", "bfloat16", shape) == (group,)
    assert launched("instance", "bfloat16", shape) == ("run_norm_brief", "average_running")


@pytest.mark.parametrize("op", ["train", "backward"])
def test_channels_last_have_rows_of_all_positions(op):
    assert launched(op, "bfloat16", (14648, 4, 256), channel_axis=-1) == ("column_kept",)


@pytest.mark.parametrize(
    ("op", "shape", "vectors"),
    [
        ("train", (57, 256, 1021), "8, 8, .* Ends::kMasked, false>"),
        ("train", (57, 255, 1021), "8, 8, .* Ends::kMasked, false>"),  # samples start anywhere
        ("train", (16, 8, 2049), "1, 1, .* Ends::kWhole, false>"),  # little
        ("train", (1, 8, 2**31 + 1), "1, 1, .* Ends::kWhole, false>"),  # beyond 32 bits
        ("instance", (57, 256, 1021), "8, 8, .* Ends::kMasked, false>"),
        ("instance", (16, 8, 2049), "8, 8, .* Ends::kMasked, false>"),
        ("instance", (57, 255, 1021), "8, 1, .* Ends::kRagged, true>"),
        ("instance", (57, 256, 3), "8, 1, .* Ends::kRagged, true>"),  # no second vector
        ("instance", (57, 256, 2), "2, 2, .* Ends::kWhole, false>"),
        ("instance", (57, 256, 1020), "4, 4, .* Ends::kWhole, false>"),
        ("group", (57, 256, 1021), "8, 8, .* Ends::kWhole, true>"),
        ("group", (57, 96, 1021), "8, 8, .* Ends::kMasked, true>"),
        ("group", (57, 96, 1022), "8, 8, .* Ends::kMasked, true>"),
        ("group", (57, 96, 1020), "4, 4, .* Ends::kWhole, false>"),
    ],
)
def test_vectors_of_runs_that_none_divides(op, shape, vectors):
    plan = OPS[op].plan("bfloat16", shape)
    assert re.search(f"RunShape<{vectors}", plan[0].kernel), plan[0].kernel


@pytest.mark.parametrize(
    ("step", "ends"),
    [
        (3 * 299 * 299, "Masked"),
        (3 * 299 * 299 + 5, "Masked"),  # other memory lies between samples
        (-3 * 299 * 299, "Whole"),  # the first sample ends the array
        (0, "Whole"),  # all samples do
    ],
)
def test_only_the_last_sample_may_end_within_a_vector(step, ends):
    op = OPS["stats"]
    call = op._hypothetical_call("bfloat16", (13, 3, 299 * 299), None, (), True, 1)
    x = call.x._replace(strides=(step, *call.x.strides[1:]))
    call = replace(call, inputs={**call.inputs, "x": x}, device=Device("cuda"))
    plan = KERNELS[op.name].plan(call, False)
    assert f"Ends::k{ends}" in plan.launches[0].kernel
