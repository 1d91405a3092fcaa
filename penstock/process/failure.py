"""How a command says that it cannot start. Without the options: processes that take none import it too."""

from __future__ import annotations

import sys
from typing import NoReturn


def fail(command: str, message: str) -> NoReturn:
    """End with one line on standard error and exit status 1: for faults that the operator can fix."""
    print(f"{command}: {message}", file=sys.stderr)
    raise SystemExit(1)
