"""How a command says that it cannot start. Without the options: processes that take none import it too."""

from __future__ import annotations

import sys
from typing import NoReturn


def one_line(text: str) -> str:
    """Write what is not printable, such as line ends and escape sequences from a file, as Python's escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def fail(command: str, message: str) -> NoReturn:
    """End with one line on standard error and exit status 1: for faults that the operator can fix."""
    print(f"{command}: {message}", file=sys.stderr)
    raise SystemExit(1)
