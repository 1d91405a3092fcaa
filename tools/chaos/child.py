"""A process that the run has started: the server, a frontend or a proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.tools import processes
from penstock.tools.chaos.errors import ChaosError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Child(processes.Child):
    """A process in a session of its own, so that all of its descendants can be found."""

    failure = ChaosError

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """log receives its output, after what is there."""
        self._path = log
        with log.open("ab") as file:
            super().__init__(name, argv, environment, file, has_session=True)

    def log_text(self) -> str:
        return self._path.read_text(errors="replace")
