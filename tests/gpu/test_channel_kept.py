"""Sets kept on chip by CTAs that wait for each other: many of them, and beside other work."""

from __future__ import annotations

import pytest
from cases import assert_same_bits
from channel_cases import copied, make_inputs, make_op
from channels_on_gpu import check, on_gpu, run
from on_gpu import cupy, spin

from cunorm.cuda import devices

pytestmark = pytest.mark.gpu

# Sets of 1.3, 2 and twice 1 MB: more of them than the GPU keeps at a time.
CASES = [
    ("group_norm", (14, 6, 640, 512)),
    ("instance_norm", (20, 2, 1024, 1024)),
    ("batch_norm_backward-training", (2, 40, 512, 512)),
]
every_case = pytest.mark.parametrize(("mode", "shape"), CASES)


def skip_unless_kept(mode, shape):
    """Where the card is of another kind, its sets are walked otherwise."""
    plan = make_op(mode).plan("float16", shape)
    kept = [launch for launch in plan if launch.kernel.startswith("run_kept")]
    if not kept:
        arch = devices.compute_capability(cupy.cuda.Device().id)
        pytest.skip(f"compute capability {arch / 10} keeps no such sets")


@every_case
def test_more_sets_than_are_kept_at_a_time(mode, shape):
    skip_unless_kept(mode, shape)
    check(mode, make_inputs(mode, shape, "float16", centre=0.5))


@every_case
@pytest.mark.parametrize("blocks", [40, 132, 400])
def test_beside_other_work(mode, shape, blocks):
    """CTAs find less room than the launch counts on: nobody waits for those that cannot start."""
    skip_unless_kept(mode, shape)
    inputs = make_inputs(mode, shape, "float16")
    quiet, left = run(mode, on_gpu(copied(inputs)))
    arrays = on_gpu(copied(inputs))
    with cupy.cuda.Stream(non_blocking=True) as other:
        spin(30, blocks, 1024)
    busy, also_left = run(mode, arrays)
    other.synchronize()
    for one, two in zip((*quiet, *left.values()), (*busy, *also_left.values()), strict=True):
        if one is not None:
            assert_same_bits(one, two)
