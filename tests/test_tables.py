"""The tables of launches: what they choose, how entries go in, and their text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.table_text import table_text
from bench.tables import using
from cunorm.cuda import channel_choices, choices, row_clusters, row_table, run_table
from cunorm.cuda.tables import Ladder, Manner, Row, Step, Table
from cunorm.targets import registry

# By norm, elements of a row, bytes of one, addends and compute capability: threads and packs of
# each. A measurement may change them; the bits of results change with threads.
CHOSEN = {
    ("rms", 64, 2): "8 x 1, 8 a CTA, early, 16 CTAs",
    ("rms", 128, 2): "16 x 1, 8 a CTA, early, 8 CTAs, brief",
    ("rms", 256, 2): "32 x 1, 4 a CTA, early, 8 CTAs, brief",
    ("rms", 512, 2): "32 x 2, 4 a CTA, early, 8 CTAs, brief",
    ("rms", 1024, 2): "32 x 4, 2 a CTA, early, 11 CTAs",
    ("rms", 1152, 2): "128 x 2, 1 a CTA, early, 7 CTAs",
    ("rms", 2048, 2): "128 x 2, 1 a CTA, early, 7 CTAs",
    ("rms", 4096, 2): "256 x 2, 1 a CTA, early, 3 CTAs",
    ("rms", 8192, 2): "256 x 4, 1 a CTA, early, 2 CTAs",
    ("rms", 12288, 2): "256 x 3, 1 a CTA, early, 3 CTAs, 2 in a cluster",
    ("rms", 16384, 2): "256 x 2, 1 a CTA, staged, 4 CTAs, 4 in a cluster",
    ("rms", 32768, 2): "256 x 2, 1 a CTA, staged, 4 CTAs, 8 in a cluster",
    ("rms", 65536, 2): "256 x 4, 1 a CTA, staged, 4 CTAs, 8 in a cluster",
    ("rms", 131072, 2): "256 x 4, 1 a CTA, staged, 4 CTAs, 16 in a cluster",
    ("rms", 64, 4): "8 x 2, 8 a CTA, early, 14 CTAs",
    ("rms", 256, 4): "32 x 2, 2 a CTA, early, 14 CTAs",
    ("rms", 1024, 4): "64 x 4, 1 a CTA, early, 11 CTAs",
    ("rms", 5120, 4): "256 x 3, 1 a CTA, early, 3 CTAs, 2 in a cluster",
    ("rms", 6144, 4): "256 x 3, 1 a CTA, early, 3 CTAs, 2 in a cluster",
    ("rms", 8192, 4): "256 x 2, 1 a CTA, staged, 4 CTAs, 4 in a cluster",
    ("rms", 256, 8): "32 x 4, 2 a CTA, early, 8 CTAs",
    ("rms", 4096, 8): "256 x 8, 1 a CTA, late, 1 CTAs",
    ("rms", 6144, 8): "512 x 6, 1 a CTA, late, 1 CTAs",
    ("rms", 4095, 2): "256 x 2, 1 a CTA, early, 3 CTAs",
    ("rms", 1021, 4): "64 x 4, 1 a CTA, early, 11 CTAs",
    ("rms", 1001, 8): "256 x 4, 1 a CTA, early, 2 CTAs",
    ("layer", 64, 2): "8 x 1, 8 a CTA, staged, 16 CTAs",
    ("layer", 128, 2): "8 x 2, 8 a CTA, staged, 16 CTAs",
    ("layer", 256, 2): "16 x 2, 4 a CTA, staged, 16 CTAs",
    ("layer", 512, 2): "32 x 2, 2 a CTA, staged, 16 CTAs",
    ("layer", 1024, 2): "32 x 4, 2 a CTA, staged, 16 CTAs",
    ("layer", 1152, 2): "32 x 5, 2 a CTA, staged, 8 CTAs, brief",
    ("layer", 2048, 2): "128 x 2, 1 a CTA, staged, 8 CTAs",
    ("layer", 4096, 2): "128 x 4, 1 a CTA, staged, 8 CTAs",
    ("layer", 8192, 2): "256 x 4, 1 a CTA, staged, 4 CTAs",
    ("layer", 12288, 2): "256 x 6, 1 a CTA, staged, 3 CTAs",
    ("layer", 16384, 2): "512 x 4, 1 a CTA, staged, 2 CTAs",
    ("layer", 32768, 2): "512 x 4, 1 a CTA, staged, 2 CTAs, 2 in a cluster",
    ("layer", 65536, 2): "256 x 4, 1 a CTA, staged, 4 CTAs, 8 in a cluster",
    ("layer", 131072, 2): "512 x 4, 1 a CTA, staged, 2 CTAs, 8 in a cluster",
    ("layer", 64, 4): "8 x 2, 8 a CTA, early, 12 CTAs",
    ("layer", 256, 4): "32 x 2, 2 a CTA, early, 12 CTAs",
    ("layer", 1024, 4): "64 x 4, 1 a CTA, early, 9 CTAs",
    ("layer", 5120, 4): "256 x 5, 1 a CTA, staged, 4 CTAs",
    ("layer", 6144, 4): "256 x 6, 1 a CTA, staged, 3 CTAs",
    ("layer", 8192, 4): "512 x 4, 1 a CTA, staged, 2 CTAs",
    ("layer", 256, 8): "32 x 4, 2 a CTA, early, 7 CTAs",
    ("layer", 4096, 8): "256 x 8, 1 a CTA, late, 1 CTAs",
    ("layer", 6144, 8): "512 x 6, 1 a CTA, late, 1 CTAs",
    ("layer", 4095, 2): "128 x 4, 1 a CTA, early, 4 CTAs",
    ("layer", 1021, 4): "64 x 4, 1 a CTA, early, 9 CTAs",
    ("layer", 1001, 8): "256 x 4, 1 a CTA, early, 2 CTAs",
    ("adaptive", 64, 2): "8 x 1, 8 a CTA, staged, 16 CTAs",
    ("adaptive", 128, 2): "8 x 2, 8 a CTA, staged, 16 CTAs",
    ("adaptive", 256, 2): "16 x 2, 4 a CTA, staged, 16 CTAs",
    ("adaptive", 512, 2): "32 x 2, 2 a CTA, staged, 16 CTAs",
    ("adaptive", 1024, 2): "32 x 4, 2 a CTA, staged, 16 CTAs",
    ("adaptive", 1152, 2): "128 x 2, 1 a CTA, staged, 8 CTAs",
    ("adaptive", 2048, 2): "128 x 2, 1 a CTA, staged, 8 CTAs",
    ("adaptive", 4096, 2): "256 x 2, 1 a CTA, staged, 4 CTAs",
    ("adaptive", 8192, 2): "256 x 4, 1 a CTA, staged, 4 CTAs",
    ("adaptive", 12288, 2): "256 x 6, 1 a CTA, staged, 3 CTAs",
    ("adaptive", 16384, 2): "512 x 4, 1 a CTA, staged, 2 CTAs",
    ("adaptive", 32768, 2): "512 x 4, 1 a CTA, staged, 2 CTAs, 2 in a cluster",
    ("adaptive", 65536, 2): "512 x 4, 1 a CTA, staged, 2 CTAs, 4 in a cluster",
    ("adaptive", 131072, 2): "512 x 4, 1 a CTA, staged, 2 CTAs, 8 in a cluster",
    ("adaptive", 4095, 2): "256 x 2, 1 a CTA, early, 3 CTAs",
    ("adaptive", 1021, 4): "64 x 4, 1 a CTA, early, 9 CTAs",
    ("adaptive", 1001, 8): "256 x 4, 1 a CTA, early, 2 CTAs",
    ("rms", 256, 2, 2): "32 x 1, 4 a CTA, early, 8 CTAs, brief",
    ("rms", 4096, 2, 2): "256 x 2, 1 a CTA, staged, 4 CTAs",
    ("rms", 8192, 4, 2): "256 x 2, 1 a CTA, staged, 4 CTAs, 4 in a cluster",
    ("layer", 1152, 2, 2): "32 x 5, 2 a CTA, early, 8 CTAs, brief",
    ("layer", 4096, 2, 2): "128 x 4, 1 a CTA, staged, 8 CTAs",
    ("layer", 4096, 2, 1, 75): "128 x 4, 1 a CTA, early, 4 CTAs",
    ("layer", 4096, 2, 1, 80): "128 x 4, 1 a CTA, staged, 8 CTAs",
    ("layer", 4096, 2, 1, 89): "128 x 4, 1 a CTA, early, 4 CTAs",
    ("layer", 4096, 2, 1, 100): "128 x 4, 1 a CTA, staged, 8 CTAs",
    ("layer", 4096, 2, 1, 120): "128 x 4, 1 a CTA, early, 4 CTAs",
    ("layer", 65536, 2, 1, 80): "256 x 4, 1 a CTA, late, 3 CTAs, 8 segments",
    ("rms", 256, 2, 1, 120): "32 x 1, 4 a CTA, early, 8 CTAs, brief",
}

SMALL = Table(
    ladders=(
        Ladder((Step(8, 8), Step(64, 16), Step(512, 64, "measured")), kinds=("layer",)),
        Ladder((Step(64, 32), Step(1024, 128))),
        Ladder((Step(4096, 256),), whole=False),
    ),
    manners=(
        Manner(kinds=("rms",), vectors=64, brief=True, block=128),
        Manner(addends=(2,), above=8, reading=("early",)),
        Manner(reading=("staged", "early"), block=64, brief=False),
    ),
)


def told(tile):
    more = [f"{tile.cluster} in a cluster"] if tile.cluster > 1 else []
    more += [f"{tile.shared} shared"] if tile.shared else []
    more += [f"{tile.segments} segments"] if tile.segments else []
    more += ["brief"] if tile.brief else []
    shape = f"{tile.threads} x {tile.packs}, {tile.rows} a CTA"
    return ", ".join([shape, tile.reading, f"{tile.ctas} CTAs", *more])


def chosen(norm, cols, itemsize, addends=1, arch=90):
    words = 1.0 if norm == "rms" else 2.0
    kind = addends, norm != "rms", norm == "adaptive"
    return choices.row_tile(cols, itemsize, 16 // itemsize, arch, words, *kind)


@pytest.mark.parametrize("key", CHOSEN, ids=lambda key: "-".join(map(str, key)))
def test_chosen_launches(key):
    assert told(chosen(*key)) == CHOSEN[key]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer", "adaptive"])
def test_clusters_take_over_where_the_table_ends(kind, odd):
    """Few vectors a thread, but in the longest rows; longer ones are cut into segments."""
    assert row_clusters.step(Row(kind, 2, True, 1, 1024), odd) is None
    for vectors in (2561, 3000, 4096, 4097, 8192, 16384, 16385, 32768, 50000, 65536):
        step = row_clusters.step(Row(kind, 2, True, 1, vectors), odd)
        assert step.vectors >= vectors
        packs = -(-vectors // (step.threads * step.cluster))
        assert 1 < packs <= (4 if vectors <= 32768 else 8)
        assert 2 <= step.cluster <= 16
    assert row_clusters.step(Row(kind, 2, True, 1, 65537), odd) is None


def test_a_table_of_clusters_is_not_written_without_them():
    table = Table(ladders=(Ladder((Step(64, 32, cluster=2),)),), manners=())
    with pytest.raises(ValueError, match="several CTAs"):
        table_text(row_table, table)


MODULES = [row_table, run_table]
KINDS = {
    row_table: ("rms", "layer", "adaptive"),
    run_table: ("forward", "backward", "tight forward", "tight backward"),
}


def kinds_of_rows(module=row_table):
    for kind in KINDS[module]:
        for itemsize in (2, 4, 8):
            for whole in (True, False):
                for addends in (1, 2):
                    yield Row(kind, itemsize, whole, addends, 1)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_steps_rise_and_are_powers_of_two(module):
    for row in kinds_of_rows(module):
        steps = module.TABLE.ladder(row).steps
        assert [s.vectors for s in steps] == sorted({s.vectors for s in steps})
        assert all(s.threads & (s.threads - 1) == 0 and 1 <= s.threads <= 512 for s in steps)
        most = choices.most_held(4 if row.whole else 2)
        assert all(s.vectors <= s.threads * most for s in steps)


@pytest.mark.parametrize("arch", [75, 80, 90, 100, 120])
def test_the_table_of_runs_goes_as_far_as_registers(arch):
    for itemsize, vec in ((2, 8), (2, 1), (4, 4), (4, 1), (8, 2), (8, 1)):
        for tensors in (1, 2):
            registers = max(vec * itemsize // 4, 1)
            held = channel_choices.most_held(registers, itemsize, arch, tensors)
            row = channel_choices.run_row(512 * held, vec, itemsize, arch, tensors)
            assert run_table.TABLE.threads(row) == 512
            assert run_table.TABLE.ladder(row).steps[-1].vectors == row.vectors


def test_every_row_is_told_all():
    for row in kinds_of_rows():
        for vectors in (1, 8, 9, 64, 65, 128, 160, 161, 1536, 4096, 1 << 31):
            manner = row_table.TABLE.manner(row._replace(vectors=vectors))
            assert manner.reading and manner.block and manner.brief is not None


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_tables_stand_as_the_tuning_writes_them(module):
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text == table_text(module, module.TABLE)


@pytest.mark.parametrize("table", [row_table.TABLE, run_table.TABLE, SMALL])
def test_the_text_reads_back(table):
    read = {}
    exec(table_text(row_table, table), read)
    assert read["TABLE"] == table


def test_quotes_and_long_reasons_read_back():
    reason = 'a "quoted" word, a \\ and ' + " and ".join(["much to say of it"] * 12)
    table = SMALL.with_threads(Row("layer", 2, True, 1, 100), 32, reason)
    table = table.with_manner(Manner(reason=reason))
    text, read = table_text(row_table, table), {}
    exec(text, read)
    assert read["TABLE"] == table
    assert max(map(len, text.splitlines())) <= 100


# Looking up


def test_the_first_ladder_that_serves_a_row_counts():
    assert SMALL.threads(Row("layer", 2, True, 1, 9)) == 16
    assert SMALL.threads(Row("rms", 2, True, 1, 9)) == 32
    assert SMALL.threads(Row("layer", 2, False, 1, 9)) == 256
    assert SMALL.threads(Row("layer", 2, True, 1, 513)) is None


def test_what_an_entry_leaves_open_the_next_one_says():
    manner = SMALL.manner(Row("rms", 2, True, 2, 9))
    assert (manner.brief, manner.block, manner.reading) == (True, 128, ("early",))
    manner = SMALL.manner(Row("rms", 2, True, 2, 8))
    assert (manner.brief, manner.block, manner.reading) == (True, 128, ("staged", "early"))
    assert SMALL.manner(Row("layer", 2, True, 1, 9)).block == 64


# Entries that go in


def steps(table, row):
    return [(s.vectors, s.threads) for s in table.ladder(row).steps]


def test_new_threads_reach_down_to_where_the_step_starts():
    row = Row("layer", 4, True, 1, 100)
    table = SMALL.with_threads(row, 32, "faster")
    assert steps(table, row) == [(8, 8), (64, 16), (100, 32), (512, 64)]
    assert [s.reason for s in table.ladder(row).steps] == ["", "", "faster", "measured"]
    assert steps(table, row._replace(itemsize=2)) == [(8, 8), (64, 16), (512, 64)]
    assert steps(table, row._replace(kind="rms")) == [(64, 32), (1024, 128)]


def test_new_threads_reach_down_to_what_stays():
    row = Row("layer", 4, True, 1, 512)
    table = SMALL.with_threads(row, 32, "faster", above=256)
    assert steps(table, row) == [(8, 8), (64, 16), (256, 64), (512, 32)]
    again = table.with_threads(row, 16, "faster still", above=256)
    assert steps(again, row) == [(8, 8), (64, 16), (256, 64), (512, 16)]
    assert len(again.ladders) == len(table.ladders) == len(SMALL.ladders) + 1


def test_any_new_threads_change_those_vectors_alone():
    for row in kinds_of_rows():
        for vectors in (1, 9, 33, 64, 129, 512):
            for above in (0, vectors - 1):
                mine = row._replace(vectors=vectors)
                table = row_table.TABLE.with_threads(mine, 64, "", above)
                start = max(row_table.TABLE.step_start(mine), above)
                for n in range(1, 600):
                    now = row_table.TABLE.threads(row._replace(vectors=n))
                    expected = 64 if start < n <= vectors else now
                    assert table.threads(row._replace(vectors=n)) == expected


def test_a_table_in_use_chooses_and_drops_plans():
    table = row_table.TABLE.with_threads(Row("layer", 2, True, 1, 512), 256, "")
    before, generation = chosen("layer", 4096, 2), registry.generation
    with using(row_table, table):
        assert chosen("layer", 4096, 2).threads == 256 != before.threads
        assert registry.generation > generation
        inside = registry.generation
    assert chosen("layer", 4096, 2) == before
    assert registry.generation > inside


def test_an_entry_that_does_not_fit_the_kernel_is_not_followed():
    """Whatever a table says, launches are such as the kernels allow."""
    wish = Manner(reading=("staged",), block=128, brief=True, ctas=32)
    with using(row_table, row_table.TABLE.with_manner(wish)):
        wide = chosen("layer", 4096, 8)
        assert wide.reading == "late" and not wide.brief and wide.rows == 1
        assert wide.ctas * wide.block <= 2048
        adaptive = chosen("adaptive", 256, 2)
        assert not adaptive.brief and adaptive.block == 128
        assert not chosen("rms", 64, 2).brief  # its rows are too short for it


def test_tiles_that_ask_for_too_much_may_not_be_launched():
    tile = chosen("layer", 4096, 2)
    assert choices.may_be_launched(tile, 2, 90)
    assert not choices.may_be_launched(replace(tile, ctas=17), 2, 90)  # threads
    assert not choices.may_be_launched(replace(tile, ctas=14), 2, 90)  # registers
    assert not choices.may_be_launched(replace(tile, packs=9), 2, 90)
    assert not choices.may_be_launched(replace(tile, rows=2), 2, 90)
    assert not choices.may_be_launched(replace(tile, threads=16), 2, 90)
