"""Viewers of Penstock's engine page: they read its stream of events, and do nothing with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.http_client import ConnectionBroken, HungUp

if TYPE_CHECKING:
    from penstock.tools.bench.load_generator.http_client import ClientConnection, HttpClient

_PATH = "/engine/events"


@dataclass(slots=True)
class EngineViewer:
    connection: ClientConnection
    num_bytes: int = 0
    first: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done after the first event."""

    def see(self, _at_s: float, payload: bytes) -> None:
        self.num_bytes += len(payload)
        if not self.first.done():
            self.first.set_result(None)

    async def watch(self, request: bytes) -> None:
        """Read until the connection is hung up. Raises BenchError if the server ends it."""
        try:
            reply = await self.connection.exchange(request, self.see)
        except HungUp:
            return
        except ConnectionBroken as error:
            raise BenchError(f"{_PATH}: {error}") from None
        raise BenchError(f"{_PATH}: the server ended the stream with status {reply.status}")


@asynccontextmanager
async def engine_viewers(http: HttpClient, count: int) -> AsyncIterator[list[EngineViewer]]:
    """Viewers that have their first event, and stay while the context lasts. Raises BenchError."""
    viewers = [EngineViewer(await http.connect()) for _ in range(count)]
    watching = [asyncio.create_task(viewer.watch(http.encode_get(_PATH))) for viewer in viewers]
    try:
        for viewer, task in zip(viewers, watching, strict=True):
            await asyncio.wait([viewer.first, task], return_when=asyncio.FIRST_COMPLETED)
        if not any(task.done() for task in watching):
            yield viewers
    finally:
        for viewer in viewers:
            viewer.connection.hang_up()
        await asyncio.gather(*watching)  # the error of one that has ended
