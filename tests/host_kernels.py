"""The CUDA kernels on the host: their own text, compiled by g++, launched by their own plans.

Only what a host lacks is replaced: CUDA's headers, ``ptx.cuh`` and the declarations of shared
memory (tests/host). Optimization, register use and the GPU's memory model are not tested here.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
from cases import FUSED, PARAMETERS, TAKES_SHAPE

from cunorm import dtypes, reference
from cunorm.arrays import ArraySpec, Library
from cunorm.call import Call
from cunorm.cuda import choices, compiler, devices, driver, launch, plans, row, sources

HEADERS = Path(__file__).parent / "host"
OPTIONS = (
    *("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-w"),
    # An access that is not aligned ends the process: on a GPU it would, too.
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
    # Jumps lead from one stack to another, which is what this would refuse.
    "-U_FORTIFY_SOURCE",
    # Libraries must not share the places of __shared__ arrays: each counts its own.
    *("-ftrivial-auto-var-init=pattern", "-fno-gnu-unique", "-shared", "-fPIC"),
)
TOGETHER = 48  # kernels a library, at most
OLDEST_COMPILER = 12  # the first to know _Float16 in C++

# Per file: what a host compiler does not take, what stands for it, and how often it must occur.
_SHARED = (r"(?<!extern )__shared__ (\w+) (\w+)\[([^\]]+)\];", r"HOST_SHARED(\1, \2, \3);")
_DYNAMIC = (r"extern __shared__ (\w+) (\w+)\[\];", r"HOST_DYNAMIC_SHARED(\1, \2);")
REPLACED = {
    "team.cuh": [(*_SHARED, 4)],
    "row_segments.cuh": [(*_SHARED, 2)],
    "row_tile.cuh": [(*_DYNAMIC, 2)],
    "row_gradient.cuh": [(*_DYNAMIC, 1)],
    "row_gradient_team.cuh": [(*_SHARED, 1)],
    "row_gradient_merge.cuh": [(*_SHARED, 1)],
    "channel_runs.cuh": [(*_DYNAMIC, 1)],
    "channel_columns.cuh": [(*_SHARED, 2)],
    "channel_tiles.cuh": [(*_SHARED, 2), (*_DYNAMIC, 1)],
    "channel_columns_kept.cuh": [(*_SHARED, 3)],
    "channel_kept.cuh": [(*_SHARED, 1)],
    "channel_strips.cuh": [(*_SHARED, 1), (*_DYNAMIC, 1)],
    "group_gradient.cuh": [(*_SHARED, 2), (*_DYNAMIC, 1)],
    "group_merge.cuh": [(*_SHARED, 1)],
}

GUARD = 1024  # bytes that must stay untouched on either side of an output
POISON = 0xFF


def missing_compiler():
    """Why the kernels cannot be built here, or None where they can."""
    if shutil.which("g++") is None:
        return "needs g++, which is not installed"
    version = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True).stdout
    if int(version.split(".")[0]) < OLDEST_COMPILER:
        return f"needs g++ {OLDEST_COMPILER} or newer, found {version.strip()}"
    return None


def copy_sources(to):
    """The kernels' files as a host compiler takes them."""
    for file in sources.source_dir().glob("*.cu*"):
        if (HEADERS / file.name).exists():  # what stands for it is there
            continue
        text = file.read_text(encoding="utf-8")
        for pattern, replacement, times in REPLACED.get(file.name, ()):
            text, found = re.subn(pattern, replacement, text)
            if found != times:
                raise AssertionError(f"{file.name}: {found} of {times} declarations replaced")
        if re.search(r"\b__shared__\b|\basm volatile\(\"[^\"]", text):
            raise AssertionError(f"{file.name}: what a host compiler does not take is left")
        (to / file.name).write_text(text, encoding="utf-8")


class Guarded:
    """Memory for an output, poisoned, with a guard on either side."""

    def __init__(self, spec):
        dtype = dtypes.numpy_dtype(spec.dtype)
        size = spec.size * dtype.itemsize
        raw = np.full(size + 2 * GUARD + 16, POISON, np.uint8)
        start = GUARD + -(raw.ctypes.data + GUARD) % 16
        strides = [stride * dtype.itemsize for stride in spec.strides]
        self.array = np.ndarray(spec.shape, dtype, raw, start, strides)
        self._around = raw[:start], raw[start + size :]

    def check(self):
        if not all((part == POISON).all() for part in self._around):
            raise AssertionError("an output was written beyond its ends")


