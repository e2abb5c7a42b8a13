"""``python -m bench plot``: draws the results beside the speed of a copy."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.records import Record, Time, read
from bench.workloads import SHORT_DTYPES, WORKLOADS


@dataclass(frozen=True)
class Picture:
    """One figure: its name, title and ops, one panel each."""

    name: str
    title: str
    ops: tuple[str, ...]


_ROWS = (
    "rms_norm",
    "layer_norm",
    "fused_add_rms_norm",
    "fused_add_layer_norm",
    "ada_layer_norm",
    "ada_layer_norm_zero",
)
PICTURES = (
    Picture("rows", "Row norms, forward", _ROWS),
    Picture(
        "channels",
        "Channel norms, forward",
        ("batch_norm_train", "batch_norm_infer", "group_norm", "instance_norm"),
    ),
    Picture("row-gradients", "Row norms, backward", tuple(f"{op}_bwd" for op in _ROWS)),
    Picture(
        "channel-gradients",
        "Channel norms, backward",
        ("batch_norm_bwd", "group_norm_bwd", "instance_norm_bwd"),
    ),
)

OWN = "cunorm"
RECORDED = "recorded"


@dataclass(frozen=True)
class Style:
    """How a peer is drawn: told apart by shape as well as by colour (those of Okabe and Ito)."""

    label: str
    colour: str
    marker: str
    edge: str = "white"


STYLES = {
    OWN: Style("cunorm", "#0072B2", ""),
    "cupy": Style("CuPy", "#7F7F7F", "X"),
    "torch": Style("torch", "#D55E00", "o"),
    "compile": Style("torch.compile", "#E69F00", "s"),
    "liger": Style("Liger", "#009E73", "^"),
    "quack": Style("quack", "#CC79A7", "D"),
    "tileops": Style("TileOPs", "#000000", "v"),
    "flashinfer": Style("FlashInfer", "#F0E442", "P", edge="#555555"),
    RECORDED: Style("fastest of the others, recorded earlier", "#FFFFFF", "d", edge="#222222"),
}

# Inches.
WIDTH = 12.0
ROW = 0.28
PANEL_TITLE = 0.36
PANEL_GAP = 0.12
LABELS = 1.75
EDGE = 0.15
HEAD = 0.85
FOOT = 0.5

# Inches: a mark with its edge. Of a row: where marks may stand, and the bar.
MARK = 5.6 / 72
MARKED = 0.94
BAR = 0.7
#: How much of its colour the bar has, before its end: marks stand on it.
LIGHT = 0.4


def panels(records: Iterable[Record], picture: Picture) -> list[tuple[str, list[Record]]]:
    """The workloads of each op of `picture` that has any, in the order of the table."""
    order = {(w.op, w.shape_text, w.dtype): i for i, w in enumerate(WORKLOADS)}
    found = []
    for op in picture.ops:
        of_op = [r for r in records if r.op == op and r.of_copy(OWN) is not None]
        of_op.sort(key=lambda r: order.get((r.op, r.shape, r.dtype), len(order)))
        if of_op:
            found.append((op, of_op))
    return found


def height(rows: int) -> float:
    """Inches of a panel, its title and the gap below it included."""
    return PANEL_TITLE + ROW * rows + PANEL_GAP


def split(rows: Sequence[int]) -> int:
    """How many of the panels with so many rows each go to the left column."""
    heights = [height(count) for count in rows]

    def tallest(left: int) -> float:
        return max(sum(heights[:left]), sum(heights[left:]))

    return min(range(1, len(rows) + 1), key=tallest)


def values(record: Record) -> dict[str, float]:
    """Fraction of the copy's speed by peer; the recorded one where no other peer was timed."""
    found = {peer: value for peer in record.times if (value := record.beside_peers(peer))}
    if record.recorded is not None and not set(found) - {OWN, "cupy", "torch"}:
        found[RECORDED] = record.recorded
    return {peer: value for peer, value in found.items() if peer in STYLES}


