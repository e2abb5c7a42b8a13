"""``python -m cunorm``: the self-check."""

from __future__ import annotations

import sys

from cunorm.selfcheck import main

if __name__ == "__main__":
    sys.exit(main())
