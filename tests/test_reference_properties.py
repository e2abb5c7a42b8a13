"""What must hold of the NumPy definitions whatever the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cunorm import reference

TAKES_SHAPE = ("layer_norm", "rms_norm")


@pytest.fixture(autouse=True, scope="module")
def _numpy_errors_raise():
    """The definitions silence what they expect; nothing else may warn."""
    with np.errstate(all="raise"):
        yield


def rows_of(elements):
    shapes = hnp.array_shapes(min_dims=2, max_dims=2, max_side=40)
    return hnp.arrays(np.float32, shapes, elements=elements)


ORDINARY = st.floats(-1000, 1000, width=32, allow_subnormal=False)
WHOLE = st.integers(-1000, 1000).map(float)


@settings(deadline=None)
@given(x=rows_of(ORDINARY), exponent=st.integers(-40, 40))
def test_scaling_by_powers_of_two(x, exponent):
    """Scaling x by s and eps by s**2 changes no bit of the result."""
    scale = 2.0**exponent
    wide = x.astype(np.float64)
    for op in TAKES_SHAPE:
        norm = reference.FORWARD[op]
        np.testing.assert_array_equal(
            norm(wide, x.shape[-1], eps=2.0**-16),
            norm(wide * scale, x.shape[-1], eps=2.0**-16 * scale**2),
        )


@settings(deadline=None)
@given(x=rows_of(WHOLE), shift=st.integers(-(2**20), 2**20))
def test_shifting_by_whole_numbers(x, shift):
    """Whole numbers stay exact, so what comes out differs by the rounding of float64 at most."""
    cols = x.shape[-1]
    y = reference.layer_norm(x, cols, dtype=np.float64)
    shifted = reference.layer_norm(x + np.float32(shift), cols, dtype=np.float64)
    np.testing.assert_allclose(shifted, y, rtol=16 * 2.0**-52, atol=0)


@settings(deadline=None)
@given(x=rows_of(ORDINARY), seed=st.integers(0, 1000))
def test_order_of_the_columns(x, seed):
    order = np.random.default_rng(seed).permutation(x.shape[-1])
    for op in TAKES_SHAPE:
        norm = reference.FORWARD[op]
        y = norm(x, x.shape[-1], eps=1e-3, dtype=np.float64)
        permuted = norm(x[:, order], x.shape[-1], eps=1e-3, dtype=np.float64)
        np.testing.assert_allclose(permuted, y[:, order], rtol=64 * 2.0**-52, atol=1e-300)


@settings(deadline=None)
@given(x=rows_of(ORDINARY), data=st.data())
def test_rows_are_independent(x, data):
    """The bits of a row depend neither on its neighbours nor on its place."""
    chosen = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=5))
    for op in TAKES_SHAPE:
        norm = reference.FORWARD[op]
        whole = norm(x, x.shape[-1], eps=1e-5, return_stats=True)
        part = norm(x[chosen], x.shape[-1], eps=1e-5, return_stats=True)
        for a, b in zip(part, whole, strict=True):
            np.testing.assert_array_equal(a, b[chosen])


@given(
    lead=st.lists(st.integers(0, 5), max_size=4),
    cols=st.integers(0, 6),
    size=st.integers(1, 60),
)
def test_blocks_cover_every_row_once(lead, cols, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.common, "BLOCK_ELEMENTS", size)
        count = np.zeros(lead, int)
        for at in reference.row_blocks(lead, cols):
            count[at] += 1
            assert count[at].size in (0, 1) or count[at].size * cols <= size
    assert (count == (cols > 0)).all()
