"""The backend's own counters, read while it runs. They are in shared memory, so reading costs the backend nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.shm.client import BackendClient
from penstock.tools.bench.errors import BenchError

if TYPE_CHECKING:
    from penstock.tools.bench.harness.server import BenchServer

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Counters:
    """A client of the backend that sends no requests."""

    client: BackendClient
    max_context_tokens: int

    def read(self) -> dict[str, int]:
        """Every field of `penstock.shm.memory.board.BackendBoard`. Raises BenchError if the backend has died."""
        if (counters := self.client.backend_counters) is None:
            raise BenchError("the backend died during the run")
        return counters

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """Return how much each counter has grown."""
        now = self.read()
        return {name: now[name] - value for name, value in before.items()}


@contextlib.asynccontextmanager
async def backend_counters(server: BenchServer) -> AsyncIterator[Counters]:
    """Raises BenchError if there is no connection within 10 s."""
    client = BackendClient(server.socket)
    await client.start()
    try:
        yield Counters(client, await _max_context_tokens(client))
    finally:
        await client.close()


async def _max_context_tokens(client: BackendClient) -> int:
    """Wait for the connection; return the context length of the model. Raises BenchError."""
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            while client.backend_counters is None or client.model is None:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.005)
            return client.model.max_context_tokens
    except TimeoutError:
        raise BenchError("the backend's counters cannot be read: no connection to its socket") from None
