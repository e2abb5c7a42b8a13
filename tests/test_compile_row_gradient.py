"""NVRTC compiles what calls of the row norms' backward ops would launch, without a GPU.

As tests/test_compile.py: none may spill registers or use local memory.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("cuda.core", exc_type=ImportError, reason="needs cuda-core and NVRTC")

from backward_cases import ADAPTIVE, CLASSES, FUSED, ROW_OPS, TAKES_SHAPE
from compiling import ARCHS, Kernel

from cunorm import dtypes
from cunorm.arrays import ArraySpec
from cunorm.cuda import sources
from cunorm.cuda.row_gradient import KERNELS

# In every regime: lanes, warps, CTAs, values made twice, segments; wide and narrow accesses.
LENGTHS = (7, 64, 330, 1023, 2050, 4096, 4097, 8190, 8192, 16382, 16384, 262144, 1000003)
FEW = (64, 1023, 4096, 8190, 16384, 1000003)
# float16 takes the registers of bfloat16.
KINDS = ("bfloat16", "float32", "float64")
ROWS = 300


def launched(op, dtype, lengths=LENGTHS, change=None, **options):
    for cols in lengths:
        made = CLASSES[op](cols) if op in TAKES_SHAPE else CLASSES[op]()
        without = options.get("without", ())
        wide = options.get("parameter_dtype")
        call = made._hypothetical_call(dtype, (ROWS, cols), wide, without, False)
        inputs = call.inputs if change is None else change(call.inputs, cols)
        call = made._call(inputs, False, None, call.device)
        for launch in KERNELS[op].plan(call, False).launches:
            yield Kernel(launch.kernel, KERNELS[op].file, cols)


def one_row(inputs, cols):
    """Parameters that all rows share."""
    return {
        name: ArraySpec.contiguous((cols,), spec.dtype)
        if name in ("scale", "shift", "gate")
        else spec
        for name, spec in inputs.items()
    }


def unaligned(inputs, cols):
    return {
        n: s and s._replace(alignment=dtypes.FLOATS[s.dtype].itemsize) for n, s in inputs.items()
    }


def half_aligned(inputs, cols):
    """To what the hardware copies at least."""
    sizes = {n: s and max(dtypes.FLOATS[s.dtype].itemsize, 4) for n, s in inputs.items()}
    return {n: s and s._replace(alignment=sizes[n]) for n, s in inputs.items()}


def gaps(inputs, cols):
    """Rows that do not follow each other."""
    return {
        n: s and (s._replace(strides=(cols + 64, 1)) if s.shape == (ROWS, cols) else s)
        for n, s in inputs.items()
    }


def variants(op, lengths, kinds=KINDS):
    for dtype in kinds:
        yield from launched(op, dtype, lengths)
        if op in ADAPTIVE:
            yield from launched(op, dtype, lengths, one_row)
        if op in FUSED:
            yield from launched(op, dtype, lengths, without=("grad_residual_out",))


@pytest.mark.slow
@pytest.mark.parametrize("op", ROW_OPS)
def test_every_regime(pretend, check_kernels, op):
    pretend(90)
    check_kernels(variants(op, LENGTHS), 90)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["layer_norm_backward", "ada_layer_norm_zero_backward"])
@pytest.mark.parametrize("change", [unaligned, half_aligned, gaps])
def test_other_layouts(pretend, check_kernels, op, change):
    pretend(90)
    kernels = [k for dtype in KINDS for k in launched(op, dtype, FEW, change)]
    check_kernels(kernels, 90)


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in ROW_OPS if op not in ADAPTIVE])
def test_wide_and_absent_parameters(pretend, check_kernels, op):
    pretend(90)
    kernels = [
        *launched(op, "bfloat16", FEW, parameter_dtype="float32"),
        *launched(op, "float16", FEW, without=("weight",)),
    ]
    check_kernels(kernels, 90)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["fused_add_layer_norm_backward", "ada_layer_norm_zero_backward"])
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != 90])
def test_other_gpus(pretend, check_kernels, arch, op):
    pretend(arch)
    check_kernels(variants(op, FEW), arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_calls_reach_every_template(pretend, arch):
    pretend(arch)
    reached = {kernel.template for kernel in launched("layer_norm_backward", "bfloat16")}
    written = set()
    for path in sources.source_dir().glob("row_gradient*.cuh"):
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        written |= set(re.findall(r"__global__[^;{]*?(\w+)\(const __grid_constant__", text))
    assert len(written) == 5
    assert reached == written


@pytest.mark.parametrize("op", ROW_OPS)
def test_one_kernel_for_any_number_of_rows(op):
    made = CLASSES[op](1000) if op in TAKES_SHAPE else CLASSES[op]()

    def expressions(rows):
        return [launch.kernel for launch in made.plan("float16", (rows, 1000))]

    most = expressions(1 << 20)
    for rows in (1, 2, 7, 64, 65537):
        # A single block of rows leaves nothing to merge.
        assert expressions(rows) in (most, most[:-1] if len(most) > 1 else most)


def test_a_tile_says_what_the_kernel_is_told():
    made = CLASSES["layer_norm_backward"](4096)
    call = made._hypothetical_call("bfloat16", (64, 4096), None, (), False)
    plan = KERNELS["layer_norm_backward"].plan(call, False)
    assert plan.tile.expression in plan.launches[0].kernel
    assert replace(plan.tile, dense=False).expression not in plan.launches[0].kernel
