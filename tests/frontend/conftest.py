from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.frontend.harness import ClientConnection, FakeBackend, make_app


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def connect(backend: FakeBackend) -> AsyncIterator[Callable[..., ClientConnection]]:
    """Open connections, each to a new app over the backend."""
    async with contextlib.AsyncExitStack() as stack:

        def connect(**options: Any) -> ClientConnection:
            connection = ClientConnection(make_app(backend, **options))
            stack.push_async_callback(connection.end)
            return connection

        yield connect


@pytest.fixture
async def connection(connect: Callable[..., ClientConnection]) -> ClientConnection:
    return connect()
