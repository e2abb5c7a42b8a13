"""The benchmark's preparation: what is run where, in which order and with how much memory."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time

import pytest
from bench_fakes import clock, make_fake_cupy, make_peer, small, small_workload

from bench import __main__ as command
from bench import choice, inputs, peers, prepare, processes
from bench.peers import base
from bench.processes import Outcome, Task
from bench.workloads import WORKLOADS, Workload

__all__ = ["clock", "small"]  # fixtures

ROWS = Workload("rms_norm", (6, 32), "float32")
MORE_ROWS = Workload("layer_norm", (60, 32), "float32")
ADD = Workload("fused_add_rms_norm", (6, 32), "float32")


# The order of the tasks


def test_every_workload_meets_every_peer_large_ones_first():
    chosen = [peers.PEERS[name] for name in ("cunorm", "torch", "tileops")]
    tasks = prepare.make_tasks(chosen, [ROWS, MORE_ROWS])
    assert tasks == [Task(n, w) for w in (MORE_ROWS, ROWS) for n in ("tileops", "torch", "cunorm")]
    everything = prepare.make_tasks(list(peers.PEERS.values()), WORKLOADS)
    assert len(set(everything)) == len(peers.PEERS) * len(WORKLOADS)


def test_memory_of_a_task_is_that_of_its_call():
    assert Task("torch", ROWS).nbytes == 3 * ROWS.bytes_moved
    assert Task("cupy", ROWS).nbytes == 6 * ROWS.bytes_moved


def test_the_budget_is_what_the_processes_leave(clock):
    assert prepare.memory_budget(make_fake_cupy(clock), 16) == 70e9 - 16 * 1.2e9
    assert prepare.memory_budget(make_fake_cupy(clock), 100) == 0


def test_the_largest_tasks_run_one_by_one_on_an_h200():
    largest = max(prepare.make_tasks(list(peers.PEERS.values()), WORKLOADS), key=lambda t: t.nbytes)
    assert 40e9 < largest.nbytes < 0.7 * 140e9 - 16 * prepare.PROCESS_BYTES


def test_a_task_that_does_not_fit_lets_others_pass():
    large, middle, little = (Task("torch", w) for w in (MORE_ROWS, MORE_ROWS, ROWS))
    queue = prepare.Queue([large, middle, little], large.nbytes + little.nbytes)
    assert [queue.take(), queue.take()] == [large, little]
    queue.give_back(large)
    assert queue.take() == middle
    assert queue.take() is None


def test_a_task_over_the_budget_runs_alone():
    queue = prepare.Queue([Task("torch", MORE_ROWS), Task("torch", ROWS)], 1)
    first, taken = queue.take(), []
    thread = threading.Thread(target=lambda: taken.append(queue.take()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    queue.give_back(first)
    thread.join(10)
    assert taken == [Task("torch", ROWS)]


def test_tasks_of_a_peer_can_be_dropped():
    tasks = prepare.make_tasks([peers.PEERS["cunorm"], peers.PEERS["torch"]], [ROWS, ADD])
    queue = prepare.Queue(tasks, 10**9)
    assert queue.drop("torch") == 2
    assert queue.take().peer == "cunorm"
    assert queue.drop() == 1
    assert queue.take() is None


# One task


@pytest.fixture
def fake_cupy(monkeypatch, clock, small):
    """The stand-in, and no peer known to be missing."""
    found = make_fake_cupy(clock)
    monkeypatch.setitem(sys.modules, "cupy", found)
    processes._missing.cache_clear()
    yield found
    processes._missing.cache_clear()


def recording(clock, name, calls, **options):
    """A peer that notes whether it was bound with outputs."""
    peer = make_peer(clock, name, **options)

    def bind(workload, arrays, out):
        if workload.op.endswith("_bwd"):
            return None
        return lambda: calls.append((workload, out is not None))

    return dataclasses.replace(peer, bind=bind)


def test_a_peer_is_called_with_and_without_outputs(monkeypatch, clock, fake_cupy):
    calls = []
    for name in ("cunorm", "torch"):
        monkeypatch.setitem(peers.PEERS, name, recording(clock, name, calls))
    found = processes.attempt(Task("cunorm", ROWS))
    assert (found.called, found.error, found.broken) == (True, "", False) and found.seconds > 0
    assert calls == [(ROWS, False), (ROWS, True)]
    del calls[:]
    assert processes.attempt(Task("torch", ROWS)).called
    assert calls == [(ROWS, False)]
    found = processes.attempt(Task("torch", small_workload("layer_norm_bwd", "float32")))
    assert (found.called, found.error) == (False, "")


def test_inputs_are_not_drawn(clock, fake_cupy):
    sets = inputs.InputSets(fake_cupy, ROWS, 1, noise=None)
    assert not sets.inputs(0)["x"].any()


def test_an_error_is_told_in_one_line(monkeypatch, clock, fake_cupy):
    def spoil(outputs):
        raise TypeError("no such loop\nand more")

    monkeypatch.setitem(peers.PEERS, "torch", make_peer(clock, "torch", spoil=spoil))
    found = processes.attempt(Task("torch", ROWS))
    assert (found.called, found.error, found.broken) == (False, "TypeError: no such loop", False)


def test_a_device_that_answers_no_more_breaks_the_process(monkeypatch, clock, fake_cupy):
    def release():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(peers.PEERS, "torch", make_peer(clock, "torch", release=release))
    assert processes.attempt(Task("torch", ROWS)).broken


def test_a_missing_peer_is_told(monkeypatch, clock, fake_cupy):
    absent = dataclasses.replace(make_peer(clock, "torch"), missing=lambda: "torch is not there")
    monkeypatch.setitem(peers.PEERS, "torch", absent)
    assert processes.attempt(Task("torch", ROWS)) == Outcome(missing="torch is not there")


def test_no_device_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert processes.attempt(Task("cunorm", ROWS)).error.startswith("needs CuPy and a CUDA GPU")


# The processes


def answer_with_pid(pipe):
    for number in range(2):
        task = pipe.recv()
        pipe.send(Outcome(float(number), error=f"{task.peer} {os.getpid()}"))
    pipe.recv()


def answer_and_break(pipe):
    pipe.recv()
    pipe.send(Outcome(error=str(os.getpid()), broken=True))
    time.sleep(60)


def die(pipe):
    pipe.recv()
    os._exit(3)


def hang(pipe):
    pipe.recv()
    time.sleep(60)


def test_a_process_does_one_task_after_another():
    process = processes.Process(answer_with_pid)
    first, second = (process.run(Task("torch", ROWS)) for _ in range(2))
    process.stop()
    process.stop()
    assert (first.seconds, second.seconds) == (0.0, 1.0)
    assert first.error == second.error and str(os.getpid()) not in first.error


def test_a_broken_process_is_replaced():
    process = processes.Process(answer_and_break)
    first, second = (process.run(Task("torch", ROWS)) for _ in range(2))
    process.stop()
    assert first.error != second.error


def test_a_process_that_dies_or_hangs_is_told(monkeypatch):
    process = processes.Process(die)
    found = process.run(Task("torch", ROWS))
    assert (found.error, found.broken) == ("the process died", True)
    monkeypatch.setattr(processes, "LIMIT_S", 0.2)
    found = processes.Process(hang).run(Task("torch", ROWS))
    assert (found.error, found.broken) == ("no answer in 0 s", True)


def answer_and_stay(pipe):
    pipe.recv()
    pipe.send(Outcome(called=True))
    time.sleep(60)


def test_a_process_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(processes, "END_S", 0.2)
    process = processes.Process(answer_and_stay)
    assert process.run(Task("torch", ROWS)).called
    start = time.perf_counter()
    process.stop()
    assert time.perf_counter() - start < 30


class Pipe:
    """Hands out `tasks` and then its end."""

    def __init__(self, *tasks):
        self.tasks, self.sent = list(tasks), []

    def recv(self):
        if not self.tasks:
            raise EOFError
        return self.tasks.pop(0)

    def send(self, outcome):
        self.sent.append(outcome)


def test_what_a_process_runs(monkeypatch, clock, fake_cupy):
    for name in processes.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "3")
    monkeypatch.setitem(peers.PEERS, "cunorm", make_peer(clock))
    pipe = Pipe(Task("cunorm", ROWS), Task("cunorm", ADD))
    processes.serve(pipe)
    assert [outcome.called for outcome in pipe.sent] == [True, True]
    assert os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS") == "1"
    assert os.environ.pop("TILELANG_PRINT_ON_COMPILATION") == "0"
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_triton_has_one_cache(monkeypatch, tmp_path):
    monkeypatch.setitem(os.environ, "TRITON_CACHE_DIR", str(tmp_path))
    base.settle_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    del os.environ["TRITON_CACHE_DIR"]
    base.settle_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"].endswith(".triton/cache")


# The command


class InThisProcess:
    def run(self, task):
        return processes.attempt(task)

    def stop(self):
        pass


def test_the_whole_command(monkeypatch, capsys, clock, fake_cupy):
    def spoil(outputs):
        raise ValueError("too wide")

    absent = dataclasses.replace(make_peer(clock, "quack"), missing=lambda: "quack is not there")
    monkeypatch.setitem(os.environ, "TRITON_CACHE_DIR", "anywhere")
    monkeypatch.setitem(peers.PEERS, "cunorm", make_peer(clock))
    monkeypatch.setitem(peers.PEERS, "torch", make_peer(clock, "torch", spoil=spoil))
    monkeypatch.setitem(peers.PEERS, "quack", absent)
    monkeypatch.setattr(prepare, "Process", InThisProcess)
    monkeypatch.setattr(choice, "WORKLOADS", (ROWS, MORE_ROWS, ADD))
    assert command.main(["prepare", "--peers", "torch,quack", "--jobs", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("quack left out: quack is not there\n") == 1
    assert out.count("torch: rms_norm 6x32 f32: ValueError: too wide\n") == 1
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[-4:-1]}
    assert rows["peer"] == ["calls", "seconds", "errors"]
    assert (rows["cunorm"][0], rows["cunorm"][2]) == ("3", "0")
    assert (rows["torch"][0], rows["torch"][2]) == ("0", "3")
    assert out.endswith(" s in 2 processes\n")


def test_nothing_to_do(monkeypatch, capsys):
    assert command.main(["prepare", "--filter", "nothing"]) == 2
    assert capsys.readouterr().err == "bench: no workload matches; see --list\n"
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main(["prepare"]) == 2
    assert capsys.readouterr().err.startswith("bench: needs CuPy and a CUDA GPU: ")


def test_as_many_processes_as_cores(monkeypatch):
    for cores, jobs in ((2, 2), (128, 16), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert prepare.make_parser().parse_args([]).jobs == jobs
