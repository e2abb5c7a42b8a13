"""The CUDA kernels of batch, group and instance norm on host threads, through their own plans."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from cases import assert_same_bits
from channel_cases import (
    COMPUTING,
    DTYPES,
    MODES,
    NORMALIZING,
    RUNNING,
    TABLES,
    as_tuple,
    assert_within_bounds,
    copied,
    make_channels_of_all_kinds,
    make_inputs,
    refer,
    stats_option,
)
from host_channels import PATHS, Path, inputs_on, placed, plan_of, run
from host_kernels import missing_compiler

pytest.importorskip("ml_dtypes")
if reason := missing_compiler():
    pytest.skip(reason, allow_module_level=True)

# CTAs wait for each other there.
KEPT = ("segments kept on chip", "blocks kept on chip", "blocks kept wholly on chip")
# Of a column of a short table; one where 16-bit tables are wide, as if all were.
TABLE_LANES = [("float16", 4), ("bfloat16", 4), ("float32", 4), ("float16", 1), ("bfloat16", 1)]
WIDE_TABLE = Path((17, 33), _WIDE_TABLE=0)
every_path = pytest.mark.parametrize("path", PATHS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_mode = pytest.mark.parametrize("mode", MODES)


@every_path
@every_dtype
@every_mode
def test_random_values(kernels, mode, dtype, path):
    before = inputs_on(path, mode, dtype, centre=0.5)
    results, after = run(kernels, mode, before, PATHS[path])
    assert_within_bounds(mode, results, before, after)
    for name, array in before.items():
        if mode not in COMPUTING or name not in RUNNING:
            assert_same_bits(after[name], array, name)
    # Where a barrier is missing, it matters which warp runs ahead.
    again, left = run(kernels, mode, before, PATHS[path], backwards=True)
    for one, other in zip((*results, *after.values()), (*again, *left.values()), strict=True):
        if one is not None:
            assert_same_bits(other, one)


LARGEST = {
    "float16": 65504.0,
    "bfloat16": 2.0**127 * (2 - 2.0**-7),
    "float32": 2.0**127 * (2 - 2.0**-23),
    "float64": np.finfo(np.float64).max,
}
TINY = {"float16": 6e-7, "bfloat16": 1e-30, "float32": 1e-30, "float64": 1e-290}


@every_path
@every_dtype
@pytest.mark.parametrize("mode", NORMALIZING)
def test_what_has_no_spread_gives_its_bias(kernels, mode, dtype, path):
    before = inputs_on(path, mode, dtype)
    values = np.array([3.7, LARGEST[dtype], -LARGEST[dtype], TINY[dtype], 0.0, -1.3])
    # Channels of a group share a value: groups are a third of the channels.
    channels = before["x"].shape[1]
    each = np.repeat(values[:3], channels // 3) if mode == "group_norm" else values
    each = np.resize(each, channels).astype(before["x"].dtype)
    before["x"][...] = each[:, None, None]
    (y, mean, _), _ = run(kernels, mode, before, PATHS[path])
    assert_same_bits(y, np.broadcast_to(before["bias"][:, None, None], y.shape), "y")
    found = np.broadcast_to(mean.reshape(-1, mean.shape[-1])[0], (mean.shape[-1],))
    kept = each[:: channels // mean.shape[-1]].astype(mean.dtype)
    assert_same_bits(found.copy(), kept, "mean")


@every_path
@every_dtype
@every_mode
def test_not_a_number_stays_in_its_set(kernels, mode, dtype, path):
    clean = inputs_on(path, mode, dtype)
    spoiled = {n: None if a is None else a.copy(order="K") for n, a in clean.items()}
    name = "grad_out" if mode == "batch_norm_backward-frozen" else "x"
    spoiled[name][1, 2, 0, 0] = np.nan
    want, _ = run(kernels, mode, clean, PATHS[path])
    got, after = run(kernels, mode, spoiled, PATHS[path])
    assert_within_bounds(mode, got, spoiled, after)
    channels = clean["x"].shape[1]
    touched = np.zeros(channels, bool)
    touched[2] = True
    if mode == "group_norm":
        touched[2 // (channels // 3) * (channels // 3) :][: channels // 3] = True
    for one, other in zip(got, want, strict=True):
        if one is not None and one.shape[-1] != 3 and one.ndim != 2:
            others = one[:, ~touched] if one.ndim > 1 else one[~touched]
            theirs = other[:, ~touched] if other.ndim > 1 else other[~touched]
            assert_same_bits(others, theirs)


@every_path
@pytest.mark.parametrize("mode", NORMALIZING)
@pytest.mark.parametrize(
    ("dtype", "centre", "spread"),
    [
        ("float32", 1e4, 1e-2),
        ("float32", -3e38, 1e37),
        ("float32", 0.0, 1e-30),
        ("bfloat16", 0.0, 1e38),
        ("float64", 1e10, 1e-4),
        ("float64", 0.0, 1e300),
    ],
)
def test_far_from_zero_or_from_one(kernels, mode, dtype, centre, spread, path):
    before = inputs_on(path, mode, dtype)
    limit = LARGEST[dtype]
    values = np.clip(centre + spread * before["x"].astype(np.float64), -limit, limit)
    before["x"][...] = values.astype(before["x"].dtype)
    results, _ = run(kernels, mode, before, PATHS[path])
    assert_within_bounds(mode, results, before)


@every_path
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("mode", NORMALIZING)
def test_first_elements_that_are_far_out(kernels, mode, dtype, path):
    """What the sums are taken about is then no good, and they are taken again."""
    before = inputs_on(path, mode, dtype)
    before["x"][:3] += 300
    before["x"][-1, :, -1:, -1:] = 1000
    results, after = run(kernels, mode, before, PATHS[path])
    assert_within_bounds(mode, results, before, after)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("mode", NORMALIZING)
def test_a_first_row_that_is_far_out(kernels, mode, dtype):
    """A quarter of it is what the sums of a block of several hundred rows are taken about."""
    before = inputs_on("blocks of rows", mode, dtype)
    before["x"][:, :, 0, 0] = 5000
    results, after = run(kernels, mode, before, PATHS["blocks of rows"])
    assert_within_bounds(mode, results, before, after)


@every_path
@every_dtype
@pytest.mark.parametrize("mode", TABLES)
def test_channels_of_all_kinds(kernels, mode, dtype, path):
    before = make_channels_of_all_kinds(mode, PATHS[path].shape, dtype)
    before = PATHS[path].inputs(before)
    results, after = run(kernels, mode, before, PATHS[path])
    assert_within_bounds(mode, results, before, after)


@pytest.mark.parametrize(
    ("rows", "columns"), [(2, 31), (3, 70), (5, 70), (8, 2), (12, 8), (17, 33), (32, 70)]
)
@pytest.mark.parametrize(("dtype", "lanes"), TABLE_LANES)
@pytest.mark.parametrize("mode", TABLES)
def test_a_short_table_of_columns_of_all_kinds(kernels, mode, dtype, lanes, rows, columns):
    """Lanes that have no rows, and lanes whose column is not there."""
    path = WIDE_TABLE if lanes == 1 else None
    before = make_channels_of_all_kinds(mode, (rows, columns), dtype)
    kernel = plan_of(mode, before, path).launches[0].kernel
    assert kernel.startswith("table_") and kernel.endswith(f", {lanes}>")
    results, after = run(kernels, mode, before, path)
    assert_within_bounds(mode, results, before, after)
    two, _ = run(kernels, mode, {n: a[..., :2].copy() for n, a in before.items()}, path)
    for few, many in zip(two, results, strict=True):
        if few is not None:
            assert_same_bits(few, many[..., :2].copy())


@pytest.mark.parametrize(
    "path", ["a cluster a set", "segments of a set", "strips", "blocks of rows", *KEPT]
)
@pytest.mark.parametrize("mode", COMPUTING)
def test_momentum(kernels, mode, path):
    before = inputs_on(path, mode, "float32")
    for momentum in (0.0, 1.0):
        parameters = {**MODES[mode][1], "momentum": momentum}
        with mock.patch.dict(MODES, {mode: (MODES[mode][0], parameters)}):
            results, after = run(kernels, mode, before, PATHS[path])
            assert_within_bounds(mode, results, before, after)
        for name in RUNNING:
            same = (after[name] == before[name]).all()
            assert same == (momentum == 0), f"{name}, momentum {momentum}"


@pytest.mark.parametrize(
    "path", ["one CTA a set", "segments of a set", "strips", "blocks of rows", *KEPT]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_mode
def test_parameters_of_accumulation_type_with_strides(kernels, mode, dtype, path):
    before = inputs_on(path, mode, dtype, parameter_dtype="float32")
    for name, array in before.items():
        if array is not None and array.ndim == 1:
            table = np.full((len(array), 3), 77, array.dtype)
            table[:, 1] = array[::-1]
            before[name] = table[::-1, 1]
    results, after = run(kernels, mode, before, PATHS[path])
    assert_within_bounds(mode, results, before, after)


@pytest.mark.parametrize(
    "path", ["one CTA a set", "segments of a set", "strips", "a tile of columns", *KEPT]
)
@every_mode
def test_without_parameters(kernels, mode, path):
    before = inputs_on(path, mode, "float32")
    for name in ("weight", "bias", *(RUNNING if mode in COMPUTING else ())):
        if name in before:
            before[name] = None
    results, after = run(kernels, mode, before, PATHS[path])
    kept = {name: array for name, array in after.items() if array is not None}
    assert_within_bounds(mode, results, before, kept)


def relaid(array, how):
    """An array with the same values in an order that kernels do, or do not, walk."""
    if how == "samples last":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 0, -1)), -1, 0)
    if how == "gaps":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if how == "reversed":
        return np.flip(np.flip(array).copy())
    if how == "every other sample":
        return np.repeat(array, 2, axis=0)[::2]
    if how == "some channels":
        padding = [(0, 0)] * array.ndim
        padding[1] = (2, 1)
        return np.pad(array, padding)[:, 2:-1]
    if how == "anywhere":  # an odd number of elements from one sample to the next
        room = np.zeros((len(array), array[0].size | 1), array.dtype)
        strides = room.strides[0], *array.strides[1:]
        view = np.lib.stride_tricks.as_strided(room, array.shape, strides)
        view[...] = array
        return view
    return np.moveaxis(np.pad(np.moveaxis(array, 1, -1), [(0, 0)] * 3 + [(0, 2)])[..., :-2], -1, 1)


@pytest.mark.parametrize(
    "how",
    ["samples last", "gaps", "reversed", "every other sample", "some channels", "columns of many"],
)
@every_mode
def test_layouts(kernels, mode, how):
    before = make_inputs(mode, (4, 6, 5, 4), "float32")
    for name, array in before.items():
        if name in ("x", "grad_out"):
            before[name] = relaid(array, how)
    results, after = run(kernels, mode, before)
    assert_within_bounds(mode, results, before, after)
    plan = plan_of(mode, before)
    assert hasattr(plan, "inner") == (how in ("samples last", "gaps", "reversed"))


@pytest.mark.parametrize(
    "path",
    [
        *("one CTA a set", "one CTA a set, at length", "a cluster a set", "segments of a set"),
        *("blocks of rows", "samples of fours as rows", "a short table"),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@every_mode
def test_samples_that_start_anywhere(kernels, mode, dtype, path):
    """Vectors are shifted into place."""
    before = inputs_on(path, mode, dtype, centre=0.5)
    for name in {"x", "grad_out"} & before.keys():
        before[name] = relaid(before[name], "anywhere")
    results, after = run(kernels, mode, before, PATHS[path])
    assert_within_bounds(mode, results, before, after)


@pytest.mark.parametrize("shape", [(5, 6), (7, 3, 6), (4, 1, 1, 6), (1, 9, 5, 3, 6), (300, 6)])
@every_mode
def test_channel_axis(kernels, mode, shape):
    if shape[1:-1] in ((), (1, 1)) and mode == "instance_norm":
        pytest.skip("one value has no variance")
    before = make_inputs(mode, shape, "float16", axis=-1)
    results, after = run(kernels, mode, before, axis=-1)
    assert_within_bounds(mode, results, before, after, channel_axis=-1)


@pytest.mark.parametrize("shape", [(3, 16, 7, 7), (70, 8, 3), (2, 5, 31), (3, 1, 4099), (2, 9, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["batch_norm-inference", "batch_norm_normalize"])
def test_channels_of_any_length(kernels, mode, dtype, shape):
    """Vectors that end in another channel than they begin in, and several samples a CTA."""
    before = make_inputs(mode, shape, dtype)
    results, after = run(kernels, mode, before)
    assert_within_bounds(mode, results, before, after)
    every_other = {**before, "x": relaid(before["x"], "every other sample")}
    for got, want in zip(run(kernels, mode, every_other)[0], results, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("shape", [(5, 6, 5, 3), (5, 6, 20, 36), (5, 6, 30, 31)])
@pytest.mark.parametrize("mode", ["group_norm", "instance_norm"])
def test_sets_of_a_sample_keep_their_bits_in_any_company(kernels, mode, shape):
    before = make_inputs(mode, shape, "float32")
    before |= {name: None for name in RUNNING if name in before}
    together, _ = run(kernels, mode, before)
    for part in (slice(0, 1), slice(2, 5)):
        alone, _ = run(kernels, mode, {**before, "x": before["x"][part]})
        for one, all_of_them in zip(alone, together, strict=True):
            assert_same_bits(one, all_of_them[part])


@every_path
@every_dtype
@pytest.mark.parametrize("mode", ["group_norm", "instance_norm"])
def test_equal_samples_have_equal_bits(kernels, mode, dtype, path):
    """Whichever of them a CTA has first, and which later."""
    before = inputs_on(path, mode, dtype, centre=0.5)
    before["x"][...] = before["x"][:1]
    before["x"][:, :, 0, 0] = 3  # where a centre may be taken from, and too near to be refused
    for each in run(kernels, mode, before, PATHS[path])[0]:
        for sample in each[1:]:
            assert_same_bits(sample, each[0])


@pytest.mark.parametrize("how", ["every other sample", "samples backwards"])
@pytest.mark.parametrize("mode", ["batch_norm-training", "batch_norm_backward-training"])
def test_kept_sets_of_samples_with_steps(kernels, mode, how):
    """They are walked in 32 bits, upwards."""
    path = PATHS["segments kept on chip"]
    before = inputs_on("segments kept on chip", mode, "float32")
    for name in {"x", "grad_out"} & before.keys():
        backwards = before[name][::-1].copy()[::-1]
        before[name] = backwards if "backwards" in how else relaid(before[name], how)
    kept = "run_kept" in plan_of(mode, before, path).launches[-1].kernel
    assert kept == ("backwards" not in how)
    results, after = run(kernels, mode, before, path)
    assert_within_bounds(mode, results, before, after)


@pytest.mark.parametrize("mode", ["batch_norm-training", "batch_norm_backward-training"])
def test_strips_of_samples_with_steps(kernels, mode):
    """Each array has its own."""
    before = inputs_on("strips", mode, "float16")
    want, _ = run(kernels, mode, before, PATHS["strips"])
    before["x"] = relaid(before["x"], "every other sample")
    assert "strip_" in plan_of(mode, before, PATHS["strips"]).launches[0].kernel
    for one, other in zip(run(kernels, mode, before, PATHS["strips"])[0], want, strict=True):
        if one is not None:
            assert_same_bits(one, other)


@every_path
@pytest.mark.parametrize("mode", [m for m in MODES if m != "batch_norm_stats"])
def test_samples_of_all_arrays_run_backwards(kernels, mode, path):
    """What numbers elements in 32 bits cannot go down from the first."""
    before = inputs_on(path, mode, "float32")
    (want, *others), _ = run(kernels, mode, before, PATHS[path])
    arrays = {name: placed(array) for name, array in before.items()}
    for name in {"x", "grad_out"} & arrays.keys():
        arrays[name] = placed(before[name][::-1].copy()[::-1])
    out = [placed(np.zeros(want.shape, want.dtype)[::-1])]
    if "backward" in mode:
        out += [np.zeros_like(other) for other in others]
    plan = plan_of(mode, arrays, PATHS[path], out=out)
    assert not any("brief" in launch.kernel for launch in plan.launches)
    (got, *rest) = kernels.execute(
        lambda: plan_of(mode, arrays, PATHS[path], out=out), list(arrays.values()), out=out
    )
    assert got.strides[0] < 0
    assert_within_bounds(mode, (got, *rest), before, arrays)


@every_mode
def test_gradient_and_x_in_different_orders(kernels, mode):
    if "backward" not in mode:
        pytest.skip("one array of that shape")
    before = make_inputs(mode, (3, 6, 4, 5), "float32")
    before["grad_out"] = PATHS["a tile of columns"].inputs(before)["grad_out"]
    results, _ = run(kernels, mode, before)
    assert_within_bounds(mode, results, before)


@pytest.mark.parametrize("mode", ["group_norm", "instance_norm"])
def test_columns_of_a_sample_do_not_depend_on_the_others(kernels, mode):
    all_of_them = PATHS["blocks of rows"].inputs(make_inputs(mode, (4, 6, 60, 50), "float32"))
    one = {**all_of_them, "x": all_of_them["x"][1:2]}
    assert plan_of(mode, one)._launchers[0].grid > 1  # blocks of rows
    (want, *_), _ = run(kernels, mode, all_of_them)
    (got, *_), _ = run(kernels, mode, one)
    assert_same_bits(got, want[1:2])


def assert_same_in_place(kernels, mode, before, path=None):
    """The gradient of a weight over the weight as well."""
    want, _ = run(kernels, mode, before, path)
    arrays = {n: None if a is None else placed(a) for n, a in before.items()}
    target = arrays["grad_out"] if "backward" in mode else arrays["x"]
    out = [target]
    if "backward" in mode:
        out += [arrays["weight"], np.zeros_like(want[2])]
    got = kernels.execute(
        lambda: plan_of(mode, arrays, path, out=out), list(arrays.values()), out=out
    )
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@every_path
@pytest.mark.parametrize("mode", [m for m in MODES if m != "batch_norm_stats"])
def test_in_place(kernels, mode, path):
    assert_same_in_place(kernels, mode, inputs_on(path, mode, "float32"), PATHS[path])


@pytest.mark.parametrize(("dtype", "lanes"), TABLE_LANES)
@pytest.mark.parametrize("mode", TABLES)
def test_a_short_table_in_place(kernels, mode, dtype, lanes):
    """A lane takes a column again that others have not written."""
    path = WIDE_TABLE if lanes == 1 else None
    assert_same_in_place(kernels, mode, make_channels_of_all_kinds(mode, (17, 33), dtype), path)


@pytest.mark.parametrize("shape", [(0, 6, 4), (3, 6, 0), (2, 0, 3)])
@every_mode
def test_without_elements(kernels, mode, shape):
    before = make_inputs(mode, shape, "float32")
    results, after = run(kernels, mode, before)
    for name, array in before.items():
        assert_same_bits(after[name], array, name)
    expected = as_tuple(refer(mode, copied(before), **stats_option(mode)))
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("path", ["several sets a warp", "one CTA a set"])
@every_dtype
@pytest.mark.parametrize("mode", NORMALIZING)
def test_straight_on_and_at_length_are_the_same_bits(kernels, mode, dtype, path):
    """Which of the two runs may depend on the number of samples."""
    for centre, spread in ((0.5, 1.0), (100.0, 0.0), (0.0, 1e-30), (0.0, 1e4)):
        before = inputs_on(path, mode, dtype, centre=centre, spread=spread)
        before["x"][0, 0, 0, 0] *= 8  # far outside, where the centre may be taken from
        one, left = run(kernels, mode, before, PATHS[path])
        other, also_left = run(kernels, mode, before, PATHS[f"{path}, at length"])
        for a, b in zip((*one, *left.values()), (*other, *also_left.values()), strict=True):
            if a is not None:
                assert_same_bits(a, b)


@pytest.mark.parametrize("path", KEPT)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "mode", ["batch_norm-training", "batch_norm_backward-training", "instance_norm"]
)
def test_ctas_in_company(kernels, mode, dtype, path):
    """Alone each but the last one leaves, and that does all of the work; together they stay."""
    before = inputs_on(path, mode, dtype)
    alone, left = run(kernels, mode, before, PATHS[path])
    (grid,) = {
        launch.grid
        for launch in plan_of(mode, before, PATHS[path]).launches
        if "kept" in launch.kernel
    }
    for together in (grid, *(n for n in (2, 3) if grid % n == 0 and n < grid)):
        for backwards in (False, True):
            results, after = run(kernels, mode, before, PATHS[path], backwards, together)
            for one, other in zip(
                (*alone, *left.values()), (*results, *after.values()), strict=True
            ):
                if one is not None:
                    assert_same_bits(other, one)