def with_peers(record: Record, other: Record | None) -> Record:
    """With the peers that `other`, of another run, has and `record` lacks.

    Their times are taken as many times longer as the copy took, so that each peer stays where it
    was beside the copy of its own run.
    """
    if other is None or other.copy is None or record.copy is None:
        return record
    longer = record.copy.us / other.copy.us
    lent = {
        peer: Time(time.us * longer)
        for peer, time in other.times.items()
        if peer != OWN and peer not in record.times
    }
    return replace(record, times={**record.times, **lent})


def lanes(points: Sequence[float], apart: float) -> list[tuple[int, int]]:
    """For each mark of a row, which lane it stands in and how many there are around it.

    Marks that are closer to each other than `apart` stand in lanes, so that none covers another.
    """
    found = [(0, 1)] * len(points)
    chain: list[int] = []  # marks of which each is close to the one before
    ends: list[float] = []  # the last mark of each of their lanes

    def close() -> None:
        for i in chain:
            found[i] = (found[i][0], len(ends))
        chain.clear()
        ends.clear()

    for i in sorted(range(len(points)), key=points.__getitem__):
        if chain and points[i] - points[chain[-1]] >= apart:
            close()
        free = [lane for lane, end in enumerate(ends) if points[i] - end >= apart]
        lane = free[0] if free else len(ends)
        ends[lane : lane + 1] = [points[i]]
        found[i] = (lane, 1)
        chain.append(i)
    close()
    return found


def draw(records: Sequence[Record], picture: Picture) -> Any:
    """A matplotlib figure, or None where no workload of `picture` was timed."""
    from matplotlib.figure import Figure

    found = panels(records, picture)
    if not found:
        return None
    left = split([len(of_op) for _, of_op in found])
    columns = [column for column in (found[:left], found[left:]) if column]
    tall = HEAD + FOOT + max(sum(height(len(r)) for _, r in column) for column in columns)
    figure = Figure(figsize=(WIDTH, tall), facecolor="white")
    most = max(max(values(r).values()) for _, of_op in found for r in of_op)
    limit = max(1.1, most + 0.05)
    wide = WIDTH / 2 - LABELS - EDGE
    used: set[str] = set()
    for number, column in enumerate(columns):
        top = tall - HEAD
        for op, of_op in column:
            bottom = top - PANEL_TITLE - ROW * len(of_op)
            place = (number * WIDTH / 2 + LABELS, bottom, wide, ROW * len(of_op))
            axes = figure.add_axes(
                [x / whole for x, whole in zip(place, (WIDTH, tall) * 2, strict=True)]
            )
            used |= _panel(axes, op, of_op, limit, MARK * limit / wide)
            top = bottom - PANEL_GAP
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("fraction of the copy speed", fontsize=9)
    _head(figure, picture, records, used, tall)
    return figure


def _panel(axes: Any, op: str, records: Sequence[Record], limit: float, apart: float) -> set[str]:
    """One op: a bar for cunorm and a mark for each peer; the peers that there are."""
    places = range(len(records))
    axes.set_title(op, loc="left", fontsize=10, fontweight="bold", pad=5)
    axes.set_xlim(0, limit)
    axes.set_ylim(len(records) - 0.5, -0.5)
    labels = [f"{r.shape.replace('x', '×')} {SHORT_DTYPES.get(r.dtype, r.dtype)}" for r in records]
    axes.set_yticks(places, labels, fontsize=8)
    step = math.ceil(limit / 2) / 4
    axes.set_xticks([i * step for i in range(int(limit / step) + 1)])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=0, labelbottom=False, labelsize=8)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.axvline(1, color="#444444", linewidth=1.0, zorder=1.5)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#999999")
    marks: dict[str, list[tuple[float, float]]] = {}
    for place, record in zip(places, records, strict=True):
        of_copy = values(record)
        own = of_copy.pop(OWN)
        marks.setdefault(OWN, []).append((own, place))
        for (peer, value), (lane, count) in zip(
            of_copy.items(), lanes(list(of_copy.values()), apart), strict=True
        ):
            down = min(MARK / ROW, MARKED / count) * (lane - (count - 1) / 2)
            marks.setdefault(peer, []).append((value, place + down))
    for peer, points in marks.items():
        x, y = zip(*points, strict=True)
        if peer == OWN:
            colour = STYLES[OWN].colour
            axes.barh(y, x, height=BAR, color=colour, alpha=LIGHT, linewidth=0, zorder=2)
            ends = [(place - BAR / 2, place + BAR / 2) for place in y]
            axes.vlines(x, *zip(*ends, strict=True), colors=colour, linewidth=2.0, zorder=2.5)
        else:
            axes.scatter(x, y, zorder=3, **_mark(STYLES[peer]))
    return set(marks)


