"""The CUDA kernels of group and instance norm backward on host threads, through their own plans."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from backward_cases import (
    DTYPES,
    GROUP_OPS,
    assert_within_bounds,
    make_inputs,
    make_op,
    refer,
    sizes_of,
)
from cases import assert_same_bits
from host_channels import placed, spec_of
from host_kernels import missing_compiler

from cunorm.arrays import Device
from cunorm.cuda import devices, group_choices
from cunorm.cuda.group_gradient import KERNELS

pytest.importorskip("ml_dtypes")
if reason := missing_compiler():
    pytest.skip(reason, allow_module_level=True)


class Path:
    """A way through the kernels: launch choices that take the place of the package's own."""

    def __init__(self, shape, template, last=False, **stand_ins):
        self.shape = shape
        self.template = template
        self.last = last
        self.stand_ins = stand_ins

    def laid_out(self, inputs):
        """Inputs in the path's memory order."""
        if not self.last:
            return inputs
        moved = {n: a for n, a in inputs.items() if a is not None and a.shape == self.shape}
        return inputs | {
            name: np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
            for name, array in moved.items()
        }


def tile(channels, vectors, vec, access, itemsize, arch, *, cluster=1, lanes=32, packs=2, units=1):
    """Teams for all units of a set; as many CTAs as they need."""
    of_set = channels * -(-vectors // (lanes * packs))
    threads = group_choices.power_of_two_up(-(-of_set // (units * cluster))) * lanes
    return group_choices.GroupTile(
        vec, min(access, vec), lanes, packs, units, 0, max(threads, 32), cluster=cluster
    )


def cluster(*args):
    """Four CTAs, and a pack of each array in shared memory."""
    return replace(tile(*args, cluster=4), shared=1)


def some_units(*args):
    """Three units a thread, of which some threads have fewer."""
    return tile(*args, lanes=4, packs=1, units=3)


def shares(channels, vectors, vec, access, itemsize, arch):
    """Shares of 64 threads with two units of two packs each."""
    units = channels * -(-vectors // 16)
    return group_choices.GroupTile(vec, min(access, vec), 8, 2, 2, 0, 64, segments=-(-units // 16))


def blocks(rows, columns, vec, access, itemsize, arch):
    """Blocks of rows that a CTA takes two at a time."""
    tx = min(group_choices.power_of_two_up(-(-columns // vec)), 4)
    ty = 64 // tx
    return group_choices.ColumnTile(vec, min(access, vec), tx, ty, 2, 1, -(-rows // (5 * ty)))


PATHS = {
    "several sets a warp": Path((5, 6, 2, 2), "group_gradient_samples"),
    "several samples a record": Path(
        (13, 6, 4, 4), "group_gradient_samples", samples_together=lambda *args: 3
    ),
    "samples of a CTA a record": Path(
        (11, 6, 20, 8), "group_gradient_samples", samples_together=lambda *args: 4
    ),
    "one CTA a set": Path((9, 6, 25, 24), "group_gradient"),
    "records folded": Path((21, 6, 25, 24), "group_gradient", rows_folded=lambda *args: 4),
    "several units a thread": Path((9, 9, 30, 20), "group_gradient", group_tile=some_units),
    "a cluster a set": Path((2, 6, 39, 36), "group_gradient_cluster", group_tile=cluster),
    "a cluster for all samples": Path((5, 6, 20, 36), "group_gradient_few"),
    "one sample": Path((1, 12, 20, 36), "group_gradient_single"),
    "shares of a set": Path((2, 6, 39, 36), "group_gradient_sums", group_tile=shares),
    "positions as rows": Path((3, 6, 7, 5), "column_group_sums", last=True),
    "blocks of rows": Path((2, 24, 40, 31), "column_group_sums", last=True, column_tile=blocks),
    "blocks of rows folded": Path(
        (3, 24, 40, 21),
        "column_group_sums",
        last=True,
        column_tile=blocks,
        rows_folded=lambda *args: 8,
    ),
}
every_path = pytest.mark.parametrize("path", PATHS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_op = pytest.mark.parametrize("op", GROUP_OPS)


def inputs_on(path, op, dtype, **options):
    found = make_inputs(op, sizes_of(op, PATHS[path].shape), dtype, **options)
    return PATHS[path].laid_out(found)


def sizes_on(path, op):
    return sizes_of(op, PATHS[path].shape)


def plan_of(op, inputs, path=None, axis=1, arch=90, out=()):
    sizes = sizes_of(op, inputs["x"].shape, axis)
    specs = {name: None if a is None else spec_of(a) for name, a in inputs.items()}
    call = make_op(op, sizes)._call(specs, False, axis, Device("cuda"))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "compute_capability", lambda index: arch))
        for name, stand_in in (PATHS[path].stand_ins if path else {}).items():
            stack.enter_context(mock.patch.object(group_choices, name, stand_in))
        return KERNELS[op].plan(call, bool(out))


def run(kernels, op, inputs, path=None, backwards=False, **options):
    """The gradients; inputs must be left as they were."""
    given = {name: placed(array) for name, array in inputs.items()}
    results = kernels.execute(
        lambda: plan_of(op, given, path, **options), list(given.values()), backwards
    )
    for name, array in inputs.items():
        if array is not None:
            assert_same_bits(given[name], array, name)
    return results if len(results) == 3 else (results[0], None, results[1])


@every_path
@every_op
def test_paths_lead_where_they_say(op, path):
    """Else the tests below would look at less than there is."""
    plan = plan_of(op, inputs_on(path, op, "bfloat16"), path)
    templates = [launch.kernel.partition("<")[0] for launch in plan.launches]
    assert templates[0] == PATHS[path].template
    more = {"group_gradient_single": 0, "group_gradient_few": 0, "group_gradient_sums": 2}
    more["column_group_sums"] = 2
    folded = "group_gradient_fold" in templates
    assert folded == ("folded" in path)
    assert len(templates) == 1 + more.get(templates[0], 1) + folded
    assert ("group_gradient_merge" in templates) == (len(templates) > 1)


@every_path
@every_dtype
@every_op
def test_random_values(kernels, op, dtype, path):
    inputs = inputs_on(path, op, dtype, centre=0.5, grad_centre=0.25)
    results = run(kernels, op, inputs, path)
    assert_within_bounds(op, results, inputs, sizes_on(path, op))
    # Where a barrier is missing, it matters which warp runs ahead.
    again = run(kernels, op, inputs, path, backwards=True)
    for one, other in zip(results, again, strict=True):
        assert_same_bits(other, one)


@every_path
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@every_op
def test_the_gradient_of_a_sample_has_the_same_bits_in_any_company(kernels, op, dtype, path):
    inputs = inputs_on(path, op, dtype)
    samples = len(inputs["x"])
    whole = run(kernels, op, inputs, path)[0]
    for chosen in ([0], [samples - 1], [*range(samples)] * (12 // samples + 1)):
        part = {n: a if n == "weight" else a[chosen] for n, a in inputs.items()}
        part = PATHS[path].laid_out(part) if PATHS[path].shape == part["x"].shape else part
        if PATHS[path].last:  # taking samples keeps no memory order
            for name in ("grad_out", "x"):
                last = np.ascontiguousarray(np.moveaxis(part[name], 1, -1))
                part[name] = np.moveaxis(last, -1, 1)
        assert_same_bits(run(kernels, op, part, path)[0], whole[chosen])


@every_path
@every_dtype
@every_op
def test_not_a_number_stays_in_its_set(kernels, op, dtype, path):
    clean = inputs_on(path, op, dtype)
    spoiled = clean | {"x": clean["x"].copy(order="K")}
    sample = len(clean["x"]) - 1
    spoiled["x"][sample, 2, 0, 0] = np.nan
    want, got = run(kernels, op, clean, path), run(kernels, op, spoiled, path)
    assert_within_bounds(op, got, spoiled, sizes_on(path, op))
    channels = clean["x"].shape[1]
    of_set = channels // clean["mean"].shape[1]
    touched = np.zeros(want[0].shape[:2], bool)
    touched[sample, 2 // of_set * of_set :][:of_set] = True
    assert np.isnan(got[0][touched].astype(np.float64)).all()
    assert_same_bits(got[0][~touched], want[0][~touched])
    others = np.arange(channels) != 2
    assert_same_bits(got[1][others], want[1][others])
    assert_same_bits(got[2], want[2])


@every_path
@pytest.mark.parametrize(
    ("dtype", "centre", "grad_centre"),
    [("float32", 1e4, 0.0), ("float32", 0.0, 1e4), ("float64", 1e10, 1e8), ("float16", 30, 10)],
)
@every_op
def test_far_from_zero(kernels, op, dtype, centre, grad_centre, path):
    inputs = inputs_on(path, op, dtype, centre=centre, grad_centre=grad_centre)
    results = run(kernels, op, inputs, path)
    assert_within_bounds(op, results, inputs, sizes_on(path, op))


@every_path
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_op
def test_weights_of_accumulation_type_and_statistics_with_strides(kernels, op, dtype, path):
    inputs = inputs_on(path, op, dtype, parameter_dtype="float32")
    for name in ("weight", "mean", "rstd"):
        table = np.full((*inputs[name].shape, 3), 77, inputs[name].dtype)
        table[..., 1] = np.flip(inputs[name])
        inputs[name] = np.flip(table[..., 1])
    results = run(kernels, op, inputs, path)
    assert_within_bounds(op, results, inputs, sizes_on(path, op))
    assert results[1].dtype == results[2].dtype == np.float32


@every_op
def test_statistics_that_no_single_stride_tells(kernels, op):
    sizes = sizes_of(op, (4, 6, 5, 4))
    inputs = make_inputs(op, sizes, "float32")
    for name in ("mean", "rstd"):
        inputs[name] = np.asfortranarray(inputs[name])
    assert plan_of(op, inputs).inner is not None
    assert_within_bounds(op, run(kernels, op, inputs), inputs, sizes)


@every_path
@every_op
def test_without_a_weight(kernels, op, path):
    inputs = inputs_on(path, op, "bfloat16", without=("weight",))
    results = run(kernels, op, inputs, path)
    assert results[1] is None and results[2].dtype == np.float32
    assert_within_bounds(op, results, inputs, sizes_on(path, op))


def relaid(array, how):
    """An array with the same values in an order that kernels do, or do not, walk."""
    if how == "samples last":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 0, -1)), -1, 0)
    if how == "reversed":
        return np.flip(np.flip(array).copy())
    if how == "expanded":
        return np.broadcast_to(array[:1, :1, :1, :1], array.shape)
    if how == "every other sample":
        return np.repeat(array, 2, axis=0)[::2]
    if how == "some channels":
        return np.pad(array, [(0, 0), (2, 1), (0, 0), (0, 0)])[:, 2:-1]
    return np.moveaxis(np.pad(np.moveaxis(array, 1, -1), [(0, 0)] * 3 + [(0, 2)])[..., :-2], -1, 1)


COPIED = ("samples last", "reversed", "expanded")


@pytest.mark.parametrize("how", [*COPIED, "every other sample", "some channels", "columns of many"])
@every_op
def test_layouts(kernels, op, how):
    sizes = sizes_of(op, (4, 6, 5, 4))
    inputs = make_inputs(op, sizes, "float32", statistics=False)
    for name in ("grad_out",) if how == "expanded" else ("x", "grad_out"):
        inputs[name] = relaid(inputs[name], how)
    assert_within_bounds(op, run(kernels, op, inputs), inputs, sizes)
    assert hasattr(plan_of(op, inputs), "inner") == (how in COPIED)


@every_op
def test_gradient_and_x_in_different_orders(kernels, op):
    sizes = sizes_of(op, (3, 6, 4, 5))
    inputs = make_inputs(op, sizes, "float32")
    last = np.ascontiguousarray(np.moveaxis(inputs["grad_out"], 1, -1))
    inputs["grad_out"] = np.moveaxis(last, -1, 1)
    assert_within_bounds(op, run(kernels, op, inputs), inputs, sizes)


@pytest.mark.parametrize("shape", [(5, 6), (7, 3, 6), (4, 1, 1, 6), (1, 9, 5, 3, 6), (300, 6)])
@every_op
def test_channel_axis(kernels, op, shape):
    sizes = sizes_of(op, shape, axis=-1)
    inputs = make_inputs(op, sizes, "float16", statistics=False)
    results = run(kernels, op, inputs, axis=-1)
    assert_within_bounds(op, results, inputs, sizes)


@pytest.mark.parametrize(
    "shape", [(3, 6, 1), (40, 3, 7), (2, 3, 49), (9, 6, 14, 14), (2, 3, 147, 21), (1, 99, 3)]
)
@every_op
def test_sizes(kernels, op, shape):
    sizes = sizes_of(op, shape)
    inputs = make_inputs(op, sizes, "float32", statistics=False)
    assert_within_bounds(op, run(kernels, op, inputs), inputs, sizes)


@every_path
@pytest.mark.parametrize("backwards", [False, True], ids=["", "last CTA first"])
@pytest.mark.parametrize("target", ["grad_out", "x"])
@every_op
def test_in_place(kernels, op, target, backwards, path):
    """The gradient of the weight over the weight as well, whichever CTA is first."""
    inputs = inputs_on(path, op, "float32")
    want = run(kernels, op, inputs, path)
    arrays = {n: placed(a) for n, a in inputs.items()}
    out = [arrays[target], arrays["weight"], np.zeros_like(want[2])]
    got = kernels.execute(
        lambda: plan_of(op, arrays, path, out=out), list(arrays.values()), backwards, out=out
    )
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("shape", [(0, 6, 4), (3, 6, 0), (2, 0, 3)])
@every_op
def test_without_elements(kernels, op, shape):
    sizes = sizes_of(op, shape)
    inputs = make_inputs(op, sizes, "float32", statistics=False)
    results = run(kernels, op, inputs)
    for got, want in zip(results, refer(op, inputs, sizes), strict=True):
        assert_same_bits(got, want)
    assert not results[1].any() and not results[2].any()


@pytest.mark.parametrize("arch", [75, 80, 120])
@every_op
def test_without_clusters_or_roomy_shared_memory(kernels, op, arch):
    for shape in ((2, 6, 20, 36), (2, 6, 70, 60)):
        sizes = sizes_of(op, shape)
        inputs = make_inputs(op, sizes, "bfloat16")
        assert_within_bounds(op, run(kernels, op, inputs, arch=arch), inputs, sizes)
