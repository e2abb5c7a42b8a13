"""Op objects: what they check, how a call finds its plan, and what they tell of themselves."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import Any, ClassVar

from cunorm import arrays, dtypes, errors, targets
from cunorm.arrays import ArraySpec, Device, Library
from cunorm.call import Call, Launch, Plan

_PLANS_PER_OP = 512  # signatures an op remembers; the oldest is forgotten first


class Op:
    """Base of the op objects.

    An op object is built once with the parameters of the operation and called with arrays. It
    keeps a plan for every signature (shapes, dtypes, layouts, device) it has met; threads may
    share it.
    """

    name: ClassVar[str]
    input_names: ClassVar[tuple[str, ...]]  # x first
    output_names: ClassVar[tuple[str, ...]] = ("y",)
    statistic_names: ClassVar[tuple[str, ...]] = ()
    required: ClassVar[frozenset[str]]  # inputs that cannot be None

    def __init__(self, *, target: str | None = None) -> None:
        targets.check_name(self.name, target)
        self.target = target
        self._plans: dict[Any, tuple[Plan, OverlapGuard]] = {}

    # -- what a subclass says ---------------------------------------------------------------

    @property
    def attributes(self) -> dict[str, Any]:
        """The op's own parameters by name, as its function takes them."""
        raise NotImplementedError

    def _expected_shape(self, argument: str, x: ArraySpec) -> tuple[int, ...]:
        """Shape that an input must have; ValueError where x itself will not do."""
        raise NotImplementedError

    def _shape_fits(self, argument: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        return shape == expected

    def _shape_wording(self, argument: str, expected: tuple[int, ...]) -> str:
        return str(expected)

    def _statistic_shape(self, x: ArraySpec) -> tuple[int, ...]:
        raise NotImplementedError

    def _flops_per_element(self) -> int:
        raise NotImplementedError

    # -- calls ------------------------------------------------------------------------------

    def _run(self, inputs: tuple[Any, ...], out: Any, return_stats: bool) -> Any:
        if out is None:
            outs: tuple[Any, ...] = ()
        elif isinstance(out, (tuple, list)):
            outs = tuple(out) or (out,)  # what is empty or too long has no plan: it is refused
        else:
            outs = (out,)
        library = arrays.exact_library(type(inputs[0]))
        found = None if library is None else library.fingerprint(inputs + outs)
        if found is not None:
            key, pointers = found
            planned = self._plans.get((key, return_stats, targets.registry.generation))
            if planned is not None:
                plan, guard = planned
                if outs:
                    guard.check(pointers)
                results = plan.run(library, inputs, outs, pointers)
                return results[0] if len(results) == 1 else tuple(results)
        return self._run_unplanned(inputs, out, return_stats)

    def _out_tuple(self, out: Any) -> tuple[Any, ...]:
        count = len(self.output_names)
        if count == 1 and not isinstance(out, (tuple, list)):
            return (out,)
        outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if len(outs) != count or any(o is None for o in outs):
            expected = "an array" if count == 1 else f"a tuple of {count} arrays"
            raise errors.wrong_type(self.name, "out", expected, out)
        return outs

    def _run_unplanned(self, inputs: tuple[Any, ...], out: Any, return_stats: bool) -> Any:
        outs = () if out is None else self._out_tuple(out)
        x = inputs[0]
        known = arrays.library_of(x) is not None or hasattr(x, "__dlpack__")
        device = arrays.device_of(self.name, "x", x) if known else None
        target = targets.resolve(self.name, self.target, x, device)
        kernel = target.kernel(self.name)
        if device is None:  # arrays that only their target knows: it checks them
            return kernel(self, *inputs, out=outs, return_stats=return_stats)

        inputs, outs, library = self._brought_home(inputs, outs, device)
        call = self._checked_call(library, inputs, outs, return_stats, device)
        if not hasattr(kernel, "plan"):
            return self._call_function(kernel, target, call, library, inputs, outs, x)

        found = library.fingerprint(inputs + outs)
        if found is None:
            raise errors.wrong_type(self.name, "x", "an array on a CUDA device", x)
        plan = kernel.plan(call, bool(outs))
        results = plan.run(library, inputs, outs, found[1])
        if len(self._plans) >= _PLANS_PER_OP:
            self._plans.pop(next(iter(self._plans)), None)
        self._plans[found[0], return_stats, targets.registry.generation] = plan, OverlapGuard(call)
        return self._handed_back(results, outs, x)

    def _brought_home(
        self, inputs: tuple[Any, ...], outs: tuple[Any, ...], device: Device
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Library]:
        """All arrays as those of one library; those of x where it is CuPy, NumPy or torch."""
        library = arrays.library_of(inputs[0]) or arrays.native(device)
        names = [*self.input_names, *_out_names(len(outs))] if outs else [*self.input_names]
        given = [*inputs, *outs]
        for argument, array in zip(names, given, strict=True):
            if array is None:
                if argument in self.required:
                    raise errors.wrong_type(self.name, argument, "an array", array)
                continue
            where = arrays.device_of(self.name, argument, array)
            its_library = arrays.library_of(array)
            name = its_library.spec(array).dtype if its_library else None
            if name is not None and name not in dtypes.FLOATS:
                raise errors.wrong_dtype(self.name, argument, dtypes.FLOATS, name)
            if where != device:
                raise errors.wrong_device(self.name, argument, device, where)
            if its_library is not None:
                lost = its_library.lost_gradient([array])
                if lost is not None:
                    raise errors.needs_grad(self.name, argument)
        for argument, array in zip(names[len(inputs) :], outs, strict=True):
            its_library = arrays.library_of(array)
            if its_library is None:
                raise errors.wrong_type(self.name, argument, "a CuPy, NumPy or torch array", array)
            if not its_library.writable(array):
                raise errors.read_only(self.name, argument)
        home = [
            a if a is None or arrays.library_of(a) is library else library.adopt(a) for a in given
        ]
        return tuple(home[: len(inputs)]), tuple(home[len(inputs) :]), library

    def _checked_call(
        self,
        library: Library,
        inputs: Sequence[Any],
        outs: Sequence[Any],
        return_stats: bool,
        device: Device,
    ) -> Call:
        pointers = [library.pointer(a) for a in (*inputs, *outs) if a is not None]
        low_bits = 16
        for pointer in pointers:
            low_bits |= pointer
        alignment = low_bits & -low_bits
        specs = [None if a is None else library.spec(a, alignment) for a in inputs]
        call = self._call(dict(zip(self.input_names, specs, strict=True)), return_stats, device)
        if not outs:
            return call
        given = {
            name: library.spec(array, alignment)
            for name, array in zip(self.output_names, outs, strict=True)
        }
        self._check_out(call, given)
        call = Call(call.op, call.attributes, call.inputs, given, call.statistics, device)
        OverlapGuard(call).check([0 if a is None else library.pointer(a) for a in (*inputs, *outs)])
        return call

    def _call(
        self, inputs: Mapping[str, ArraySpec | None], return_stats: bool, device: Device
    ) -> Call:
        """The call of inputs with these specs, checked; outputs laid out like x."""
        x = inputs["x"]
        if x is None:
            raise errors.wrong_type(self.name, "x", "an array", None)
        if x.dtype not in dtypes.FLOATS:
            raise errors.wrong_dtype(self.name, "x", dtypes.FLOATS, x.dtype)
        wide = dtypes.accumulation(x.dtype)
        for argument, spec in inputs.items():
            if spec is None or argument == "x":
                continue
            if spec.dtype not in dtypes.FLOATS:
                raise errors.wrong_dtype(self.name, argument, dtypes.FLOATS, spec.dtype)
            allowed = [x.dtype] if argument == "residual" else [x.dtype, wide]
            if spec.dtype not in allowed:
                raise errors.dtype_mismatch(self.name, argument, allowed, spec.dtype)
        for argument, spec in inputs.items():
            if spec is None:
                continue
            expected = self._expected_shape(argument, x)
            if not self._shape_fits(argument, spec.shape, expected):
                wanted = self._shape_wording(argument, expected)
                raise errors.wrong_shape(self.name, argument, wanted, spec.shape)
        strides = arrays.dense_strides(x.shape, x.strides)
        outputs = {name: ArraySpec(x.shape, strides, x.dtype) for name in self.output_names}
        statistics = {}
        if return_stats:
            shape = self._statistic_shape(x)
            statistics = {n: ArraySpec.contiguous(shape, wide) for n in self.statistic_names}
        return Call(self.name, self.attributes, inputs, outputs, statistics, device)

    def _check_out(self, call: Call, given: Mapping[str, ArraySpec]) -> None:
        for argument, (name, spec) in zip(_out_names(len(given)), given.items(), strict=True):
            expected = call.outputs[name]
            if spec.dtype != expected.dtype:
                raise errors.dtype_mismatch(self.name, argument, [expected.dtype], spec.dtype)
            if spec.shape != expected.shape:
                raise errors.wrong_shape(self.name, argument, expected.shape, spec.shape)
            if arrays.overlaps_itself(spec.shape, spec.strides):
                raise errors.shared_elements(self.name, argument, spec.strides)

    def _call_function(
        self,
        kernel: Any,
        target: targets.Target,
        call: Call,
        library: Library,
        inputs: Sequence[Any],
        outs: Sequence[Any],
        x: Any,
    ) -> Any:
        """A target that is a function of arrays: the reference, or a registered one."""
        return_stats = bool(call.statistics)
        host = isinstance(library, arrays.Torch) and target.device == "cpu"
        if not host:
            results = kernel(self, *inputs, out=tuple(outs), return_stats=return_stats)
            if target.device is None:
                return results
            results = results if isinstance(results, tuple) else (results,)
            return self._handed_back(results, outs, x)
        views = [None if a is None else library.to_numpy(a) for a in inputs]
        out_views = tuple(library.to_numpy(a) for a in outs)
        results = kernel(self, *views, out=out_views, return_stats=return_stats)
        results = results if isinstance(results, tuple) else (results,)
        tensors = [library.from_numpy(r) for r in results[len(outs) :]]
        results = [*outs, *tensors]
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def _handed_back(results: Sequence[Any], outs: Sequence[Any], x: Any) -> Any:
        if arrays.library_of(x) is None:
            results = [arrays.give_back(r, x) for r in results]
        return results[0] if len(results) == 1 else tuple(results)

    # -- what an op tells of itself ---------------------------------------------------------

    def backward_op(self) -> Op | None:
        """The matching backward op, or None where there is none."""
        return None

    def parameter_shapes(self, x_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Name and shape of each parameter that a call on an x of this shape takes."""
        x = ArraySpec.contiguous(tuple(x_shape), "float32")
        self._expected_shape("x", x)
        names = [n for n in self.input_names if n not in ("x", "residual")]
        return {name: self._expected_shape(name, x) for name in names}

    def _hypothetical_call(
        self,
        dtype: Any,
        shape: Sequence[int],
        parameter_dtype: Any,
        without: Sequence[str],
        return_stats: bool,
    ) -> Call:
        name = dtypes.name_of(dtype)
        x = ArraySpec.contiguous(tuple(shape), name)
        wide = name if parameter_dtype is None else dtypes.name_of(parameter_dtype)
        inputs: dict[str, ArraySpec | None] = {}
        for argument in self.input_names:
            kind = name if argument in ("x", "residual") else wide
            inputs[argument] = ArraySpec.contiguous(self._expected_shape(argument, x), kind)
        for argument in without:
            if argument not in inputs or argument in self.required:
                raise errors.wrong_value(self.name, "without", "optional parameters", argument)
            inputs[argument] = None
        return self._call(inputs, return_stats, Device("cuda"))

    def _plan(self, call: Call) -> Plan:
        name = self.target or targets.BUILTIN
        kernel = targets.find(name).kernel(self.name)
        if not hasattr(kernel, "plan"):
            raise ValueError(f"{self.name}: target {name!r} makes no plans")
        return kernel.plan(call, False)

    def plan(
        self,
        dtype: Any,
        shape: Sequence[int],
        *,
        parameter_dtype: Any = None,
        without: Sequence[str] = (),
        return_stats: bool = False,
    ) -> list[Launch]:
        """The kernel launches of a call on contiguous arrays; needs no data.

        Parameters
        ----------
        dtype, shape
            Those of x.
        parameter_dtype : optional
            dtype of the parameters; that of x by default.
        without : sequence of str
            Optional parameters that the call leaves out.
        return_stats : bool
            Whether the call returns its statistics.

        Returns
        -------
        list of Launch
            Kernel name, grid, block, shared memory and the CUDA source as compiled. On a machine
            without a GPU: as for compute capability 9.0.
        """
        call = self._hypothetical_call(dtype, shape, parameter_dtype, without, return_stats)
        return list(self._plan(call).launches)

    def compile(
        self,
        dtype: Any,
        shape: Sequence[int],
        *,
        parameter_dtype: Any = None,
        without: Sequence[str] = (),
    ) -> None:
        """Build what a later call on such arrays needs, on the current device.

        Parameters as for `plan`. Row counts do not matter: one build serves all.
        """
        self._plan(self._hypothetical_call(dtype, shape, parameter_dtype, without, False)).compile()

    def roofline(
        self,
        dtype: Any,
        shape: Sequence[int],
        *,
        parameter_dtype: Any = None,
        without: Sequence[str] = (),
        return_stats: bool = False,
    ) -> dict[str, int]:
        """Floating-point operations of a call, and the fewest bytes it moves.

        Every input is counted as read once, every output as written once.
        """
        call = self._hypothetical_call(dtype, shape, parameter_dtype, without, return_stats)
        specs = [*call.inputs.values(), *call.outputs.values(), *call.statistics.values()]
        nbytes = sum(s.size * dtypes.FLOATS[s.dtype].itemsize for s in specs if s is not None)
        return {"flops": call.x.size * self._flops_per_element(), "bytes": nbytes}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as calling the op."""
        return self(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in self.attributes.items()]
        if self.target is not None:
            shown.append(f"target={self.target!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}  # plans hold addresses of this process


class OverlapGuard:
    """Outputs may be inputs exactly; they may share memory in no other way.

    Layouts are known when a plan is made, addresses only at each call: what remains to be done
    then is to compare a few numbers.
    """

    def __init__(self, call: Call) -> None:
        self.op = call.op
        self.names = [*call.inputs, *_out_names(len(call.outputs))]
        self.specs = [*call.inputs.values(), *call.outputs.values()]
        extents = [(0, 0) if s is None else s.extent for s in self.specs]
        first_out = len(call.inputs)
        self.pairs = []
        for out in range(first_out, len(self.specs)):
            low, high = extents[out]
            for other in range(out):
                if self.specs[other] is None:
                    continue
                other_low, other_high = extents[other]
                same = self.specs[out] == self.specs[other]
                # at these distances from the other, and beyond, an output is clear of it
                self.pairs.append((out, other, other_low - high, other_high - low, same))
        self.first_out = first_out

    def check(self, pointers: Sequence[int]) -> None:
        """Raise ValueError where an output would be written over what is not it."""
        for out, other, nearest_below, nearest_above, same in self.pairs:
            if not nearest_below < pointers[out] - pointers[other] < nearest_above:
                continue
            pointer, other_pointer = pointers[out], pointers[other]
            if same and pointer == other_pointer and other < self.first_out:
                continue
            spec, other_spec = self.specs[out], self.specs[other]
            if arrays.share_memory(pointer, spec, other_pointer, other_spec):  # type: ignore[arg-type]
                raise errors.overlap(self.op, self.names[out], self.names[other])


def _out_names(count: int) -> list[str]:
    return ["out"] if count == 1 else [f"out[{i}]" for i in range(count)]


def checked_eps(op: str, eps: Any) -> float:
    """eps as a float; it must be finite and not negative."""
    try:
        value = float(eps)
    except OverflowError:  # an int beyond all floats
        value = inf
    except (TypeError, ValueError):
        raise errors.wrong_type(op, "eps", "a number", eps) from None
    if isinstance(eps, (str, bytes)):
        raise errors.wrong_type(op, "eps", "a number", eps)
    if not (isfinite(value) and value >= 0):
        raise errors.wrong_value(op, "eps", "finite and not negative", eps)
    return value


def checked_shape(op: str, shape: Any) -> tuple[int, ...]:
    """normalized_shape as a tuple of ints."""
    if isinstance(shape, (str, bytes)):
        raise errors.wrong_type(op, "normalized_shape", "an int or a sequence of ints", shape)
    try:
        sizes = (operator.index(shape),)
    except TypeError:
        try:
            sizes = tuple(operator.index(n) for n in shape)
        except TypeError:
            raise errors.wrong_type(
                op, "normalized_shape", "an int or a sequence of ints", shape
            ) from None
    if not sizes or min(sizes) < 0:
        raise errors.wrong_value(
            op, "normalized_shape", "one or more sizes that are not negative", shape
        )
    return sizes
