"""Op objects by their parameters, made once for all calls of the functions."""

from __future__ import annotations

from typing import Any

from cunorm.ops import Op
from cunorm.ops.checks import checked_shape

_OPS: dict[Any, Any] = {}
_MOST_OPS = 1024


def op_of(kind: type[Op], target: str | None, *parameters: Any) -> Any:
    """The op object of these parameters, made once."""
    if parameters and type(parameters[0]) in (
        tuple,
        list,
    ):  # (4, 6.0) equals (4, 6) until it is looked at
        parameters = (checked_shape(kind.name, parameters[0]), *parameters[1:])
    key = (kind, target, parameters, *map(type, parameters))  # and 6.0 equals 6
    try:
        op = _OPS.get(key)
    except TypeError:  # what cannot be looked up will be refused
        return kind(*parameters, target=target)
    if op is None:
        op = kind(*parameters, target=target)
        if len(_OPS) >= _MOST_OPS:
            _OPS.clear()
        _OPS[key] = op
    return op
