"""What CTAs that wait for each other keep on chip: much of it, and beside other work."""

from __future__ import annotations

import pytest
from cases import assert_same_bits
from channel_cases import copied, make_inputs, make_op
from channels_on_gpu import check, on_gpu, run
from on_gpu import cupy, spin

from cunorm.cuda import devices

pytestmark = pytest.mark.gpu

# Sets of 1.3, 2 and twice 1 MB: more of them than the GPU keeps at a time. Blocks of rows: all on
# chip, joined at once and in two steps; half of them, a third of them; of more samples than fit.
CASES = [
    ("group_norm", (14, 6, 640, 512), "channels first"),
    ("instance_norm", (20, 2, 1024, 1024), "channels first"),
    ("batch_norm_backward-training", (2, 40, 512, 512), "channels first"),
    ("batch_norm-training", (64, 1024, 8, 8), "channels last"),
    ("batch_norm-training", (3, 72, 33, 41), "channels last"),
    ("batch_norm-training", (64, 256, 48, 48), "channels last"),
    ("batch_norm_backward-training", (64, 1024, 8, 8), "channels last"),
    ("batch_norm_backward-training", (5, 136, 51, 49), "channels last"),
    ("batch_norm_backward-training", (32, 256, 48, 48), "channels last"),
    ("instance_norm", (40, 64, 40, 40), "channels last"),
]
every_case = pytest.mark.parametrize(("mode", "shape", "layout"), CASES)


def skip_unless_kept(mode, shape, layout):
    """Where the card is of another kind, its sets are walked otherwise."""
    if layout == "channels last":
        plan = make_op(mode).plan("float16", (shape[0], *shape[2:], shape[1]), channel_axis=-1)
    else:
        plan = make_op(mode).plan("float16", shape)
    kept = [launch for launch in plan if launch.kernel.startswith(("run_kept", "column_kept"))]
    if not kept:
        arch = devices.compute_capability(cupy.cuda.Device().id)
        pytest.skip(f"compute capability {arch / 10} keeps no such sets")


@every_case
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_much_of_it(mode, shape, layout, dtype):
    skip_unless_kept(mode, shape, layout)
    check(mode, make_inputs(mode, shape, dtype, centre=0.5), layout)


OF_SAMPLES = [case for case in CASES if case[0] in ("group_norm", "instance_norm")]


@pytest.mark.parametrize(("mode", "shape", "layout"), OF_SAMPLES)
def test_equal_samples_have_equal_bits(mode, shape, layout):
    """Whichever of them a CTA has first, and which later."""
    skip_unless_kept(mode, shape, layout)
    inputs = make_inputs(mode, shape, "float16", centre=0.5)
    inputs["x"][...] = inputs["x"][:1]
    for each in run(mode, on_gpu(inputs, layout))[0]:
        for sample in each[1:]:
            assert_same_bits(sample, each[0])


@every_case
@pytest.mark.parametrize("blocks", [40, 132, 400])
def test_beside_other_work(mode, shape, layout, blocks):
    """CTAs find less room than the launch counts on: nobody waits for those that cannot start."""
    skip_unless_kept(mode, shape, layout)
    inputs = make_inputs(mode, shape, "float16")
    quiet, left = run(mode, on_gpu(copied(inputs), layout))
    arrays = on_gpu(copied(inputs), layout)
    with cupy.cuda.Stream(non_blocking=True) as other:
        spin(30, blocks, 1024)
    busy, also_left = run(mode, arrays)
    other.synchronize()
    for one, two in zip((*quiet, *left.values()), (*busy, *also_left.values()), strict=True):
        if one is not None:
            assert_same_bits(one, two)
