"""``python -m bench``: the command line of the timing run; other commands are by the side."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.choice import add_choice, chosen_workloads
from bench.device import gpu_or_say
from bench.peers import Peer
from bench.peers.base import settle_triton_cache
from bench.report import FAIL, CsvReport, Result, TableReport, describe_machine, summary
from bench.sweep import Settings, Sweep
from bench.workloads import Workload

QUICK_SAMPLES = 3

#: Each has a module with a ``main``.
COMMANDS = {
    "prepare": "compile beforehand, many at a time, what peers would compile in the timing run",
    "compare": "tell what became slower or faster between two CSV files",
    "sizes": "time sizes in between, odd ones and views, and print what misses its limit",
    "tune": "time other launches than a table of cunorm's chooses, and propose a table",
    "plot": "draw CSV files beside the speed of a copy, as SVG and PNG",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Time cunorm on the GPU of this machine.",
        epilog="\n".join(
            ["other commands, each with a --help of its own:"]
            + [f"  python -m bench {name:8} {text}" for name, text in COMMANDS.items()]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_choice(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument(
        "--warm", action="store_true", help="one set of inputs: what fits stays in the L2 cache"
    )
    parser.add_argument(
        "--host-only", action="store_true", help="only the host time of enqueueing a call"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the workloads and stop; needs no GPU"
    )
    return parser


def found_peers(wanted: Sequence[Peer]) -> list[Peer]:
    """Those of `wanted` that can run here; says why the others cannot."""
    found = []
    for peer in wanted:
        missing = peer.missing()
        if missing:
            print(f"{peer.name} left out: {missing}", flush=True)
        else:
            found.append(peer)
    return found


def run(cp: Any, args: argparse.Namespace, workloads: Sequence[Workload]) -> list[Result]:
    """Measure `workloads` and report them."""
    peers = found_peers(args.peers)
    machine = describe_machine(cp, peers)
    print(machine, flush=True)
    settings = Settings(
        samples=QUICK_SAMPLES if args.quick else Settings.samples,
        warm=args.warm,
        host_only=args.host_only,
    )
    sweep = Sweep(cp, peers, settings)
    names = [peer.name for peer in peers]
    results = []
    file = CsvReport(args.csv, machine, settings.mode, names) if args.csv else None
    try:
        with TableReport(names, machine.keeps_record) as table:
            for workload in workloads:
                result = sweep.measure(workload)
                results.append(result)
                table.add(result)
                if file is not None:
                    file.add(result)
    finally:
        if file is not None:
            file.close()
    print("\n".join(summary(results, machine.keeps_record)), flush=True)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that is named first, or the timing run."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(f"bench.{argv[0]}").main(argv[1:])
    return time_workloads(argv)


def time_workloads(argv: Sequence[str]) -> int:
    """The timing run: 0, or 1 when a result was wrong, or 2 when nothing could be measured."""
    args = make_parser().parse_args(argv)
    workloads = chosen_workloads(args)
    if not workloads:
        print("bench: no workload matches; see --list", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(f"{w.label}  {w.bytes_moved} bytes" for w in workloads))
        return 0
    cp = gpu_or_say()
    if cp is None:
        return 2
    settle_triton_cache()
    results = run(cp, args, workloads)
    return int(any(result.status == FAIL for result in results))


if __name__ == "__main__":
    sys.exit(main())
