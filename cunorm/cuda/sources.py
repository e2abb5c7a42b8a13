"""CUDA sources as one text: CuPy's disk cache hashes the text, not the files it includes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'^#include "([^"]+)"$')


@cache
def source_dir() -> Path:
    """Where the .cu files are: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "cuda_src", package.parent / "cuda_src"):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"cunorm's CUDA sources are missing: no cuda_src beside {package}")


@cache
def source(name: str) -> str:
    """The text of ``cuda_src/<name>.cu`` with every quoted include put in place once.

    ``#line`` makes compiler messages name the file that a line came from.
    """
    seen: set[str] = set()

    def inlined(file: str) -> list[str]:
        seen.add(file)
        lines = [f'#line 1 "cuda_src/{file}"']
        text = (source_dir() / file).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            include = _INCLUDE.match(line)
            if include is None:
                if line != "#pragma once":
                    lines.append(line)
                else:
                    lines.append("")
            elif include[1] not in seen:
                lines += inlined(include[1])
                lines.append(f'#line {number + 1} "cuda_src/{file}"')
            else:
                lines.append("")
        return lines

    return "\n".join(inlined(f"{name}.cu")) + "\n"