def _mark(style: Style) -> dict[str, Any]:
    return {
        "s": 24,
        "marker": style.marker,
        "color": style.colour,
        "edgecolors": style.edge,
        "linewidths": 0.7,
        "clip_on": False,
    }


def _head(
    figure: Any, picture: Picture, records: Sequence[Record], used: set[str], tall: float
) -> None:
    """Title, what it was measured on, and what the marks are."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    gpus = " and ".join(dict.fromkeys(r.gpu for r in records if r.gpu))
    days = sorted({r.date[:10] for r in records if r.date})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""
    figure.text(EDGE / WIDTH, 1 - 0.28 / tall, picture.title, fontsize=13, fontweight="bold")
    about = "1 is the speed of a copy of the same bytes; further right is faster"
    where = ", ".join(text for text in (gpus, when) if text)
    figure.text(EDGE / WIDTH, 1 - 0.5 / tall, f"{about}  ({where})" if where else about, fontsize=9)
    handles = []
    for peer, style in STYLES.items():
        if peer == OWN and peer in used:
            handles.append(Patch(color=style.colour, alpha=LIGHT, label=style.label))
        elif peer in used:
            mark = {"markerfacecolor": style.colour, "markeredgecolor": style.edge, "markersize": 7}
            handles.append(
                Line2D([], [], linestyle="", marker=style.marker, label=style.label, **mark)
            )
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 1 - 0.56 / tall),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handletextpad=0.4,
        columnspacing=1.4,
    )


def save(figure: Any, stem: Path) -> list[Path]:
    """Write `figure` as SVG and PNG; the same bytes for the same results."""
    import matplotlib

    paths = []
    with matplotlib.rc_context({"svg.hashsalt": "cunorm"}):
        for ending, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 150})):
            path = stem.with_name(f"{stem.name}.{ending}")
            figure.savefig(path, **options)
            paths.append(path)
    return paths


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench plot",
        description="Draw results beside the speed of a copy, as SVG and PNG.",
    )
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        metavar="FILE.csv",
        help="a workload of a later file replaces that of an earlier one",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="STEM",
        help="what the files are called, before -rows.svg and so on (default: the last CSV)",
    )
    parser.add_argument(
        "--peers-of",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE.csv",
        help="where peers are from that the results lack, beside the copies of their own run",
    )
    parser.add_argument("--mode", choices=("cold", "warm"), default="cold")
    return parser


def main(argv: Sequence[str]) -> int:
    """0, or 2 when nothing could be drawn."""
    args = make_parser().parse_args(argv)
    stem = args.out or args.results[-1].with_suffix("")
    try:
        others = read(args.peers_of)
        records = [
            with_peers(r, others.get(r.key))
            for r in read(args.results).values()
            if r.mode == args.mode
        ]
        figures = {picture.name: draw(records, picture) for picture in PICTURES}
    except (OSError, ValueError, ImportError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    figures = {name: figure for name, figure in figures.items() if figure is not None}
    if not figures:
        print(f"bench: no {args.mode} workload with times of cunorm and a copy", file=sys.stderr)
        return 2
    stem.parent.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        print("\n".join(str(path) for path in save(figure, stem.with_name(f"{stem.name}-{name}"))))
    return 0
