"""The CUDA kernels of batch, group and instance norm on host threads, through their own plans."""

from __future__ import annotations

import numpy as np
import pytest
from cases import assert_same_bits
from channel_cases import (
    COMPUTING,
    DTYPES,
    MODES,
    NORMALIZING,
    RUNNING,
    assert_within_bounds,
    make_inputs,
)
from host_channels import PATHS, plan_of, run
from host_kernels import HostKernels, missing_compiler

from cunorm import dtypes

pytest.importorskip("ml_dtypes")
if reason := missing_compiler():
    pytest.skip(reason, allow_module_level=True)

every_path = pytest.mark.parametrize("path", PATHS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_mode = pytest.mark.parametrize("mode", MODES)


def inputs_on(path, mode, dtype, **options):
    return PATHS[path].inputs(make_inputs(mode, PATHS[path].shape, dtype, **options))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """All variants that the paths need, built at once."""
    built = HostKernels(tmp_path_factory.mktemp("channel_kernels"))
    built.build(
        plan_of(mode, inputs_on(path, mode, dtype), PATHS[path])
        for mode in MODES
        for path in PATHS
        for dtype in DTYPES
    )
    return built


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
