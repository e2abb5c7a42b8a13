"""What must hold of batch, group and instance norm whatever the numbers and the sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cunorm import reference


@pytest.fixture(autouse=True, scope="module")
def _numpy_errors_raise():
    """The definitions silence what they expect; nothing else may warn."""
    with np.errstate(all="raise"):
        yield


ORDINARY = st.floats(-1000, 1000, width=32, allow_subnormal=False)
SHAPES = hnp.array_shapes(min_dims=2, max_dims=4, max_side=7)
NORMS = {
    "batch": lambda x, **options: reference.batch_norm(x, training=True, **options),
    "group": lambda x, **options: reference.group_norm(x, 1, **options),
    "instance": lambda x, **options: reference.instance_norm(x, **options),
}
every_norm = pytest.mark.parametrize("name", NORMS)


def arrays_of(elements, dtype=np.float32):
    return SHAPES.flatmap(lambda shape: hnp.arrays(dtype, shape, elements=elements))


@every_norm
@settings(deadline=None)
@given(x=arrays_of(ORDINARY), exponent=st.integers(-40, 40))
def test_scaling_by_powers_of_two(name, x, exponent):
    """Scaling x by s and eps by s**2 changes no bit of the result."""
    scale, wide = 2.0**exponent, x.astype(np.float64)
    np.testing.assert_array_equal(
        NORMS[name](wide, eps=2.0**-16), NORMS[name](wide * scale, eps=2.0**-16 * scale**2)
    )


@every_norm
@settings(deadline=None)
@given(x=arrays_of(st.integers(-1000, 1000).map(float)), shift=st.integers(-(2**20), 2**20))
def test_shifting_by_whole_numbers(name, x, shift):
    """Whole numbers stay exact, so what comes out differs by the rounding of float64 at most."""
    y = NORMS[name](x, dtype=np.float64)
    shifted = NORMS[name](x + np.float32(shift), dtype=np.float64)
    np.testing.assert_allclose(shifted, y, rtol=16 * 2.0**-52, atol=0)


@settings(deadline=None)
@given(x=arrays_of(ORDINARY), seed=st.integers(0, 1000))
def test_the_order_of_the_samples(x, seed):
    order = np.random.default_rng(seed).permutation(len(x))
    y = NORMS["batch"](x, eps=1e-3, dtype=np.float64)
    permuted = NORMS["batch"](x[order], eps=1e-3, dtype=np.float64)
    np.testing.assert_allclose(permuted, y[order], rtol=64 * 2.0**-52, atol=1e-300)
    for name in ("group", "instance"):  # which know of no other sample
        np.testing.assert_array_equal(NORMS[name](x[order]), NORMS[name](x)[order])


@settings(deadline=None)
@given(x=arrays_of(ORDINARY), data=st.data())
def test_channels_are_independent(x, data):
    """The bits of a channel depend neither on the other channels nor on its place."""
    chosen = data.draw(st.lists(st.integers(0, x.shape[1] - 1), min_size=1, max_size=5))
    for name in ("batch", "instance"):
        whole = NORMS[name](x, return_stats=True)
        part = NORMS[name](x[:, chosen], return_stats=True)
        np.testing.assert_array_equal(part[0], whole[0][:, chosen])
        for a, b in zip(part[1:], whole[1:], strict=True):
            np.testing.assert_array_equal(a, b[..., chosen])


@settings(deadline=None)
@given(x=arrays_of(ORDINARY))
def test_one_group_is_a_row(x):
    y = reference.group_norm(x, 1, return_stats=True)
    rows = reference.layer_norm(x, x.shape[1:], return_stats=True)
    np.testing.assert_array_equal(y[0], rows[0])
    for a, b in zip(y[1:], rows[1:], strict=True):
        np.testing.assert_array_equal(a.ravel(), b.ravel())


@settings(deadline=None)
@given(x=arrays_of(ORDINARY, np.float64), seed=st.integers(0, 1000))
def test_the_gradient_sees_no_shift_and_no_scale(x, seed):
    """Moving or (with eps=0) stretching a channel changes nothing, so its gradient is across."""
    grad_out = np.random.default_rng(seed).standard_normal(x.shape)
    _, mean, rstd = reference.batch_norm(x, training=True, eps=0.0, return_stats=True)
    grad, *_ = reference.batch_norm_backward(grad_out, x, None, mean, rstd)
    axes = (0, *range(2, x.ndim))
    spread = (1, -1, *(1,) * (x.ndim - 2))
    size = np.abs(rstd) * np.abs(grad_out).sum(axis=axes)
    xhat = (x - mean.reshape(spread)) * rstd.reshape(spread)
    # A channel of one value, or of equal ones, has no spread to be stretched.
    largest = 1 + np.abs(xhat).max(axis=axes)
    rounding = 64 * 2.0**-52 * x.size
    # The mean is rounded: beside an offset, so are the deviations from it.
    rounding = rounding * (1 + np.abs(mean) * rstd)
    assert (np.abs(grad.sum(axis=axes)) <= rounding * size * largest**2).all()
    assert (np.abs((grad * xhat).sum(axis=axes)) <= rounding * size * largest**3).all()


@settings(deadline=None)
@given(
    x=arrays_of(ORDINARY, np.float64).filter(lambda x: x.size > x.shape[1]),
    momentum=st.floats(0, 1),
)
def test_running_statistics_stay_between_old_and_new(x, momentum):
    old_mean, old_var = np.full(x.shape[1], 3.0), np.full(x.shape[1], 2.0)
    mean, var = old_mean.copy(), old_var.copy()
    reference.batch_norm_stats(x, mean, var, momentum)
    axes = (0, *range(2, x.ndim))
    for old, found, new in (
        (old_mean, mean, x.mean(axis=axes)),
        (old_var, var, x.var(axis=axes, ddof=1)),
    ):
        slack = 1e-9 * (1 + np.abs(new))
        assert (found >= np.minimum(old, new) - slack).all()
        assert (found <= np.maximum(old, new) + slack).all()


@pytest.mark.torch
@pytest.mark.parametrize(
    "shape",
    [(70_001, 3), (70_001, 2, 2), (2, 70_001, 2), (3, 4, 7), (3, 4, 7, 7), (2, 4, 14, 14),
     (2, 2, 147, 147), (1, 2, 48, 48, 48)],
    ids=str,
)  # fmt: skip
def test_sizes(shape):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(3.0, 2.0, shape)
    tensor = torch.from_numpy(x)
    functional = torch.nn.functional
    expected = [functional.batch_norm(tensor, None, None, training=True)]
    got = [reference.batch_norm(x, training=True)]
    if len(shape) > 2:
        expected.append(functional.instance_norm(tensor))
        got.append(reference.instance_norm(x))
        expected.append(functional.group_norm(tensor, 1))
        got.append(reference.group_norm(x, 1))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-10, atol=1e-11)
