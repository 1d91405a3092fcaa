"""One frontend as the backend sees it: its memory, its credit, its open requests, and its unsent events."""

from __future__ import annotations

import os
import secrets
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import islice

import msgspec

from penstock.shm.buffers.buffer_export import ExportedBuffers, Loan, LoanError
from penstock.shm.link.rendezvous import ControlConnection
from penstock.shm.memory import arena
from penstock.shm.memory.board import FrontendBoard
from penstock.shm.messages import (
    MAX_LOGPROBS,
    MAX_VECTOR_PART_BYTES,
    Adapter,
    ArenaRef,
    BufferContent,
    BufferRef,
    BufferReturn,
    EventLogprobs,
    Failure,
    Finish,
    Generate,
    ModelCard,
    Progress,
    PromptHeader,
    PromptLogprobs,
    Quote,
    Request,
    Started,
    StepOutputs,
    StreamRecord,
    TextHeader,
    VectorPart,
    WireError,
)

MAX_EVENTS_PER_MESSAGE = 1 << 14
_MAX_HOLD_S = 0.25
"""Events of requests with batch_delivery are held this long; the engine's next turn after that sends them."""
MAX_LOGPROBS_PER_MESSAGE = 1 << 13
"""Entries of prompts and of generated tokens together. Each has at most 20 top tokens of 14 bytes, and one with more
counts as several, so with the events and vectors they stay below a message's limit."""
_MAX_VECTOR_BYTES_PER_MESSAGE = MAX_VECTOR_PART_BYTES
_PART_OVERHEAD_BYTES = 64
"""Bytes of a part beside its values, at most."""


