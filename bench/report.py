"""Results as a table on the terminal and as CSV."""

from __future__ import annotations

import csv
import datetime
import math
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from bench.peers import Peer
from bench.timing import GpuTime
from bench.workloads import RECORDED, Workload

OK, FAIL, SKIP = "ok", "FAIL", "skip"


@dataclass
class Result:
    """What was measured of one workload; None is what was not."""

    workload: Workload
    status: str = OK
    detail: str = ""
    copy: GpuTime | None = None
    gpu: dict[str, GpuTime] = field(default_factory=dict)
    #: cunorm where it allocates its outputs, as its peers do.
    pooled: GpuTime | None = None
    host_us: dict[str, float] = field(default_factory=dict)
    #: cunorm with ``out=``.
    host_out_us: float | None = None

    @property
    def copy_us(self) -> float | None:
        return None if self.copy is None else self.copy.us

    @property
    def gpu_us(self) -> dict[str, float]:
        return {peer: time.us for peer, time in self.gpu.items()}

    @property
    def gb_per_s(self) -> float | None:
        us = self.gpu_us.get("cunorm")
        return None if us is None else self.workload.bytes_moved / us / 1e3

    @property
    def of_copy(self) -> float | None:
        us = self.gpu_us.get("cunorm")
        return None if us is None or self.copy_us is None else self.copy_us / us

    @property
    def to_peer(self) -> float | None:
        """cunorm, allocating too, over the recorded fastest peer: under 1 is faster."""
        peer = self.workload.peer_us
        return None if self.pooled is None or peer is None else self.pooled.us / peer

    def note(self, text: str) -> None:
        self.detail = f"{self.detail}; {text}" if self.detail else text


@dataclass(frozen=True)
class Machine:
    """Where and with what it was measured."""

    date: str
    machine: str
    gpu: str
    driver: str
    cuda: str
    cupy: str
    cunorm: str
    #: Name and version of the other peers.
    peers: str = ""

    @property
    def keeps_record(self) -> bool:
        """Whether this is the card of the recorded numbers."""
        return "H200" in self.gpu

    def __str__(self) -> str:
        software = f"CUDA {self.cuda}, CuPy {self.cupy}, cunorm {self.cunorm}"
        others = f", {self.peers}" if self.peers else ""
        return f"{self.gpu}, driver {self.driver}, {software}{others}, {self.date}"


def describe_machine(cp: Any, peers: Sequence[Peer] = ()) -> Machine:
    """Describe the current device and the software on it."""
    import cunorm

    runtime = cp.cuda.runtime
    name = runtime.getDeviceProperties(cp.cuda.Device().id)["name"]
    return Machine(
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine=platform.node(),
        gpu=name.decode() if isinstance(name, bytes) else str(name),
        driver=_driver_version() or cuda_version(runtime.driverGetVersion()),
        cuda=cuda_version(runtime.runtimeGetVersion()),
        cupy=cp.__version__,
        cunorm=cunorm.__version__,
        peers=", ".join(f"{peer.name} {peer.version}" for peer in peers if peer.version),
    )


