"""In which order rows are walked backward, and what a plan makes of it, without a GPU."""

from __future__ import annotations

import pytest
from backward_cases import make_op, sizes_of

from cunorm.arrays import ArraySpec, Device
from cunorm.cuda.plans import EmptyPlan, StagedPlan
from cunorm.cuda.row_gradient import KERNELS
from cunorm.cuda.row_gradient_layout import axis_order, walk_of

ZERO = "ada_layer_norm_zero_backward"


def spec(*shape, strides=None, dtype="float32"):
    made = ArraySpec.contiguous(shape, dtype)
    return made if strides is None else made._replace(strides=strides)


def plan_of(op, shape, change=None, out_given=False, **shapes):
    sizes = sizes_of(op, shape)
    made = make_op(op, sizes)
    inputs = {}
    for name in made.input_names:
        own = sizes.statistic if name in ("mean", "rstd") else shape
        own = sizes.parameter if name == "weight" else own
        inputs[name] = spec(*shapes.get(name, own))
    call = made._call(inputs | (change or {}), False, None, Device("cuda"))
    return KERNELS[op].plan(call, out_given)


def test_axes_that_a_sum_goes_over_are_inside_a_group():
    lead = (4, 3, 5)
    assert axis_order(lead, [spec(16)], 1) == ([], [0, 1, 2])
    assert axis_order(lead, [spec(4, 1, 1, 16)], 1) == ([0], [1, 2])
    assert axis_order(lead, [spec(3, 1, 16)], 1) == ([1], [0, 2])
    assert axis_order(lead, [spec(4, 1, 1, 16), spec(5, 16)], 1) == ([0, 2], [1])
    assert axis_order(lead, [], 1) == ([], [0, 1, 2])


def test_axes_merge_where_arrays_step_through_them_evenly():
    x, scale = spec(4, 3, 5, 16), spec(4, 1, 1, 16)
    walk = walk_of(x.shape, [(x, 1), None, (scale, 1)], [scale], 1)
    assert (walk.kept, walk.reduced) == ((4,), (15,))
    assert walk.strides == ((240, 16), None, (16, 0))
    assert (walk.groups, walk.members) == (4, 15)


def test_statistics_are_one_number_a_row():
    x, rstd = spec(4, 3, 16), spec(4, 3, strides=(1, 4))
    walk = walk_of(x.shape, [(x, 1), (rstd, 0)], [spec(16)], 1)
    assert walk.strides == ((48, 16), (1, 4))


@pytest.mark.parametrize(
    ("shapes", "groups", "members", "records"),
    [
        ({}, 1, 60, 0),
        ({"scale": (16,), "shift": (16,), "gate": (16,)}, 1, 60, 3),
        ({"scale": (4, 1, 16), "shift": (4, 1, 16), "gate": (4, 1, 16)}, 4, 15, 3),
        ({"scale": (15, 16), "shift": (15, 16), "gate": (1, 15, 16)}, 15, 4, 3),
        ({"scale": (4, 1, 16), "shift": (16,)}, 4, 15, 2),
        ({"scale": (4, 1, 16), "gate": (15, 16)}, 60, 1, 2),
    ],
)
def test_groups_are_rows_that_share_every_parameter(shapes, groups, members, records):
    plan = plan_of(ZERO, (4, 15, 16), **shapes)
    assert (plan.walk.groups, plan.walk.members) == (groups, members)
    assert len(plan.summed) == records
    merges = [launch.kernel for launch in plan.launches if "merge" in launch.kernel]
    assert bool(merges) == bool(records and not plan.direct)


def test_a_group_of_one_block_needs_no_second_launch():
    assert len(plan_of("layer_norm_backward", (1, 64)).launches) == 1
    assert len(plan_of("layer_norm_backward", (10_000, 64)).launches) == 2
    scale = {"scale": (500, 1, 64)}
    assert len(plan_of("ada_layer_norm_backward", (500, 3, 64), **scale).launches) == 1


def test_statistics_may_be_written_over_only_when_all_have_read_them():
    """A row of several CTAs: the gradient may go where the mean is."""
    plan = plan_of("layer_norm_backward", (1, 262_144))
    assert plan.tile.segments
    assert not plan.direct


def test_rows_that_are_no_runs_are_copied():
    plan = plan_of("rms_norm_backward", (6, 8), {"grad_out": spec(6, 8, strides=(1, 6))})
    assert isinstance(plan, StagedPlan)
    assert plan.inner.call.inputs["grad_out"].strides == (8, 1)
    assert plan.inner.call.inputs["x"].strides == (8, 1)


def test_alternating_axes_are_copied_in_the_order_of_the_walk():
    shape, own = (2, 3, 2, 3, 16), (2, 1, 2, 1, 16)
    plan = plan_of("ada_layer_norm_backward", shape, scale=own)
    assert isinstance(plan, StagedPlan)
    assert plan.inner.walk.sizes == (4, 9)


def test_parameters_that_differ_along_too_many_sets_of_axes():
    shapes = {"scale": (2, 1, 1, 2, 1, 8), "shift": (2, 1, 2, 1, 8), "gate": (2, 2, 1, 1, 1, 8)}
    with pytest.raises(ValueError, match="fewer different sets of axes"):
        plan_of(ZERO, (2, 2, 2, 2, 2, 8), **shapes)


def test_no_elements_no_launch():
    for shape in ((0, 4), (3, 0)):
        plan = plan_of("ada_layer_norm_backward", shape)
        assert isinstance(plan, EmptyPlan)
        assert list(plan.launches) == []
