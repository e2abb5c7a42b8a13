"""Processes that call peers once, to have them compile."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

from bench.device import find_gpu
from bench.inputs import InputSets
from bench.peers import PEERS, Peer
from bench.workloads import Workload

#: A process that has not answered for so many seconds hangs.
LIMIT_S = 180.0
#: So does one that has not ended for so many.
END_S = 10.0

#: Each process compiles in itself, as there are as many as cores, and says nothing of it.
ENVIRONMENT = {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TILELANG_PRINT_ON_COMPILATION": "0",
}


@dataclass(frozen=True)
class Task:
    """One workload, to be called once with one peer."""

    peer: str
    workload: Workload

    @property
    def nbytes(self) -> int:
        """Device memory that it needs at most."""
        return PEERS[self.peer].memory * self.workload.bytes_moved


@dataclass(frozen=True)
class Outcome:
    """What came of a task.

    Attributes
    ----------
    seconds : float
        Spent on it, the first import of the peer included.
    called : bool
        Whether the peer has the op and was called.
    error : str
        What went wrong, or ``""``.
    missing : str
        Why the peer cannot run here, or ``""``.
    broken : bool
        Whether the process is of no further use.
    """

    seconds: float = 0.0
    called: bool = False
    error: str = ""
    missing: str = ""
    broken: bool = False


class Process:
    """Does one task after another; started when first needed, and again once it broke."""

    def __init__(self, body: Callable[[Any], None] | None = None) -> None:
        self._body = body or serve
        self._child: Any = None
        self._pipe: Any = None

    def run(self, task: Task) -> Outcome:
        if self._child is None:
            self._start()
        outcome = self._ask(task)
        if outcome.broken:
            self._child.kill()
            self.stop()
        return outcome

    def stop(self) -> None:
        """End the process, which has no task."""
        if self._child is not None:
            self._pipe.close()
            self._child.join(END_S)
            self._child.kill()  # which does nothing to one that has ended
            self._child.join()
            self._child = None

    def _start(self) -> None:
        # not forked: CUDA and the threads of libraries do not survive that
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=self._body, args=(theirs,))
        self._child.start()
        theirs.close()  # so that its end is noticed here

    def _ask(self, task: Task) -> Outcome:
        start = perf_counter()
        error = f"no answer in {LIMIT_S:.0f} s"
        try:
            self._pipe.send(task)
            if self._pipe.poll(LIMIT_S):
                answer: Outcome = self._pipe.recv()
                return answer
        except (EOFError, OSError):
            error = "the process died"
        return Outcome(perf_counter() - start, error=error, broken=True)


def serve(pipe: Any) -> None:
    """Answer tasks until the other end of `pipe` is closed: what a process runs."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(task))


def attempt(task: Task) -> Outcome:
    """Call the peer once; whatever it raises is told."""
    start = perf_counter()
    cp, problem = find_gpu()
    if cp is None:
        return Outcome(error=problem)
    missing = _missing(task.peer)
    if missing:
        return Outcome(missing=missing)
    peer, called, error = PEERS[task.peer], False, ""
    try:
        called = call_once(cp, peer, task.workload)
    except Exception as raised:  # of any kind: the others go on
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    answers = release(cp, peer)
    return Outcome(perf_counter() - start, called, error, broken=not answers)


@cache
def _missing(peer: str) -> str:
    return PEERS[peer].missing()


def call_once(cp: Any, peer: Peer, workload: Workload) -> bool:
    """Call `peer` with and without `out`, if it can tell them apart; False without such an op."""
    sets = InputSets(cp, workload, 1, noise=None)
    for out in (None, sets.outputs(0))[: 1 + peer.has_out]:
        call = peer.bind(workload, sets.inputs(0), out)
        if call is None:
            return False
        call()
    cp.cuda.get_current_stream().synchronize()
    return True


def release(cp: Any, peer: Peer) -> bool:
    """Give device memory back; False where the device does not answer this process any more."""
    try:
        cp.cuda.get_current_stream().synchronize()
        cp.get_default_memory_pool().free_all_blocks()
        peer.release()
    except Exception:
        return False
    return True
