"""Which kernels serve a call: registry, claims, default, entry points, errors."""

from __future__ import annotations

import importlib.metadata
import re
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from cunorm import ops, targets
from cunorm.arrays import Device


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry of its own for each test, with no installed entry points."""
    fresh = targets._Registry()
    fresh.entry_points_loaded = True
    monkeypatch.setattr(targets, "registry", fresh)
    return fresh


class Recorder:
    """A kernel that notes what it was given."""

    def __init__(self, result="the result"):
        self.result = result
        self.calls = []

    def __call__(self, op, *inputs, out, return_stats):
        self.calls.append(SimpleNamespace(op=op, inputs=inputs, out=out, stats=return_stats))
        return self.result


class Ours:
    """An array type that only a registered target knows."""


X = np.arange(12.0).reshape(3, 4)
WEIGHT = np.full(4, 2.0)


# -- what a target is given and gives ----------------------------------------------------------


def test_a_kernel_is_given_op_inputs_out_and_return_stats():
    kernel = Recorder()
    cunorm.register_target("mine", {"layer_norm": kernel})
    op = cunorm.LayerNormFwdOp(4, eps=0.5, target="mine")
    out = np.empty_like(X)
    assert op(X, WEIGHT, out=out, return_stats=True) == "the result"
    (call,) = kernel.calls
    assert call.op is op
    assert call.op.attributes == {"normalized_shape": (4,), "eps": 0.5}
    assert [a is b for a, b in zip(call.inputs, (X, WEIGHT, None), strict=True)] == [True] * 3
    assert len(call.out) == 1
    assert call.out[0] is out
    assert call.stats is True


def test_out_is_an_empty_tuple_when_there_is_none():
    kernel = Recorder()
    cunorm.register_target("mine", {"fused_add_rms_norm": kernel})
    cunorm.fused_add_rms_norm(X, X, WEIGHT, target="mine")
    assert kernel.calls[0].out == ()
    assert kernel.calls[0].stats is False


def test_two_outputs_come_as_a_pair():
    kernel = Recorder()
    cunorm.register_target("mine", {"fused_add_rms_norm": kernel})
    out = [np.empty_like(X), np.empty_like(X)]
    cunorm.fused_add_rms_norm(X, X, WEIGHT, out=out, target="mine")
    assert [a is b for a, b in zip(kernel.calls[0].out, out, strict=True)] == [True, True]


def test_host_arrays_are_checked_before_a_registered_kernel_runs():
    kernel = Recorder()
    cunorm.register_target("mine", {"layer_norm": kernel})
    with pytest.raises(ValueError, match=re.escape("weight must have shape (4,), got (3,)")):
        cunorm.layer_norm(X, 4, np.ones(3), target="mine")
    assert not kernel.calls


def test_arrays_that_only_the_target_knows_reach_it_as_they_are():
    kernel = Recorder()
    cunorm.register_target("mine", {"layer_norm": kernel}, claims=lambda x: isinstance(x, Ours))
    x = Ours()
    assert cunorm.layer_norm(x, 4, "weight", None) == "the result"
    assert kernel.calls[0].inputs == (x, "weight", None)
    with pytest.raises(TypeError, match="x must be an array"):
        cunorm.layer_norm(object(), 4)


# -- who is chosen -----------------------------------------------------------------------------


def test_host_arrays_go_to_the_reference():
    np.testing.assert_array_equal(
        cunorm.layer_norm(X, 4, WEIGHT), cunorm.layer_norm(X, 4, WEIGHT, target="numpy")
    )
    chosen = targets.resolve("layer_norm", None, X, Device("cpu"))
    assert chosen.name == "numpy"
    assert targets.resolve("layer_norm", None, X, Device("cuda", 1)).name == "cuda"


def test_builtin_is_the_cuda_target():
    assert cunorm.BUILTIN == "cuda"
    chosen = targets.resolve("rms_norm", cunorm.BUILTIN, X, Device("cuda"))
    assert chosen.name == "cuda"
    assert chosen.device == "cuda"


def test_a_claim_comes_before_the_tree_and_a_name_before_a_claim():
    kernel = Recorder()
    cunorm.register_target("mine", {"layer_norm": kernel}, claims=lambda x: True)
    assert cunorm.layer_norm(X, 4) == "the result"
    assert isinstance(cunorm.layer_norm(X, 4, target="numpy"), np.ndarray)
    assert len(kernel.calls) == 1


def test_without_claims_a_target_is_only_taken_by_name():
    kernel = Recorder()
    cunorm.register_target("mine", {"layer_norm": kernel})
    assert isinstance(cunorm.layer_norm(X, 4), np.ndarray)
    assert cunorm.layer_norm(X, 4, target="mine") == "the result"


def test_claims_see_the_array():
    seen = []
    cunorm.register_target("mine", {}, claims=lambda x: bool(seen.append(x)))
    cunorm.layer_norm(X, 4)
    assert len(seen) == 1
    assert seen[0] is X


def test_two_claimants_are_an_error():
    cunorm.register_target("one", {"layer_norm": Recorder()}, claims=lambda x: True)
    cunorm.register_target("two", {"layer_norm": Recorder()}, claims=lambda x: True)
    with pytest.raises(ValueError) as raised:
        cunorm.layer_norm(X, 4)
    assert str(raised.value) == (
        "ndarray array is claimed by several targets: 'one', 'two'; name one with target="
    )
    assert cunorm.layer_norm(X, 4, target="one") == "the result"


def test_a_missing_op_names_the_targets_that_have_it():
    cunorm.register_target("mine", {"layer_norm": Recorder()})
    cunorm.register_target("other", {"rms_norm": Recorder()})
    with pytest.raises(ValueError) as raised:
        cunorm.rms_norm(X, 4, target="mine")
    assert str(raised.value) == (
        "rms_norm: target 'mine' has no such op; targets that have it: cuda, numpy, other"
    )


def test_no_silent_fallback_for_a_claimant_that_lacks_the_op():
    cunorm.register_target("mine", {"layer_norm": Recorder()}, claims=lambda x: True)
    with pytest.raises(ValueError, match="target 'mine' has no such op"):
        cunorm.rms_norm(X, 4)


def test_an_error_of_a_kernel_is_not_swallowed():
    def broken(op, *inputs, out, return_stats):
        raise RuntimeError("broken")

    cunorm.register_target("mine", {"layer_norm": broken}, claims=lambda x: True)
    with pytest.raises(RuntimeError, match="broken"):
        cunorm.layer_norm(X, 4)


def test_the_numpy_target_has_every_op():
    every = {kind.name for kind in vars(ops).values() if hasattr(kind, "input_names")}
    assert set(targets.find("numpy").kernels) == every


def test_whatever_runs_on_a_gpu_runs_on_a_host():
    assert set(targets.find("cuda").kernels) == set(targets.find("numpy").kernels)


# -- the default -------------------------------------------------------------------------------


def test_the_default_applies_until_it_is_restored():
    kernel = Recorder()
    cunorm.register_target("mine", {"layer_norm": kernel})
    assert cunorm.set_default_target("mine") is None
    assert cunorm.layer_norm(X, 4) == "the result"
    assert isinstance(cunorm.layer_norm(X, 4, target="numpy"), np.ndarray)
    assert cunorm.set_default_target("numpy") == "mine"
    assert isinstance(cunorm.layer_norm(X, 4), np.ndarray)
    assert cunorm.set_default_target(None) == "numpy"
    assert isinstance(cunorm.layer_norm(X, 4), np.ndarray)
    assert len(kernel.calls) == 1


def test_the_default_comes_before_claims():
    cunorm.register_target("claims", {"layer_norm": Recorder("claimed")}, claims=lambda x: True)
    cunorm.register_target("mine", {"layer_norm": Recorder()})
    cunorm.set_default_target("mine")
    assert cunorm.layer_norm(X, 4) == "the result"


def test_a_default_that_cannot_take_the_array_is_an_error():
    cunorm.set_default_target("cuda")
    with pytest.raises(ValueError, match="target 'cuda' needs arrays on a CUDA device"):
        cunorm.layer_norm(X, 4)


def test_an_op_object_follows_the_default():
    op = cunorm.LayerNormFwdOp(4)
    assert isinstance(op(X), np.ndarray)
    cunorm.register_target("mine", {"layer_norm": Recorder()})
    cunorm.set_default_target("mine")
    assert op(X) == "the result"


# -- adding and removing -----------------------------------------------------------------------


def test_registering_again_replaces():
    cunorm.register_target("mine", {"layer_norm": Recorder("first")})
    cunorm.register_target("mine", {"layer_norm": Recorder("second")})
    assert cunorm.layer_norm(X, 4, target="mine") == "second"


def test_kernels_are_copied():
    kernels = {"layer_norm": Recorder()}
    cunorm.register_target("mine", kernels)
    kernels.clear()
    assert cunorm.layer_norm(X, 4, target="mine") == "the result"


def test_unregistering_removes_and_ends_a_default():
    cunorm.register_target("mine", {"layer_norm": Recorder()})
    cunorm.set_default_target("mine")
    cunorm.unregister_target("mine")
    assert isinstance(cunorm.layer_norm(X, 4), np.ndarray)
    with pytest.raises(ValueError, match="unknown target 'mine'"):
        cunorm.layer_norm(X, 4, target="mine")


def test_every_change_makes_plans_obsolete():
    seen = [targets.registry.generation]
    for change in (
        lambda: cunorm.register_target("mine", {}),
        lambda: cunorm.set_default_target("mine"),
        lambda: cunorm.set_default_target(None),
        lambda: cunorm.unregister_target("mine"),
    ):
        change()
        seen.append(targets.registry.generation)
    assert len(set(seen)) == len(seen)


# -- entry points ------------------------------------------------------------------------------


class Entry:
    def __init__(self, name, provider):
        self.name = name
        self.provider = provider
        self.loads = 0

    def load(self):
        self.loads += 1
        return self.provider


@pytest.fixture
def install(monkeypatch, registry):
    def install(*entries):
        registry.entry_points_loaded = False

        def entry_points(*, group):
            return list(entries) if group == "cunorm.targets" else []

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    return install


def test_an_entry_point_is_found_by_name(install):
    kernel = Recorder()
    entry = Entry("plugin", SimpleNamespace(kernels={"layer_norm": kernel}))
    install(entry)
    assert cunorm.layer_norm(X, 4, target="plugin") == "the result"
    assert isinstance(cunorm.layer_norm(X, 4), np.ndarray)
    assert cunorm.layer_norm(X, 4, target="plugin") == "the result"
    assert entry.loads == 1


def test_an_entry_point_may_claim(install):
    provider = SimpleNamespace(
        kernels={"layer_norm": Recorder()}, claims=lambda x: isinstance(x, Ours)
    )
    install(Entry("plugin", provider))
    assert cunorm.layer_norm(Ours(), 4) == "the result"


def test_an_entry_point_can_be_the_default(install):
    install(Entry("plugin", SimpleNamespace(kernels={"layer_norm": Recorder()})))
    cunorm.set_default_target("plugin")
    assert cunorm.layer_norm(X, 4) == "the result"


def test_a_registered_target_hides_an_entry_point_of_its_name(install):
    install(Entry("plugin", SimpleNamespace(kernels={"layer_norm": Recorder("theirs")})))
    cunorm.register_target("plugin", {"layer_norm": Recorder("ours")})
    assert cunorm.layer_norm(X, 4, target="plugin") == "ours"


def test_entry_points_are_known_to_the_error(install):
    install(Entry("plugin", SimpleNamespace(kernels={})))
    with pytest.raises(ValueError, match="known targets: cuda, numpy, plugin"):
        cunorm.layer_norm(X, 4, target="plug")


def test_the_in_tree_targets_load_no_entry_points(install):
    entry = Entry("plugin", SimpleNamespace(kernels={}))
    install(entry)
    cunorm.layer_norm(X, 4, target="numpy")
    assert entry.loads == 0
