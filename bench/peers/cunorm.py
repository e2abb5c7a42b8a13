"""cunorm, as its users call it."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Arrays, Call, Peer
from bench.workloads import Workload


def _bind(workload: Workload, a: Arrays, out: tuple[Any, ...] | None) -> Call | None:
    import cunorm

    function = getattr(cunorm, workload.function, None)
    if function is None:
        return None
    options = workload.options
    if out is None:
        return lambda: function(**a, **options)
    target = out if len(out) > 1 else out[0]
    return lambda: function(**a, **options, out=target)


PEER = Peer("cunorm", lambda: "", _bind, launches=4, has_out=True)
