"""What must hold of gradients whatever the numbers and the sizes."""

from __future__ import annotations

import numpy as np
import pytest
from backward_cases import CLASSES, GROUP_OPS, OPS, ROW_OPS, make_inputs, refer, sizes_of, x_name
from hypothesis import given, settings
from hypothesis import strategies as st

every_op = pytest.mark.parametrize("op", OPS)
SIDES = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@pytest.fixture(autouse=True, scope="module")
def _numpy_errors_raise():
    """The definitions silence what they expect; nothing else may warn."""
    with np.errstate(all="raise"):
        yield


def sizes_from(op, sides, axis=1):
    """The shape itself for rows, or with six channels for groups."""
    if op in ROW_OPS:
        return sizes_of(op, sides)
    samples, *spatial = sides
    return sizes_of(op, (samples, 6, *spatial) if axis == 1 else (*sides, 6), axis)


def per_row(op):
    """Inputs that have something for each row or sample."""
    return (*CLASSES[op].like_x, "mean", "rstd")


@every_op
@settings(deadline=None)
@given(sides=SIDES, seed=st.integers(0, 1000), exponent=st.integers(-40, 40))
def test_gradients_are_linear_in_what_comes_back(op, sides, seed, exponent):
    """Powers of two exactly, sums but for rounding."""
    sizes = sizes_from(op, sides)
    inputs = make_inputs(op, sizes, "float64", seed=seed, statistics=False)
    others = make_inputs(op, sizes, "float64", seed=seed + 77, statistics=False)
    names = [n for n in ("grad_out", "grad_residual_out") if n in inputs]
    one = refer(op, inputs, sizes)
    scaled = refer(op, inputs | {n: inputs[n] * 2.0**exponent for n in names}, sizes)
    for got, want in zip(scaled, one, strict=True):
        np.testing.assert_array_equal(got, want * 2.0**exponent)
    two = refer(op, inputs | {n: others[n] for n in names}, sizes)
    both = refer(op, inputs | {n: inputs[n] + others[n] for n in names}, sizes)
    for got, *parts in zip(both, one, two, strict=True):
        np.testing.assert_allclose(got, sum(parts), rtol=1e-11, atol=1e-11)


@every_op
@settings(deadline=None)
@given(sides=SIDES, seed=st.integers(0, 1000))
def test_the_order_of_rows_and_samples(op, sides, seed):
    sizes = sizes_from(op, [*sides, 5] if op in ROW_OPS else sides)
    inputs = make_inputs(op, sizes, "float64", seed=seed, statistics=False)
    order = np.random.default_rng(seed).permutation(sizes.x[0])
    moved = {n: a[order] if n in per_row(op) else a for n, a in inputs.items()}
    (of_x, *sums), (of_moved, *moved_sums) = (refer(op, i, sizes) for i in (inputs, moved))
    np.testing.assert_array_equal(of_moved, of_x[order])
    for got, want in zip(moved_sums, sums, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


@every_op
@settings(deadline=None)
@given(sides=SIDES, seed=st.integers(0, 1000), data=st.data())
def test_sums_over_parts_add_up(op, sides, seed, data):
    """Gradients of x come part by part; those of parameters are what the parts give together."""
    sizes = sizes_from(op, [*sides, 5] if op in ROW_OPS else sides)
    inputs = make_inputs(op, sizes, "float64", seed=seed, statistics=False)
    cut = data.draw(st.integers(0, sizes.x[0]))
    of_x, *sums = refer(op, inputs, sizes)
    parts = []
    for part in (slice(None, cut), slice(cut, None)):
        some = {n: a[part] if n in per_row(op) else a for n, a in inputs.items()}
        parts.append(refer(op, some, sizes_of(op, some[x_name(op)].shape)))
    np.testing.assert_array_equal(np.concatenate([p[0] for p in parts]), of_x)
    for i, want in enumerate(sums, start=1):
        np.testing.assert_allclose(parts[0][i] + parts[1][i], want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("op", GROUP_OPS)
@settings(deadline=None)
@given(sides=SIDES, seed=st.integers(0, 1000))
def test_where_the_channels_are_does_not_matter(op, sides, seed):
    first, last = (sizes_from(op, sides, axis) for axis in (1, -1))
    inputs = make_inputs(op, first, "float64", seed=seed, statistics=False)
    moved = {n: np.moveaxis(a, 1, -1) if n in ("x", "grad_out") else a for n, a in inputs.items()}
    of_x, *sums = refer(op, inputs, first)
    of_moved, *moved_sums = refer(op, moved, last)
    np.testing.assert_allclose(np.moveaxis(of_moved, -1, 1), of_x, rtol=1e-12, atol=1e-13)
    for got, want in zip(moved_sums, sums, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
