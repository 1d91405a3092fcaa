"""The backend's end of the link: receives requests of all frontends, sends each its StepOutputs."""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import zmq

from penstock.shm.buffers.buffer_export import BufferExporter, LoanError
from penstock.shm.link.connected_frontend import ConnectedFrontend
from penstock.shm.link.events import Cancellation, FrontendDeath, LinkEvent, Question, Submission
from penstock.shm.link.frontend_table import FrontendTable, LinkCounters
from penstock.shm.link.rendezvous import Rendezvous
from penstock.shm.link.zmq_sockets import HANDSHAKE_TIMEOUT_S, MAX_REQUESTS_IN_FLIGHT, new_socket, receive
from penstock.shm.memory.arena import DescriptorError
from penstock.shm.memory.board import BackendBoard, FrontendBoard
from penstock.shm.memory.ledger import Ledger
from penstock.shm.messages import (
    MAX_TO_BACKEND_BYTES,
    NO_TOKEN,
    Adapter,
    AskQuote,
    AskStream,
    Cancel,
    CancelOther,
    ChangeAdapter,
    Credit,
    EventLogprobs,
    Failure,
    FailureCode,
    Finish,
    Generate,
    ModelCard,
    Pool,
    PoolBatch,
    Progress,
    Quote,
    Started,
    StreamRecord,
    ToBackend,
    VectorPart,
    WireError,
    decode_to_backend,
    encode,
)

logger = logging.getLogger("penstock.link")

MAX_FAULTS = 3
"""Bad messages or descriptors after which a frontend is disconnected."""
_MAX_MESSAGES_PER_TURN = 4096
_LAST_WORDS_MS = 1000
"""Time that a closing backend gives its last messages to reach the frontends."""
_RETRY_S = 0.02
"""Pause before the next attempt after ZeroMQ refused a message."""


