"""NVRTC compiles what calls of group and instance norm backward would launch, without a GPU.

As tests/test_compile.py: none may spill registers or use local memory.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cuda.core", exc_type=ImportError, reason="needs cuda-core and NVRTC")

from compiling import ARCHS, Kernel

import cunorm
from cunorm.arrays import Device
from cunorm.cuda import sources
from cunorm.cuda.group_gradient import KERNELS

# Samples in every regime, (groups, C, ...); walked channels first and channels last.
SAMPLES = (
    (32, 64),
    (32, 512),
    (8, 64, 3),
    (3, 12, 7),
    (32, 640, 8, 8),
    (32, 1280, 16, 16),
    (8, 96, 13, 13),
    (32, 128, 32, 32),
    (32, 320, 32, 32),
    (32, 256, 56, 56),
    (32, 320, 64, 64),
    (4, 12, 147, 147),
    (32, 320, 128, 128),
    (32, 512, 256, 256),
    (1, 20, 256, 256),
    (32, 128, 1024, 1024),
)
SIZES = (1, 8, 64, 2000)  # samples
# float16 takes the registers of bfloat16; GPUs of a generation take about the same.
KINDS = {
    80: ("bfloat16", "float64"),
    90: ("bfloat16", "float32", "float64"),
    100: ("bfloat16", "float64"),
    120: ("bfloat16", "float64"),
}


def launched(op, dtype, alignment=16):
    """What calls launch, in every regime."""
    for groups, channels, *spatial in SAMPLES:
        one = (
            cunorm.GroupNormBwdOp(groups)
            if op == "group_norm_backward"
            else cunorm.InstanceNormBwdOp()
        )
        for samples in SIZES:
            for axis in (1, -1):
                shape = (
                    (samples, channels, *spatial) if axis == 1 else (samples, *spatial, channels)
                )
                call = one._hypothetical_call(dtype, shape, None, (), False, axis)
                inputs = {n: s and s._replace(alignment=alignment) for n, s in call.inputs.items()}
                call = call.__class__(
                    call.op, call.attributes, inputs, call.outputs, {}, Device("cuda")
                )
                for launch in KERNELS[op].plan(call, False).launches:
                    yield Kernel(launch.kernel, KERNELS[op].file, channels)


def variants(kinds, alignment=16):
    return [k for op in KERNELS for dtype in kinds for k in launched(op, dtype, alignment)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_regime(pretend, check_kernels, arch):
    pretend(arch)
    check_kernels(variants(KINDS.get(arch, ("bfloat16",))), arch)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "alignment"), [("float16", 2), ("float32", 4)])
def test_unaligned_arrays(pretend, check_kernels, dtype, alignment):
    pretend(90)
    check_kernels(variants((dtype,), alignment), 90)


@pytest.mark.parametrize("arch", ARCHS)
def test_calls_reach_every_template(pretend, arch):
    pretend(arch)
    reached = {k.template for op in KERNELS for k in launched(op, "bfloat16")}
    written = set()
    for path in sources.source_dir().glob("group_*.cuh"):
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        written |= set(re.findall(r"__global__[^;{]*?(\w+)\(const __grid_constant__", text))
    clusters = {"group_gradient_cluster", "group_gradient_few"}
    assert clusters < written
    assert reached == (written | {"run_map", "column_map"}) - (clusters if arch < 90 else set())


@pytest.mark.parametrize("op", KERNELS)
def test_few_kernels_for_any_number_of_samples(op):
    """One cluster for all samples up to eight of them; more share kernels."""
    one = cunorm.GroupNormBwdOp(8) if op == "group_norm_backward" else cunorm.InstanceNormBwdOp()
    for shape in ((96, 8, 8), (96, 7, 7), (96, 32, 32), (96, 112, 112), (96, 1024, 1024)):
        expressions = set()
        for samples in (1, 2, 3, 5, 8, 9, 16, 33, 64, 100, 255, 1024, 4097):
            plan = one.plan("float16", (samples, *shape))
            expressions |= {launch.kernel for launch in plan}
        assert len(expressions) <= 8
