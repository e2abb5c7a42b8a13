"""torch.compile of what a torch user calls."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from bench.peers.base import Arrays, Call, missing_on_torch, torch_peer
from bench.peers.torch import function, prepare
from bench.workloads import Workload


@lru_cache(maxsize=1)  # one for all sets of inputs: compiling takes seconds
def _compiled(workload: Workload) -> Any:
    torch = importlib.import_module("torch")
    called = function(workload)
    if called is None:
        return None
    torch.compiler.reset()  # else torch gives up after so many shapes of one function
    return torch.compile(called, dynamic=False, options=_options())


def _options() -> dict[str, Any]:
    """What is compiled may come from the disk, but not what was chosen by timing it: that other
    process may have shared the GPU.
    """
    known = importlib.import_module("torch._inductor").list_options()
    return {name: False for name in ("autotune_local_cache",) if name in known}


def _bind(workload: Workload, arrays: Arrays) -> Call | None:
    called, a = _compiled(workload), prepare(workload, arrays)
    if called is None or a is None:
        return None
    return lambda: called(**a)


PEER = torch_peer("compile", missing_on_torch("triton"), _bind, launches=10, package="triton")
