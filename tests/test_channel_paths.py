"""The paths of the tests on the host lead to the kernels that they are named after."""

from __future__ import annotations

import pytest
from channel_cases import MODES
from host_channels import PATHS, inputs_on, plan_of

pytest.importorskip("ml_dtypes")

WHOLE = (
    *("several sets a warp", "several sets a warp, at length"),
    *("one CTA a set", "one CTA a set, at length"),
    *("a cluster a set", "strips", "narrow strips", "a short table", "a tile of columns"),
    *("blocks kept on chip", "blocks kept wholly on chip"),
    *("several sets a warp, of any length", "one CTA a set, of any length"),
    *("one CTA a set, masked ends", "a cluster a set, of any length"),
    *("vectors of several channels", "a cluster with vectors of several channels"),
    "samples that start anywhere",
)
# Where the channels of batch norm are walked by single elements.
OF_ANY_LENGTH = ("several sets a warp, of any length", "one CTA a set, of any length")
MAPPED_STRAIGHT_ON = (
    *("several sets a warp", "one CTA a set", "a cluster a set", "segments kept on chip", "strips"),
    *("vectors of several channels", "segments of a set"),
)
TEMPLATES = {
    "several sets a warp": ("run_norm_brief", "run_gradient_brief"),
    "one CTA a set": ("run_norm_brief", "run_gradient_brief"),
    "several sets a warp, at length": ("run_norm", "run_gradient"),
    "one CTA a set, at length": ("run_norm", "run_gradient"),
    "a cluster a set": ("run_norm_cluster", "run_gradient_cluster"),
    "several sets a warp, of any length": ("run_norm", "run_gradient_brief"),
    "one CTA a set, of any length": ("run_norm", "run_gradient_cluster"),
    "one CTA a set, masked ends": ("run_norm", "run_gradient"),
    "a last segment without elements": ("run_statistics", "run_gradient_sums"),
    "samples that start anywhere": ("run_norm", "run_gradient"),
    "segments of samples that start anywhere": ("run_statistics", "run_gradient_sums"),
    "a cluster a set, of any length": ("run_norm_cluster", "run_gradient_cluster"),
    "vectors of several channels": ("run_norm", "run_gradient"),
    "a cluster with vectors of several channels": ("run_norm_cluster", "run_gradient_cluster"),
    "segments of a set": ("run_statistics", "run_gradient_sums"),
    "segments with masked ends": ("run_statistics", "run_gradient_sums"),
    "segments of sets of any length": ("run_statistics", "run_gradient_sums"),
    "segments kept on chip": ("clear_attendance", "clear_attendance"),
    "segments of short runs": ("run_statistics", "run_gradient_sums"),
    "strips": ("strip_norm", "strip_gradient"),
    "narrow strips": ("strip_norm", "strip_gradient"),
    "a short table": ("table_norm", "table_gradient"),
    "a tile of columns": ("column_norm", "column_gradient"),
    "blocks of rows": ("column_statistics", "column_gradient_sums"),
    "blocks kept on chip": ("column_kept", "column_kept"),
    "blocks kept wholly on chip": ("column_kept", "column_kept"),
    "samples as rows": ("column_statistics", "column_gradient_sums"),
    "samples of pairs as rows": ("column_statistics", "column_gradient_sums"),
    "samples of fours as rows": ("column_statistics", "column_gradient_sums"),
}
# What takes the place of a path there.
READ_ONCE = {
    "segments kept on chip": "segments of a set",
    "strips": "one CTA a set",
    "narrow strips": "one CTA a set",
    "blocks kept on chip": "blocks of rows",
    "blocks kept wholly on chip": "blocks of rows",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
def test_paths_lead_where_they_say(mode, path):
    """Else the tests above would look at less than there is."""
    plan = plan_of(mode, inputs_on(path, mode, "bfloat16"), PATHS[path])
    launched = [launch.kernel.partition("<")[0] for launch in plan.launches]
    if mode in ("batch_norm-inference", "batch_norm_normalize", "instance_norm-running"):
        brief = mode != "batch_norm_normalize" and path in MAPPED_STRAIGHT_ON
        runs = "run_map_brief" if brief else "run_map"
        assert launched[0] == ("column_map" if PATHS[path].columns else runs)
        return
    if mode in ("group_norm", "instance_norm") and not PATHS[path].per_sample:
        return
    expected = TEMPLATES[path]["backward" in mode]
    if mode == "batch_norm-training" and path in OF_ANY_LENGTH:
        expected = "run_norm_brief"
    if mode in ("batch_norm_stats", "batch_norm_backward-frozen"):  # nothing is read again
        path = READ_ONCE.get(path, path)
        expected = TEMPLATES[path]["backward" in mode]
    if mode == "batch_norm_stats" or mode in ("group_norm", "instance_norm"):
        expected = expected.replace("table", "column")
    if mode == "batch_norm_stats":  # nothing is written
        expected = expected.replace("_brief", "")
    if mode == "group_norm" and PATHS[path].columns:  # made of columns by the merge alone
        expected = "column_statistics"
    assert launched[0] == expected
    single = path in WHOLE and (mode != "group_norm" or not PATHS[path].columns)
    more = launched[1:-1] if launched[-1] == "average_running" else launched[1:]
    assert bool(more) == (not single)
