"""What the backward ops share: gradients laid out like their arrays, none for an absent weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cunorm import dtypes, errors
from cunorm.arrays import ArraySpec
from cunorm.ops.base import Op

_OF_X = ("grad_x", "grad_sum")
_OF_WEIGHT = "grad_weight"


class GradientOp(Op):
    """An op that gives the gradients of x and of parameters.

    What the forward op has no weight for has no gradient: None stands in its place, in `out` too.
    """

    weight_index: ClassVar[int]  # of the weight among the inputs

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if hasattr(cls, "input_names"):
            cls.weight_index = cls.input_names.index("weight")

    def _present_outputs(self, inputs: Mapping[str, Any]) -> tuple[str, ...]:
        if inputs.get("weight") is not None:
            return self.output_names
        return tuple(name for name in self.output_names if name != _OF_WEIGHT)

    def _output(self, name: str, inputs: Mapping[str, ArraySpec | None], axis: int | None) -> Any:
        if name in _OF_X:
            return super()._output(name, inputs, axis)
        x: Any = inputs[self.x_name]
        weight = inputs["weight"]
        kind = dtypes.accumulation(x.dtype) if weight is None else weight.dtype
        return ArraySpec.contiguous(self._expected_shape("weight", x, axis), kind)

    def _out_tuple(self, inputs: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        if inputs[self.weight_index] is None:
            return out  # as `_gradients` leaves it
        return super()._out_tuple(inputs, out)

    def _without_weight(self, out: Any) -> tuple[Any, ...]:
        """The arrays of `out` where there is no gradient of a weight."""
        outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if [array is None for array in outs] != [n == _OF_WEIGHT for n in self.output_names]:
            gap = self.output_names.index(_OF_WEIGHT)
            expected = f"a tuple of {len(self.output_names)} arrays (out[{gap}] being None)"
            raise errors.wrong_type(self.name, "out", expected, out)
        return tuple(array for array in outs if array is not None)

    def _gradients(self, inputs: tuple[Any, ...], out: Any, axis: int | None = None) -> Any:
        """One gradient for each of `output_names`, None where there is none."""
        if inputs[self.weight_index] is not None:
            return self._run(inputs, out, False, axis)
        if out is not None:
            out = self._without_weight(out)
        results = self._run(inputs, out, False, axis)
        results = results if isinstance(results, tuple) else (results,)
        if len(results) == len(self.output_names):
            return results
        given = iter(results)
        return tuple(None if n == _OF_WEIGHT else next(given) for n in self.output_names)
