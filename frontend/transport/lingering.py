"""An answer whose events a client can read again over another connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.shm.client import BackendClient


@dataclass(slots=True)
class LingeringAnswer:
    """An answer to read again. It belongs to one exchange.

    The same path, body, id, time and seed give the same events.
    """

    linger_s: int
    path: str
    """The path of the endpoint that answers."""
    body: bytes
    begun: tuple[str, int] | None = None
    """The answer's id, which names the stream, and the second since 1970 when it began; None until it begins."""
    seed: int | None = None
    """The seed for a body without one; None until the answer begins."""
    num_received: int = 0
    """Events that the client has received over earlier connections."""
    backend: BackendClient | None = None
    """The backend that has kept the stream; None for a new one."""

    @property
    def is_resumed(self) -> bool:
        return self.backend is not None
