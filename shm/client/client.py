"""`BackendClient`: submit, stream, cancel.

It connects the parts: `connection` finds the backend, `capacity` refuses requests, `outbox` holds unsent messages,
`open_streams` receives, `resubmission` carries streams over to the next backend.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.shm.buffers.device_api import OpenDevice
from penstock.shm.buffers.shared_buffers import BufferGone, BufferSlice, SharedBuffer, SharedBuffers
from penstock.shm.client.capacity import BackendUnavailable, Capacity
from penstock.shm.client.connection import BackendConnection, ConnectionEvents, Membership
from penstock.shm.client.counters import ClientCounters
from penstock.shm.client.outbox import Outbox
from penstock.shm.client.queued_requests import QueuedRequests
from penstock.shm.client.request import GenerationRequest, Question, question_message
from penstock.shm.client.resubmission import Resubmission
from penstock.shm.client.session import Session
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.client.streams.pooled import PooledRequest, PooledStream
from penstock.shm.client.streams.reader_turns import ReaderTurns
from penstock.shm.client.streams.stream_table import OpenStreams
from penstock.shm.client.streams.token_stream import AnswerStream, TokenStream
from penstock.shm.memory.board import BackendBoard, FrontendBoard
from penstock.shm.memory.ledger import Ledger
from penstock.shm.messages import (
    Adapter,
    BufferContent,
    BufferKind,
    BufferRequest,
    ContentSpec,
    FailureCode,
    Finish,
    ModelCard,
    QuoteTerms,
    Request,
)

_READY_POLL_S = 0.01
_EXPIRY_GRACE_S = 0.1
"""The backend ends an expired stream on time. The client ends it this much later, if the backend is dead or hangs."""

StreamT = TypeVar("StreamT", bound="OpenStream")


class BackendClient:
    """A client of one backend. It outlives the backend: it reconnects by itself and resubmits open streams.

    Use it in one event loop. It never blocks, and it does not poll while it is connected.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        resume_timeout_s: float = 600.0,
        max_held: int = 0,
        hold_timeout_s: float = 120.0,
        buffers: BufferRequest | None = None,
        open_device: OpenDevice | None = None,
        membership: Membership = Membership(),  # noqa: B008 - frozen
    ) -> None:
        """resume_timeout_s is how long open streams wait for the next backend before they fail. The default is enough
        to load 70 GB at 0.2 GB/s.

        While no backend is ready, `submit` holds up to max_held new streams, each for at most hold_timeout_s. When one
        tenant has taken them all, others still find places, in all as many again.

        buffers asks the backend for shared buffers (`take_buffer`). Buffers on a GPU need open_device, which is
        `cuda_driver.open_device`. If both kinds are accepted and the GPU's cannot be opened here, the client uses
        buffers on the host. Raises ValueError.

        membership is for `ReplicaSet`, which has a client for each replica.
        """
        if buffers is not None and BufferKind.CUDA in buffers.kinds and open_device is None:
            raise ValueError("buffers.kinds contains CUDA; pass open_device=cuda_driver.open_device")
        self._socket_path = socket_path
        self._model: ModelCard | None = None
        self._next_request_id = 0
        self.ledger = Ledger()
        self._counters = ClientCounters()
        self._streams = OpenStreams(self._counters, self.ledger)
        self._turns = ReaderTurns()
        self._outbox = Outbox(self._streams)
        self._held = QueuedRequests(
            self._streams, self._outbox, max_held, hold_timeout_s, is_ready=lambda: self.ready, send=self._send
        )
        self._streams.on_shutting_down, self._streams.on_adapters = self._wait_for_next_backend, self._take_adapters
        self._resubmission = Resubmission(self._streams, self._outbox, self._held, self._counters, resume_timeout_s)
        self._next_send: asyncio.Handle | None = None
        self._membership = membership
        events = ConnectionEvents(
            accept=membership.accept,
            attach=self._attach,
            outputs=self._streams.dispatch,
            send=self._send,
            detach=self._detach,
            wants_last_words=lambda: not membership.has_others(),
        )
        self._connection = BackendConnection(socket_path, self.ledger, buffers, open_device, events)
        self._capacity = Capacity(socket_path, self._connection, self._streams, self._outbox, self._held)

    async def start(self) -> None:
        """Begin to connect, and return at once. The backend may start later."""
        self._connection.start()

    async def wait_until_ready(self, timeout_s: float | None = None) -> ModelCard:
        """Return the backend's model once it is `ready`. Call `start` first.

        Raises BackendUnavailable after timeout_s; None waits forever.
        """
        if not self._connection.is_started:
            raise RuntimeError("the client is not started; call start() first")
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready or self._model is None:  # noqa: ASYNC110 - the heartbeat is in shared memory
                    await asyncio.sleep(_READY_POLL_S)
        except TimeoutError:
            raise BackendUnavailable(
                f"no backend is ready at {self._socket_path} after {timeout_s} s; is one running with this --socket?"
            ) from None
        return self._model

    async def close(self) -> None:
        """Open streams end CANCELLED, and the backend frees them."""
        for stream in self._streams:
            self._streams.finish(stream, Finish.CANCELLED)
        await self._connection.close()
        self._outbox.clear()
        self._held.clear()
        self._resubmission.stop_waiting()

    @property
    def model(self) -> ModelCard | None:
        """The backend's model; None before the first connection. A reconnection keeps it."""
        return self._model

    @property
    def ready(self) -> bool:
        """Connected, not draining, and the heartbeat on the backend's board is younger than 2 s."""
        return self._capacity.is_ready

    @property
    def retry_after_s(self) -> int:
        """Seconds after which a request that was refused now may be sent again, at least 1.

        With a backend, the time in which its wait queue drains at the recent rate; without one, the time that the last
        outage took, or as long again as this one has lasted.
        """
        return self._capacity.retry_after_s

    @property
    def board(self) -> FrontendBoard:
        """This process's own numbers for the current session; between sessions, those since the last one ended.

        The backend adds up the boards of all its frontends. The user of this client writes what only it knows, such as
        latencies of responses. Read this attribute each time: the board changes with the session.
        """
        return self._counters.board

    @property
    def backend_board(self) -> BackendBoard | None:
        """The board of the connected backend, read-only; valid until the connection ends."""
        session = self._connection.live_session
        return None if session is None else session.backend_board

    @property
    def backend_counters(self) -> dict[str, int] | None:
        """The present values of the backend's board; None without a connection."""
        session = self._connection.session
        return None if session is None else session.backend_board.values()

    @property
    def counters(self) -> dict[str, int]:
        """This process's numbers since its start, by their names in `FrontendBoard`."""
        return self._counters.totals(len(self._streams))

    def balance(self) -> dict[str, int]:
        """Resources held now, by kind: sessions, streams, slots, unsent messages and credits."""
        session = self._connection.session
        credits_owed = 0 if session is None else session.credits_owed
        held = self.ledger.balance() | {"unsent": len(self._outbox), "credits_owed": credits_owed}
        return {kind: count for kind, count in held.items() if count}

    def take_buffer(self) -> SharedBuffer:
        """Take a free shared buffer. It is the caller's until `release`, or until the backend ends.

        Raises BuffersExhausted when none is free, and BufferGone without buffers or without a backend.
        """
        return self._buffers(self._connection.session).take()

    @property
    def num_free_buffers(self) -> int:
        """Buffers that `take_buffer` can give now."""
        session = self._connection.session
        return 0 if session is None or session.buffers is None else session.buffers.num_free

    @property
    def buffer_contents(self) -> dict[BufferContent, ContentSpec]:
        """The contents that shared buffers can carry with this backend, and their rows. Empty without buffers."""
        session = self._connection.session
        if session is None or session.buffers is None:
            return {}
        return {spec.content: spec for spec in session.buffers.grant.contents}

    @staticmethod
    def _buffers(session: Session | None) -> SharedBuffers:
        if session is None or session.buffers is None:
            raise BufferGone("no shared buffers: the client asked for none, or no backend is connected")
        return session.buffers

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Send the request, or queue it while the link is full or no backend is ready. Returns at once.

        Raises BackendUnavailable when not `ready` and it cannot be held: its tenant may hold no more, or it uses shared
        buffers. Raises Overloaded when the backend's board shows a full wait queue. A request that may share another's
        sequence is sent even then, and so is one of a tenant with few open streams here; the backend decides.

        Raises ValueError for a request outside the bounds of the messages; the backend checks the model's own bounds.
        Raises ValueError, BufferGone and DeviceError for shared buffers that cannot be lent; the caller keeps them.
        """
        return self._start(TokenStream, request, request.to_message, output=request.output)

    def ask_quote(self, request: GenerationRequest, terms: QuoteTerms) -> AnswerStream:
        """Ask when the request would finish; it does not run. Raises as `submit` does, and is never held."""
        return self._start(AnswerStream, request, partial(request.to_quote, terms), may_hold=False)

    def ask(self, question: Question, deadline_s: float | None = None) -> AnswerStream:
        """Send a question, which is never held, as `submit` does. At deadline_s (monotonic) it ends EXPIRED."""
        self._capacity.check(b"", may_share=True, may_hold=False)
        message = question_message(self._next_request_id, question)
        stream = AnswerStream(message, array("i"), self._abandon, deadline_s, turns=self._turns)
        return self._open(stream, is_ready=True)

    @property
    def has_room(self) -> bool:
        """False from the refusal of a pooled request until `wait_for_room` would return."""
        return self._streams.room.is_set()

    async def wait_for_room(self) -> None:
        """Wait until a backend that refused a pooled request for a full wait queue has places again, or is gone.

        Returns at once if none has refused. Others may take the places first: then it refuses again.
        """
        await self._streams.room.wait()

    def check_capacity(self, tenant: bytes, *, may_share: bool) -> None:
        """Raise what `submit` would raise now for lack of a backend or of a place.

        Call it before the work that makes a request's tokens.
        """
        self._capacity.check(tenant, may_share=may_share, may_hold=True)

    def submit_pooled(self, request: PooledRequest) -> PooledStream:
        """`submit` for a request whose result is a vector. It may share an equal one's computation. Requests of a group
        that are submitted in one turn of the event loop are sent together. Raises as `submit` does."""
        return self._start(PooledStream, request, request.to_message)

    @property
    def open_streams(self) -> list[OpenStream]:
        return list(self._streams)

    def give_streams(self, streams: Sequence[OpenStream]) -> list[OpenStream]:
        """Give up the open streams that another client can `adopt`. A backend that still runs cancels them."""
        given = self._resubmission.give(streams, is_alive=self._connection.live_session is not None)
        self._send_soon()
        return given

    def fail_streams(self) -> None:
        """End all open streams FAILED: no backend can continue them."""
        self._streams.fail_all()

    def inherit(self, predecessor: BackendClient) -> None:
        """Add the numbers of a closed client that this one replaces."""
        self._counters.add(predecessor.counters)

    def adopt(self, streams: Sequence[OpenStream], *, backend_died: bool) -> None:
        """Continue the streams of another client. backend_died: that client's backend died with them."""
        for stream in streams:
            stream.move(self._next_request_id, self._abandon)
            self._next_request_id += 1
            self._streams.add(stream)
        self._resubmission.take_over(streams, backend_died=backend_died)
        self._send_soon()

    def _start(
        self,
        kind: Callable[..., StreamT],
        request: GenerationRequest | PooledRequest,
        to_message: Callable[[int, int], Request],
        *,
        output: BufferSlice | None = None,
        may_hold: bool = True,
    ) -> StreamT:
        """Lend the request's buffers, and send it or hold it."""
        uses_buffers = isinstance(request.token_ids, BufferSlice) or output is not None
        may_hold, may_share = may_hold and not uses_buffers, request.is_shareable
        has_begun = isinstance(request, PooledRequest) and request.has_begun
        is_ready = self._capacity.check(request.tenant, may_share=may_share, may_hold=may_hold, has_begun=has_begun)
        self._capacity.check_pixels(request.tenant, request.pixels)
        tokens = request.prompt_tokens()
        message, loans = to_message(self._next_request_id, len(tokens)), {}
        if uses_buffers:
            loans = self._buffers(self._connection.session).lend(request.token_ids, output)
            message = msgspec.structs.replace(message, **loans)
        stream = kind(message, tokens, self._abandon, request.deadline_s, turns=self._turns, group=request.group)
        stream.loans, stream.pixels = list(loans.values()), request.pixels
        return self._open(stream, is_ready=is_ready)

    def _open(self, stream: StreamT, *, is_ready: bool) -> StreamT:
        self._next_request_id += 1
        self._streams.add(stream)
        if stream.deadline_s is not None:
            delay_s = max(0.0, stream.deadline_s - time.monotonic()) + _EXPIRY_GRACE_S
            stream.expiry = asyncio.get_running_loop().call_later(delay_s, stream.expire)
        if is_ready:
            self._outbox.submit(stream)
            is_grouped = isinstance(stream, PooledStream) and stream.group > 0
            self._send_soon() if is_grouped else self._send()
        else:
            self._held.hold(stream)
        return stream

    def _wait_for_next_backend(self, stream: OpenStream) -> bool:
        """The backend refused the request because it ends. Keep it for the next one, if that is possible."""
        can_wait = self._held.is_enabled or self._membership.has_others()
        if stream.loans or isinstance(stream, AnswerStream) or not can_wait:
            return False
        stream.note_failure(None)
        if stream.admitted_ns:
            stream.is_queued = True  # `resume` submits it; it may wait as long as other open streams
        else:
            self._held.hold(stream)
        return True

    def _abandon(self, stream: OpenStream, finish: Finish) -> None:
        """End the stream now, and cancel the request in the backend."""
        if stream.finish is not Finish.NONE:
            return
        self._streams.finish(stream, finish)
        # The outbox skips a queued stream that has ended; only a request that was sent needs a message.
        if not stream.is_queued and self._connection.session is not None:
            self._outbox.cancel(stream.request_id, stream.keep)
            self._send_soon()  # together with others: a client that hangs up ends many streams

    # Called by the connection

    def _attach(self, session: Session) -> None:
        self._capacity.outage.end()
        self._counters.move_to(session.board)
        self._streams.buffers, self._streams.free_pixels = session.buffers, session.free_pixels
        self._resubmission.stop_waiting()
        previous, self._model = self._model, session.model
        if previous is None or previous.identity == session.model.identity:
            self._resubmission.resume()
        else:
            self._streams.fail_all()

    def _take_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        if self._model is not None:
            self._model = msgspec.structs.replace(self._model, adapters=adapters)
            self._membership.accept(self._model)

    def _detach(self) -> None:
        self._capacity.outage.begin()
        # Shared buffers go with the session, and with them the streams that use some.
        self._streams.buffers, self._streams.free_pixels = None, lambda _: None
        self._streams.room.set()
        for stream in self._streams:
            if stream.is_bound:
                self._streams.fail(stream, FailureCode.UNAVAILABLE)
        self._resubmission.backend_died()
        self._membership.lost()
        self._counters.leave_board(len(self._streams))

    def _send(self) -> None:
        session = self._connection.live_session
        if session is not None:
            self._resubmission.submit_next_suspect()
            if self._outbox.send(session):
                self._send_soon()
            self._connection.receive_soon(session)

    def _send_soon(self) -> None:
        if self._next_send is None:
            self._next_send = asyncio.get_running_loop().call_soon(self._send_now)

    def _send_now(self) -> None:
        self._next_send = None
        self._send()
