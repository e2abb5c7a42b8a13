"""NVRTC compiles what calls would launch, for every supported GPU and without one.

The kernels are asked of the package itself: plans for rows of many lengths, on a pretended
compute capability. Of kernels that differ only in how many registers their data takes, the
heaviest is compiled. None may spill registers or use local memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache

import pytest
from compiling import ARCHS, Kernel

import cunorm
from cunorm import dtypes
from cunorm.arrays import Device
from cunorm.call import Call
from cunorm.cuda import devices, sources
from cunorm.cuda.target import KERNELS

core = pytest.importorskip("cuda.core", exc_type=ImportError, reason="needs cuda-core and NVRTC")
pathfinder = pytest.importorskip("cuda.pathfinder", exc_type=ImportError)

OPS = {
    "layer_norm": cunorm.LayerNormFwdOp,
    "rms_norm": cunorm.RMSNormFwdOp,
    "fused_add_layer_norm": cunorm.FusedAddLayerNormFwdOp,
    "fused_add_rms_norm": cunorm.FusedAddRMSNormFwdOp,
    "ada_layer_norm": cunorm.AdaLayerNormFwdOp,
    "ada_layer_norm_zero": cunorm.AdaLayerNormZeroFwdOp,
}
THOROUGH = (80, 90)  # in all regimes; the others with their heaviest kernels
WIDE_AND_NARROW = ("bfloat16", "float32", "float64")  # float16 takes the registers of bfloat16
SEGMENTED = ("row_segment_statistics", "row_segment_merge", "row_segment_normalize")
SHAPE = re.compile(r"RowShape<(.*?)>")


def row_lengths(itemsize: int) -> list[int]:
    """Lengths in every regime: each width of access, few and many of them, all the way up."""
    widest = 16 // itemsize
    lengths = {1000003, 2000006, 4000012, 8000024, 1 << 20, 1 << 22}
    for vec in (1, 2, 4, 8):
        if vec > widest:
            continue
        for threads in (2**i for i in range(14)):
            for packs in range(1, 33):
                vectors = threads * packs
                if vec < widest:  # an odd number of them, or they would be wider
                    vectors -= 1 - vectors % 2
                lengths.add(vec * max(vectors, 1))
    return sorted(lengths)


@cache
def shape_names() -> list[str]:
    """The template parameters of RowShape, in order."""
    text = (sources.source_dir() / "row_shape.cuh").read_text(encoding="utf-8")
    header = re.search(r"template <([^>]*)>\s*struct RowShape", text)
    return re.findall(r"(?:int|bool|Reading) (\w+)", header[1])


def op_of(name: str, cols: int):
    kind = OPS[name]
    return kind(cols) if name in ("layer_norm", "rms_norm") else kind()


@cache
def planned(arch, name, dtype, parameter_dtype, without, alignment) -> list[Kernel]:
    """Each once, for the pretended compute capability."""
    kernels: dict[str, Kernel] = {}
    for cols in row_lengths(dtypes.FLOATS[dtype].itemsize):
        call = op_of(name, cols)._hypothetical_call(
            dtype, (3, cols), parameter_dtype, without, False
        )
        inputs = {n: s and s._replace(alignment=alignment) for n, s in call.inputs.items()}
        call = Call(call.op, call.attributes, inputs, call.outputs, {}, Device("cuda"))
        for launch in KERNELS[name].plan(call, False).launches:
            kernel = Kernel(launch.kernel, KERNELS[name].file, cols)
            kernels.setdefault(kernel.expression, kernel)
    return list(kernels.values())


def launched(name, dtype, *, parameter_dtype=None, without=(), alignment=16) -> list[Kernel]:
    arch = devices.compute_capability(0)
    return planned(arch, name, dtype, parameter_dtype, tuple(without), alignment)


Shape = dict[str, str]  # the arguments of RowShape by their names


def every_regime(shape: Shape) -> tuple:
    """Kernels that agree in this differ in the size of their data alone."""
    threads = int(shape["THREADS"])
    block = threads * int(shape["ROWS"])
    registers = 65536 // (block * int(shape["CTAS"])) // 8  # what launch bounds allow
    team = min(threads, 64) if threads >= 32 else 8  # lanes, a warp, several warps
    sizes = ("THREADS", "ROWS", "CTAS", "PACKS", "CLUSTER", "SHARED")
    several = [int(shape.get(name, 0)) > 1 for name in ("CLUSTER", "SHARED")]
    rest = [value for name, value in shape.items() if name not in sizes]
    return *rest, *several, team, min(registers, 32)


def widths(shape: Shape) -> tuple:
    return (shape["VEC"] == "1",)  # single elements, or several at a time


def heaviest(kernels: Iterable[Kernel], regime: Callable[[Shape], tuple]) -> list[Kernel]:
    """Of every regime the kernel with the most data in registers."""
    best: dict[tuple, tuple[int, Kernel]] = {}
    for kernel in kernels:
        found = SHAPE.search(kernel.expression)
        key, data = (kernel.expression,), 0
        if found:
            shape = dict(zip(shape_names(), found[1].split(", "), strict=False))
            around = kernel.expression[: found.start()], kernel.expression[found.end() :]
            key = (*around, *regime(shape))
            data = int(shape["PACKS"]) * int(shape["VEC"]) * int(shape["CLUSTER"])
        if key not in best or best[key][0] < data:
            best[key] = data, kernel
    return [kernel for _, kernel in best.values()]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", THOROUGH)
def test_all_regimes(pretend, check_kernels, arch, op, dtype):
    pretend(arch)
    regime = every_regime if arch == 90 or dtype in WIDE_AND_NARROW else widths
    kernels = heaviest(launched(op, dtype), regime)
    if dtypes.accumulation(dtype) != dtype:
        mixed = launched(op, dtype, parameter_dtype=dtypes.accumulation(dtype))
        kernels += heaviest(mixed, widths)
    check_kernels(kernels, arch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("op", OPS)
def test_unaligned_arrays_and_absent_parameters(pretend, check_kernels, op, dtype):
    pretend(90)
    unaligned = launched(op, dtype, alignment=dtypes.FLOATS[dtype].itemsize)
    kernels = heaviest(unaligned, widths)
    optional = [n for n in OPS[op].input_names if n not in OPS[op].required]
    for absent in (optional[:1], optional[1:], optional):
        if absent:
            kernels += heaviest(launched(op, dtype, without=absent), widths)
    check_kernels(kernels, 90)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in THOROUGH])
def test_heaviest_kernels(pretend, check_kernels, arch, op):
    pretend(arch)
    kernels = []
    for dtype in WIDE_AND_NARROW:
        kernels += heaviest(launched(op, dtype), widths)
    check_kernels(kernels, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_calls_reach_every_template(pretend, arch):
    """Else the tests above would look at less than there is."""
    pretend(arch)
    reached = {kernel.template for kernel in launched("layer_norm", "bfloat16")}
    written = set()
    for path in sources.source_dir().iterdir():
        if path.suffix in (".cu", ".cuh") and not path.name.startswith(
            ("channel_", "group_", "row_gradient")
        ):
            text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
            written |= set(re.findall(r"__global__[^;{]*?(\w+)\(const __grid_constant__", text))
    assert written == {"row_norm", "row_norm_brief", "row_norm_cluster", *SEGMENTED}
    assert reached == written - ({"row_norm_cluster"} if arch < 90 else set())


@pytest.mark.parametrize("op", OPS)
def test_one_kernel_for_any_number_of_rows_and_for_statistics(op):
    def expressions(rows, **options):
        plan = op_of(op, 1000).plan("float16", (rows, 1000), **options)
        return [launch.kernel for launch in plan]

    first = expressions(1)
    for rows in (2, 7, 64, 65537, 1 << 31):
        assert expressions(rows) == first
        assert expressions(rows, return_stats=True) == first


def test_files_share_kernels_and_no_names():
    """Else a kernel of one would be taken for that of another, of which one is compiled."""
    names: dict[str, str] = {}
    for path in sources.source_dir().glob("*.cu"):
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        assert not re.search(r"#\s*(define|undef)|__global__|template\s*<\s*>", text)
        for name in re.findall(r"^(?:struct|using) (\w+)", text, re.M):
            assert names.setdefault(name, path.name) == path.name
    assert len(names) > 10


def test_an_error_names_the_real_file():
    wrong = "static __device__ __forceinline__ A apply"
    text = sources.source("rms_norm")
    assert text.count(wrong) == 1
    options = core.ProgramOptions(
        std="c++17", arch="sm_90", include_path=pathfinder.find_nvidia_header_directory("cudart")
    )
    program = core.Program(text.replace(wrong, "oops"), "c++", options)
    lines = (sources.source_dir() / "rms_norm.cu").read_text(encoding="utf-8").splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if wrong in line)
    with pytest.raises(Exception, match=re.escape(f"cuda_src/rms_norm.cu({number})")):
        program.compile("cubin")
