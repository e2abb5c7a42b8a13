"""Kernels compiled by NVRTC without a GPU, in processes that work ahead of the tests.

A kernel is compiled once for an architecture, whichever tests look at it. All that a run of
pytest is going to look at is begun before its first test, and those tests come last: meanwhile
one process runs all others, which leaves no core idle.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import re
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from typing import NamedTuple

import pytest
from rehearsal import rehearse

from cunorm.cuda import sources
from cunorm.cuda.compiler import OPTIONS

ARCHS = (75, 80, 86, 89, 90, 100, 120)
TOGETHER = 8  # kernels a program: the headers cost less than one, and all end at about one time


class Kernel(NamedTuple):
    expression: str
    file: str
    cols: int

    @property
    def template(self) -> str:
        return self.expression.partition("<")[0]


class Use(NamedTuple):
    """What ptxas says of a kernel."""

    stack: int
    spill_stores: int
    spill_loads: int
    registers: int


def compiled(file: str, expressions: list[str], arch: int) -> dict[str, Use]:
    """Some kernels of a file by one run of NVRTC, with the options that CuPy gives it."""
    from cuda import core, pathfinder

    options = core.ProgramOptions(
        std="c++17",
        ftz=True,
        device_as_default_execution_space=True,
        arch=f"sm_{arch}",
        include_path=pathfinder.find_nvidia_header_directory("cudart"),
        ptxas_options="-v",
    )
    log = io.StringIO()
    program = core.Program(sources.source(file), "c++", options)
    cubin = program.compile("cubin", name_expressions=expressions, logs=log)
    said = dict(
        re.findall(r"Compiling entry function '(\S+)'(.*?Used \d+ registers)", log.getvalue(), re.S)
    )
    numbers = re.compile(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*Used (\d+) registers",
        re.S,
    )
    use = {}
    for expression in expressions:
        found = numbers.search(said[cubin.symbol_mapping[expression].decode()])
        use[expression] = Use(*map(int, found.groups()))
    return use


def give_way() -> None:
    """To the process that runs the tests: it waits for nobody until all others have run."""
    if hasattr(os, "nice"):
        os.nice(10)


@cache
def pool() -> ProcessPoolExecutor:
    assert OPTIONS == ("-std=c++17",)  # else `compiled` is to follow
    workers = min(os.cpu_count() or 1, 8)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), give_way)


# By expression and architecture, of any file: what two files call the same is the same, since only
# headers have kernels and each file its own names (test_compile.py looks whether it is so).
_begun: dict[tuple[str, int], Future] = {}


def begin(kernels: Iterable[Kernel], arch: int) -> None:
    """Has those compiled that nobody has asked for yet."""
    by_file: dict[str, list[str]] = {}
    files = {kernel.expression: kernel.file for kernel in kernels}
    for name, file in files.items():
        if (name, arch) not in _begun:
            by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        for i in range(0, len(names), TOGETHER):
            some = names[i : i + TOGETHER]
            run = pool().submit(compiled, file, some, arch)
            _begun.update(((name, arch), run) for name in some)


def check_kernels(kernels: Iterable[Kernel], arch: int) -> None:
    """Fails where a kernel uses local memory."""
    kernels = list(kernels)
    cols = {kernel.expression: kernel.cols for kernel in kernels}
    begin(kernels, arch)
    use = {name: _begun[name, arch].result()[name] for name in cols}
    bad = [
        f"{cols[name]} columns, sm_{arch}: {name}: {numbers}"
        for name, numbers in use.items()
        if numbers.stack or numbers.spill_stores or numbers.spill_loads
    ]
    assert use
    if bad:
        pytest.fail("\n".join([f"{len(bad)} of {len(use)} use local memory:", *bad]), False)


def compiles(item: pytest.Item) -> bool:
    return "check_kernels" in getattr(item, "fixturenames", ())


def begin_ahead(items: Iterable[pytest.Item]) -> None:
    """Has all compiled that these tests will look at."""
    for item in filter(compiles, items):
        rehearse(item, check_kernels=begin)


def stop() -> None:
    if pool.cache_info().currsize:
        pool().shutdown(cancel_futures=True)
        pool.cache_clear()
        _begun.clear()