class BackendLink:
    """One turn of the backend's loop is `wait`, `receive`, work with `push`, `flush`. For one thread; never blocks
    outside `wait`.

    A frontend that returns no credit for stall_limit_s while output waits for it is treated as dead.
    """

    def __init__(
        self,
        socket_path: Path,
        card: ModelCard,
        board: BackendBoard,
        *,
        credit: int = 256,
        max_frontends: int = 128,
        stall_limit_s: float = 5.0,
        exporter: BufferExporter | None = None,
    ) -> None:
        """The board stays the caller's; the link closes the exporter. Raises CannotListen."""
        self._exporter = exporter
        self._stall_limit_s = stall_limit_s
        self._credit = credit
        self._pending: dict[int, ConnectedFrontend] = {}  # those with unsent events, by epoch
        self._events: deque[LinkEvent] = deque()
        self._wake_fd = -1
        self.counters = LinkCounters()
        self.ledger = Ledger()
        self._rendezvous = Rendezvous(
            socket_path, max_connections=max_frontends, handshake_timeout_s=HANDSHAKE_TIMEOUT_S
        )
        try:
            listener, self._message_socket_fd = self._rendezvous.address.unnamed_listener()
        except BaseException:
            self._rendezvous.close()
            raise
        self._table = FrontendTable(
            self._rendezvous, self._message_socket_fd, card, board, self.ledger, credit=credit, exporter=exporter
        )
        self._frontends = self._table.by_epoch
        self._context = zmq.Context()
        self._socket = new_socket(
            self._context,
            zmq.ROUTER,
            max_unsent=4 * credit,
            max_unread=MAX_REQUESTS_IN_FLIGHT,
            max_message_bytes=MAX_TO_BACKEND_BYTES,
        )
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.setsockopt(zmq.BACKLOG, 2 * max_frontends)
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind("ipc://unnamed")
        # zmq.Poller takes several times as long, twice a step.
        self._poller = select.epoll()
        self._poller.register(int(self._socket.getsockopt(zmq.FD)), select.EPOLLIN)
        self._poller.register(self._rendezvous.fileno(), select.EPOLLIN)

    @property
    def frontends(self) -> dict[int, FrontendBoard]:
        """The boards of the connected frontends, by epoch. Read only."""
        return {epoch: frontend.board for epoch, frontend in self._frontends.items()}

    def balance(self) -> dict[str, int]:
        """Resources held now, by kind: frontends, open requests, buffer memory, events that wait for credit."""
        held = self.ledger.balance()
        held["request"] = sum(len(frontend.open_requests) for frontend in self._frontends.values())
        if self._exporter is not None:
            held["buffer_bytes"] = self._exporter.held_bytes
        held["unsent"] = sum(frontend.num_unsent for frontend in self._pending.values())
        return {kind: count for kind, count in held.items() if count}

    # Waiting

    def wait(self, timeout_s: float | None, wake_fd: int) -> None:
        """Sleep until `receive` has something to do, wake_fd is readable, or timeout_s has passed.

        wake_fd is an eventfd of the caller, who also reads it. It must stay open as long as this link.
        """
        if self._events:
            return
        if wake_fd != self._wake_fd:
            if self._wake_fd >= 0:
                self._poller.unregister(self._wake_fd)
            self._poller.register(wake_fd, select.EPOLLIN)
            self._wake_fd = wake_fd
        if (due_s := self._due_s()) is not None:
            remaining_s = max(0.0, due_s - time.monotonic())
            timeout_s = remaining_s if timeout_s is None else min(timeout_s, remaining_s)
        if not self._has_messages():
            self._poller.poll(timeout_s)

    def _has_messages(self) -> bool:
        """Whether messages have arrived. The socket's fd is edge-triggered, and a send may consume its wake-up, so ask
        before each wait."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _due_s(self) -> float | None:
        """Monotonic time at which the next turn is due even if nothing arrives."""
        times = [] if (handshake_s := self._rendezvous.deadline_s()) is None else [handshake_s]
        for frontend in self._pending.values():
            if frontend.waiting_since_s is not None:
                times.append(frontend.waiting_since_s + self._stall_limit_s)
                if frontend.credit:
                    times.append(time.monotonic() + _RETRY_S)
        return min(times, default=None)

    # Receiving

    def receive(self) -> list[LinkEvent]:
        """All events since the last call, in order. Answers malformed messages by itself.

        A few times a second it also adds up the frontends' boards on the backend's.
        """
        self._receive_messages()
        for frontend in self._table.turn():
            self._disconnect(frontend)
        self._disconnect_stalled()
        self._table.show_totals()
        events = list(self._events)
        self._events.clear()
        return events

    def _receive_messages(self) -> None:
        if not self._has_messages():  # quicker than a receive that fails
            return
        for _ in range(_MAX_MESSAGES_PER_TURN):
            parts = receive(self._socket, 2)
            if parts is None:
                return
            self.counters.messages_in += 1
            frontend = self._table.by_identity.get(parts[0])
            if frontend is None:
                self.counters.strangers += 1
                continue
            try:
                if len(parts) != 2:
                    raise WireError(f"a message of {len(parts)} parts, expected 2")
                self._take(frontend, decode_to_backend(parts[1]))
            except WireError:
                self._fault(frontend)

    def _take(self, frontend: ConnectedFrontend, message: ToBackend) -> None:
        match message:
            case Generate() | Pool() | AskQuote():
                self._take_prompt(frontend, message)
            case PoolBatch(inputs):
                for pool in inputs:
                    self._take_prompt(frontend, pool)
            case CancelOther() | AskStream() | ChangeAdapter():
                frontend.open(message)
                self._events.append(Question(frontend.epoch, message))
            case Cancel(request_id, noticed_ns, keep):
                if request_id in frontend.open_requests:
                    self._close_request(frontend, request_id)
                    self._events.append(Cancellation(frontend.epoch, request_id, noticed_ns, keep))
            case Credit(count=count):
                if frontend.credit + count > self._credit:
                    raise WireError(f"{count} credits returned; {self._credit - frontend.credit} were outstanding")
                frontend.credit += count
                if frontend.epoch in self._pending and frontend.is_due:
                    self._flush_one(frontend)

    def _take_prompt(self, frontend: ConnectedFrontend, message: Generate | Pool | AskQuote) -> None:
        request_id = message.request_id
        frontend.open(message)
        try:
            output = frontend.borrow_output(message) if isinstance(message, Generate) else None
            embeddings = frontend.borrow_embeddings(message)
            tokens = frontend.copy_tokens(message, is_new=output is not None) if embeddings is None else b""
        except (DescriptorError, LoanError, WireError) as error:
            logger.warning("rejected request %d of %s: %s", request_id, frontend.name, error)
            failure = Failure(request_id, FailureCode.BAD_DESCRIPTOR)
            self.push(frontend.epoch, request_id, NO_TOKEN, Finish.REJECTED, failure=failure)
            self._fault(frontend)
            return
        if embeddings is None and not isinstance(message.tokens, bytes):
            # Say that it is copied: its slot or buffer is free again, however long the request waits.
            self.push(frontend.epoch, request_id, NO_TOKEN)
        self._events.append(Submission(frontend.epoch, message, tokens, output, embeddings, frontend.read_pixels))

    def _close_request(self, frontend: ConnectedFrontend, request_id: int) -> None:
        frontend.end(request_id)
        if frontend.num_unsent:
            self._pending[frontend.epoch] = frontend

    def _fault(self, frontend: ConnectedFrontend) -> None:
        self.counters.faults += 1
        frontend.num_faults += 1
        if frontend.num_faults == MAX_FAULTS:
            self.counters.expelled += 1
            logger.warning("disconnecting %s: it sent %d malformed messages", frontend.name, MAX_FAULTS)
            self._disconnect(frontend)

    # The end of frontends

    def _disconnect(self, frontend: ConnectedFrontend) -> None:
        """Exactly once per frontend: every caller finds it in the table."""
        self._pending.pop(frontend.epoch, None)
        self._table.remove(frontend)
        self._events.append(FrontendDeath(frontend.epoch))

    def _disconnect_stalled(self) -> None:
        if not self._pending:
            return
        now_s = time.monotonic()
        for frontend in list(self._pending.values()):
            if frontend.waiting_since_s is not None and now_s - frontend.waiting_since_s >= self._stall_limit_s:
                self.counters.stalled += 1
                logger.warning("disconnecting %s: it took no output for %g s", frontend.name, self._stall_limit_s)
                self._disconnect(frontend)

    # Sending

    def push(
        self,
        frontend: int,
        request_id: int,
        token_id: int,
        finish: Finish = Finish.NONE,
        started: Started | None = None,
        failure: Failure | None = None,
        logprobs: EventLogprobs | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Add an event to what the next `flush` sends. Does nothing for a request that is not open.

        A finish other than NONE closes the request. token_id is NO_TOKEN for an end without a token. logprobs.event is
        ignored; the link sets it.
        """
        target = self._frontends.get(frontend)
        if target is not None and request_id in target.open_requests:
            if finish:
                self._close_request(target, request_id)
            self._pending[frontend] = target
            target.add(request_id, token_id, finish, started, failure, logprobs, progress)

    def push_answer(self, frontend: int, answer: Quote | StreamRecord) -> None:
        """Add a quote or a record. The end of its request, if that is open, comes next."""
        if (target := self._frontends.get(frontend)) is not None and answer.request_id in target.open_requests:
            target.add_answer(answer)

    def push_prompt_logprobs(self, frontend: int, request_id: int, entry: EventLogprobs) -> None:
        """Add an entry for the prompt token at index entry.event. Does nothing for a request that is not open."""
        target = self._frontends.get(frontend)
        if target is not None and request_id in target.open_requests:
            self._pending[frontend] = target
            target.add_prompt_logprobs(request_id, entry)

    def push_vectors(
        self, frontend: int, request_id: int, parts: Iterable[VectorPart], started: Started | None = None
    ) -> None:
        """Add a whole result, which ends its request with STOP. Does nothing for a request that is not open."""
        target = self._frontends.get(frontend)
        if target is not None and request_id in target.open_requests:
            target.add_vectors(parts)
            self.push(frontend, request_id, NO_TOKEN, Finish.STOP, started)

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        """`push` one token for each of several requests of a frontend; no token starts or ends its request."""
        if (target := self._frontends.get(frontend)) is None:
            return
        if not target.open_requests.issuperset(request_ids):
            for request_id, token_id in zip(request_ids, token_ids, strict=True):
                self.push(frontend, request_id, token_id)
            return
        self._pending[frontend] = target
        target.add_tokens(request_ids, token_ids)

    def note_preemption(self, frontend: int, request_id: int) -> None:
        """The request was preempted because KV pages were short. Its frontend learns it with the next events."""
        if (target := self._frontends.get(frontend)) is not None and request_id in target.open_requests:
            target.add_preemption(request_id)

    def announce_room(self, frontend: int) -> None:
        """Tell a frontend, if it is still connected, that the wait queue has places again."""
        if (target := self._frontends.get(frontend)) is not None:
            self._pending[frontend] = target
            target.add_room()

    def announce_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """Tell all frontends, present and future."""
        self._table.announce_adapters(adapters)
        self._pending.update(self._frontends)

    def flush(self) -> None:
        """Send what credit allows, one message per frontend and step, and keep the rest in order.

        Events of requests with batch_delivery may be held for a moment.
        """
        for frontend in list(self._pending.values()):
            if frontend.is_due:
                self._flush_one(frontend)

    def _flush_one(self, frontend: ConnectedFrontend) -> None:
        while frontend.num_unsent:
            if not frontend.credit or not self._send(frontend):
                if frontend.waiting_since_s is None:
                    frontend.waiting_since_s = time.monotonic()
                return
        frontend.waiting_since_s = None
        del self._pending[frontend.epoch]

    def _send(self, frontend: ConnectedFrontend) -> bool:
        outputs = frontend.next_outputs()
        try:
            self._socket.send(frontend.identity, zmq.NOBLOCK | zmq.SNDMORE)
            self._socket.send(encode(outputs), zmq.NOBLOCK)
        except zmq.Again:
            self.counters.blocked_sends += 1
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.counters.unreachable += 1
            return False
        frontend.sent()
        self.counters.messages_out += 1
        self.counters.events_out += len(outputs.finishes)
        return True

    def close(self) -> None:
        """Give flushed messages a moment to arrive, then close every frontend's control socket."""
        self._poller.close()
        self._socket.close(linger=_LAST_WORDS_MS)
        self._context.term()
        for frontend in list(self._frontends.values()):
            self._disconnect(frontend)
        if self._exporter is not None:
            self._exporter.close()
        self._events.clear()
        os.close(self._message_socket_fd)
        self._rendezvous.close()
