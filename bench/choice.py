"""Which workloads and peers a command is asked for."""

from __future__ import annotations

import argparse

from bench.peers import PEERS, Peer
from bench.workloads import WORKLOADS, Workload, select

QUICK_BYTES = 150_000_000


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose workloads and peers."""
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="WORDS",
        help="only workloads whose op, shape and dtype match all the words; may be repeated",
    )
    parser.add_argument(
        "--peers",
        type=parse_peers,
        default=parse_peers(",".join(PEERS)),
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(PEERS)} (default: all that are installed)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small workloads only; timed with fewer samples"
    )


def parse_peers(text: str) -> list[Peer]:
    """The peers named in `text`, cunorm first whether named or not."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no peer {', '.join(unknown)}; there are {', '.join(PEERS)}"
        )
    return [PEERS[name] for name in dict.fromkeys(["cunorm", *names])]


def chosen_workloads(args: argparse.Namespace) -> list[Workload]:
    found = select(args.filter, WORKLOADS)
    if args.quick:
        found = [w for w in found if w.bytes_moved <= QUICK_BYTES]
    return found
