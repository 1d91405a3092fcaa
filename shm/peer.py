"""One frontend as the backend sees it: its memory, its credit, its open requests, and the events it is owed."""

from __future__ import annotations

import os
import secrets
from array import array
from contextlib import ExitStack
from typing import TYPE_CHECKING

from shm import arena
from shm.board import FrontendBoard
from shm.wire import ArenaRef, Failure, Finish, Started, StepOutputs, WireError

if TYPE_CHECKING:
    from shm.rendezvous import Connection
    from shm.wire import Submit

MAX_EVENTS_PER_MESSAGE = 1 << 14


class Peer:
    """Lives from the welcome to the death. Private to the backend: nothing in it can be reached by the frontend."""

    def __init__(self, epoch: int, connection: Connection, max_context_tokens: int, credit: int) -> None:
        """Makes the frontend's memory, whose fds stay open until `close_fds`. Raises OSError: no memory, no fds."""
        self.epoch = epoch
        self.identity = secrets.token_bytes(16)
        self.connection = connection
        self.credit = credit
        """StepOutputs that may still be sent before some are acknowledged."""
        self.num_faults = 0
        self.waiting_since_s: float | None = None
        """Monotonic time since when output has been waiting although nothing of it could be sent."""
        self.open_requests: set[int] = set()
        self._next_sequence = 0
        # The columns of the events not sent yet.
        self._request_ids = array("Q")
        self._token_ids = array("i")
        self._finishes = bytearray()
        self._started: list[Started] = []
        self._failures: list[Failure] = []
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

    def close(self) -> None:
        self._fds.close()
        self._mappings.close()

    def copy_tokens(self, submit: Submit) -> bytes:
        """The submission's tokens, checked to be whole and at least a prompt. Raises DescriptorError, WireError."""
        tokens = self._arena.read(submit.tokens) if isinstance(submit.tokens, ArenaRef) else submit.tokens
        if len(tokens) % 4 or len(tokens) < 4 * submit.num_prompt_tokens:
            raise WireError(f"{len(tokens)} bytes for at least {submit.num_prompt_tokens} tokens")
        return tokens

    @property
    def num_unsent(self) -> int:
        """Events not sent yet."""
        return len(self._finishes)

    def add(
        self, request_id: int, token_id: int, finish: Finish, started: Started | None, failure: Failure | None
    ) -> None:
        self._request_ids.append(request_id)
        self._token_ids.append(token_id)
        self._finishes.append(finish)
        if started is not None:
            self._started.append(started)
        if failure is not None:
            self._failures.append(failure)

    def next_outputs(self) -> StepOutputs:
        """The first of the unsent events, as many as one message takes; they stay until `sent`.

        A Started or a Failure may travel ahead of its event when there are more events than that, never behind it.
        """
        return StepOutputs(
            sequence=self._next_sequence,
            request_ids=self._request_ids[:MAX_EVENTS_PER_MESSAGE].tobytes(),
            token_ids=self._token_ids[:MAX_EVENTS_PER_MESSAGE].tobytes(),
            finishes=bytes(self._finishes[:MAX_EVENTS_PER_MESSAGE]),
            started=tuple(self._started[:MAX_EVENTS_PER_MESSAGE]),
            failures=tuple(self._failures[:MAX_EVENTS_PER_MESSAGE]),
        )

    def sent(self) -> None:
        """What `next_outputs` returned is on its way."""
        self._next_sequence += 1
        self.credit -= 1
        self.waiting_since_s = None
        for column in (self._request_ids, self._token_ids, self._finishes, self._started, self._failures):
            del column[:MAX_EVENTS_PER_MESSAGE]
