"""The result of an examination."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    OK = "ok"
    NOTE = "note"
    """It works; something better is possible."""
    WARNING = "warning"
    """It works now, and may fail or be slow later."""
    ERROR = "error"
    """The server does not start, or cannot serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    """A noun, such as "C++ compiler"."""
    found: str
    remedy: str = ""
    """What the user can do. Every finding that is not OK has one."""

    def __post_init__(self) -> None:
        if self.level is not Level.OK and not self.remedy:
            raise ValueError(f"{self.subject} is {self.level} and has no remedy")
