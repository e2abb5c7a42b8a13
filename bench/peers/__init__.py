"""Who is measured: cunorm, and what its users would call without it."""

from __future__ import annotations

from bench.peers import compile, cunorm, cupy, flashinfer, liger, quack, tileops, torch
from bench.peers.base import Arrays, Call, Peer

__all__ = ["PEERS", "Arrays", "Call", "Peer"]

#: By name, in the order in which they are measured.
PEERS: dict[str, Peer] = {
    module.PEER.name: module.PEER
    for module in (cunorm, cupy, torch, compile, liger, quack, tileops, flashinfer)
}