def spaced_layout(workspaces):
    """As `plans.workspace_layout`, with a guard behind each."""
    offsets, end = [], 0
    for spec in workspaces:
        offsets.append(end)
        end += -(-nbytes_of(spec) // 16) * 16 + GUARD
    return offsets, end


def nbytes_of(spec):
    return spec.size * dtypes.FLOATS[spec.dtype].itemsize


class HostMemory(Library):
    """What a plan asks of an array library, over host memory."""

    def __init__(self):
        self.outputs = []
        self.workspaces = []

    def workspace(self, device, nbytes):
        place = super().workspace(device, nbytes)

        def remember():
            array, address = place()
            self.workspaces.append(array.view(np.uint8))
            return array, address

        return remember

    def check(self, plan):
        """That nothing was written beside outputs, workspaces and the parts of these."""
        for output in self.outputs:
            output.check()
        specs = getattr(plan, "_workspaces", ())
        offsets, _ = spaced_layout(specs)
        for workspace in self.workspaces:
            for spec, start, after in zip(specs, offsets, [*offsets[1:], None], strict=True):
                if not (workspace[start + nbytes_of(spec) : after] == POISON).all():
                    raise AssertionError("a workspace was written beyond its end")

    def allocator(self, device, spec):
        return partial(self._allocate, spec)

    def _allocate(self, spec):
        self.outputs.append(Guarded(spec))
        return self.outputs[-1].array

    def pointer(self, array):
        return array.ctypes.data

    def current_device(self):
        return 0

    def stream(self, device):
        return 0


def make_plan(op, inputs, eps=None, tile=None, offset=0):
    """The plan of a call for compute capability 9.0; `tile` takes the place of its choice."""
    x = inputs["x"]
    specs = {
        name: None if a is None else ArraySpec.contiguous(a.shape, dtypes.name_of(a.dtype))
        for name, a in ordered(op, inputs).items()
    }
    if offset:
        itemsizes = {name: a.itemsize for name, a in inputs.items() if a is not None}
        specs |= {n: specs[n]._replace(alignment=size) for n, size in itemsizes.items()}
    attributes = {"eps": default_eps(op) if eps is None else eps}
    if op in TAKES_SHAPE:
        attributes["normalized_shape"] = x.shape[-1:]
    outputs = ("y", "residual_out") if op in FUSED else ("y",)
    statistics = ("rstd",) if op.endswith("rms_norm") else ("mean", "rstd")
    wide = dtypes.accumulation(dtypes.name_of(x.dtype))
    call = Call(
        op,
        attributes,
        specs,
        dict.fromkeys(outputs, specs["x"]),
        {name: ArraySpec.contiguous(x.shape[:-1], wide) for name in statistics},
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "compute_capability", lambda index: 90))
        if tile is not None:
            stack.enter_context(mock.patch.object(choices, "row_tile", lambda *a, **k: tile))
        return row.KERNELS[op].plan(call, False)


def default_eps(op):
    return inspect.signature(reference.FORWARD[op]).parameters["eps"].default


def ordered(op, inputs):
    names = ["x", *(["residual"] if op in FUSED else []), *PARAMETERS[op]]
    return {name: inputs.get(name) for name in names}


