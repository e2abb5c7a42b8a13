"""A table of launches as the text of the module that holds it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from cunorm.cuda.tables import Ladder, Manner, Step, Table

WIDTH = 100
_STEP = " " * 4
_START = "TABLE = Table("


def table_text(module: ModuleType, table: Table) -> str:
    """The text of the module with another table, as ruff would format it."""
    head, _, _ = Path(str(module.__file__)).read_text(encoding="utf-8").partition(_START)
    ladders = [_call("Ladder", _said(ladder), 2) for ladder in table.ladders]
    manners = [_call("Manner", _said(manner), 2) for manner in table.manners]
    return "\n".join(
        [
            f"{head}{_START}",
            f"{_STEP}ladders=(",
            *ladders,
            f"{_STEP}),",
            f"{_STEP}manners=(",
            *manners,
            f"{_STEP}),",
            ")\n",
        ]
    )


def _said(entry: Ladder | Manner) -> list[tuple[str, Any]]:
    """Fields that are not the defaults; what is long, last."""
    found = [
        (f.name, value) for f in fields(entry) if (value := getattr(entry, f.name)) != f.default
    ]
    return sorted(found, key=lambda pair: pair[0] == "steps")


def _call(name: str, said: Sequence[tuple[str, Any]], depth: int) -> str:
    lines = [f"{_STEP * depth}{name}("]
    for field, value in said:
        if field == "steps":
            lines += [f"{_STEP * (depth + 1)}steps=("]
            lines += [_step(step, depth + 2) for step in value]
            lines += [f"{_STEP * (depth + 1)}),"]
        else:
            lines.append(_line(f"{field}=", value, depth + 1))
    return "\n".join([*lines, f"{_STEP * depth}),"])


def _step(step: Step, depth: int) -> str:
    if step.cluster > 1:
        raise ValueError("a table has no rows that several CTAs share")
    numbers = f"{step.vectors}, {step.threads}"
    if not step.reason:
        return f"{_STEP * depth}Step({numbers}),"
    line = f"{_STEP * depth}Step({numbers}, {_literal(step.reason)}),"
    if len(line) <= WIDTH:
        return line
    inside = f"{_STEP * (depth + 1)}"
    return "\n".join(
        [
            f"{_STEP * depth}Step(",
            f"{inside}{step.vectors},",
            f"{inside}{step.threads},",
            _line("", step.reason, depth + 1),
            f"{_STEP * depth}),",
        ]
    )


def _line(before: str, value: Any, depth: int) -> str:
    """A field, over several lines where a text is long."""
    indent = _STEP * depth
    text = _literal(value) if isinstance(value, str) else _plain(value)
    if len(indent + before + text) + 1 <= WIDTH or not isinstance(value, str):
        return f"{indent}{before}{text},"
    inside = indent + (_STEP if before else "")
    room = WIDTH - len(inside) - 4  # quotes, a space, a comma
    parts = textwrap.wrap(_escaped(value), room, break_long_words=False, break_on_hyphens=False)
    lines = [f'{inside}"{part} "' for part in parts[:-1]] + [f'{inside}"{parts[-1]}"']
    pieces = "\n".join(lines)
    return f"{indent}{before}(\n{pieces}\n{indent})," if before else f"{pieces},"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _literal(text: str) -> str:
    return f'"{_escaped(text)}"'


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        parts = [_plain(v) for v in value]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    return _literal(value) if isinstance(value, str) else repr(value)
