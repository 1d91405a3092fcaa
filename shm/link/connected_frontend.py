"""One frontend as the backend sees it: its memory, its credit, its open requests, and the events it is owed."""

from __future__ import annotations

import os
import secrets
import time
from array import array
from collections import defaultdict, deque
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from penstock.shm.buffers.buffer_export import LoanError
from penstock.shm.memory import arena
from penstock.shm.memory.board import FrontendBoard
from penstock.shm.messages import (
    ArenaRef,
    BufferContent,
    BufferRef,
    EventLogprobs,
    Failure,
    Finish,
    PromptLogprobs,
    Started,
    StepOutputs,
    WireError,
)

if TYPE_CHECKING:
    from penstock.shm.buffers.buffer_export import ExportedBuffers, Loan
    from penstock.shm.link.rendezvous import ControlConnection
    from penstock.shm.messages import BufferReturn, Submit

MAX_EVENTS_PER_MESSAGE = 1 << 14
_MAX_HOLD_S = 0.25
"""What nobody waits for is kept this long: by then the engine's next turn sends it."""
MAX_LOGPROBS_PER_MESSAGE = 1 << 13
"""Of the prompts' and the others together. At most 20 likeliest tokens each, 14 bytes apiece: with the events they stay
under a message's limit."""


class ConnectedFrontend:
    """Lives from the welcome to the death. Private to the backend: nothing in it can be reached by the frontend."""

    def __init__(
        self,
        epoch: int,
        connection: ControlConnection,
        max_context_tokens: int,
        credit: int,
        buffers: ExportedBuffers | None = None,
    ) -> None:
        """Makes the frontend's memory, whose fds stay open until `close_fds`. Raises OSError: no memory, no fds.

        The shared buffers stay the caller's.
        """
        self.epoch = epoch
        self.identity = secrets.token_bytes(16)
        self.connection = connection
        self.credit = credit
        """StepOutputs that may still be sent before some are acknowledged."""
        self.num_faults = 0
        self.waiting_since_s: float | None = None
        """Monotonic time since when output has been waiting although nothing of it could be sent."""
        self.open_requests: set[int] = set()
        self._in_bundles: set[int] = set()
        """Those of them whose tokens may wait for one another."""
        self._is_urgent = False
        """Somebody waits for some of the events not sent yet."""
        self._held_since_s: float | None = None
        """Since when there are any for which nobody does."""
        self.buffers = buffers
        self._loans: defaultdict[int, list[Loan]] = defaultdict(list)  # by request, until its end
        self._next_sequence = 0
        # The columns of the events not sent yet.
        self._request_ids = array("Q")
        self._token_ids = array("i")
        self._finishes = bytearray()
        self._started: list[Started] = []
        self._failures: list[Failure] = []
        self._preempted: list[int] = []
        self._logprobs: deque[tuple[int, EventLogprobs]] = deque()
        """With the number of their event since the beginning."""
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._num_sent = 0
        """Events in messages that have been sent."""
        self._returned: list[BufferReturn] = []
        self.arena_slots, self.arena_slot_bytes = arena.geometry(max_context_tokens)
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

    def close_fds(self) -> None:
        """The frontend has received them, or never will; the mappings stay."""
        self._fds.close()
        if self.buffers is not None:
            self.buffers.close_fds()

    def close(self) -> None:
        self._fds.close()
        self._mappings.close()

    def copy_tokens(self, submit: Submit) -> bytes:
        """The submission's tokens, checked to be whole and at least a prompt.

        Raises DescriptorError, WireError, and LoanError for a shared buffer that does not hold them.
        """
        match submit.tokens:
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
        if len(tokens) % 4 or len(tokens) < 4 * submit.num_prompt_tokens:
            raise WireError(f"{len(tokens)} bytes for at least {submit.num_prompt_tokens} tokens")
        if submit.output is not None and len(tokens) > 4 * submit.num_prompt_tokens:
            raise WireError("an output for a request that goes on where another ended")
        return tokens

    def borrow_output(self, submit: Submit) -> Loan | None:
        """What the request's output is to be written to, until `end`. Raises LoanError, WireError."""
        if submit.output is None:
            return None
        if submit.may_share:
            raise WireError("an output for a request that may join another")
        return self._borrow(submit, submit.output, to_backend=False)

    def borrow_embeddings(self, submit: Submit) -> Loan | None:
        """The request's prompt until `end`, where that is no tokens. Raises LoanError, WireError."""
        ref = submit.tokens
        if not isinstance(ref, BufferRef) or ref.content is not BufferContent.PROMPT_EMBEDDINGS:
            return None
        if submit.may_share:
            raise WireError("embeddings of a request that may join another")
        if submit.num_prompt_logprobs >= 0:
            raise WireError("embeddings of a request that wants its prompt's log probabilities")
        if ref.num_rows != submit.num_prompt_tokens:
            raise WireError(f"{ref.num_rows} embeddings for {submit.num_prompt_tokens} tokens")
        loan = self._borrow(submit, ref, to_backend=True)
        loan.check_written()
        return loan

    def _borrow(self, submit: Submit, ref: BufferRef, *, to_backend: bool) -> Loan:
        loan = self._own_buffers().borrow(ref, to_backend=to_backend)
        self._loans[submit.request_id].append(loan)
        return loan

    def open(self, submit: Submit) -> None:
        """A request that is not open."""
        self.open_requests.add(submit.request_id)
        if submit.batch_delivery:
            self._in_bundles.add(submit.request_id)

    def end(self, request_id: int) -> None:
        """The request is over, whatever has become of it: the buffers that it had go back."""
        self.open_requests.remove(request_id)
        self._in_bundles.discard(request_id)
        for loan in self._loans.pop(request_id, ()):
            self._returned.append(self._own_buffers().give_back(loan))
            self._is_urgent = True

    def _own_buffers(self) -> ExportedBuffers:
        if self.buffers is None:
            raise LoanError("a shared buffer of a client that has none")
        return self.buffers

    @property
    def num_unsent(self) -> int:
        """Events, log probabilities of prompts and returned buffers not sent yet."""
        return len(self._finishes) + len(self._prompt_logprobs) + len(self._returned)

    @property
    def is_due(self) -> bool:
        """What is not sent yet is waited for, or has waited long enough."""
        held_s = 0.0 if self._held_since_s is None else time.monotonic() - self._held_since_s
        return self._is_urgent or held_s >= _MAX_HOLD_S

    def _hold(self) -> None:
        """An event was added that may wait."""
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
    ) -> None:
        if finish or started or failure or token_id < 0 or request_id not in self._in_bundles:
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

    def add_prompt_logprobs(self, request_id: int, entry: EventLogprobs) -> None:
        self._is_urgent = True
        self._prompt_logprobs.append(PromptLogprobs(request_id, (entry,)))

    def add_tokens(self, request_ids: list[int], token_ids: list[int]) -> None:
        """Events of a token each that neither start nor end their request."""
        if self._in_bundles.issuperset(request_ids):
            self._hold()
        else:
            self._is_urgent = True
        self._request_ids.extend(request_ids)
        self._token_ids.extend(token_ids)
        self._finishes += bytes(len(token_ids))

    def add_preemption(self, request_id: int) -> None:
        """Rides with the next events."""
        self._preempted.append(request_id)

    def next_outputs(self) -> StepOutputs:
        """The first of the unsent events, as many as one message takes; they stay until `sent`.

        A Started or a Failure may travel ahead of its event when there are more events than that, never behind it.
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
            returned=tuple(self._returned),  # no more than there are buffers
            logprobs=tuple(
                msgspec.structs.replace(logprobs, event=number - self._num_sent)
                for number, logprobs in self._logprobs
                if number < self._num_sent + count
            ),
            prompt_logprobs=tuple(self._prompt_logprobs[:MAX_LOGPROBS_PER_MESSAGE]),
        )

    def _num_next(self) -> int:
        """Events of the next message: log probabilities are long, few of them fill it. Those of prompts go first."""
        num_left = MAX_LOGPROBS_PER_MESSAGE - len(self._prompt_logprobs)
        if num_left <= 0:
            return 0
        count = min(len(self._finishes), MAX_EVENTS_PER_MESSAGE)
        if len(self._logprobs) > num_left:
            count = min(count, self._logprobs[num_left][0] - self._num_sent)
        return count

    def sent(self) -> None:
        """What `next_outputs` returned is on its way."""
        self._next_sequence += 1
        self.credit -= 1
        self.waiting_since_s = None
        self._returned.clear()
        count = self._num_next()  # before what it depends on has gone
        self._num_sent += count
        while self._logprobs and self._logprobs[0][0] < self._num_sent:
            self._logprobs.popleft()
        for column in (self._request_ids, self._token_ids, self._finishes):
            del column[:count]
        del self._prompt_logprobs[:MAX_LOGPROBS_PER_MESSAGE]
        for told in (self._started, self._failures, self._preempted):
            del told[:MAX_EVENTS_PER_MESSAGE]
        if not self.num_unsent:
            self._is_urgent, self._held_since_s = False, None
