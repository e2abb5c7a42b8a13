"""What is asked of CuPy for a kernel that is loaded; needs neither."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cunorm.cuda import compiler
from cunorm.cuda.compiler import Kernel


@pytest.fixture
def functions(monkeypatch):
    """By expression, as CuPy has them: one for all that ask for it."""
    found = {}

    def get_function(expression):
        fresh = SimpleNamespace(
            kernel=SimpleNamespace(ptr=1), max_dynamic_shared_size_bytes=48 << 10
        )
        return found.setdefault(expression, fresh)

    def raw_module(**_):
        return SimpleNamespace(get_function=get_function)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=raw_module))
    monkeypatch.setattr(compiler, "_functions", {})
    return found


@pytest.mark.parametrize("order", [(160, 32), (100_000, 60_000, 32), (32, 100_000, 70_000)])
def test_shared_memory_that_was_allowed_stays(functions, order):
    """Passes over planes of different sizes differ in it alone."""
    kernels = [Kernel("batch_norm", "run_map<...>", 1, nbytes) for nbytes in order]
    for kernel in (*kernels, *kernels):
        compiler.load(kernel, 0)
    assert functions["run_map<...>"].max_dynamic_shared_size_bytes == max(48 << 10, *order)
