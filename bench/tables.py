"""Launches by a table that is being tried, in place of the package's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cunorm.cuda.tables import Table
from cunorm.targets import registry


@contextmanager
def using(module: Any, table: Table) -> Iterator[None]:
    """Launches by `table` in place of ``module.TABLE``; plans that calls have made are dropped."""
    before = module.TABLE
    _put(module, table)
    try:
        yield
    finally:
        _put(module, before)


def _put(module: Any, table: Any) -> None:
    with registry.lock:
        module.TABLE = table
        registry.generation += 1
