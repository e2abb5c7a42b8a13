"""NVRTC compiles what calls of batch, group and instance norm would launch, without a GPU.

As tests/test_compile.py: none may spill registers or use local memory.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cuda.core", exc_type=ImportError, reason="needs cuda-core and NVRTC")

from channel_cases import CLASSES, MODES
from compiling import ARCHS, Kernel

from cunorm.arrays import Device
from cunorm.cuda import sources
from cunorm.cuda.channel import KERNELS

# Shapes in every regime, (N, C, ...); walked channels first and channels last.
BATCHES = (
    (32, 64),
    (50, 64),
    (32, 20000),
    (31, 20000),
    (65536, 512),
    (3, 5, 7),
    (8, 64, 32, 32),
    (8, 300, 32, 32),
    (4, 256, 28, 28),
    (16, 24, 56, 56),
    (4, 128, 1024, 1024),
    (256, 64, 56, 56),
    (256, 2048, 7, 7),
    (37, 512, 7, 7),
    (64, 256, 15, 15),
    (5, 2048, 3, 3),
    (256, 1024, 14, 14),
    (2, 32, 128, 128, 128),
    (2000, 7, 30),
    (64, 3, 31, 31),
    *((80, 320, 32, 32), (256, 8, 32, 32), (512, 8, 32, 32)),  # clusters of small CTAs
    # odd planes of aligned samples
    (1200, 8, 129),
    (57, 256, 1021),
    (14, 256, 4099),
    (20, 8, 65537),
    (1, 8, 999983),
    (13, 3, 299, 299),  # samples that start anywhere
)
GROUPED = (
    (8, 128, 32, 32),
    (4, 128, 30, 30),
    (2, 320, 128, 128),
    *((1, 80, 128, 128), (1, 128, 128, 128), (1, 256, 128, 128)),  # clusters of small CTAs
    (8, 512, 256, 256),
    (1, 128, 1024, 1024),
    (2, 32, 128, 128, 128),
    (64, 8, 31),
    (64, 16, 3),
    # odd planes: vectors of several channels, masked ends, and samples that start anywhere
    *((9, 512, 2), (64, 256, 49), (4, 128, 1021), (4, 64, 20011)),
    *((4, 24, 7), (4, 24, 129), (4, 24, 1021), (4, 24, 4099), (4, 24, 20011), (1, 24, 262145)),
    *((4, 9, 3), (4, 9, 129), (4, 9, 1021), (4, 9, 4099), (4, 9, 20011), (1, 9, 262145)),
)
# float16 takes the registers of bfloat16; GPUs of a generation take about the same.
KINDS = {
    80: ("bfloat16", "float64"),
    90: ("bfloat16", "float32", "float64"),
    100: ("bfloat16", "float64"),
    120: ("bfloat16", "float64"),
}


def launched(mode, dtype, alignment=16):
    """What calls in a mode launch, in every regime."""
    name, parameters = MODES[mode]
    for shape in GROUPED if name in ("group_norm", "instance_norm") else BATCHES:
        if name == "group_norm":
            parameters = {"num_groups": 8 if shape[1] % 8 == 0 else 3}
        op = CLASSES[name](**parameters)
        for axis in (1, -1):
            placed = shape if axis == 1 else (shape[0], *shape[2:], shape[1])
            call = op._hypothetical_call(dtype, placed, None, (), bool(op.statistic_names), axis)
            inputs = {n: s and s._replace(alignment=alignment) for n, s in call.inputs.items()}
            call = call.__class__(
                call.op, call.attributes, inputs, call.outputs, call.statistics, Device("cuda")
            )
            for launch in KERNELS[name].plan(call, False).launches:
                yield Kernel(launch.kernel, KERNELS[name].file, shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_regime(pretend, check_kernels, arch):
    pretend(arch)
    kinds = KINDS.get(arch, ("bfloat16",))
    check_kernels([k for m in MODES for d in kinds for k in launched(m, d)], arch)


@pytest.mark.slow
def test_unaligned_arrays(pretend, check_kernels):
    pretend(90)
    unaligned = [
        k
        for m in MODES
        for d, size in (("float16", 2), ("float32", 4))
        for k in launched(m, d, alignment=size)
    ]
    check_kernels(unaligned, 90)


@pytest.mark.parametrize("arch", ARCHS)
def test_calls_reach_every_template(pretend, arch):
    pretend(arch)
    reached = {k.template for mode in MODES for k in launched(mode, "bfloat16")}
    written = set()
    for path in sources.source_dir().glob("channel_*.cuh"):
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        written |= set(re.findall(r"__global__[^;{]*?(\w+)\(const __grid_constant__", text))
    clusters = {name for name in written if name.endswith("_cluster")}
    assert len(clusters) == 2
    kept = {"run_kept", "column_kept", "clear_attendance", "strip_norm", "strip_gradient"}
    assert kept < written
    missing = (clusters if arch < 90 else set()) | (kept if arch not in (90, 100) else set())
    assert reached == written - missing


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
def test_the_most_that_is_kept(pretend, check_kernels, arch):
    """In float16 alone, which is not scaled."""
    pretend(arch)
    kernels = [k for m in MODES for k in launched(m, "float16") if "run_kept" in k.expression]
    assert {k.file for k in kernels} >= {"batch_norm", "batch_norm_backward", "group_norm"}
    check_kernels(kernels, arch)


@pytest.mark.parametrize("mode", MODES)
def test_few_kernels_for_any_size(mode):
    """Shapes choose among a number of kernels; they do not each have their own."""
    name, parameters = MODES[mode]
    op = CLASSES[name](**parameters)
    expressions = set()
    for batch in (1, 2, 3, 5, 8, 16, 33, 64, 100, 255, 1024, 4097):
        for side in (8, 12, 16, 20, 32, 48, 64, 112, 224):
            plan = op.plan("float16", (batch, 96, side, side))
            expressions |= {launch.kernel for launch in plan}
    assert len(expressions) <= 48
