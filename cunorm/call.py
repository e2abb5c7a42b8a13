"""What an op asks of a target, without data, and what a target answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cunorm.arrays import ArraySpec, Device, Library


@dataclass(frozen=True)
class Call:
    """A call of an op: everything but the addresses."""

    op: str
    # The op's own parameters (eps, normalized_shape, ...), and channel_axis where it takes one.
    attributes: Mapping[str, Any]
    inputs: Mapping[str, ArraySpec | None]  # in the order of the op's arguments
    outputs: Mapping[str, ArraySpec]
    statistics: Mapping[str, ArraySpec] = field(default_factory=dict)  # those to be returned
    device: Device = Device("cuda")
    mutated: tuple[str, ...] = ()  # inputs that the call updates in place
    x_name: str = "x"  # what the op calls the input that is normalized

    @property
    def x(self) -> ArraySpec:
        spec = self.inputs[self.x_name]
        if spec is None:
            raise ValueError(f"{self.op}: {self.x_name} is missing")
        return spec


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as `op.plan` shows it."""

    kernel: str
    grid: int
    block: int
    shared_memory: int
    source: str = field(repr=False)


class Plan(Protocol):
    """A call made ready: nothing is left but to take addresses and launch."""

    launches: Sequence[Launch]

    def run(
        self, library: Library, inputs: Sequence[Any], out: Sequence[Any], pointers: Sequence[int]
    ) -> Sequence[Any]:
        """Queue the work; `pointers` are those of `inputs` and `out`; give outputs, statistics."""

    def compile(self) -> None:
        """Build what `run` would build at its first call."""
