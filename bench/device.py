"""The GPU of this machine."""

from __future__ import annotations

import sys
from typing import Any


def find_gpu() -> tuple[Any, str]:
    """CuPy, or None and why nothing can be measured."""
    try:
        import cupy as cp
    except ImportError as error:
        return None, f"needs CuPy and a CUDA GPU: {error}".splitlines()[0]
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        return None, f"needs a CUDA GPU: {error}".splitlines()[0]
    return (cp, "") if count else (None, "needs a CUDA GPU: CuPy finds none")


def gpu_or_say() -> Any:
    """CuPy; or None, and why nothing can be measured has been printed."""
    cp, problem = find_gpu()
    if cp is None:
        print(f"bench: {problem}", file=sys.stderr)
    return cp
