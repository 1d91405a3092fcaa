"""The types of ASGI, as uvicorn calls an application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

Scope = dict[str, Any]
AsgiMessage = dict[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

ABORT_EXTENSION = "penstock.abort"
"""Key in the scope's extensions: a function that drops the connection and its unsent data."""
WORKING_EXTENSION = "penstock.working"
"""Key in a WebSocket's extensions: a function that tells whether the application works for the connection."""
PART_EXTENSION = "penstock.part"
"""Key in the scope's extensions: a `PartWriter`."""


class PartWriter(Protocol):
    """Writes parts of an answer whose length is open, without a coroutine."""

    def takes_part(self) -> bool:
        """Whether the answer has begun and the client reads fast enough."""

    def write_part(self, body: bytes) -> None:
        """Call only after `takes_part` is true, in the same turn of the event loop. body is not empty."""
