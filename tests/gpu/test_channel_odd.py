"""Planes that no vector divides: their ends masked, shifted, and vectors of several channels."""

from __future__ import annotations

import numpy as np
import pytest
from cases import assert_same_bits
from channel_cases import MODES, NORMALIZING, assert_within_bounds, copied, make_inputs
from channels_on_gpu import backwards, check, on_gpu, run

pytestmark = pytest.mark.gpu

# A few lanes, a warp, a CTA, clusters, segments. Samples of 24 channels are aligned, those of 9
# start anywhere; groups have 8 channels, or 3.
SHAPES = (
    *((70, 48, 3), (5, 24, 7), (40, 24, 129), (11, 24, 1021), (30, 24, 4099)),
    *((3, 24, 20011), (1, 24, 262145), (2, 24, 33, 91, 109)),
    *((70, 9, 3), (40, 9, 129), (4, 9, 4099), (3, 9, 20011), (1, 9, 262145), (13, 3, 299, 299)),
)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_mode = pytest.mark.parametrize("mode", NORMALIZING)


@every_shape
@every_mode
def test_random_values(mode, shape):
    for dtype in ("float16", "bfloat16", "float32"):
        check(mode, make_inputs(mode, shape, dtype, centre=0.5))


@every_shape
@every_mode
def test_a_mean_far_above_the_spread(mode, shape):
    check(mode, make_inputs(mode, shape, "float32", centre=1e4, spread=1e-2))


@every_shape
@every_mode
def test_not_a_number_stays_where_it_is(mode, shape):
    """At either end of a plane, next to another channel."""
    for dtype in ("float16", "float32"):
        inputs = make_inputs(mode, shape, dtype)
        planes = inputs["x"].reshape(*shape[:2], -1)
        planes[0, 1, -1] = planes[0, -1, 0] = np.nan
        check(mode, inputs)


@every_shape
@every_mode
def test_what_has_no_spread_gives_its_bias(mode, shape):
    for dtype in ("bfloat16", "float32"):
        inputs = make_inputs(mode, shape, dtype)
        inputs["x"][...] = 3.7
        (y, *_), _ = run(mode, on_gpu(inputs))
        bias = inputs["bias"].reshape(-1, *[1] * (len(shape) - 2))
        assert_same_bits(y, np.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] > 1], ids=str)
@pytest.mark.parametrize("mode", ["group_norm", "instance_norm"])
def test_equal_samples_have_equal_bits(mode, shape):
    """In any company, wherever they start."""
    for dtype in ("float16", "float32"):
        inputs = make_inputs(mode, shape, dtype, centre=0.5)
        inputs["x"][...] = inputs["x"][:1]
        (y, *_), _ = run(mode, on_gpu(inputs))
        inputs["x"] = inputs["x"][:1]
        (alone, *_), _ = run(mode, on_gpu(inputs))
        for sample in y:
            assert_same_bits(sample, alone[0])


@pytest.mark.parametrize(
    "shape", [(70, 24, 7), (11, 24, 129), (3, 24, 4099), (1, 24, 87383)], ids=str
)
def test_groups_of_three_channels_with_odd_planes(monkeypatch, shape):
    monkeypatch.setitem(MODES, "group_norm", ("group_norm", {"num_groups": 8}))
    for dtype in ("bfloat16", "float32"):
        check("group_norm", make_inputs("group_norm", shape, dtype, centre=0.5))


# Few pixels and many, one CTA a channel and segments of one; three channels of an odd number of
# pixels, so that every sample starts elsewhere in its 16 bytes, and the last ends within some.
PICTURES = ((60, 3, 61, 101), (13, 3, 299, 299))
every_picture = pytest.mark.parametrize("shape", PICTURES, ids=str)


@every_picture
@pytest.mark.parametrize("layout", ["every other sample", "some channels", "anywhere"])
def test_batch_norm_of_pictures_in_other_memory(shape, layout):
    for dtype in ("float16", "float32"):
        check("batch_norm-training", make_inputs("batch_norm-training", shape, dtype), layout)


@every_picture
@pytest.mark.parametrize("mode", ["batch_norm-training", "batch_norm-inference"])
def test_pictures_from_the_last_to_the_first(mode, shape):
    for dtype in ("float16", "float32"):
        inputs = make_inputs(mode, shape, dtype)
        before = copied(inputs)
        results, after = run(mode, backwards(inputs))
        assert_within_bounds(mode, results, before, after)


@every_picture
@pytest.mark.parametrize(
    "mode", ["batch_norm-inference", "batch_norm_normalize", "batch_norm_backward-training"]
)
def test_every_element_of_a_picture_is_written(mode, shape):
    """The last pack has fewer than the others."""
    for dtype in ("bfloat16", "float32", "float64"):
        check(mode, make_inputs(mode, shape, dtype))


@every_shape
@pytest.mark.parametrize("mode", ["batch_norm_backward-training", "batch_norm_backward-frozen"])
def test_gradients(mode, shape):
    for dtype in ("float16", "bfloat16", "float32"):
        check(mode, make_inputs(mode, shape, dtype))


@pytest.mark.parametrize("shape", [(40, 24, 1021), (13, 3, 299, 299)], ids=str)
def test_not_a_number_stays_in_its_channel(shape):
    """In x and in grad_out, at either end of a plane, next to another channel."""
    mode = "batch_norm_backward-training"
    for dtype in ("float16", "float32"):
        inputs = make_inputs(mode, shape, dtype)
        for name, sample, channel, end in (("x", 0, 1, -1), ("grad_out", 3, 1, 0)):
            inputs[name].reshape(*shape[:2], -1)[sample, channel, end] = np.nan
        check(mode, inputs)


@pytest.mark.parametrize("mode", ["batch_norm-training", "instance_norm"])
def test_a_last_segment_without_elements(mode):
    """One element less than whole segments: runs that start with a vector end before the last."""
    shape = (1, 8, 43 * 12288 - 1)  # segments of 12288 elements in 16 bits, 6144 in float32
    for dtype in ("float16", "float32"):
        check(mode, make_inputs(mode, shape, dtype, centre=0.5))
