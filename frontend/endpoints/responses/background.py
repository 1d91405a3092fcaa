"""Responses that are generated whether or not a client listens."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.endpoints.responses.event_log import EventLog
from penstock.frontend.transport.disconnect import ClientGoneError
from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later
from penstock.frontend.transport.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from penstock.frontend.endpoints.responses.pending_response import PendingResponse
    from penstock.frontend.formats.responses import ResponsesFormat
    from penstock.frontend.transport.asgi import AsgiMessage, Receive, Send
    from penstock.frontend.transport.open_exchanges import OpenExchanges

logger = logging.getLogger("penstock.responses")

MAX_IN_BACKGROUND = 64
"""Responses of one worker that run in the background at a time."""
MAX_STREAMED_IN_BACKGROUND = 8
"""Background responses at a time whose events are kept; each may take MAX_LOG_BYTES."""
MAX_LOG_BYTES = 8 << 20
"""Events of one response that is both streamed and in the background."""


class _BackgroundExchange(Exchange):
    """A copy of the client's request that is not tied to the client's connection."""

    def __init__(self, client: Exchange, receive: Receive, send: Send, on_submitted: Callable[[], None]) -> None:
        super().__init__({**client.scope, "extensions": {}}, receive, send)
        self.tenant, self.received_s, self.request_id = client.tenant, client.received_s, client.request_id
        self.key_name, self.account = client.key_name, client.account
        if self.account is not None:
            self.account.hold()
        self._on_submitted = on_submitted

    def on_disconnect(self, on_abort: Callable[[], None]) -> None:
        """Called by the endpoint right after the request has been submitted, which is why it is noted here."""
        super().on_disconnect(on_abort)
        self._on_submitted()


class BackgroundRun:
    """Runs one response over an exchange of its own. It is that exchange's client: it takes the events, and hangs up
    when the run is cancelled."""

    def __init__(self, client: Exchange, pending: PendingResponse, *, keeps_events: bool) -> None:
        self.exchange = _BackgroundExchange(client, self._receive, self._send, self._note_submission)
        self.pending = pending
        self.on_submitted: Callable[[], None] | None = None
        self.is_submitted = False
        self.begun = asyncio.Event()
        """Set when the run has been submitted, or has failed before that; then `error` says why."""
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self.events = EventLog() if keeps_events else None
        self._is_cancelled = asyncio.Event()

    @property
    def response_id(self) -> str:
        return self._format.response_id

    @property
    def _format(self) -> ResponsesFormat:
        if self.pending.format is None:
            raise RuntimeError("a run has a format once it has been submitted")
        return self.pending.format

    def snapshot(self) -> bytes:
        """Return the response object as it stands, as JSON."""
        return msgspec.json.encode(self._format.snapshot())

    async def run(self, work: Coroutine[None, None, None]) -> None:
        """Run the work to its end; `error` is what it raised."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - `conclude` and the creating request report it
            self.error = error
        finally:
            self.exchange.finish()
            self.begun.set()

    def conclude(self) -> None:
        """Add the error's event, if there was an error, and keep the answer."""
        answer = self._format
        match self.error:
            case None:
                pass
            case ClientGoneError():
                answer.cancel()
            case ApiError() as error:
                self._take(answer.failure(error))
            case _:
                self._take(answer.failure(ApiError(ErrorKind.INTERNAL, "an internal error ended the answer")))
        if self.events is not None:
            self.events.end()
        self.pending.keep(answer, None if self.events is None else self.events.events)
        self.ended.set()

    def cancel(self) -> None:
        self._is_cancelled.set()
        self.exchange.abort(ClientGoneError())

    def _note_submission(self) -> None:
        self.is_submitted = True
        if self.on_submitted is not None:
            self.on_submitted()
        self.begun.set()

    async def _receive(self) -> AsgiMessage:
        await self._is_cancelled.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.body":
            self._take(message["body"])

    def _take(self, data: bytes) -> None:
        if self.events is None or data.startswith(b":"):
            return
        self.events.add(data)
        if self.events.num_bytes > MAX_LOG_BYTES:
            self.exchange.abort(_too_long())


class BackgroundRuns:
    """The responses that run in the background of one worker."""

    def __init__(self, open_exchanges: OpenExchanges) -> None:
        """A run's exchange is one of the open ones: it counts, is drained and is ended with them."""
        self._open_exchanges = open_exchanges
        self._runs: dict[str, BackgroundRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def check_capacity(self, *, is_streamed: bool) -> None:
        """Raises ApiError when no further run may start."""
        num_streamed = sum(run.events is not None for run in self._runs.values())
        if len(self._tasks) >= MAX_IN_BACKGROUND:
            message = f"{MAX_IN_BACKGROUND} responses run in the background already, the limit; retry later"
            raise retry_later(ErrorKind.OVERLOADED, message, 1)
        if is_streamed and num_streamed >= MAX_STREAMED_IN_BACKGROUND:
            message = f"{MAX_STREAMED_IN_BACKGROUND} responses are streamed in the background already, the limit"
            raise retry_later(ErrorKind.OVERLOADED, f"{message}; retry later or leave stream out", 1)

    async def start(self, run: BackgroundRun, work: Coroutine[None, None, None]) -> None:
        """Start the run. Returns when it has been submitted; raises what it failed with before that."""
        task = asyncio.create_task(self._run(run, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await run.begun.wait()
        if not run.is_submitted:
            raise run.error or ApiError(ErrorKind.INTERNAL, "an internal error occurred")

    def find(self, tenant: bytes, response_id: str) -> BackgroundRun | None:
        """Return the tenant's run with this id; None when it does not run."""
        run = self._runs.get(response_id)
        return run if run is not None and run.exchange.tenant == tenant else None

    async def cancel(self, tenant: bytes, response_id: str) -> None:
        """Cancel the run, if it runs. Returns when it has ended."""
        run = self.find(tenant, response_id)
        if run is not None:
            run.cancel()
            await run.ended.wait()

    async def _run(self, run: BackgroundRun, work: Coroutine[None, None, None]) -> None:
        self._open_exchanges.add(run.exchange)
        run.on_submitted = lambda: self._runs.__setitem__(run.response_id, run)
        try:
            await run.run(work)
            if run.error is not None and not isinstance(run.error, ApiError | ClientGoneError):
                logger.error("%s failed in the background", run.exchange.request_id, exc_info=run.error)
            if run.is_submitted:
                run.conclude()
        finally:
            self._open_exchanges.discard(run.exchange)
            if run.is_submitted:
                del self._runs[run.response_id]


def _too_long() -> ApiError:
    message = (
        f"stream: the events of a background response may take {MAX_LOG_BYTES} bytes; leave stream out for a longer one"
    )
    return ApiError(ErrorKind.INVALID_VALUE, message, param="stream")
