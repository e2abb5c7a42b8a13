"""The self-check: every op on the GPU there is, or on NumPy, against the float64 reference.

``python -m cunorm`` prints a row per op, dtype and shape. Errors are judged by
`cunorm.precision`; speed is set beside what the same machine needs to copy as many bytes.
"""

from __future__ import annotations

import argparse
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import dtypes, ops, precision, reference, targets

OPS = tuple(reference.FORWARD)
_CLASSES = {kind.name: kind for kind in vars(ops).values() if hasattr(kind, "input_names")}
_TAKES_SHAPE = ("layer_norm", "rms_norm")
_BLOCK = 1 << 20  # elements made on the host; larger arrays repeat them
_SHAPES = ((130, 33), (3, 12_289))
_LARGE_COLS = 4096


class Row(NamedTuple):
    """A line of the table; numbers that are not there are None."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    verdict: str
    ulps: float | None = None
    of_bound: float | None = None
    seconds: float | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None
    note: str = ""


# ---------------------------------------------------------------------------------------------
# where the check runs
# ---------------------------------------------------------------------------------------------


class Host:
    """NumPy arrays, timed by the clock."""

    large_bytes = 1 << 22

    def __init__(self) -> None:
        self._copy_seconds: dict[int, float] = {}

    def describe(self) -> list[str]:
        return [f"{platform.processor() or platform.machine()}, no GPU in use"]

    def repeated(self, block: Any, rows: int) -> Any:
        """An array of so many rows: those of a host block, again and again."""
        return np.concatenate([block] * -(-rows // len(block)))[:rows]

    def upload(self, array: Any) -> Any:
        return array

    def download(self, array: Any) -> Any:
        return array

    def seconds(self, call: Callable[[], Any]) -> float:
        call()
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return median(taken)

    def copy_seconds(self, nbytes: int) -> float:
        """What a copy takes that reads and writes so many bytes together."""
        if nbytes not in self._copy_seconds:
            source, destination = self._bytes(nbytes // 2), self._bytes(nbytes // 2)
            self._copy_seconds[nbytes] = self.seconds(lambda: self._copy(destination, source))
        return self._copy_seconds[nbytes]

    def _bytes(self, count: int) -> Any:
        return np.zeros(max(count, 1), np.uint8)

    def _copy(self, destination: Any, source: Any) -> None:
        np.copyto(destination, source)


class Gpu(Host):
    """CuPy arrays on the current device, timed by events around batches of calls."""

    large_bytes = 1 << 27

    def __init__(self, cupy: Any) -> None:
        super().__init__()
        self.cupy = cupy

    def describe(self) -> list[str]:
        cupy, device = self.cupy, self.cupy.cuda.Device()
        properties = cupy.cuda.runtime.getDeviceProperties(device.id)
        capability = device.compute_capability
        versions = {
            "driver for CUDA": cupy.cuda.runtime.driverGetVersion(),
            "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        }
        shown = [f"{k} {v // 1000}.{v % 1000 // 10}" for k, v in versions.items()]
        return [
            f"{properties['name'].decode()}, compute capability "
            f"{capability[:-1]}.{capability[-1]}, {', '.join(shown)}"
        ]

    def repeated(self, block: Any, rows: int) -> Any:
        block = self.upload(block)
        array = self.cupy.empty((rows, *block.shape[1:]), block.dtype)
        for start in range(0, rows, len(block)):
            part = array[start : start + len(block)]
            self.cupy.copyto(part, block[: len(part)])
        return array

    def upload(self, array: Any) -> Any:
        return self.cupy.asarray(array)

    def download(self, array: Any) -> Any:
        return self.cupy.asnumpy(array)

    def seconds(self, call: Callable[[], Any]) -> float:
        cuda = self.cupy.cuda
        calls, batches = 20, 5
        for _ in range(3):
            call()
        taken = []
        for _ in range(batches):
            start, end = cuda.Event(), cuda.Event()
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            taken.append(cuda.get_elapsed_time(start, end) / 1e3 / calls)
        return median(taken)

    def _bytes(self, count: int) -> Any:
        return self.cupy.zeros(max(count, 1), np.uint8)

    def _copy(self, destination: Any, source: Any) -> None:
        self.cupy.copyto(destination, source)


def find_gpu() -> tuple[Any, str]:
    """CuPy, if it has a device that works, else None and why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return None, "CuPy is not installed"
        return None, f"CuPy cannot be imported: {_one_line(error)}"
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return None, "CUDA sees no device"
        cupy.cuda.Device().synchronize()
    except Exception as error:
        return None, f"CuPy {cupy.__version__} finds no usable GPU: {_one_line(error)}"
    return cupy, ""


