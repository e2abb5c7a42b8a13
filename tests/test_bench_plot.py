"""The pictures of the benchmark: what is drawn, and that nothing covers a label."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import plot
from bench.peers import PEERS
from bench.records import Record, Time, read
from bench.workloads import OPS, WORKLOADS

RESULTS = Path(__file__).parent.parent / "bench" / "results"
NEWEST = RESULTS / "2026-11-30-h200-dependent.csv"
PEERS_RUN = RESULTS / "2026-11-30-h200-peers.csv"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def record(workload, recorded=None, **times):
    return Record(
        workload.op,
        workload.shape_text,
        workload.dtype,
        "cold",
        "ok",
        workload.bytes_moved,
        Time(10.0),
        {peer: Time(us) for peer, us in times.items()},
        "TileOPs" if recorded else "",
        recorded,
        "NVIDIA H200",
        "2026-11-30T12:00:00Z",
    )


EVERYTHING = [record(w, **{peer: 11.0 + 2 * i for i, peer in enumerate(PEERS)}) for w in WORKLOADS]


def test_every_op_is_in_one_picture():
    ops = [op for picture in plot.PICTURES for op in picture.ops]
    assert sorted(ops) == sorted(OPS)


def test_every_peer_is_told_apart():
    assert set(PEERS) | {plot.RECORDED} == set(plot.STYLES)
    peers = [style for name, style in plot.STYLES.items() if name not in (plot.OWN, plot.RECORDED)]
    assert len({style.marker for style in peers}) == len({s.colour for s in peers}) == len(peers)


def test_the_recorded_peer_is_drawn_where_no_other_compiled_one_was_timed():
    first = WORKLOADS[0]
    assert plot.values(record(first, 0.9, cunorm=10.0)) == {"cunorm": 1.0, "recorded": 0.9}
    assert set(plot.values(record(first, 0.9, cunorm=10.0, torch=20.0))) == {
        "cunorm",
        "torch",
        "recorded",
    }
    assert plot.values(record(first, 0.9, cunorm=10.0, tileops=8.0)) == {
        "cunorm": 1.0,
        "tileops": 1.25,
    }


def test_panels_are_in_the_order_of_the_table():
    found = plot.panels(EVERYTHING[::-1], plot.PICTURES[0])
    assert [op for op, _ in found] == list(plot.PICTURES[0].ops)
    for op, of_op in found:
        assert [r.shape for r in of_op] == [w.shape_text for w in WORKLOADS if w.op == op]
    assert plot.panels([record(WORKLOADS[0], torch=20.0)], plot.PICTURES[0]) == []


@pytest.mark.parametrize(
    ("rows", "left"), [([5], 1), ([5, 5], 1), ([19, 12, 5, 5, 4, 4], 2), ([12, 3, 8], 1)]
)
def test_columns_are_about_as_tall(rows, left):
    assert plot.split(rows) == left


@pytest.mark.parametrize(
    ("points", "places"),
    [
        ([], []),
        ([0.5, 0.2], [(0, 1), (0, 1)]),
        ([0.5, 0.52, 0.8], [(0, 2), (1, 2), (0, 1)]),
        ([0.5, 0.56, 0.53], [(0, 2), (0, 2), (1, 2)]),  # two lanes do for a chain of three
        ([0.5, 0.5, 0.5, 0.549], [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ],
)
def test_marks_that_are_close_stand_in_lanes(points, places):
    assert plot.lanes(points, 0.05) == places


def test_no_mark_covers_another():
    matplotlib = pytest.importorskip("matplotlib")
    peers = read([PEERS_RUN])
    records = [plot.with_peers(r, peers[r.key]) for r in read([NEWEST]).values()]
    for picture in plot.PICTURES:
        figure = plot.draw(records, picture)
        found = 0
        for axes in figure.axes:
            rows = [c for c in axes.collections if type(c) is matplotlib.collections.PathCollection]
            at = [axes.transData.transform(p) for c in rows for p in c.get_offsets()]
            found += len(at)
            inches = [(x / figure.dpi, y / figure.dpi) for x, y in at]
            for (x, y), (other_x, other_y) in combinations(inches, 2):
                apart = max(abs(x - other_x), abs(y - other_y))
                assert apart > 0.65 * plot.MARK, (picture.name, axes.get_title(loc="left"))
        assert found > 50


@pytest.mark.parametrize("picture", plot.PICTURES, ids=lambda picture: picture.name)
def test_no_text_covers_another(picture):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = plot.draw(EVERYTHING, picture)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text()]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts]
    shown = [(text, box) for text, box in boxes if box.width > 1]
    assert len(shown) > 25
    wide, tall = canvas.get_width_height()
    for text, box in shown:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= wide and box.y1 <= tall, text
    for (text, box), (other, other_box) in combinations(shown, 2):
        assert not box.overlaps(other_box), (text, other)
    for axes in figure.axes:
        frame = axes.get_window_extent(renderer)
        inside = [text for text, box in shown if frame.shrunk(0.98, 0.98).overlaps(box)]
        assert inside == []


def test_results_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    stem = tmp_path / "images" / "h200"
    assert command.main(["plot", str(NEWEST), "--out", str(stem)]) == 0
    names = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert names == {path.name for path in stem.parent.iterdir()}
    assert names == {
        f"h200-{picture.name}.{end}" for picture in plot.PICTURES for end in ("svg", "png")
    }
    first = (stem.parent / "h200-rows.svg").read_bytes()
    assert command.main(["plot", str(NEWEST), "--out", str(stem)]) == 0
    assert (stem.parent / "h200-rows.svg").read_bytes() == first


def test_peers_of_another_run_stay_where_they_were_beside_its_copy():
    first = WORKLOADS[0]
    mine, other = record(first, cunorm=8.0, quack=9.0), record(first, cunorm=11, quack=7, torch=25)
    other = replace(other, copy=Time(20.0))
    values = plot.values(plot.with_peers(mine, other))
    assert values == {"cunorm": 10 / 8, "quack": 10 / 9, "torch": pytest.approx(20 / 25)}
    assert plot.with_peers(mine, None) == mine
    assert plot.with_peers(mine, replace(other, copy=None)) == mine


def test_peers_of_another_run_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = []
    for arguments in ([], ["--peers-of", str(PEERS_RUN)]):
        stem = tmp_path / f"h200-{len(drawn)}"
        assert command.main(["plot", str(NEWEST), *arguments, "--out", str(stem)]) == 0
        drawn.append((tmp_path / f"{stem.name}-rows.svg").read_text(encoding="utf-8"))
    assert "Liger" not in drawn[0]
    assert "Liger" in drawn[1]


def test_what_cannot_be_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert command.main(["plot", str(tmp_path / "none.csv")]) == 2
    assert command.main(["plot", str(NEWEST), "--mode", "warm"]) == 2
    assert "no warm workload" in capsys.readouterr().err


def test_the_newest_results_have_what_the_pictures_show():
    records = read([NEWEST]).values()
    found = [len(of_op) for p in plot.PICTURES for _, of_op in plot.panels(records, p)]
    assert sum(found) == len(records) == len(WORKLOADS)
