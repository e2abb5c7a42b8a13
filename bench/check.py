"""Whether what a peer returned is right, before it is timed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.workloads import CHANNEL_OPS, Workload
from cunorm import precision, reference

#: About so many elements are compared at each end of the output.
EDGE_ELEMENTS = 1 << 18
#: ``||y - reference|| / ||reference||`` allowed to a peer that is not cunorm: several roundings
#: to bfloat16 stay well below, a wrong formula does not.
PEER_ERROR = 1e-2
_SCAN = 1 << 26


def edge_rows(rows: int, columns: int, elements: int = EDGE_ELEMENTS) -> list[slice]:
    """The first and the last rows, or all of them where there are few."""
    count = max(1, elements // max(columns, 1))
    if 2 * count >= rows:
        return [slice(0, rows)]
    return [slice(0, count), slice(rows - count, rows)]


def check_written(cp: Any, outputs: tuple[Any, ...]) -> str:
    """Say which of the poisoned `outputs` still hold poison, or ``""``."""
    for number, output in enumerate(outputs):
        bits = output.reshape(-1).view(f"u{output.dtype.itemsize}")
        poison = bits.dtype.type(np.iinfo(bits.dtype).max)
        for start in range(0, bits.size, _SCAN):
            if bool((bits[start : start + _SCAN] == poison).any()):
                return f"output {number} was not written in full"
    return ""


def check_outputs(
    cp: Any,
    workload: Workload,
    inputs: dict[str, Any],
    outputs: tuple[Any, ...],
    *,
    strict: bool,
) -> str:
    """Compare the edges of `outputs` with the reference: what is wrong, or ``""``.

    `strict` asks for the error bound of `cunorm.precision`, element by element; otherwise the
    outputs have to be near in norm.
    """
    names = (*workload.spec.outputs, *workload.spec.sums)
    if len(outputs) != len(names):
        return f"{len(names)} outputs expected, {len(outputs)} came"
    for name, output in zip(names, outputs, strict=True):
        if output.shape != (workload.sum_shape if name in workload.spec.sums else workload.shape):
            return f"{name} has shape {output.shape}"
    judge = _strict if strict else _loose
    parts = _channel_parts if workload.op in CHANNEL_OPS else _row_parts
    for given, found in parts(cp, workload, inputs, outputs):
        wrong = judge(workload, given, found)
        if wrong:
            return wrong
    return ""


Part = tuple[dict[str, Any], list[Any]]  # inputs by name; outputs, None for what it cannot judge


def _row_parts(
    cp: Any, workload: Workload, inputs: dict[str, Any], outputs: tuple[Any, ...]
) -> Iterator[Part]:
    """The first and the last rows; of sums over all rows, the first and the last columns."""
    columns, sums = workload.shape[-1], len(workload.spec.sums)
    rows = math.prod(workload.shape[:-1])
    extents = {operand.name: operand.extent for operand in workload.spec.operands}
    full = outputs[: len(outputs) - sums]
    for part in edge_rows(rows, columns):
        given = {}
        for name, array in inputs.items():
            if extents[name] == "full":
                array = array.reshape(rows, columns)[part]
            elif extents[name] == "rows":
                array = array.reshape(rows)[part]
            given[name] = cp.asnumpy(array)
        found = [cp.asnumpy(output.reshape(rows, columns)[part]) for output in full]
        yield given, found + [None] * sums
    if not sums:
        return
    for part in edge_rows(columns, rows):
        given = {}
        for name, array in inputs.items():
            if extents[name] == "full":
                array = array.reshape(rows, columns)
            given[name] = cp.asnumpy(
                array.reshape(rows) if extents[name] == "rows" else array[..., part]
            )
        found = [cp.asnumpy(output[part]) for output in outputs[len(full) :]]
        yield given, [None] * len(full) + found


def _channel_parts(
    cp: Any, workload: Workload, inputs: dict[str, Any], outputs: tuple[Any, ...]
) -> Iterator[Part]:
    """The first and the last channels, or groups of channels: of one sample where each sample
    has its own statistics and nothing is summed over all of them.
    """
    channels = workload.shape[1]
    width = channels // workload.groups if workload.groups else 1
    each_sample = workload.op in ("group_norm", "instance_norm")
    extents = {operand.name: operand.extent for operand in workload.spec.operands}
    for sample, start in [(0, 0), (workload.shape[0] - 1, channels - width)]:
        samples = slice(sample, sample + 1) if each_sample else slice(None)
        part = slice(start, start + width)
        given = {}
        for name, array in inputs.items():
            if extents[name] == "samples":
                array = array[:, start // width : start // width + 1]
            else:
                array = array[samples, part] if array.ndim > 1 else array[part]
            given[name] = cp.asnumpy(array)
        found = [o[samples, part] if o.ndim > 1 else o[part] for o in outputs]
        yield given, [cp.asnumpy(output) for output in found]


def _options(workload: Workload, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the reference for the part that is compared."""
    options = workload.options
    if "normalized_shape" in options:
        options["normalized_shape"] = given["x"].shape[-1]
    return {**options, "num_groups": 1} if workload.groups else options


def _strict(workload: Workload, given: dict[str, Any], found: list[Any]) -> str:
    backward = workload.function in reference.BACKWARD
    judge = precision.backward_deviation if backward else precision.forward_deviation
    deviations = judge(workload.function, found, given, **_options(workload, given))
    for name, deviation in deviations.items():
        if not deviation.ratio <= 1:
            return f"{name} is wrong: {deviation.ulps:.3g} ulp, {deviation.ratio:.3g} of the bound"
    return ""


def _loose(workload: Workload, given: dict[str, Any], found: list[Any]) -> str:
    function = (reference.FORWARD | reference.BACKWARD)[workload.function]
    running = {n: np.array(given[n], np.float64) for n in given if n.startswith("running")}
    expected = function(**{**given, **running}, **_options(workload, given), dtype=np.float64)
    several = expected if isinstance(expected, tuple) else (expected,)
    names = (*workload.spec.outputs, *workload.spec.sums)
    for name, value, actual in zip(names, several, found, strict=True):
        if actual is None:
            continue
        right = value.astype(np.float64)
        error = np.linalg.norm(actual.astype(np.float64) - right) / np.linalg.norm(right)
        if not error <= PEER_ERROR:
            return f"{name} is wrong: relative error {error:.3g}"
    return ""
