"""What a peer is, and what the peers that compute on torch tensors share."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.workloads import Workload

Arrays = dict[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    """One way to compute the workloads.

    Attributes
    ----------
    name : str
        As in ``--peers`` and in the column names.
    missing : callable
        ``missing()`` says why the peer cannot run on this machine, or returns ``""``.
    bind : callable
        ``bind(workload, inputs, out)`` returns a call without arguments, or None when the peer
        has no such op. `inputs` maps names to CuPy arrays; `out` is a tuple of arrays to write
        into, or None to allocate. A peer without ``out=`` allocates in both cases. It is bound
        to one set of inputs after another: what is compiled is kept for the whole workload.
    launches : int
        The most kernels that one call launches.
    has_out : bool
        Whether `bind` honours `out`.
    overwrites : frozenset of str
        The ops that write over their inputs.
    to_cupy : callable
        From one output of the call to a CuPy array.
    release : callable
        Gives cached device memory back.
    package : str
        The distribution that its version is read from.
    memory : int
        Device memory of a call at most, inputs and outputs included, over the bytes that the
        workload moves.
    """

    name: str
    missing: Callable[[], str]
    bind: Callable[[Workload, Arrays, tuple[Any, ...] | None], Call | None]
    launches: int
    has_out: bool = False
    overwrites: frozenset[str] = frozenset()
    to_cupy: Callable[[Any], Any] = lambda array: array
    release: Callable[[], None] = lambda: None
    package: str = ""
    memory: int = 3

    def call(self, workload: Workload, inputs: Arrays, out: tuple[Any, ...] | None) -> Call:
        """What `bind` returns, for an op that the peer is known to have."""
        found = self.bind(workload, inputs, out)
        if found is None:
            raise LookupError(f"{self.name} has no {workload.op}")
        return found

    @property
    def version(self) -> str:
        """That of `package`, or ``""``."""
        try:
            return importlib.metadata.version(self.package) if self.package else ""
        except importlib.metadata.PackageNotFoundError:
            return ""


def missing_torch() -> str:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "this torch has no CUDA"


def missing_on_torch(module: str) -> Callable[[], str]:
    """Says whether torch is there and `module` can be imported."""
    package = module.partition(".")[0]

    def missing() -> str:
        problem = missing_torch()
        if problem:
            return problem
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name == package:
                return f"{package} is not installed"
            return f"{package} needs {error.name}"
        except Exception as error:  # what an import runs can fail in any way
            return f"{package} cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        return ""

    return missing


def settle_triton_cache() -> None:
    """Have Triton's cache in one place.

    torch.compile moves it once it compiles: what other peers compile with Triton would then be
    looked for elsewhere by a process that goes through the peers in another order.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))


def tensors(arrays: Arrays) -> Arrays:
    """The same memory as torch tensors."""
    torch = importlib.import_module("torch")
    return {name: torch.from_dlpack(array) for name, array in arrays.items()}


def torch_to_cupy(tensor: Any) -> Any:
    import cupy

    return cupy.from_dlpack(tensor)


def release_torch() -> None:
    importlib.import_module("torch").cuda.empty_cache()


def torch_peer(
    name: str,
    missing: Callable[[], str],
    bind: Callable[[Workload, Arrays], Call | None],
    launches: int,
    package: str,
    overwrites: frozenset[str] = frozenset(),
) -> Peer:
    """A peer that takes torch tensors and allocates what it returns."""
    return Peer(
        name,
        missing,
        lambda workload, arrays, out: bind(workload, arrays),
        launches,
        overwrites=overwrites,
        to_cupy=torch_to_cupy,
        release=release_torch,
        package=package,
    )
