"""Notices when a client hangs up, and ends the work for its request.

uvicorn reports a closed connection only through `receive`; `send` then returns silently. So as soon as a request's body
has been read, a task waits in `receive` for the disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from penstock.frontend.transport.asgi import Receive


class ClientGoneError(Exception):
    """The client closed the connection, so nobody is left to answer."""


class Abortable:
    """Work for one request that ends early when the client hangs up, or when `abort` is called."""

    def __init__(self, receive: Receive) -> None:
        self.ending: Exception | None = None
        """Why the work ended early: ClientGoneError, or what `abort` was given."""
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._on_abort: Callable[[], None] | None = None

    def abort(self, ending: Exception) -> None:
        """End the work for this reason. Only the first reason counts."""
        if self.ending is None:
            self.ending = ending
            if self._on_abort is not None:
                self._on_abort()

    def on_disconnect(self, on_abort: Callable[[], None]) -> None:
        """Call on_abort once the client hangs up or `abort` is called; at once if that has happened already.

        The body must have been read: the watcher would swallow it.
        """
        self._watch_for_disconnect()
        self._set_on_abort(on_abort)

    @contextlib.asynccontextmanager
    async def cancelled_on_disconnect(self) -> AsyncIterator[None]:
        """Cancel what is awaited inside when the client hangs up, and raise `ending`.

        For use after the body has been read and before `on_disconnect`.
        """
        async with self._cancelled_on_abort(timeout_s=None):
            self._watch_for_disconnect()
            yield

    async def wait_for(self, event: asyncio.Event, timeout_s: float) -> None:
        """Return when the event is set or the time is up.

        Raises `ending`. Use it after the body has been read.
        """
        with contextlib.suppress(TimeoutError):
            async with self._cancelled_on_abort(timeout_s):
                self._watch_for_disconnect()
                await event.wait()

    @contextlib.asynccontextmanager
    async def _cancelled_on_abort(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Raises TimeoutError when the time is up, and `ending` as soon as it is set."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                self._set_on_abort(lambda: None if limit.expired() else limit.reschedule(0.0))
                yield
        except TimeoutError:
            if self.ending is None:
                raise
        finally:
            self._on_abort = None
        if self.ending is not None:
            raise self.ending

    def _set_on_abort(self, on_abort: Callable[[], None]) -> None:
        self._on_abort = on_abort
        if self.ending is not None:
            on_abort()

    def _watch_for_disconnect(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.abort(ClientGoneError())

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
