"""How far a long command is."""

from __future__ import annotations

import sys


class Progress:
    """On a terminal in one line, elsewhere now and then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._live = sys.stdout.isatty()

    def show(self, done: int) -> None:
        if self._live:
            print(f"\r{done} of {self._total}", end="", flush=True)
        elif done % 50 == 0:
            print(f"{done} of {self._total}", flush=True)

    def tell(self, text: str) -> None:
        print(f"\r{text}" if self._live else text, flush=True)