class ConnectedFrontend:
    """Exists from the welcome to the death. Only the backend can reach its fields."""

    def __init__(
        self,
        epoch: int,
        connection: ControlConnection,
        model: ModelCard,
        credit: int,
        buffers: ExportedBuffers | None = None,
    ) -> None:
        """Make the frontend's memory; its fds stay open until `close_fds`. The shared buffers stay the caller's.

        Raises OSError: no memory or no fds.
        """
        self.epoch = epoch
        self.identity = secrets.token_bytes(16)
        self.connection = connection
        self.credit = credit
        """StepOutputs that may still be sent before the frontend returns credit."""
        self.num_faults = 0
        self.waiting_since_s: float | None = None
        """Monotonic time since which output waits and nothing could be sent."""
        self.open_requests: set[int] = set()
        self._batched: set[int] = set()
        """Open requests with batch_delivery."""
        self._is_urgent = False
        """At least one unsent event must not be held."""
        self._held_since_s: float | None = None
        """Monotonic time of the oldest held event."""
        self.buffers = buffers
        self._loans: defaultdict[int, list[Loan]] = defaultdict(list)  # by request id, until its end
        self._next_sequence = 0
        # The columns of the unsent events.
        self._request_ids = array("Q")
        self._token_ids = array("i")
        self._finishes = bytearray()
        self._started: list[Started] = []
        self._failures: list[Failure] = []
        self._quotes: list[Quote] = []
        self._records: deque[tuple[int, StreamRecord]] = deque()
        """(number of the event that ends the record's request, record)."""
        self._progress: list[Progress] = []
        self._preempted: list[int] = []
        self._logprobs: deque[tuple[int, EventLogprobs]] = deque()
        """(number of the event since the connection began, entry)."""
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._vectors: deque[tuple[int, VectorPart]] = deque()
        """(number of the event that ends the part's request, part)."""
        self._num_sent = 0
        """Events in messages that have been sent."""
        self._returned: list[BufferReturn] = []
        self._has_room = False
        self._adapters: tuple[Adapter, ...] | None = None
        self.arena_slots, self.arena_slot_bytes, _ = arena.geometry(model.max_context_tokens, model.max_picture_bytes)
        with ExitStack() as mappings, ExitStack() as fds:
            self.arena_fd = arena.create_fd(self.arena_slots, self.arena_slot_bytes)
            fds.callback(os.close, self.arena_fd)
            self.board_fd = FrontendBoard.create_fd()
            fds.callback(os.close, self.board_fd)
            self._arena = arena.ArenaReader(self.arena_fd, self.arena_slots, self.arena_slot_bytes, epoch)
            mappings.callback(self._arena.close)
            self.board = FrontendBoard.attach(self.board_fd)
            mappings.callback(self.board.close)
            self._fds = fds.pop_all()
            self._mappings = mappings.pop_all()

    @property
    def name(self) -> str:
        """How log lines name it."""
        return f"frontend {self.epoch} (pid {self.connection.pid})"

    def close_fds(self) -> None:
        """The frontend has received them, or never will. The mappings stay."""
        self._fds.close()
        if self.buffers is not None:
            self.buffers.close_fds()

    def close(self) -> None:
        self._fds.close()
        self._mappings.close()

    def copy_tokens(self, message: PromptHeader, *, is_new: bool = False) -> bytes:
        """The request's tokens: all of them, and at least the prompt. is_new: no others are allowed.

        Raises DescriptorError, WireError, and LoanError for a shared buffer that does not hold them.
        """
        match message.tokens:
            case ArenaRef() as ref:
                tokens = self._arena.read(ref)
            case BufferRef() as ref:
                loan = self._own_buffers().borrow(ref, to_backend=True)
                try:
                    tokens = loan.read()
                finally:
                    self._returned.append(self._own_buffers().give_back(loan))
            case bytes() as tokens:
                pass
        if len(tokens) % 4 or len(tokens) < 4 * message.num_prompt_tokens:
            raise WireError(f"{len(tokens)} bytes; a prompt of {message.num_prompt_tokens} tokens has 4 per token")
        if is_new and len(tokens) > 4 * message.num_prompt_tokens:
            raise WireError("an output buffer for a resubmitted request")
        return tokens

    def borrow_output(self, message: Generate) -> Loan | None:
        """The loan that receives the request's output, until `end`. Raises LoanError, WireError."""
        if message.output is None:
            return None
        if message.may_share:
            raise WireError("an output buffer for a request with may_share")
        return self._borrow(message.request_id, message.output, to_backend=False)

    def borrow_embeddings(self, message: PromptHeader) -> Loan | None:
        """The request's prompt, if it is embeddings, until `end`. Raises LoanError, WireError."""
        ref = message.tokens
        if not isinstance(ref, BufferRef) or ref.content is not BufferContent.PROMPT_EMBEDDINGS:
            return None
        if message.may_share:
            raise WireError("prompt embeddings for a request with may_share")
        if isinstance(message, TextHeader) and message.num_prompt_logprobs >= 0:
            raise WireError("log probabilities of a prompt of embeddings")
        if ref.num_rows != message.num_prompt_tokens:
            raise WireError(f"{ref.num_rows} embeddings for a prompt of {message.num_prompt_tokens} tokens")
        loan = self._borrow(message.request_id, ref, to_backend=True)
        loan.check_written()
        return loan

    def _borrow(self, request_id: int, ref: BufferRef, *, to_backend: bool) -> Loan:
        loan = self._own_buffers().borrow(ref, to_backend=to_backend)
        self._loans[request_id].append(loan)
        return loan

    def read_pixels(self, ref: ArenaRef) -> memoryview:
        """For any thread. Raises DescriptorError, also once the request or the frontend is gone."""
        return self._arena.read_pixels(ref)

    def open(self, message: Request) -> None:
        """Raises WireError if its id is taken."""
        request_id = message.request_id
        if request_id in self.open_requests:
            raise WireError(f"request {request_id} is open already")
        self.open_requests.add(request_id)
        if isinstance(message, Generate) and message.batch_delivery:
            self._batched.add(request_id)

    def end(self, request_id: int) -> None:
        """The request is over, for whatever reason. Its buffers go back to the client."""
        self.open_requests.remove(request_id)
        self._batched.discard(request_id)
        for loan in self._loans.pop(request_id, ()):
            self._returned.append(self._own_buffers().give_back(loan))
            self._is_urgent = True

    def _own_buffers(self) -> ExportedBuffers:
        if self.buffers is None:
            raise LoanError("a shared buffer from a client that has none")
        return self.buffers

    @property
    def num_unsent(self) -> int:
        """Unsent events, log probabilities of prompts, parts of vectors, returned buffers, and notes."""
        num_parts = len(self._prompt_logprobs) + len(self._vectors) + len(self._records)
        return len(self._finishes) + num_parts + len(self._returned) + self._has_room + (self._adapters is not None)

    @property
    def is_due(self) -> bool:
        """Whether the unsent events include an urgent one, or have been held long enough."""
        held_s = 0.0 if self._held_since_s is None else time.monotonic() - self._held_since_s
        return self._is_urgent or held_s >= _MAX_HOLD_S

    def _hold(self) -> None:
        """Note that an event was added that may be held."""
        if self._held_since_s is None:
            self._held_since_s = time.monotonic()

    def add(
        self,
        request_id: int,
        token_id: int,
        finish: Finish,
        started: Started | None,
        failure: Failure | None,
        logprobs: EventLogprobs | None,
        progress: Progress | None = None,
    ) -> None:
        if finish or started or failure or token_id < 0 or request_id not in self._batched:
            self._is_urgent = True
        else:
            self._hold()
        self._request_ids.append(request_id)
        self._token_ids.append(token_id)
        self._finishes.append(finish)
        if logprobs is not None:
            self._logprobs.append((self._num_sent + len(self._finishes) - 1, logprobs))
        if started is not None:
            self._started.append(started)
        if failure is not None:
            self._failures.append(failure)
        if progress is not None:
            self._progress.append(progress)

    def add_answer(self, answer: Quote | StreamRecord) -> None:
        """Add an answer. The next event added must be the one that ends its request."""
        if isinstance(answer, Quote):
            self._quotes.append(answer)
        else:
            self._records.append((self._num_sent + len(self._finishes), answer))

    def add_prompt_logprobs(self, request_id: int, entry: EventLogprobs) -> None:
        self._is_urgent = True
        self._prompt_logprobs.append(PromptLogprobs(request_id, (entry,)))

    def add_vectors(self, parts: Iterable[VectorPart]) -> None:
        """Add all parts of one result. The next event added must be the one that ends its request."""
        number = self._num_sent + len(self._finishes)
        self._vectors.extend((number, part) for part in parts)

    def add_tokens(self, request_ids: list[int], token_ids: list[int]) -> None:
        """One event per token; none starts or ends its request."""
        if self._batched.issuperset(request_ids):
            self._hold()
        else:
            self._is_urgent = True
        self._request_ids.extend(request_ids)
        self._token_ids.extend(token_ids)
        self._finishes += bytes(len(token_ids))

    def add_preemption(self, request_id: int) -> None:
        """Add a note that is sent with the next events."""
        self._preempted.append(request_id)

    def add_room(self) -> None:
        """Add a note that the wait queue has places again (`StepOutputs.has_room`)."""
        self._is_urgent = self._has_room = True

    def add_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """Add the note which adapters the model has (`StepOutputs.adapters`)."""
        self._is_urgent, self._adapters = True, adapters

    def next_outputs(self) -> StepOutputs:
        """The first unsent events, as many as fit one message; they stay until `sent`.

        If more are left, a Started, a Failure, a Quote or a Progress may travel before its event, but never after it.
        """
        count = self._num_next()
        return StepOutputs(
            sequence=self._next_sequence,
            request_ids=self._request_ids[:count].tobytes(),
            token_ids=self._token_ids[:count].tobytes(),
            finishes=bytes(self._finishes[:count]),
            started=tuple(self._started[:MAX_EVENTS_PER_MESSAGE]),
            failures=tuple(self._failures[:MAX_EVENTS_PER_MESSAGE]),
            preempted=tuple(self._preempted[:MAX_EVENTS_PER_MESSAGE]),
            returned=tuple(self._returned),  # at most one per buffer
            logprobs=tuple(
                msgspec.structs.replace(logprobs, event=number - self._num_sent)
                for number, logprobs in self._logprobs
                if number < self._num_sent + count
            ),
            prompt_logprobs=tuple(self._prompt_logprobs[:MAX_LOGPROBS_PER_MESSAGE]),
            vectors=tuple(part for _, part in islice(self._vectors, self._num_next_vectors())),
            quotes=tuple(self._quotes[:MAX_EVENTS_PER_MESSAGE]),
            record=self._records[0][1] if self._records else None,
            progress=tuple(self._progress[:MAX_EVENTS_PER_MESSAGE]),
            has_room=self._has_room,
            adapters=self._adapters,
        )

    def _num_next_vectors(self) -> int:
        """Number of parts in the next message: as many as fit, and at least one."""
        num_bytes = 0
        for count, (_, part) in enumerate(self._vectors):
            num_bytes += _PART_OVERHEAD_BYTES + len(part.values) + len(part.indices)
            if count and num_bytes > _MAX_VECTOR_BYTES_PER_MESSAGE:
                return count
        return len(self._vectors)

    def _num_next(self) -> int:
        """Number of events in the next message.

        The limit on log probabilities applies to it, and those of prompts go first. No part of a vector may come after
        its event.
        """
        num_left = MAX_LOGPROBS_PER_MESSAGE - len(self._prompt_logprobs)
        if num_left <= 0:
            return 0
        count = min(len(self._finishes), MAX_EVENTS_PER_MESSAGE)
        for number, entry in self._logprobs:
            num_left -= max(1, -(-len(entry.top_ids) // MAX_LOGPROBS))
            if num_left < 0:
                count = min(count, number - self._num_sent)
                break
        if (num_vectors := self._num_next_vectors()) < len(self._vectors):
            count = min(count, self._vectors[num_vectors][0] - self._num_sent)
        if len(self._records) > 1:
            count = min(count, self._records[1][0] - self._num_sent)
        return count

    def sent(self) -> None:
        """Remove the events that `next_outputs` returned: they are sent."""
        self._next_sequence += 1
        self.credit -= 1
        self.waiting_since_s = None
        self._returned.clear()
        self._has_room, self._adapters = False, None
        count, num_vectors = self._num_next(), self._num_next_vectors()  # before their inputs change
        self._num_sent += count
        for _ in range(num_vectors):
            self._vectors.popleft()
        if self._records:
            self._records.popleft()
        while self._logprobs and self._logprobs[0][0] < self._num_sent:
            self._logprobs.popleft()
        for column in (self._request_ids, self._token_ids, self._finishes):
            del column[:count]
        del self._prompt_logprobs[:MAX_LOGPROBS_PER_MESSAGE]
        for notes in (self._started, self._failures, self._preempted, self._quotes, self._progress):
            del notes[:MAX_EVENTS_PER_MESSAGE]
        if not self.num_unsent:
            self._is_urgent, self._held_since_s = False, None
