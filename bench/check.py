"""Whether what a peer returned is right, before it is timed."""

from __future__ import annotations

import math
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
    """Compare the edge rows of `outputs` with the reference: what is wrong, or ``""``.

    `strict` asks for the error bound of `cunorm.precision`, element by element; otherwise the
    outputs have to be near in norm.
    """
    names = (*workload.spec.outputs, *workload.spec.sums)
    if len(outputs) != len(names):
        return f"{len(names)} outputs expected, {len(outputs)} came"
    for name, output in zip(names, outputs, strict=True):
        if output.shape != (workload.shape[1:2] if name in workload.spec.sums else workload.shape):
            return f"{name} has shape {output.shape}"
    if workload.op in CHANNEL_OPS:
        return _check_channels(cp, workload, inputs, outputs, strict)
    columns = workload.shape[-1]
    rows = math.prod(workload.shape[:-1])
    judge = _strict if strict else _loose
    for part in edge_rows(rows, columns):
        given = {}
        for operand in workload.spec.operands:
            array = inputs[operand.name]
            full = operand.extent == "full"
            given[operand.name] = cp.asnumpy(array.reshape(rows, columns)[part] if full else array)
        found = [cp.asnumpy(output.reshape(rows, columns)[part]) for output in outputs]
        wrong = judge(workload, given, found)
        if wrong:
            return wrong
    return ""


def _check_channels(
    cp: Any, workload: Workload, inputs: dict[str, Any], outputs: tuple[Any, ...], strict: bool
) -> str:
    """The first and the last channels, or groups of channels: of one sample where each sample
    has its own statistics.
    """
    judge = _strict if strict else _loose
    channels = workload.shape[1]
    width = channels // workload.groups if workload.groups else 1
    each_sample = workload.op in ("group_norm", "instance_norm")
    ends = [(0, 0), (workload.shape[0] - 1, channels - width)]
    for sample, start in ends:
        samples = slice(sample, sample + 1) if each_sample else slice(None)
        part = slice(start, start + width)

        def cut(array: Any, at: tuple[slice, slice] = (samples, part)) -> Any:
            piece = array[at] if array.ndim > 1 else array[at[1]]
            return cp.asnumpy(piece)

        given = {name: cut(array) for name, array in inputs.items()}
        wrong = judge(workload, given, [cut(output) for output in outputs])
        if wrong:
            return wrong
    return ""


def _options(workload: Workload) -> dict[str, Any]:
    """Arguments of the reference for the part that is compared."""
    options = workload.options | _row_length(workload)
    return {**options, "num_groups": 1} if workload.groups else options


def _row_length(workload: Workload) -> dict[str, int]:
    """The argument that only `layer_norm` and `rms_norm` take."""
    plain = workload.op in ("layer_norm", "rms_norm")
    return {"normalized_shape": workload.shape[-1]} if plain else {}


def _strict(workload: Workload, given: dict[str, Any], found: list[Any]) -> str:
    backward = workload.function in reference.BACKWARD
    judge = precision.backward_deviation if backward else precision.forward_deviation
    deviations = judge(workload.function, found, given, **_options(workload))
    for name, deviation in deviations.items():
        if not deviation.ratio <= 1:
            return f"{name} is wrong: {deviation.ulps:.3g} ulp, {deviation.ratio:.3g} of the bound"
    return ""


def _loose(workload: Workload, given: dict[str, Any], found: list[Any]) -> str:
    function = (reference.FORWARD | reference.BACKWARD)[workload.function]
    running = {n: np.array(given[n], np.float64) for n in given if n.startswith("running")}
    expected = function(**{**given, **running}, **_options(workload), dtype=np.float64)
    several = expected if isinstance(expected, tuple) else (expected,)
    names = (*workload.spec.outputs, *workload.spec.sums)
    for name, value, actual in zip(names, several, found, strict=True):
        right = value.astype(np.float64)
        error = np.linalg.norm(actual.astype(np.float64) - right) / np.linalg.norm(right)
        if not error <= PEER_ERROR:
            return f"{name} is wrong: relative error {error:.3g}"
    return ""