def cuda_version(number: int) -> str:
    """13010 is 13.1."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver_version(path: str = "/proc/driver/nvidia/version") -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return found.group(1) if found else ""


def microseconds(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 10 else f"{us:.1f}"


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g}" if nbytes < 1e9 else f"{nbytes / 1e6:.0f}"


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


@dataclass(frozen=True)
class Column:
    title: str
    width: int


def columns(peers: Sequence[str], recorded: bool) -> list[Column]:
    """The columns of the table for these peers."""
    found = [
        Column("op", 24),
        Column("shape", 22),
        Column("dtype", 8),
        Column("MB", 7),
        Column("copy us", 8),
        Column("cunorm us", 9),
        Column("pool us", 7),
        Column("GB/s", 5),
        Column("of copy", 7),
        Column("host us", 7),
        Column("out= us", 7),
    ]
    found += [Column(f"{peer} us", 9) for peer in peers if peer != "cunorm"]
    if recorded:
        found += [Column("peer us", 8), Column("to peer", 7)]
    return found + [Column("status", 6)]


def cells(result: Result, peers: Sequence[str], recorded: bool) -> list[str]:
    """One row of the table, in the order of `columns`."""
    w = result.workload
    rate = result.gb_per_s
    found = [
        w.op,
        w.shape_text,
        w.dtype,
        megabytes(w.bytes_moved),
        microseconds(result.copy_us),
        microseconds(result.gpu_us.get("cunorm")),
        microseconds(None if result.pooled is None else result.pooled.us),
        "-" if rate is None else f"{rate:.0f}",
        ratio(result.of_copy),
        microseconds(result.host_us.get("cunorm")),
        microseconds(result.host_out_us),
    ]
    found += [microseconds(result.gpu_us.get(peer)) for peer in peers if peer != "cunorm"]
    if recorded:
        found += [microseconds(w.peer_us), ratio(result.to_peer)]
    return [*found, result.status]


def line(texts: Sequence[str], shape: Sequence[Column]) -> str:
    """`texts` side by side: the first three to the left, numbers to the right."""
    pairs = zip(texts, shape, strict=True)
    return " ".join(
        text.ljust(column.width) if i < 3 else text.rjust(column.width)
        for i, (text, column) in enumerate(pairs)
    ).rstrip()


class TableReport:
    """Shows each result as it comes: a live table on a terminal that has rich, lines elsewhere."""

    def __init__(self, peers: Sequence[str], recorded: bool, file: TextIO | None = None) -> None:
        self._peers = peers
        self._recorded = recorded
        self._file = sys.stdout if file is None else file
        self._columns = columns(peers, recorded)
        self._live, self._table = self._make_live()

    def _make_live(self) -> tuple[Any, Any]:
        if not self._file.isatty():
            return None, None
        try:
            from rich.console import Console
            from rich.live import Live
            from rich.table import Table
        except ImportError:
            return None, None
        table = Table()
        for i, column in enumerate(self._columns):
            table.add_column(column.title, justify="left" if i < 3 else "right", no_wrap=True)
        console = Console(file=self._file)
        if console.width < sum(column.width + 3 for column in self._columns) + 1:
            return None, None
        return Live(table, console=console, vertical_overflow="visible"), table

    def __enter__(self) -> TableReport:
        if self._live is None:
            titles = [column.title for column in self._columns]
            print(line(titles, self._columns), file=self._file, flush=True)
        else:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, result: Result) -> None:
        row = cells(result, self._peers, self._recorded)
        if self._live is not None:
            self._table.add_row(*row, style=None if result.status == OK else "red")
            self._live.refresh()
        else:
            print(line(row, self._columns), file=self._file, flush=True)


def csv_fields(peers: Sequence[str]) -> list[str]:
    """The columns of the CSV file."""
    timed = ("copy", *peers)
    return [
        *("op", "shape", "dtype", "bytes", "status"),
        *(f"{name}_us" for name in timed),
        *(f"{name}_us_{end}" for name in timed for end in ("low", "high")),
        *("cunorm_pool_us", "gb_per_s", "of_copy"),
        *(f"{peer}_host_us" for peer in peers),
        *("cunorm_host_out_us", "recorded_copy_us", "recorded_peer_us", "recorded_peer"),
        *("to_recorded_peer", "mode", "detail"),
        *Machine.__dataclass_fields__,
    ]


def csv_row(result: Result, machine: Machine, mode: str, peers: Sequence[str]) -> dict[str, str]:
    """One line of the CSV file; what was not measured is empty."""
    w = result.workload
    kept = machine.keeps_record
    values: dict[str, Any] = {
        "op": w.op,
        "shape": w.shape_text,
        "dtype": w.dtype,
        "bytes": w.bytes_moved,
        "status": result.status,
        "cunorm_pool_us": None if result.pooled is None else result.pooled.us,
        "gb_per_s": result.gb_per_s,
        "of_copy": result.of_copy,
        "cunorm_host_out_us": result.host_out_us,
        "recorded_copy_us": w.copy_us if kept else None,
        "recorded_peer_us": w.peer_us if kept else None,
        "recorded_peer": w.peer if kept else None,
        "to_recorded_peer": result.to_peer if kept else None,
        "mode": mode,
        "detail": result.detail,
        **asdict(machine),
    }
    times = {"copy": result.copy, **result.gpu}
    for name in ("copy", *peers):
        time = times.get(name)
        values[f"{name}_us"] = None if time is None else time.us
        values[f"{name}_us_low"] = None if time is None else time.low
        values[f"{name}_us_high"] = None if time is None else time.high
    for peer in peers:
        values[f"{peer}_host_us"] = result.host_us.get(peer)
    return {name: _csv_text(value) for name, value in values.items()}


def _csv_text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


class CsvReport:
    """Writes each result as it comes, so that a sweep cut short leaves what it had."""

    def __init__(self, path: Path, machine: Machine, mode: str, peers: Sequence[str]) -> None:
        self._file = path.open("w", newline="", encoding="utf-8")
        self._machine, self._mode, self._peers = machine, mode, peers
        self._writer = csv.DictWriter(self._file, csv_fields(peers))
        self._writer.writeheader()

    def add(self, result: Result) -> None:
        self._writer.writerow(csv_row(result, self._machine, self._mode, self._peers))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def summary(results: Sequence[Result], recorded: bool) -> list[str]:
    """The lines below the table."""
    lines = [f"{r.workload.label}: {r.detail}" for r in results if r.detail]
    copies = [r for r in results if r.of_copy is not None]
    if copies:
        mean = _geometric_mean([r.of_copy for r in copies if r.of_copy is not None])
        lines.append(f"{len(copies)} timed, geometric mean {mean:.3f} of the copy speed")
    against = [(r.to_peer, r) for r in results if r.to_peer is not None]
    if recorded and against:
        worst, where = max(against, key=lambda pair: pair[0])
        within = sum(value <= 1.10 for value, _ in against)
        mean = _geometric_mean([value for value, _ in against])
        lines.append(
            f"against the recorded fastest peer: geometric mean {mean:.3f}, {within} of "
            f"{len(against)} within 1.10, worst {worst:.2f} ({where.workload.label})"
        )
        lines.append(f"peer us: {RECORDED}")
    failed = sum(r.status == FAIL for r in results)
    if failed:
        lines.append(f"{failed} FAILED the check against the reference and were not timed")
    return lines


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
