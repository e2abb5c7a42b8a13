"""Op objects by their parameters, made once for all calls of the functions.

The functions run them by `Op._run`, as the objects' own ``__call__`` does: a call of an object by
keywords costs 0.3 us.
"""

from __future__ import annotations

from typing import Any

_OPS: dict[Any, Any] = {}
_MOST_OPS = 1024
_SEQUENCES = (tuple, list)


def op_of(*key: Any) -> Any:
    """The op object of a class, a target, parameters and the type of each: 6.0 equals 6."""
    try:
        op = _OPS.get(key)
    except TypeError:  # a list, or what will be refused
        op = None
    return _made_once(key) if op is None else op


def _made_once(key: tuple[Any, ...]) -> Any:
    exact = _exact(key) if len(key) > 2 and type(key[2]) in _SEQUENCES else key
    try:
        op = _OPS.get(exact)
    except TypeError:  # what cannot be looked up will be refused
        return _make(key)
    if op is None:
        op = _make(key)
        if len(_OPS) >= _MOST_OPS:
            _OPS.clear()
        _OPS[exact] = op
    return op


def _exact(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key with the types of its shape's sizes: (4, 6.0) equals (4, 6), too."""
    types = map(type, key[2])
    if type(key[2]) is list:
        key = (*key[:2], tuple(key[2]), *key[3:])
    return (*key, *types)


def _make(key: tuple[Any, ...]) -> Any:
    kind, target, *rest = key
    return kind(*rest[: len(rest) // 2], target=target)
