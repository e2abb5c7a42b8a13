"""How kernels reach the driver: what a launch that may start early says, and who waits for whom."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import pytest

import cunorm
from cunorm.cuda import devices, driver, sources
from cunorm.cuda.compiler import Function

SHAPE = driver.Shape(grid=70000, block=256, shared_memory=1024, parameter_bytes=64)


class CuError(Exception):
    pass


class Config(ctypes.Structure):
    """CUlaunchConfig, as cuda.h has it."""

    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute with a value of one number."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int)]


@pytest.fixture
def queued(monkeypatch):
    """What reaches cuLaunchKernelEx; the driver answers with the numbers in `answers`."""
    real = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    seen = SimpleNamespace(launches=[], answers=[])

    def launch(config, function, arguments, extra):
        raw = Config.from_address(config.getPtr())
        attribute = Attribute.from_address(raw.attributes)
        numbers = {name: getattr(raw, name) for name, _ in Config._fields_[:8]}
        numbers |= {"count": raw.count, "id": attribute.id, "value": attribute.value}
        seen.launches.append((numbers, int(function), arguments, extra))
        return (seen.answers.pop() if seen.answers else 0,)

    names = ("CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchConfig", "CUfunction")
    stand_in = SimpleNamespace(
        cuLaunchKernelEx=launch, **{name: getattr(real, name) for name in names}
    )
    bindings = driver._Bindings(stand_in, CuError)
    monkeypatch.setattr(driver, "_dependent_bindings", lambda device: bindings)
    return seen


def test_a_launch_says_that_it_may_start_early(queued):
    queue = driver.new_queue(Function(0xF00, None), SHAPE, 0)
    for stream in (0, 0xABC, 0xABC, 0):
        queue(stream, 0xA0, 0)
    assert [numbers["stream"] or 0 for numbers, *_ in queued.launches] == [0, 0xABC, 0xABC, 0]
    for numbers, *rest in queued.launches:
        del numbers["stream"]
        sizes = {"gx": 70000, "gy": 1, "gz": 1, "bx": 256, "by": 1, "bz": 1, "shared": 1024}
        assert numbers == sizes | {"count": 1, "id": 6, "value": 1}  # stream serialization
        assert rest == [0xF00, 0xA0, 0]


def test_queues_of_one_kernel_do_not_share_a_stream(queued):
    one, other = (driver.new_queue(Function(1, None), SHAPE, 0) for _ in range(2))
    one(5, 0, 0)
    other(7, 0, 0)
    one(5, 0, 0)
    assert [numbers["stream"] for numbers, *_ in queued.launches] == [5, 7, 5]


def test_an_error_of_the_driver_is_raised(queued):
    queue = driver.new_queue(Function(1, None), SHAPE, 0)
    queued.answers.append(201)
    with pytest.raises(CuError) as raised:
        queue(0, 0, 0)
    assert raised.value.args == (201,)
    queue(0, 0, 0)


@pytest.mark.parametrize(
    "capability, version", [(75, 13000), (89, 13000), (90, 12030), (100, 12000), (90, 0)]
)
def test_where_launches_are_never_early(monkeypatch, capability, version):
    driver._dependent_bindings.cache_clear()
    monkeypatch.setattr(devices, "compute_capability", lambda index: capability)
    monkeypatch.setattr(devices, "driver_version", lambda: version)
    assert driver._dependent_bindings(0) is None
    driver._dependent_bindings.cache_clear()


def test_every_kernel_takes_its_turn_first():
    """Else it would read what the launch before it has not written yet."""
    kernels = []
    for path in sources.source_dir().glob("*.cu*"):
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        found = re.findall(r"__global__[^;{]*?(\w+)\([^{;]*\)\s*{\s*([^\n]*)", text)
        assert len(found) == text.count("__global__")
        kernels += found
    assert len(kernels) > 40
    assert {first for _, first in kernels} == {"ptx::take_turn();"}


WAIT = "griddepcontrol.wait"
MEMORY = re.compile(r"\b(?:ld\.global|st\.global|cp\.async|prefetch|atom|red)\b")
CALLS = [
    (cunorm.LayerNormFwdOp(512), (64, 512)),
    (cunorm.FusedAddRMSNormFwdOp(), (64, 4095)),
    (cunorm.RMSNormFwdOp(65536), (64, 65536)),
    (cunorm.LayerNormFwdOp(1000003), (2, 1000003)),
    (cunorm.LayerNormBwdOp(1024), (4096, 1024)),
    (cunorm.BatchNormFwdOp(training=True), (64, 64, 56, 56)),
    (cunorm.BatchNormFwdOp(), (4, 256, 28, 28)),
    (cunorm.GroupNormBwdOp(32), (2, 320, 128, 128)),
]


def compiled_to_ptx(source: str, expressions: list[str]) -> str:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
    pathfinder = pytest.importorskip("cuda.pathfinder", exc_type=ImportError)
    headers = pathfinder.find_nvidia_header_directory("cudart")
    options = ["-std=c++17", "-arch=compute_90", "-default-device", f"-I{headers}"]
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"", 0, [], [])
    assert not error
    for expression in expressions:
        (error,) = nvrtc.nvrtcAddNameExpression(program, expression.encode())
        assert not error
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    assert not error
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytearray(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.decode()


@pytest.mark.slow
@pytest.mark.parametrize("op, shape", CALLS, ids=lambda value: getattr(value, "name", str(value)))
def test_the_compiler_moves_no_load_before_the_wait(op, shape):
    launches = op.plan("float16", shape)
    (source,) = {launch.source for launch in launches}
    kernels = list(dict.fromkeys(launch.kernel for launch in launches))
    entries = re.findall(r"\.entry .*?^}", compiled_to_ptx(source, kernels), re.S | re.M)
    assert len(entries) == len(kernels)
    for entry in entries:
        before, wait, after = entry.partition(WAIT)
        assert wait and MEMORY.search(after)
        assert not MEMORY.search(before)
