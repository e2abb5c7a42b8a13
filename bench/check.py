"""Whether what a peer returned is right, before it is timed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bench.workloads import Workload
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
    names = workload.spec.outputs
    if len(outputs) != len(names):
        return f"{len(names)} outputs expected, {len(outputs)} came"
    for name, output in zip(names, outputs, strict=True):
        if output.shape != workload.shape:
            return f"{name} has shape {output.shape}"
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


def _row_length(workload: Workload) -> dict[str, int]:
    """The argument that only `layer_norm` and `rms_norm` take."""
    plain = workload.op in ("layer_norm", "rms_norm")
    return {"normalized_shape": workload.shape[-1]} if plain else {}


def _strict(workload: Workload, given: dict[str, Any], found: list[Any]) -> str:
    deviations = precision.forward_deviation(
        workload.op, found, given, eps=workload.spec.eps, **_row_length(workload)
    )
    for name, deviation in deviations.items():
        if not deviation.ratio <= 1:
            return f"{name} is wrong: {deviation.ulps:.3g} ulp, {deviation.ratio:.3g} of the bound"
    return ""


def _loose(workload: Workload, given: dict[str, Any], found: list[Any]) -> str:
    function = reference.FORWARD[workload.op]
    expected = function(**given, eps=workload.spec.eps, dtype=np.float64, **_row_length(workload))
    several = expected if isinstance(expected, tuple) else (expected,)
    for name, value, actual in zip(workload.spec.outputs, several, found, strict=True):
        right = value.astype(np.float64)
        error = np.linalg.norm(actual.astype(np.float64) - right) / np.linalg.norm(right)
        if not error <= PEER_ERROR:
            return f"{name} is wrong: relative error {error:.3g}"
    return ""
