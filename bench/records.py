"""Reads the CSV files of earlier runs."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.workloads import SHORT_DTYPES

Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Time:
    """Microseconds, and the extremes of the samples where the file has them."""

    us: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Record:
    """One workload of a run.

    Attributes
    ----------
    op, shape, dtype, mode, status : str
        As in the file.
    bytes_moved : int
    copy : Time, optional
    times : dict of str to Time
        GPU times of the peers that have one.
    recorded_peer : str
        The fastest implementation known before, ``""`` where there is none.
    recorded : float, optional
        The copy over that implementation, both of the run that recorded it.
    gpu, date : str
        Where and when the run was.
    pooled : Time, optional
        cunorm where it allocates its outputs, as its peers do.
    """

    op: str
    shape: str
    dtype: str
    mode: str
    status: str
    bytes_moved: int
    copy: Time | None
    times: dict[str, Time]
    recorded_peer: str = ""
    recorded: float | None = None
    gpu: str = ""
    date: str = ""
    pooled: Time | None = None

    @property
    def key(self) -> Key:
        return self.op, self.shape, self.dtype, self.mode

    @property
    def label(self) -> str:
        return f"{self.op} {self.shape} {SHORT_DTYPES.get(self.dtype, self.dtype)}"

    def of_copy(self, peer: str) -> float | None:
        """The copy's time over that of `peer`: 1 is the speed of a copy."""
        if self.copy is None or peer not in self.times:
            return None
        return self.copy.us / self.times[peer].us

    def beside_peers(self, peer: str) -> float | None:
        """The same by times that were taken in the same way, where the file has them."""
        if peer == "cunorm" and self.copy is not None and self.pooled is not None:
            return self.copy.us / self.pooled.us
        return self.of_copy(peer)


def read(paths: Iterable[Path]) -> dict[Key, Record]:
    """The workloads of several files; a later one replaces an earlier one.

    Raises `ValueError` where a file is not one of the benchmark's.
    """
    found: dict[Key, Record] = {}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if not {"op", "shape", "dtype", "copy_us"} <= set(reader.fieldnames or ()):
                raise ValueError(f"{path} is not a result of python -m bench")
            for row in reader:
                record = _record(row)
                found[record.key] = record
    return found


def _record(row: dict[str, str]) -> Record:
    peers = [name.removesuffix("_host_us") for name in row if name.endswith("_host_us")]
    times = {peer: time for peer in peers if (time := _time(row, peer)) is not None}
    copy, peer = row.get("recorded_copy_us"), row.get("recorded_peer_us")
    return Record(
        op=row["op"],
        shape=row["shape"],
        dtype=row["dtype"],
        mode=row.get("mode", ""),
        status=row.get("status", ""),
        bytes_moved=int(row.get("bytes") or 0),
        copy=_time(row, "copy"),
        times=times,
        recorded_peer=row.get("recorded_peer", "") if peer else "",
        recorded=float(copy) / float(peer) if copy and peer else None,
        pooled=_time(row, "cunorm_pool"),
        gpu=row.get("gpu", ""),
        date=row.get("date", ""),
    )


def _time(row: dict[str, str], name: str) -> Time | None:
    us, *ends = (row.get(f"{name}_us{end}") for end in ("", "_low", "_high"))
    if not us:
        return None
    low, high = (float(end) if end else None for end in ends)
    return Time(float(us), low, high)