class HostKernels:
    """Kernels built for the host so far, and how to run a call with them."""

    def __init__(self, directory):
        self._directory = directory
        self._functions = {}
        self._noted = None  # what would be built, while nothing is
        copy_sources(directory)

    @contextmanager
    def noting(self):
        """Launches do nothing here; what they would launch is compiled at once at the end."""
        self._noted = set()
        yield
        wanted, self._noted = self._noted, None
        self._build(wanted)

    def _build(self, wanted):
        """In few parts, since a header costs more than a kernel, of about the same length."""
        by_file = {}
        for kernel in sorted(wanted - self._functions.keys()):
            by_file.setdefault(kernel.file, []).append(kernel)
        parts = []
        for kernels in by_file.values():
            count = -(-len(kernels) // TOGETHER)
            parts += [kernels[i::count] for i in range(count)]
        names = [f"kernels{len(self._functions)}_{i}" for i in range(len(parts))]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            for functions in pool.map(self._compile, names, parts):
                self._functions.update(functions)

    def _compile(self, name, kernels):
        lines = ['#include "cuda_host.hpp"', f'#include "{kernels[0].file}.cu"']
        for i, kernel in enumerate(kernels):
            lines += [
                f'extern "C" const char* launch{i}(void** arguments, unsigned grid, unsigned block,'
                " unsigned cluster, unsigned shared, bool backwards) {",
                "    const auto kernel = [](const void* args) {",
                f"        call_kernel({kernel.expression}, args);",
                "    };",
                "    return host::run({grid, block, cluster, shared, kernel, arguments[0]},"
                " backwards);",
                "}",
            ]
        code, library = self._directory / f"{name}.cpp", self._directory / f"{name}.so"
        code.write_text("\n".join([*lines, ""]), encoding="utf-8")
        command = ["g++", *OPTIONS, f"-I{HEADERS}", "-o", str(library), str(code)]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            raise AssertionError(f"g++ does not take the kernels:\n{built.stderr[:4000]}")
        loaded = ctypes.CDLL(str(library))
        functions = {kernel: getattr(loaded, f"launch{i}") for i, kernel in enumerate(kernels)}
        for function in functions.values():
            function.argtypes = ctypes.c_void_p, *[ctypes.c_uint] * 4, ctypes.c_bool
            function.restype = ctypes.c_char_p
        return functions

    def run(self, op, inputs, eps=None, tile=None, backwards=False, offset=0):
        """Outputs, then statistics; `backwards` lets the last warp run first. Inputs start `offset`
        elements behind a multiple of 16 bytes.
        """
        arrays = [None if a is None else aligned(a, offset) for a in ordered(op, inputs).values()]
        return self.execute(lambda: make_plan(op, inputs, eps, tile, offset), arrays, backwards)

    def execute(self, plan, arrays, backwards=False, out=(), together=1):
        """What the plan that `plan()` makes gives on these inputs.

        `together`: CTAs that run at the same time, where their number is a multiple of it.
        """

        def driver_launch(
            function, grid, _y, _z, block, _by, _bz, shared, _stream, arguments, _extra
        ):
            launch_on_host, cluster = function
            if cluster == 1 and grid % together == 0:
                cluster = together
            message = launch_on_host(arguments, grid, block, cluster, shared, backwards)
            if message:
                raise AssertionError(message.decode())

        def load(kernel, device):
            function = idle if self._noted is not None else self._functions[kernel]
            return compiler.Function((function, kernel.cluster), None)

        with ExitStack() as stack:
            for module, name, stand_in in (
                (driver, "_cupy_launch", lambda: driver_launch),
                (driver, "_dependent_bindings", lambda device: None),
                (launch, "load", load),
                (devices, "is_capturing", lambda stream: False),
                (devices, "current", lambda index: nullcontext()),
                (plans, "workspace_layout", spaced_layout),
            ):
                stack.enter_context(mock.patch.object(module, name, stand_in))
            made = plan()
            if self._noted is None:
                self._build(set(kernels_of(made)))
            else:
                self._noted.update(kernels_of(made))
            memory = HostMemory()
            pointers = [0 if a is None else a.ctypes.data for a in (*arrays, *out)]
            results = made.run(memory, arrays, tuple(out), pointers)
            memory.check(getattr(made, "inner", made))
        for result in results:
            result[result != result] = np.nan  # a GPU has one NaN; a host keeps that of an operand
        return tuple(results)


def idle(*launch):
    """A launch that does nothing."""
    return None


def kernels_of(plan):
    """All that a plan launches; a staged plan's is what it stages."""
    inner = getattr(plan, "inner", plan)
    return [launcher.kernel for launcher in getattr(inner, "_launchers", ())]


def aligned(array, offset=0):
    """A copy at a multiple of 16 bytes, which is what a contiguous spec promises; or behind it."""
    room = ArraySpec.contiguous((array.size + offset,), dtypes.name_of(array.dtype))
    copy = Guarded(room).array[offset:].reshape(array.shape)
    copy[...] = array
    return copy
