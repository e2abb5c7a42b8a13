"""``python -m bench sizes``: no size may be a trap.

Copy and cunorm alone, on sizes between those that are timed otherwise: lengths from 64 to 262,144,
odd and prime ones among them, from one row to a million; from one to a million positions in a
channel; and views that start at element 1 of an aligned array.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.device import gpu_or_say
from bench.peers import PEERS
from bench.progress import Progress
from bench.report import FAIL, CsvReport, Machine, Result, describe_machine, microseconds
from bench.sweep import Settings, Sweep
from bench.workloads import Workload, select

DTYPES = ("bfloat16", "float32")

LARGE_BYTES = 20_000_000
#: Of a copy: what moves more than `LARGE_BYTES` may take so many times as long.
LARGE_LIMIT = 1.35
#: The same for rows whose starts are not aligned.
UNALIGNED_LIMIT = 1.15
#: What moves less may take so many microseconds longer.
SMALL_LIMIT_US = 2.0

SAMPLES = 3
MOST_BYTES = 100_000_000
MIDDLE_BYTES = 8_000_000

LENGTHS = (
    *(64, 128, 256, 768, 1024, 2048, 4096, 8192),
    *(12288, 16384, 32768, 65536, 131072, 262_144),
    # primes, and other odd ones
    *(67, 127, 257, 1021, 2053, 3001, 4095, 10007),
    *(20011, 50021, 100003, 196613, 262139),
)
SPATIAL = (
    *(1, 2, 3, 7, 16, 49, 196, 784, 1021, 3136, 4099, 12544, 16384),
    *(50176, 65537, 262144, 999983, 1_000_000),
)


@dataclass(frozen=True)
class Point:
    """A workload, and how many times as long as a copy it may take where it is large."""

    workload: Workload
    limit: float = LARGE_LIMIT

    def limit_us(self, copy_us: float) -> float:
        """The longest that the call may take."""
        if self.workload.bytes_moved > LARGE_BYTES:
            return self.limit * copy_us
        return copy_us + SMALL_LIMIT_US


def row_shapes(length: int, itemsize: int, middle: bool) -> list[tuple[int, int]]:
    """One row, as many as `MOST_BYTES` hold, and some between the two if `middle`."""
    each = 2 * length * itemsize
    rows = {1, MOST_BYTES // each}
    if middle:
        rows.add(max(MIDDLE_BYTES // each, 1))
    return [(count, length) for count in sorted(rows)]


def channel_shape(positions: int, itemsize: int, most_bytes: int) -> tuple[int, ...]:
    """About `most_bytes` of samples with as many channels as usual for so many positions."""
    channels = 256 if positions <= 4099 else 64 if positions <= 50176 else 8
    samples = most_bytes // (2 * itemsize * positions * channels)
    shape = (max(samples, 1), channels, positions)
    return shape[:2] if positions == 1 else shape


def row_points(dtype: str, itemsize: int) -> Iterable[Point]:
    for number, length in enumerate(LENGTHS):
        for op in ("layer_norm", "rms_norm"):
            middle = op == "layer_norm" and number % 2 == 0
            for shape in row_shapes(length, itemsize, middle):
                limit = UNALIGNED_LIMIT if length == 4095 else LARGE_LIMIT
                yield Point(Workload(op, shape, dtype), limit)
    for op in ("layer_norm", "rms_norm"):
        if dtype == "bfloat16":
            yield Point(Workload(op, (1_000_000, 64), dtype))
        for length in (1024, 4096):
            shape = (MOST_BYTES // (2 * itemsize * length), length)
            yield Point(Workload(op, shape, dtype, start=1), UNALIGNED_LIMIT)


def channel_points(dtype: str, itemsize: int) -> Iterable[Point]:
    shapes = [channel_shape(count, itemsize, int(0.6 * MOST_BYTES)) for count in SPATIAL]
    shapes += [channel_shape(count, itemsize, MIDDLE_BYTES) for count in SPATIAL[::2]]
    for shape in dict.fromkeys(shapes):
        yield from channel_ops(shape, dtype)
    yield from channel_ops(channel_shape(784, itemsize, int(0.6 * MOST_BYTES)), dtype, start=1)


def channel_ops(shape: tuple[int, ...], dtype: str, start: int = 0) -> Iterable[Point]:
    yield Point(Workload("batch_norm_train", shape, dtype, start=start))
    if len(shape) > 2:  # else each channel of a sample is one number
        yield Point(Workload("instance_norm", shape, dtype, start=start))
    groups = shape[1] // (8 if shape[1] > 8 else 2)
    yield Point(Workload("group_norm", shape, dtype, start=start, groups=groups))


def make_points() -> list[Point]:
    found: list[Point] = []
    for dtype, itemsize in zip(DTYPES, (2, 4), strict=True):
        found += row_points(dtype, itemsize)
        found += channel_points(dtype, itemsize)
    return found


def missed(point: Point, result: Result) -> str:
    """What is wrong with the result of a point, or ``""``."""
    us, copy_us = result.gpu_us.get("cunorm"), result.copy_us
    if us is None or copy_us is None:
        return result.detail or "not timed"
    if us <= point.limit_us(copy_us):
        return ""
    return (
        f"{microseconds(us)} us, {us / copy_us:.2f} x copy ({microseconds(copy_us)} us); "
        f"at most {microseconds(point.limit_us(copy_us))} us"
    )


def run(cp: Any, points: Sequence[Point], machine: Machine, path: Path | None) -> int:
    """Time `points` and print those that miss; how many."""
    sweep = Sweep(cp, [PEERS["cunorm"]], Settings(samples=SAMPLES))
    file = CsvReport(path, machine, "cold", ["cunorm"]) if path else None
    progress, misses = Progress(len(points)), 0
    try:
        for done, point in enumerate(points, start=1):
            result = sweep.measure(point.workload)
            problem = missed(point, result)
            if problem:
                misses += 1
                progress.tell(f"{point.workload.label}: {problem}")
                if result.status != FAIL and problem != result.detail:
                    result.note(f"over its limit: {problem}")
            if file is not None:
                file.add(result)
            progress.show(done)
    finally:
        if file is not None:
            file.close()
    progress.tell(f"{misses} of {len(points)} sizes miss")
    return misses


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench sizes",
        description="Time many sizes of five ops and print those that miss their limit.",
    )
    parser.add_argument("--filter", action="append", default=[], metavar="WORDS")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--list", action="store_true", help="print the sizes; needs no GPU")
    return parser


def main(argv: Sequence[str]) -> int:
    """0, or 1 when a size misses its limit, or 2 when nothing could be measured."""
    args = make_parser().parse_args(argv)
    points = make_points()
    chosen = set(select(args.filter, tuple(point.workload for point in points)))
    points = [point for point in points if point.workload in chosen]
    if not points:
        print("bench: no size matches; see --list", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{p.workload.label}  {p.workload.bytes_moved} bytes" for p in points))
        return 0
    cp = gpu_or_say()
    if cp is None:
        return 2
    machine = describe_machine(cp)
    print(machine, flush=True)
    return int(run(cp, points, machine, args.csv) > 0)
