"""Op objects: what they check, how a call finds its plan, and what they tell of themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cunorm import arrays, dtypes, errors, targets
from cunorm.arrays import ArraySpec, Device, Library, exact_library
from cunorm.call import Call, Launch, Plan
from cunorm.ops.checks import OverlapGuard, out_label
from cunorm.targets import registry

STATISTICS = ("mean", "rstd")  # as inputs
_PLANS_PER_OP = 512  # signatures an op remembers; the oldest is forgotten first


class Op:
    """Base of the op objects.

    An op object is built once with the parameters of the operation and called with arrays. It
    keeps a plan for every signature (shapes, dtypes, layouts, device) it has met; threads may
    share it.
    """

    name: ClassVar[str]
    input_names: ClassVar[tuple[str, ...]]  # in the order of the op's arguments
    output_names: ClassVar[tuple[str, ...]] = ("y",)
    statistic_names: ClassVar[tuple[str, ...]] = ()
    required: ClassVar[frozenset[str]]  # inputs that cannot be None
    x_name: ClassVar[str] = "x"  # the input that is normalized: what others are held against
    like_x: ClassVar[frozenset[str]] = frozenset(  # inputs of its shape and dtype
        {"x", "residual", "residual_out", "grad_out", "grad_residual_out"}
    )

    def __init__(self, *, target: str | None = None) -> None:
        targets.check_name(self.name, target)
        self.target = target
        self._plans: dict[Any, tuple[Plan, OverlapGuard | None]] = {}

    # -- what a subclass says ---------------------------------------------------------------

    @property
    def attributes(self) -> dict[str, Any]:
        """The op's own parameters by name, as its function takes them."""
        raise NotImplementedError

    def _expected_shape(self, argument: str, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        """Shape that an input must have; ValueError where x itself will not do.

        `axis` is the channel_axis of the call, here and below; None for ops without one.
        """
        raise NotImplementedError

    def _shape_fits(self, argument: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        return shape == expected

    def _shape_wording(self, argument: str, expected: tuple[int, ...]) -> str:
        return str(expected)

    def _allowed_dtypes(self, argument: str, x: ArraySpec) -> list[str]:
        if argument in self.like_x:
            return [x.dtype]
        if argument in STATISTICS:
            return [dtypes.accumulation(x.dtype)]
        return [x.dtype, dtypes.accumulation(x.dtype)]

    def _check_together(
        self, inputs: Mapping[str, ArraySpec | None], x: ArraySpec, axis: int | None
    ) -> None:
        """What no input shows alone."""

    def _mutated(self, inputs: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of a call's inputs that it updates in place."""
        return ()

    def _present_outputs(self, inputs: Mapping[str, Any]) -> tuple[str, ...]:
        """The outputs that a call with these inputs has."""
        return self.output_names

    def _output(self, name: str, inputs: Mapping[str, ArraySpec | None], axis: int | None) -> Any:
        """Spec of an output; by default one laid out like x."""
        x: Any = inputs[self.x_name]
        return ArraySpec(x.shape, arrays.dense_strides(x.shape, x.strides), x.dtype)

    def _statistic_shape(self, x: ArraySpec, axis: int | None) -> tuple[int, ...]:
        raise NotImplementedError

    def _flops_per_element(self) -> int:
        raise NotImplementedError

    # -- calls ------------------------------------------------------------------------------

    def _run(
        self,
        inputs: tuple[Any, ...],
        out: Any,
        return_stats: bool,
        axis: int | None = None,
    ) -> Any:
        kind = type(inputs[0])
        outs: tuple[Any, ...] = ()
        if out is not None:
            if type(out) is not kind and isinstance(out, (tuple, list)):
                outs = tuple(out)  # what is too long has no plan: it is refused
            outs = outs or (out,)
        library = exact_library(kind)
        found = None if library is None else library.fingerprint(inputs + outs)
        if found is not None:
            key, pointers = found
            planned = self._plans.get((key, return_stats, axis, registry.generation))
            if planned is not None:
                plan, guard = planned
                if guard is not None and tuple(pointers) not in guard.clear:
                    guard.check(pointers)
                results = plan.run(library, inputs, outs, pointers)
                return results[0] if len(results) == 1 else tuple(results)
        return self._run_unplanned(inputs, out, return_stats, axis)

    def _out_tuple(self, inputs: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        """The arrays of `out`, one for each output that a call with these inputs has."""
        count = len(self.output_names)
        if count == 1 and not isinstance(out, (tuple, list)):
            return (out,)
        outs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
        if len(outs) != count or any(o is None for o in outs):
            expected = "an array" if count == 1 else f"a tuple of {count} arrays"
            raise errors.wrong_type(self.name, "out", expected, out)
        return outs

    def _labels(self, present: Iterable[str]) -> list[str]:
        """What errors call these outputs."""
        names = self.output_names
        return [out_label(names.index(name), len(names)) for name in present]

    def _run_unplanned(
        self, inputs: tuple[Any, ...], out: Any, return_stats: bool, axis: int | None
    ) -> Any:
        outs = () if out is None else self._out_tuple(inputs, out)
        x = inputs[self.input_names.index(self.x_name)]
        known = arrays.library_of(x) is not None or hasattr(x, "__dlpack__")
        device = arrays.device_of(self.name, self.x_name, x) if known else None
        target = targets.resolve(self.name, self.target, x, device, self.x_name)
        kernel = target.kernel(self.name)
        options: dict[str, Any] = {"return_stats": return_stats}
        if axis is not None:
            options["channel_axis"] = axis
        if device is None:  # arrays that only their target knows: it checks them
            return kernel(self, *inputs, out=outs, **options)

        inputs, outs, library = self._brought_home(inputs, outs, x, device)
        call = self._checked_call(library, inputs, outs, return_stats, axis, device)
        if not hasattr(kernel, "plan"):
            return self._call_function(kernel, target, options, library, inputs, outs, x)

        found = library.fingerprint(inputs + outs)
        if found is None:
            raise errors.wrong_type(self.name, self.x_name, "an array on a CUDA device", x)
        plan = kernel.plan(call, bool(outs))
        results = plan.run(library, inputs, outs, found[1])
        if len(self._plans) >= _PLANS_PER_OP:
            self._plans.pop(next(iter(self._plans)), None)
        guard = self._guard(call, bool(outs))
        self._plans[found[0], return_stats, axis, registry.generation] = plan, guard
        return self._handed_back(results, outs, x)

    def _brought_home(
        self, inputs: tuple[Any, ...], outs: tuple[Any, ...], x: Any, device: Device
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Library]:
        """All arrays as those of one library; those of x where it is CuPy, NumPy or torch."""
        library = arrays.library_of(x) or arrays.native(device)
        named = dict(zip(self.input_names, inputs, strict=True))
        written = set(self._mutated(named))
        arguments = list(named.items())
        if outs:
            labels = self._labels(self._present_outputs(named))
            arguments += zip(labels, outs, strict=True)
            written.update(labels)
        for argument, array in arguments:
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
                raise errors.wrong_device(self.name, argument, device, where, self.x_name)
            if its_library is not None:
                lost = its_library.lost_gradient([array])
                if lost is not None:
                    raise errors.needs_grad(self.name, argument)
        for argument, array in arguments:
            if argument in written and array is not None:
                self._check_writable(argument, array)
        home = [
            a if a is None or arrays.library_of(a) is library else library.adopt(a)
            for _, a in arguments
        ]
        for (argument, array), adopted in zip(arguments, home, strict=True):
            if argument in written and adopted is not array:
                self._check_shared(argument, array, adopted)
        return tuple(home[: len(inputs)]), tuple(home[len(inputs) :]), library

    def _check_writable(self, argument: str, array: Any) -> None:
        library = arrays.library_of(array)
        if library is None:
            raise errors.wrong_type(self.name, argument, "a CuPy, NumPy or torch array", array)
        if not library.writable(array):
            raise errors.read_only(self.name, argument)

    def _check_shared(self, argument: str, array: Any, adopted: Any) -> None:
        """Refuse an array to be written that another library could only copy."""
        mine, its = arrays.library_of(array), arrays.library_of(adopted)
        if mine is None or its is None or mine.spec(array).size == 0:
            return
        if mine.pointer(array) != its.pointer(adopted):
            raise errors.cannot_share(self.name, argument, type(its).__name__)

    def _checked_call(
        self,
        library: Library,
        inputs: Sequence[Any],
        outs: Sequence[Any],
        return_stats: bool,
        axis: int | None,
        device: Device,
    ) -> Call:
        pointers = [0 if a is None else library.pointer(a) for a in (*inputs, *outs)]
        low_bits = 16
        for pointer in pointers:
            low_bits |= pointer
        alignment = low_bits & -low_bits
        specs = [None if a is None else library.spec(a, alignment) for a in inputs]
        named = dict(zip(self.input_names, specs, strict=True))
        call = self._call(named, return_stats, axis, device)
        if outs:
            given = {
                name: library.spec(array, alignment)
                for name, array in zip(call.outputs, outs, strict=True)
            }
            self._check_out(call, given)
            call = replace(call, outputs=given)
        guard = self._guard(call, bool(outs))
        if guard is not None:
            guard.check(pointers)
        return call

    def _guard(self, call: Call, out_given: bool) -> OverlapGuard | None:
        """What each call must still check; None for calls that write to new memory alone."""
        if not out_given and not call.mutated:
            return None
        return OverlapGuard(call, self._labels(call.outputs) if out_given else ())

    def _call(
        self,
        inputs: Mapping[str, ArraySpec | None],
        return_stats: bool,
        axis: int | None,
        device: Device,
    ) -> Call:
        """The call of inputs with these specs, checked; outputs laid out like x."""
        x = inputs[self.x_name]
        if x is None:
            raise errors.wrong_type(self.name, self.x_name, "an array", None)
        if x.dtype not in dtypes.FLOATS:
            raise errors.wrong_dtype(self.name, self.x_name, dtypes.FLOATS, x.dtype)
        for argument, spec in inputs.items():
            if spec is None or argument == self.x_name:
                continue
            if spec.dtype not in dtypes.FLOATS:
                raise errors.wrong_dtype(self.name, argument, dtypes.FLOATS, spec.dtype)
            allowed = self._allowed_dtypes(argument, x)
            if spec.dtype not in allowed:
                raise errors.dtype_mismatch(self.name, argument, allowed, spec.dtype)
        for argument, spec in inputs.items():
            if spec is None:
                continue
            expected = self._expected_shape(argument, x, axis)
            if not self._shape_fits(argument, spec.shape, expected):
                wanted = self._shape_wording(argument, expected)
                raise errors.wrong_shape(self.name, argument, wanted, spec.shape)
        self._check_together(inputs, x, axis)
        mutated = self._mutated(inputs)
        for argument in mutated:
            spec = inputs[argument]
            if spec is not None and arrays.overlaps_itself(spec.shape, spec.strides):
                raise errors.shared_elements(self.name, argument, spec.strides)
        outputs = {n: self._output(n, inputs, axis) for n in self._present_outputs(inputs)}
        statistics = {}
        if return_stats:
            shape, wide = self._statistic_shape(x, axis), dtypes.accumulation(x.dtype)
            statistics = {n: ArraySpec.contiguous(shape, wide) for n in self.statistic_names}
        attributes = self.attributes if axis is None else {**self.attributes, "channel_axis": axis}
        return Call(
            self.name, attributes, inputs, outputs, statistics, device, mutated, self.x_name
        )

    def _check_out(self, call: Call, given: Mapping[str, ArraySpec]) -> None:
        for argument, (name, spec) in zip(self._labels(given), given.items(), strict=True):
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
        options: Mapping[str, Any],
        library: Library,
        inputs: Sequence[Any],
        outs: Sequence[Any],
        x: Any,
    ) -> Any:
        """A target that is a function of arrays: the reference, or a registered one."""
        host = isinstance(library, arrays.Torch) and target.device == "cpu"
        if not host:
            results = kernel(self, *inputs, out=tuple(outs), **options)
            if target.device is None:
                return results
            results = results if isinstance(results, tuple) else (results,)
            return self._handed_back(results, outs, x)
        views = [None if a is None else library.to_numpy(a) for a in inputs]
        out_views = tuple(library.to_numpy(a) for a in outs)
        results = kernel(self, *views, out=out_views, **options)
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

    def _axis(self, channel_axis: Any) -> int | None:
        """The channel axis of a question; most ops know of none."""
        if channel_axis is not None:
            raise TypeError(f"{self.name}: there is no channel_axis, got {channel_axis!r}")
        return None

    def parameter_shapes(
        self, x_shape: Sequence[int], *, channel_axis: int | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Name and shape of each parameter and running statistic that a call on such an x takes.

        `channel_axis` is for ops with channels, and 1 by default.
        """
        axis = self._axis(channel_axis)
        x = ArraySpec.contiguous(tuple(x_shape), "float32")
        self._expected_shape("x", x, axis)
        names = [n for n in self.input_names if n not in self.like_x]
        return {name: self._expected_shape(name, x, axis) for name in names}

    def _hypothetical_call(
        self,
        dtype: Any,
        shape: Sequence[int],
        parameter_dtype: Any,
        without: Sequence[str],
        return_stats: bool,
        channel_axis: Any = None,
    ) -> Call:
        axis = self._axis(channel_axis)
        name = dtypes.name_of(dtype)
        x = ArraySpec.contiguous(tuple(shape), name)
        wanted = name if parameter_dtype is None else dtypes.name_of(parameter_dtype)
        inputs: dict[str, ArraySpec | None] = {}
        for argument in self.input_names:
            kind = name if argument in self.like_x else wanted
            if argument in STATISTICS and name in dtypes.FLOATS:
                kind = dtypes.accumulation(name)
            inputs[argument] = ArraySpec.contiguous(self._expected_shape(argument, x, axis), kind)
        for argument in without:
            if argument not in inputs or argument in self.required:
                raise errors.wrong_value(self.name, "without", "optional parameters", argument)
            inputs[argument] = None
        return self._call(inputs, return_stats, axis, Device("cuda"))

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
        channel_axis: int | None = None,
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
        channel_axis : int, optional
            For ops with channels: 1 (the default) or -1.

        Returns
        -------
        list of Launch
            Kernel name, grid, block, shared memory and the CUDA source as compiled. On a machine
            without a GPU: as for compute capability 9.0.
        """
        call = self._hypothetical_call(
            dtype, shape, parameter_dtype, without, return_stats, channel_axis
        )
        return list(self._plan(call).launches)

    def compile(
        self,
        dtype: Any,
        shape: Sequence[int],
        *,
        parameter_dtype: Any = None,
        without: Sequence[str] = (),
        channel_axis: int | None = None,
    ) -> None:
        """Build what a later call on such arrays needs, on the current device.

        Parameters as for `plan`. Row counts do not matter: one build serves all.
        """
        call = self._hypothetical_call(dtype, shape, parameter_dtype, without, False, channel_axis)
        self._plan(call).compile()

    def roofline(
        self,
        dtype: Any,
        shape: Sequence[int],
        *,
        parameter_dtype: Any = None,
        without: Sequence[str] = (),
        return_stats: bool = False,
        channel_axis: int | None = None,
    ) -> dict[str, int]:
        """Floating-point operations of a call, and the fewest bytes it moves.

        Every input is counted as read once, every output as written once; running statistics
        that are updated as both.
        """
        call = self._hypothetical_call(
            dtype, shape, parameter_dtype, without, return_stats, channel_axis
        )
        specs = [*call.inputs.values(), *call.outputs.values(), *call.statistics.values()]
        specs += [call.inputs[name] for name in call.mutated]
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
