"""How a command says that it cannot start. Without the options: processes that take none import it too."""

from __future__ import annotations

import sys
from typing import NoReturn

USAGE_STATUS = 2
"""Exit status of a command that is badly written."""


def fail(command: str, message: str, status: int = 1) -> NoReturn:
    """End with one line on standard error: for faults that the operator can fix."""
    print(f"{command}: {message}", file=sys.stderr)
    raise SystemExit(status)
