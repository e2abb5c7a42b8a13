"""``python -m bench prepare``: compiles beforehand what peers would compile in the timing run.

torch.compile, TileOPs and others compile for seconds per workload, one after the other, while
the GPU idles. Here many processes do that at once and leave it in the peers' caches on disk.
Nothing is timed or checked.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from bench.choice import add_choice, chosen_workloads
from bench.device import gpu_or_say
from bench.peers import Peer
from bench.peers.base import settle_triton_cache
from bench.processes import Outcome, Process, Task
from bench.progress import Progress
from bench.workloads import Workload

MAX_JOBS = 16
#: Of the device memory, for all processes together.
MEMORY_SHARE = 0.7
#: Device memory of a process before it allocates anything: its context and what it loads.
PROCESS_BYTES = 1_200_000_000


class Queue:
    """Hands out tasks in their order, but first those that the memory budget has room for."""

    def __init__(self, tasks: Sequence[Task], budget: int) -> None:
        self._tasks = list(tasks)
        self._budget = budget
        self._held = 0
        self._changed = threading.Condition()

    def take(self) -> Task | None:
        """The next task, for which it may wait; None when there are none left."""
        with self._changed:
            while self._tasks:
                for number, task in enumerate(self._tasks):
                    if not self._held or self._held + task.nbytes <= self._budget:
                        self._held += task.nbytes
                        return self._tasks.pop(number)
                self._changed.wait()
        return None

    def give_back(self, task: Task) -> None:
        """Tell that `task` holds no memory any more."""
        with self._changed:
            self._held -= task.nbytes
            self._changed.notify_all()

    def drop(self, peer: str | None = None) -> int:
        """Forget the tasks of `peer`, or all of them; how many these were."""
        with self._changed:
            kept = [task for task in self._tasks if peer not in (None, task.peer)]
            dropped = len(self._tasks) - len(kept)
            self._tasks = kept
            self._changed.notify_all()
        return dropped


@dataclass
class Sum:
    """What the tasks of a peer came to."""

    calls: int = 0
    seconds: float = 0.0
    errors: int = 0


class Tally:
    """Adds up what comes from the processes, and tells errors as they come."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.sums = {task.peer: Sum() for task in reversed(tasks)}
        self._progress = Progress(len(tasks))
        self._done = 0
        self._lock = threading.Lock()

    def add(self, task: Task, outcome: Outcome) -> None:
        with self._lock:
            found = self.sums[task.peer]
            found.seconds += outcome.seconds
            found.calls += outcome.called
            if outcome.error:
                found.errors += 1
                self._progress.tell(f"{task.peer}: {task.workload.label}: {outcome.error}")
            self._step(1)

    def leave_out(self, peer: str, reason: str, dropped: int) -> None:
        """Count what is dropped of a peer that cannot run here; the first to say so is told."""
        with self._lock:
            if self.sums.pop(peer, None) is not None:
                self._progress.tell(f"{peer} left out: {reason}")
            self._step(1 + dropped)

    def lines(self) -> list[str]:
        head = f"{'peer':12}{'calls':>7}{'seconds':>9}{'errors':>8}"
        return [head] + [
            f"{name:12}{s.calls:7}{s.seconds:9.1f}{s.errors:8}" for name, s in self.sums.items()
        ]

    def _step(self, count: int) -> None:
        for _ in range(count):
            self._done += 1
            self._progress.show(self._done)


def make_tasks(peers: Sequence[Peer], workloads: Sequence[Workload]) -> list[Task]:
    """Large workloads first, as few of them run at a time; of each all peers, so that processes
    seldom wait for the lock of one peer's cache. The last peers compile the longest.
    """
    ordered = sorted(workloads, key=lambda workload: -workload.bytes_moved)
    return [Task(peer.name, workload) for workload in ordered for peer in reversed(peers)]


def memory_budget(cp: Any, jobs: int) -> int:
    """Bytes that tasks of `jobs` processes may hold on the device."""
    free, _ = cp.cuda.runtime.memGetInfo()
    return max(int(MEMORY_SHARE * free) - jobs * PROCESS_BYTES, 0)


def run(tasks: Sequence[Task], jobs: int, budget: int) -> Tally:
    """Do `tasks` in `jobs` processes."""
    queue, tally = Queue(tasks, budget), Tally(tasks)

    def work() -> None:
        process = Process()
        try:
            while (task := queue.take()) is not None:
                outcome = process.run(task)
                queue.give_back(task)
                if outcome.missing:
                    tally.leave_out(task.peer, outcome.missing, queue.drop(task.peer))
                else:
                    tally.add(task, outcome)
        finally:
            process.stop()

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in [pool.submit(work) for _ in range(jobs)]:
                future.result()
        finally:
            queue.drop()
    return tally


def usual_jobs() -> int:
    return min(os.cpu_count() or 1, MAX_JOBS)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench prepare",
        description="Compile beforehand, many at a time, what peers would compile while timed.",
    )
    add_choice(parser)
    parser.add_argument(
        "--jobs",
        type=int,
        default=usual_jobs(),
        metavar="N",
        help="processes (default: one per CPU core, at most %(default)s here)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """0, or 2 when nothing could be done; errors of peers are told and do not matter."""
    args = make_parser().parse_args(argv)
    workloads = chosen_workloads(args)
    if not workloads:
        print("bench: no workload matches; see --list", file=sys.stderr)
        return 2
    cp = gpu_or_say()
    if cp is None:
        return 2
    settle_triton_cache()
    start = perf_counter()
    tasks = make_tasks(args.peers, workloads)
    jobs = max(min(args.jobs, len(tasks)), 1)
    tally = run(tasks, jobs, memory_budget(cp, jobs))
    print("\n".join(tally.lines()))
    print(f"{perf_counter() - start:.1f} s in {jobs} processes", flush=True)
    return 0
