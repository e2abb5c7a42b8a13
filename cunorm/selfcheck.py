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
from math import prod
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import dtypes, selfcases, targets
from cunorm.selfcases import OPS, Shape, Variant


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


def check(where: Host, variant: Variant, shape: Shape, dtype: str, target: str | None) -> Row:
    """Run an op on data of this shape, judge it and time it."""
    op, (count, *rest), axis = variant.op, shape.sizes, shape.channel_axis
    block = min(count, max(1, selfcases.BLOCK // prod(rest)))
    inputs = selfcases.make_inputs(op, Shape((block, *rest), axis), dtype)
    made = selfcases.make_op(variant, shape, target)
    arrays = {
        name: where.repeated(array, count)
        if selfcases.repeats(op, name)
        else where.upload(array.copy())
        for name, array in inputs.items()
    }
    options = {} if axis is None else {"channel_axis": axis}

    stats = {"return_stats": True} if made.statistic_names else {}
    results = made(*arrays.values(), **options, **stats)
    results = results if isinstance(results, tuple) else (results,)
    running = ("running_mean", "running_var") if getattr(made, "computes", False) else ()
    updated = {name: arrays[name] for name in running if name in arrays}
    named = dict(zip((*made.output_names, *made.statistic_names), results, strict=False))
    deviations: dict[str, Any] = {}
    for found, judged in _to_judge(where, op, named | updated, inputs, shape, block):
        after = {name: found.pop(name) for name in updated}
        deviations |= selfcases.judge(variant, shape, found, judged, after)
    of_bound = max(deviation.ratio for deviation in deviations.values())

    out: Any = results[: len(made.output_names)]
    written = out
    out = out if len(out) > 1 else out[0]
    seconds = where.seconds(lambda: made(*arrays.values(), out=out, **options))
    nbytes = sum(array.nbytes for array in (*arrays.values(), *written, *updated.values()))
    return Row(
        op,
        dtype,
        shape.sizes,
        "PASS" if of_bound <= 1 else "FAIL",
        next(iter(deviations.values())).ulps,
        of_bound,
        seconds,
        nbytes / seconds / 1e9,
        where.copy_seconds(nbytes) / seconds,
        _note(variant, shape),
    )


def _to_judge(
    where: Host,
    op: str,
    results: dict[str, Any],
    inputs: dict[str, Any],
    shape: Shape,
    block: int,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Results and inputs on the host: all of them, or parts where the inputs were repeated."""
    count, axis = shape.sizes[0], shape.channel_axis
    if count <= block:
        yield {name: where.download(array) for name, array in results.items()}, inputs
        return
    for cut in selfcases.cuts(op, shape, block):
        found = {}
        for name, array in results.items():
            if cut.results is None or name in cut.results:
                parts = [selfcases.part(op, cut, name, array, i, axis) for i in cut.indices]
                found[name] = selfcases.joined(cut, [where.download(p) for p in parts], axis)
        judged = dict(inputs)
        of_items = cut.of == "items"
        indices = [i % block for i in cut.indices] if of_items else cut.indices
        for name, array in inputs.items():
            parts = [selfcases.part(op, cut, name, array, i, axis) for i in indices]
            if parts[0] is not None:
                judged[name] = selfcases.joined(cut, parts, axis)
            if not of_items and selfcases.repeats(op, name):
                judged[name] = Host().repeated(judged[name], count)
        yield found, judged


def _note(variant: Variant, shape: Shape) -> str:
    last = "channel_axis=-1" if shape.channel_axis == -1 else ""
    return ", ".join(filter(None, (variant.note, last)))


def run(
    where: Host, names: Sequence[str], kinds: Sequence[str], target: str | None, quick: bool
) -> Iterator[Row]:
    """The rows of the table as they are found; no failure ends the check."""
    for op in names:
        for dtype in kinds:
            try:
                dtypes.numpy_dtype(dtype)
            except TypeError as error:
                yield Row(op, dtype, (), "SKIP", note=_one_line(error))
                continue
            shapes = selfcases.shapes(op, dtype, where.large_bytes, quick)
            for variant in selfcases.variants(op):
                for shape in shapes:
                    try:
                        yield check(where, variant, shape, dtype, target)
                    except Exception as error:  # whatever goes wrong is what the check is for
                        note = ", ".join(filter(None, (_one_line(error), _note(variant, shape))))
                        yield Row(op, dtype, shape.sizes, "FAIL", note=note)


# ---------------------------------------------------------------------------------------------
# the table
# ---------------------------------------------------------------------------------------------

_HEAD = ("op", "dtype", "shape", "ulp", "/bound", "us", "GB/s", "of copy", "")
_WIDTHS = (30, 9, 17, 7, 7, 11, 8, 8, 0)
_LEGEND = (
    "ulp: largest error of the first output beyond the allowance for arithmetic, in units in the\n"
    "        last place\n"
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
    kinds = options.dtype or tuple(dtypes.FLOATS)
    served = targets.find(target).kernels
    missing_ops = [op for op in options.op or OPS if op not in served]
    names = [op for op in options.op or OPS if op in served]
    for row in run(where, names, kinds, options.target, options.quick):
        counts[row.verdict] += 1
        print(line(cells(row)), flush=True)
    if missing_ops:
        print(f"\nnot in target {target!r}: {', '.join(missing_ops)}")
    print(f"\n{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped")
    return 1 if counts["FAIL"] else 0