# ---------------------------------------------------------------------------------------------
# what is checked
# ---------------------------------------------------------------------------------------------


def make_inputs(op: str, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """Host inputs by name, with an offset that a careless variance would not survive."""
    kind = dtypes.numpy_dtype(dtype)
    generator = np.random.default_rng(list(op.encode()))
    inputs = {}
    for name in _CLASSES[op].input_names:
        size = shape if name in ("x", "residual") else shape[-1:]
        centre = {"x": 10.0, "weight": 1.0, "scale": 1.0, "gate": 1.0}.get(name, 0.0)
        inputs[name] = (centre + generator.standard_normal(size)).astype(kind)
    return inputs


def checked_rows(rows: int, block: int) -> list[int]:
    """Rows of a large array that are held against the reference: its edges and some between."""
    picked = {0, 1, block - 1, block, rows // 2, rows - 2, rows - 1}
    return sorted(row for row in picked if 0 <= row < rows)


def check(where: Host, op: str, shape: tuple[int, int], dtype: str, target: str | None) -> Row:
    """Run an op on data of this shape, judge it and time it."""
    rows, cols = shape
    block = min(rows, max(1, _BLOCK // cols))
    inputs = make_inputs(op, (block, cols), dtype)
    per_row = ("x", "residual")
    arrays = {
        name: where.repeated(array, rows) if name in per_row else where.upload(array)
        for name, array in inputs.items()
    }
    kind = _CLASSES[op]
    made = kind(cols, target=target) if op in _TAKES_SHAPE else kind(target=target)

    results = made(*arrays.values(), return_stats=True)
    if rows <= block:
        found, judged = [where.download(result) for result in results], inputs
    else:
        picked = checked_rows(rows, block)
        found = [np.stack([where.download(result[row]) for row in picked]) for result in results]
        again = [row % block for row in picked]
        judged = {name: a[again] if name in per_row else a for name, a in inputs.items()}
    option = {"normalized_shape": cols} if op in _TAKES_SHAPE else {}
    deviations = precision.forward_deviation(op, found, judged, **option)
    of_bound = max(deviation.ratio for deviation in deviations.values())

    out: Any = results[: len(kind.output_names)]
    out = out if len(out) > 1 else out[0]
    seconds = where.seconds(lambda: made(*arrays.values(), out=out))
    written = out if isinstance(out, tuple) else (out,)
    nbytes = sum(array.nbytes for array in (*arrays.values(), *written))
    return Row(
        op,
        dtype,
        shape,
        "PASS" if of_bound <= 1 else "FAIL",
        deviations["y"].ulps,
        of_bound,
        seconds,
        nbytes / seconds / 1e9,
        where.copy_seconds(nbytes) / seconds,
    )


def shapes_for(where: Host, dtype: str, quick: bool) -> list[tuple[int, int]]:
    if quick:
        return [_SHAPES[0]]
    rows = where.large_bytes // (_LARGE_COLS * dtypes.FLOATS[dtype].itemsize)
    return [*_SHAPES, (rows, _LARGE_COLS)]


def run(
    where: Host, names: Sequence[str], kinds: Sequence[str], target: str | None, quick: bool
) -> Iterator[Row]:
    """The rows of the table as they are found; no failure ends the check."""
    served = OPS if target is None else targets.find(target).kernels
    for op in names:
        if op not in served:
            yield Row(op, "", (), "SKIP", note=f"target {target!r} has no such op")
            continue
        for dtype in kinds:
            try:
                dtypes.numpy_dtype(dtype)
            except TypeError as error:
                yield Row(op, dtype, (), "SKIP", note=_one_line(error))
                continue
            for shape in shapes_for(where, dtype, quick):
                try:
                    yield check(where, op, shape, dtype, target)
                except Exception as error:  # whatever goes wrong is what the check is for
                    yield Row(op, dtype, shape, "FAIL", note=_one_line(error))


# ---------------------------------------------------------------------------------------------
# the table
# ---------------------------------------------------------------------------------------------

_HEAD = ("op", "dtype", "shape", "ulp", "/bound", "us", "GB/s", "of copy", "")
_WIDTHS = (21, 9, 14, 7, 7, 11, 8, 8, 0)
_LEGEND = (
    "ulp: largest error of y beyond the allowance for arithmetic, in units in the last place\n"
    "/bound: largest error of any output or statistic over what is allowed (see\n"
    "        cunorm.precision); PASS is 1 or less\n"
    "of copy: speed beside a plain copy of as many bytes on this machine"
)


def cells(row: Row) -> list[str]:
    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    microseconds = None if row.seconds is None else row.seconds * 1e6
    return [
        row.op,
        row.dtype,
        " x ".join(map(str, row.shape)),
        number(row.ulps, 3),
        number(row.of_bound, 3),
        number(microseconds, 1),
        number(row.gb_per_s, 1),
        number(row.of_copy, 3),
        f"{row.verdict}  {row.note}".rstrip(),
    ]


def line(texts: Sequence[str]) -> str:
    padded = [
        text.ljust(width) if i < 3 or i == len(texts) - 1 else text.rjust(width)
        for i, (text, width) in enumerate(zip(texts, _WIDTHS, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cunorm",
        description="Run every op here, compare it with the float64 reference, time it.",
    )
    parser.add_argument("--target", help="kernels to check (default: by where the data lives)")
    parser.add_argument("--op", action="append", choices=OPS, help="only this op; may be repeated")
    parser.add_argument(
        "--dtype", action="append", choices=tuple(dtypes.FLOATS), help="only this dtype; likewise"
    )
    parser.add_argument("--quick", action="store_true", help="one small shape per op and dtype")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 if every row passed, 1 if one did not."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        if options.target is not None:
            targets.find(options.target)
    except ValueError as error:
        parser.error(str(error))

    cupy, missing = (None, "") if options.target == "numpy" else find_gpu()
    if cupy is None and options.target == targets.BUILTIN:
        print(f"target {options.target!r} needs a GPU: {missing}")
        return 1
    where = Host() if cupy is None else Gpu(cupy)
    target = options.target or ("numpy" if cupy is None else targets.BUILTIN)
    versions = f"cunorm {cunorm.__version__}, NumPy {np.__version__}"
    if cupy is not None:
        versions += f", CuPy {cupy.__version__}"
    print(f"{versions}, Python {platform.python_version()}, target {target}")
    print(*where.describe(), *([f"({missing})"] if missing else []), sep="\n")
    print(_LEGEND, line(_HEAD), sep="\n\n", flush=True)

    counts = dict.fromkeys(("PASS", "FAIL", "SKIP"), 0)
    names, kinds = options.op or OPS, options.dtype or tuple(dtypes.FLOATS)
    for row in run(where, names, kinds, options.target, options.quick):
        counts[row.verdict] += 1
        print(line(cells(row)), flush=True)
    print(f"\n{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return 1 if counts["FAIL"] else 0
