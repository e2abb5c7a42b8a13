"""Targets: which set of kernels serves an op.

A target is a name and a mapping from op names ("layer_norm") to kernels. Two are in the tree:
"cuda" (also ``cunorm.BUILTIN``) for arrays on a CUDA device and "numpy" for host arrays. Others
come by `register_target` or by an entry point of the group ``cunorm.targets``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cunorm import errors
from cunorm.arrays import Device

BUILTIN = "cuda"
ENTRY_POINTS = "cunorm.targets"

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Target:
    """A named set of kernels; `device` is the only kind of device it takes, None for its own."""

    name: str
    kernels: Mapping[str, Any]
    claims: Callable[[Any], bool] | None = None
    device: str | None = None

    def kernel(self, op: str) -> Any:
        """The kernel of an op, or an error that names the targets that have one."""
        kernel = self.kernels.get(op)
        if kernel is None:
            having = sorted(t.name for t in registry.all() if op in t.kernels)
            raise ValueError(
                f"{op}: target {self.name!r} has no such op; "
                f"targets that have it: {', '.join(having) or 'none'}"
            )
        return kernel


class _Registry:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.targets: dict[str, Target] = {}
        self.default: str | None = None
        # Changes whenever the answer of `resolve` may change: plans made before are not used.
        self.generation = 0
        self.entry_points_loaded = False

    def all(self) -> list[Target]:
        return [self.in_tree("cuda"), self.in_tree("numpy"), *self.targets.values()]

    def in_tree(self, name: str) -> Target:
        if name == "cuda":
            from cunorm.cuda.target import KERNELS

            return Target("cuda", KERNELS, device="cuda")
        from cunorm.host import KERNELS as HOST_KERNELS

        return Target("numpy", HOST_KERNELS, device="cpu")

    def load_entry_points(self) -> None:
        with self.lock:
            if self.entry_points_loaded:
                return
            self.entry_points_loaded = True
            from importlib.metadata import entry_points

            for entry in entry_points(group=ENTRY_POINTS):
                if entry.name not in self.targets:
                    provider = entry.load()
                    register_target(entry.name, provider.kernels, getattr(provider, "claims", None))

    def find(self, name: str) -> Target:
        if name in ("cuda", "numpy"):
            return self.in_tree(name)
        if name not in self.targets:
            self.load_entry_points()
        target = self.targets.get(name)
        if target is None:
            known = ", ".join(sorted({"cuda", "numpy", *self.targets}))
            raise ValueError(f"unknown target {name!r}; known targets: {known}")
        return target

    def claimant(self, array: Any) -> Target | None:
        self.load_entry_points()
        claiming = [t for t in self.targets.values() if t.claims is not None and t.claims(array)]
        if len(claiming) > 1:
            names = ", ".join(sorted(repr(t.name) for t in claiming))
            raise ValueError(
                f"{type(array).__name__} array is claimed by several targets: {names}; "
                f"name one with target="
            )
        return claiming[0] if claiming else None


registry = _Registry()


def find(name: str) -> Target:
    """The target of that name."""
    return registry.find(name)


def register_target(
    name: str,
    kernels: Mapping[str, Kernel],
    claims: Callable[[Any], bool] | None = None,
) -> None:
    """Add a target, or replace one of the same name.

    Parameters
    ----------
    name : str
        What ``target=`` will call it; "cuda" and "numpy" are taken.
    kernels : mapping of str to callable
        From op names ("layer_norm") to ``kernel(op, *inputs, out, return_stats)``: `op` is the
        op object, `inputs` the arrays of its call (None where a parameter is absent), `out` a
        tuple of arrays to write into or an empty one. Ops with channels pass `channel_axis` as
        well, 1 or -1. It returns what the op returns, and updates running statistics in place.
    claims : callable, optional
        ``claims(x)`` is true for arrays that this target serves when no target is named.

    Raises
    ------
    TypeError
        Where `name` is no str, or `kernels` no mapping to callables.
    ValueError
        Where `name` belongs to a target of cunorm's own.
    """
    if not isinstance(name, str):
        raise TypeError(f"register_target: name must be a str, got {type(name).__name__}")
    if name in ("cuda", "numpy", ""):
        raise ValueError(f"register_target: the name {name!r} is taken")
    if not isinstance(kernels, Mapping) or not all(callable(k) for k in kernels.values()):
        raise TypeError("register_target: kernels must map op names to callables")
    if claims is not None and not callable(claims):
        raise TypeError(f"register_target: claims must be callable, got {type(claims).__name__}")
    with registry.lock:
        registry.targets[name] = Target(name, dict(kernels), claims)
        registry.generation += 1


def unregister_target(name: str) -> None:
    """Remove a registered target by its name."""
    with registry.lock:
        if registry.targets.pop(name, None) is None:
            raise ValueError(f"unregister_target: no registered target {name!r}")
        if registry.default == name:
            registry.default = None
        registry.generation += 1


def set_default_target(name: str | None) -> str | None:
    """Set the target of all ops that name none; None: decide from where the input lives.

    Returns
    -------
    str or None
        The default so far, to be restored later.
    """
    if name is not None:
        check_name("set_default_target", name)
        registry.find(name)
    with registry.lock:
        before, registry.default = registry.default, name
        registry.generation += 1
    return before


def check_name(op: str, target: Any) -> None:
    """Refuse what cannot name a target."""
    if target is not None and not isinstance(target, str):
        raise TypeError(
            f"{op}: target must be a target's name or None, got {type(target).__name__}"
        )


def resolve(
    op: str, target: str | None, array: Any, device: Device | None, argument: str = "x"
) -> Target:
    """The target of a call; `device` is None for arrays that only their claimant knows.

    `argument` is what the op calls the array.
    """
    chosen: Target | None
    if target is None:
        target = registry.default
    if target is not None:
        chosen = registry.find(target)
    else:
        chosen = registry.claimant(array)
        if chosen is None:
            kind = "cuda" if device is not None and device.kind == "cuda" else "numpy"
            chosen = registry.in_tree(kind)
    if chosen.device is None:
        return chosen
    if device is None:
        raise errors.wrong_type(op, argument, "an array (CuPy, NumPy, torch or DLPack)", array)
    if device.kind != chosen.device:
        need = "in host memory"
        if chosen.device == "cuda":
            need = "on a CUDA device (CuPy comes with cunorm[cuda12x] or cunorm[cuda13x])"
        raise ValueError(f"{op}: target {chosen.name!r} needs arrays {need}, got {device}")
    return chosen
