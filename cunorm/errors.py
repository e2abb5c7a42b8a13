"""The wording of errors: the op, the argument, what was expected, what came."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def wrong_type(op: str, argument: str, expected: str, got: Any) -> TypeError:
    return TypeError(f"{op}: {argument} must be {expected}, got {type(got).__name__}")


def wrong_dtype(op: str, argument: str, allowed: Iterable[str], got: str) -> TypeError:
    return TypeError(f"{op}: {argument} must have dtype {_either(allowed)}, got {got}")


def dtype_mismatch(op: str, argument: str, allowed: Iterable[str], got: str) -> ValueError:
    return ValueError(f"{op}: {argument} must have dtype {_either(allowed)}, got {got}")


def wrong_shape(op: str, argument: str, expected: Any, got: Any) -> ValueError:
    return ValueError(f"{op}: {argument} must have shape {expected}, got {tuple(got)}")


def too_few(op: str, expected: str, shape: Any) -> ValueError:
    return ValueError(f"{op}: x must have {expected}, got shape {tuple(shape)}")


def wrong_device(op: str, argument: str, expected: Any, got: Any, like: str = "x") -> ValueError:
    return ValueError(f"{op}: {argument} must be on {expected} like {like}, got {got}")


def wrong_value(op: str, argument: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{op}: {argument} must be {expected}, got {got!r}")


def read_only(op: str, argument: str) -> ValueError:
    return ValueError(f"{op}: {argument} must be writable, got a read-only array")


def shared_elements(op: str, argument: str, strides: Any) -> ValueError:
    return ValueError(
        f"{op}: {argument} must be an array whose elements do not share memory, "
        f"got strides {strides}"
    )


def overlap(op: str, argument: str, other: str) -> ValueError:
    itself = "" if other.startswith("out") else f"{other} itself or "
    return ValueError(
        f"{op}: {argument} partly overlaps {other} in memory; pass {itself}memory of its own"
    )


def mutated_overlap(op: str, argument: str, other: str) -> ValueError:
    return ValueError(
        f"{op}: {argument} shares memory with {other}; it is updated in place and needs memory "
        f"of its own"
    )


def cannot_share(op: str, argument: str, library: str) -> ValueError:
    return ValueError(
        f"{op}: {argument} must be an array that {library} can write to where it lies, "
        f"got one that {library} would copy"
    )


def needs_grad(op: str, argument: str) -> ValueError:
    return ValueError(
        f"{op}: {argument} requires grad, and this call would lose its gradient; "
        f"pass {argument}.detach() or call under torch.no_grad()"
    )


def _either(names: Iterable[str]) -> str:
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} or {last}" if first else last
