"""Which small arrays the kernels that work straight on take."""

from __future__ import annotations

import pytest

from cunorm.arrays import ArraySpec
from cunorm.cuda.channel_layout import smalls


def array(dtype, step=1):
    return ArraySpec((6,), (step,), dtype)


@pytest.mark.parametrize(
    ("affine", "running", "expected"),
    [
        ((array("float16"), array("float16")), (array("float32"),) * 2, "Smalls<__half, float>"),
        ((array("float32"),), (), "Smalls<float, void>"),
        ((None, None), (None, None), "Smalls<void, void>"),
        ((None,), (array("float64"),) * 2, "Smalls<void, double>"),
        ((array("float32"), None), (), ""),
        ((array("float32"), array("float16")), (), ""),
        ((array("float32"), array("float32", 2)), (), ""),
        ((array("float32"),) * 2, (array("float32"), array("float32", -1)), ""),
    ],
)
def test_both_of_a_pair_in_one_dtype_or_none(affine, running, expected):
    assert smalls([affine, running], [*affine, *running]) == expected


def test_all_that_are_given_are_contiguous():
    assert smalls([(array("float32"),)], [array("float32"), array("float32", 3)]) == ""
