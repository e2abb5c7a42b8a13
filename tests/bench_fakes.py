"""A stand-in for CuPy and peers for the tests of the benchmark."""

from __future__ import annotations

import types

import numpy as np
import pytest

from bench import inputs, peers, timing
from bench.workloads import CHANNEL_OPS, Workload
from cunorm import reference
from cunorm.dtypes import numpy_dtype


class Pointer:
    def __init__(self, buffer, offset=0):
        self.buffer, self.offset = buffer, offset
        self.ptr = buffer.ctypes.data + offset

    def __add__(self, offset):
        return Pointer(self.buffer, self.offset + offset)

    def memset_async(self, value, size):
        self.buffer[self.offset : self.offset + size] = value


class Clock:
    """Host and GPU time in microseconds; the stream is a queue that never idles in between."""

    def __init__(self):
        self.host = 0.0
        self.gpu = 0.0
        self.host_lag = 0.0

    def enqueue(self, gpu_us, host_us=0.0):
        self.host += host_us + self.host_lag
        self.gpu = max(self.gpu, self.host) + gpu_us


def make_fake_cupy(clock, name=b"NVIDIA H200"):
    class Event:
        def record(self, stream):
            clock.enqueue(0.0)
            self.at = clock.gpu

        @property
        def done(self):
            return clock.host >= self.at

        def synchronize(self):
            clock.host = max(clock.host, self.at)

    class Stream:
        ptr = 0

        def synchronize(self):
            clock.host = max(clock.host, clock.gpu)

    class OutOfMemoryError(MemoryError):
        pass

    def empty(size, dtype):
        buffer = np.zeros(size, dtype)
        block = types.SimpleNamespace(data=Pointer(buffer), size=size, nbytes=buffer.nbytes)
        block.buffer = buffer
        return block

    def ndarray(shape, dtype, memptr):
        return np.ndarray(shape, dtype, memptr.buffer, memptr.offset)

    def raw_kernel(source, name):
        return lambda grid, block, args: clock.enqueue(args[0] / 1000)

    runtime = types.SimpleNamespace(
        memcpyDeviceToDevice=3,
        memcpyAsync=lambda *args: clock.enqueue(1.0 + args[2] / 2e6),
        getDeviceProperties=lambda device: {"name": name, "l2CacheSize": 1000},
        getDeviceCount=lambda: 1,
        memGetInfo=lambda: (100_000_000_000, 140_000_000_000),
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13010,
        CUDARuntimeError=RuntimeError,
    )
    return types.SimpleNamespace(
        __version__="14.2.0",
        uint8=np.uint8,
        float32=np.float32,
        float64=np.float64,
        empty=empty,
        ndarray=ndarray,
        asarray=np.asarray,
        asnumpy=np.asarray,
        moveaxis=np.moveaxis,
        RawKernel=raw_kernel,
        get_default_memory_pool=lambda: types.SimpleNamespace(free_all_blocks=lambda: None),
        cuda=types.SimpleNamespace(
            runtime=runtime,
            Event=Event,
            Device=lambda: types.SimpleNamespace(id=0),
            get_current_stream=Stream,
            get_elapsed_time=lambda begin, end: (end.at - begin.at) / 1000,
            memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        ),
    )


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(timing, "perf_counter", lambda: found.host * 1e-6)
    return found


@pytest.fixture
def small(monkeypatch):
    """Memory and noise of test size."""
    monkeypatch.setattr(inputs, "ROTATE_BYTES", 4000)
    monkeypatch.setattr(inputs, "_CHUNK", 1 << 10)
    monkeypatch.setattr(inputs, "_SPARE", 1 << 6)


def make_peer(clock, name="cunorm", spoil=lambda outputs: None, **options):
    """A peer that computes on the host and takes 3 us on the GPU and 5 us on the host."""

    def bind(workload, arrays, out):
        function = (reference.FORWARD | reference.BACKWARD)[workload.function]
        options = workload.options
        answer = []

        def call():
            clock.enqueue(3.0, host_us=5.0)
            if not answer:  # timing calls again and again what cannot change
                found = function(**arrays, **options)
                found = found if isinstance(found, tuple) else (found,)
                answer.extend(array.astype(numpy_dtype(workload.dtype)) for array in found)
            outputs = answer if out is None else out
            for target, source in zip(outputs, answer, strict=True):
                target[...] = source
            spoil(outputs)
            return tuple(outputs) if len(outputs) > 1 else outputs[0]

        return call

    settings = {"launches": 1, "has_out": name == "cunorm", **options}
    return peers.Peer(name, lambda: "", bind, **settings)


def small_workload(op, dtype, **options):
    if op in CHANNEL_OPS:
        groups = 2 if op.startswith("group_norm") else 0
        return Workload(op, (6, 8, 4, 3), dtype, groups=groups, **options)
    return Workload(op, (6, 32), dtype)
