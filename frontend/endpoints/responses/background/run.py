"""One response that is generated whether or not a client listens."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine

import msgspec

from penstock.frontend.endpoints.responses.background.event_log import EventLog
from penstock.frontend.endpoints.responses.background_places import (
    MAX_ANSWER_BYTES,
    BackgroundClaim,
    is_too_long,
    too_long,
)
from penstock.frontend.endpoints.responses.pending_response import PendingResponse
from penstock.frontend.endpoints.responses.storage.orphans import KeptRun, TakenOver
from penstock.frontend.endpoints.responses.storage.store import ResponseStore
from penstock.frontend.formats.responses import ResponsesFormat
from penstock.frontend.transport.asgi import AsgiMessage, Receive, Send
from penstock.frontend.transport.disconnect import ClientGoneError
from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.frontend.transport.exchange import Exchange

_STORES_AGAIN_AFTER_S = 1.0
_PASSING_KINDS = (ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE, ErrorKind.SHUTTING_DOWN)
"""A response that was taken over waits until these conditions end: it was admitted before."""
_INTERNAL = "an internal error ended the answer"
_DIFFERS = (
    "the worker that generated this response ended, and the next one generated another answer than the events that had "
    "been sent. Send the request again"
)


class PutBackError(Exception):
    """This worker shuts down and leaves the response to another one."""


class _BackgroundExchange(Exchange):
    """A copy of the client's request that is not tied to the client's connection."""

    def __init__(
        self,
        client: Exchange,
        receive: Receive,
        send: Send,
        on_submitted: Callable[[], None],
        can_move: Callable[[], bool],
    ) -> None:
        super().__init__({**client.scope, "extensions": {}}, receive, send)
        self.tenant, self.received_s, self.request_id = client.tenant, client.received_s, client.request_id
        self.payer, self.weight = client.payer, client.weight
        self.key_name, self.claim = client.key_name, client.claim
        if self.claim is not None:
            self.claim.share()
        # No keep-alive comment before the answer: after one, a full queue could no longer put the response back.
        self.last_sent_s = math.inf
        self._on_submitted = on_submitted
        self._can_move = can_move

    def abort(self, ending: Exception) -> None:
        is_shutdown = isinstance(ending, ApiError) and ending.kind is ErrorKind.SHUTTING_DOWN
        super().abort(PutBackError() if is_shutdown and self._can_move() else ending)

    def on_disconnect(self, on_abort: Callable[[], None]) -> None:
        """Called by the endpoint right after it has submitted the request, so the submission is noted here."""
        super().on_disconnect(on_abort)
        self._on_submitted()


class BackgroundRun:
    """Runs one response over an exchange of its own.

    The run acts as that exchange's client: it takes the events, and hangs up when the run is cancelled.
    """

    def __init__(
        self,
        client: Exchange,
        pending: PendingResponse,
        store: ResponseStore,
        claim: BackgroundClaim,
        *,
        request: bytes = b"",
        earlier: TakenOver | None = None,
    ) -> None:
        """request lets another worker run it again. earlier is the state that a worker left when it ended."""
        self.exchange = _BackgroundExchange(
            client, self._receive, self._send, self._note_submission, lambda: self.can_move
        )
        self.pending = pending
        self.claim = claim
        self.on_submitted: Callable[[], None] | None = None
        self.is_submitted = False
        self.begun = asyncio.Event()
        """Set when the run has been submitted, or has failed before that; then `error` says why."""
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self.events = EventLog(() if earlier is None else earlier.events) if claim.is_streamed else None
        self.earlier = earlier
        self.is_dropped = False
        """Whether nothing of it is to be stored: the client that made it was refused."""
        self._is_cancelled = asyncio.Event()
        # Stored so far
        self._store = store
        self._store_lock = asyncio.Lock()
        self._request = request
        self._is_begun = earlier is not None
        self._is_stored = False
        self._num_stored_events = 0 if earlier is None else len(earlier.events)
        self._stored_version = 0
        self._max_body_bytes = 0 if earlier is None else len(earlier.body) + MAX_ANSWER_BYTES

    @property
    def can_move(self) -> bool:
        """Whether another worker, or the next start of the server, can run it. An unsubmitted request is refused
        instead."""
        return self._store.is_shared and (self.is_submitted or self.earlier is not None)

    @property
    def response_id(self) -> str:
        return self._format.response_id if self.earlier is None else self.earlier.response_id

    @property
    def _format(self) -> ResponsesFormat:
        if self.pending.format is None:
            raise RuntimeError("a run has a format once it has been submitted")
        return self.pending.format

    def snapshot(self) -> bytes:
        """Return the response object in its present state, as JSON."""
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

    async def conclude(self) -> None:
        """Add the error's event, if there was an error, and store the answer if that is not done."""
        last = b""
        if self.is_submitted and not self._is_to_wait:
            match self.error:
                case None:
                    pass
                case ClientGoneError():
                    self._format.cancel()
                case ApiError() as error:
                    last = self._format.failure(error)
                case _:
                    last = self._format.failure(ApiError(ErrorKind.INTERNAL, _INTERNAL))
        await self.settle(last)
        self._take(last)
        if self.events is not None:
            self.events.end(goes_on_elsewhere=self._is_to_wait)

    @property
    def _is_to_wait(self) -> bool:
        """Whether it waits for another worker: this one shuts down, or has no place for the response that
        it took over."""
        if isinstance(self.error, PutBackError):
            return True
        is_refused = isinstance(self.error, ApiError) and self.error.kind in _PASSING_KINDS
        return self.earlier is not None and is_refused and not (self.is_submitted and self._format.num_events)

    @property
    def _is_behind(self) -> bool:
        """Whether it was taken over and has not reached the point that the earlier run had reached."""
        return self.earlier is not None and (
            not self.is_submitted or (self.events is not None and self.events.num_to_repeat > 0)
        )

    async def begin(self) -> None:
        """Store that the response runs. Raises ApiError."""
        async with self._store_lock:
            await self._begin()

    async def _begin(self) -> None:
        if not self._is_begun:
            begun = self.pending.begun(self._format)
            self._max_body_bytes = len(begun.body) + MAX_ANSWER_BYTES
            kept = KeptRun(self.claim, self._request) if self._store.is_shared else None
            await self._store.begin(self.exchange.tenant, begun, kept)
            self._is_begun = True

    async def publish(self, *, with_body: bool) -> None:
        """Store what is new, for other workers. Cancel the run if one of them asked for that. Raises ApiError."""
        async with self._store_lock:
            if self._is_begun and not self._is_stored:
                await self._publish(with_body=with_body)

    async def _publish(self, *, with_body: bool) -> None:
        if not self.is_submitted:
            return
        version = self._format.num_events
        is_new = version != self._stored_version and not self._is_behind
        body = self.snapshot() if with_body and is_new else None
        if body is not None and len(body) > self._max_body_bytes:  # until it ends, others see what was stored last
            body = None
        events = self._new_events()
        first = self._num_stored_events
        if not await self._store.update(self.exchange.tenant, self.response_id, body, first, b"".join(events)):
            self.cancel()
        self._num_stored_events += len(events)
        self._stored_version = version if body is not None else self._stored_version

    async def settle(self, last: bytes) -> None:
        """Store the final answer, with these last events, before a client can see them. Tried once (see
        `store_again`)."""
        async with self._store_lock:
            if self._is_stored or self.is_dropped:
                return
            with contextlib.suppress(ApiError):  # the database has logged it
                if self._is_to_wait:
                    await self._put_back()
                elif self.earlier is not None and self._is_behind:
                    await self._break_off(self.earlier)
                else:
                    await self._end(last)
                self._is_stored = True

    async def _put_back(self) -> None:
        """Leave it to another worker, with all events that clients have seen."""
        await self._begin()
        await self._publish(with_body=True)
        await self._store.put_back(self.exchange.tenant, self.response_id)

    async def _end(self, last: bytes) -> None:
        ended, events = self.pending.ended, self._new_events()
        if ended is None:
            raise RuntimeError("an answer is stored once it is final")
        if self.events is not None:
            events.append(last)
        await self._begin()
        await self._store.end(self.exchange.tenant, ended, self._num_stored_events, b"".join(events))

    async def _break_off(self, earlier: TakenOver) -> None:
        """End with the output of the earlier run: it is longer, and clients have seen it."""
        error: str | None = _DIFFERS
        if isinstance(self.exchange.ending or self.error, ClientGoneError):
            error = None
        elif self.pending.format is not None and self.pending.format.error_message is not None:
            error = self.pending.format.error_message
        elif self.error is not None:
            error = self.error.message if isinstance(self.error, ApiError) else _INTERNAL
        last = await self._store.break_off(earlier.tenant, earlier.response_id, error)
        if self.events is not None:
            self.events.break_off(last)

    async def store_again(self) -> None:
        """Store how it ended; retry until that succeeds."""
        while not self._is_stored and not self.is_dropped:
            await asyncio.sleep(_STORES_AGAIN_AFTER_S)
            await self.settle(b"")

    def _new_events(self) -> list[bytes]:
        return [] if self.events is None else self.events.events[self._num_stored_events :]

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
        if not self.events.add(data):
            self.exchange.abort(ApiError(ErrorKind.INTERNAL, _DIFFERS))
        elif is_too_long(self.events.num_bytes):
            self.exchange.abort(too_long())
