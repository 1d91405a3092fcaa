"""A client's resources for one connection to one backend, from the handshake to the end of either side."""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from penstock.shm.buffers.device_api import OpenDevice
from penstock.shm.buffers.shared_buffers import SharedBuffers
from penstock.shm.link.frontend_link import FrontendLink
from penstock.shm.link.join import Invitation, join
from penstock.shm.memory.arena import Arena, ArenaFull, geometry
from penstock.shm.memory.board import BackendBoard, FrontendBoard
from penstock.shm.memory.ledger import Ledger
from penstock.shm.messages import (
    MAX_INLINE_PROMPT_TOKENS,
    ArenaRef,
    AskQuote,
    BufferRequest,
    BuffersClosed,
    Cancel,
    Credit,
    Generate,
    Keep,
    Pool,
    PoolBatch,
    Request,
    StepOutputs,
    encode,
)


class Session:
    """Owns the control socket, the arena, both boards' mappings, buffers and the link; `close` frees all of them."""

    def __init__(self, invitation: Invitation, ledger: Ledger, open_device: OpenDevice | None = None) -> None:
        """Takes ownership of the invitation.

        Raises OSError, RegionError for an fd that is not a region of ours, and DeviceError for shared buffers that
        cannot be opened here.
        """
        welcome = invitation.welcome
        self.model = welcome.model
        self.epoch = welcome.epoch
        self._control = invitation.control
        self._ledger = ledger
        self._refs: dict[int, ArenaRef] = {}  # request id → the slot of its tokens, until the backend has copied them
        self._digests: dict[int, list[bytes]] = {}  # request id → its pictures, until it ends
        self._written: dict[bytes, ArenaRef] = {}  # digest → the slots of the pixels, which requests share
        self._num_users = Counter[bytes]()  # digest → places in requests
        self._credit_batch = max(1, welcome.credit // 4)
        self._credits_owed = 0
        self.buffers: SharedBuffers | None = None
        with ExitStack() as fds, ExitStack() as opened:
            fds.callback(invitation.close_fds)
            opened.callback(self._control.close)
            opened.callback(self._report_buffers_closed)
            *_, num_token_slots = geometry(self.model.max_context_tokens, self.model.max_picture_bytes)
            size = welcome.arena_slots, welcome.arena_slot_bytes
            self._arena = Arena(invitation.arena_fd, *size, welcome.epoch, num_token_slots)
            opened.callback(self._arena.close)
            self.backend_board = BackendBoard.attach(invitation.backend_board_fd)
            opened.callback(self.backend_board.close)
            self.board = FrontendBoard.attach(invitation.frontend_board_fd, writable=True)
            opened.callback(self.board.close)
            if welcome.buffers is not None:
                self.buffers = SharedBuffers(welcome.buffers, invitation.buffer_fds, open_device)
                opened.callback(self.buffers.close)
            self._link = FrontendLink(welcome, invitation.message_socket_fd)
            opened.callback(self._link.close)
            self._opened = opened.pop_all()
        self.board.pid = os.getpid()
        self.link_fd = self._link.fd
        self.control_fd = self._control.fileno()
        ledger.acquire("session", self.epoch, os.getpid())

    @classmethod
    async def open(
        cls,
        socket_path: Path,
        ledger: Ledger,
        buffer_request: BufferRequest | None = None,
        open_device: OpenDevice | None = None,
    ) -> Session:
        """Raises what `rendezvous.join` and the constructor raise."""
        return cls(await join(socket_path, buffer_request), ledger, open_device)

    @property
    def needs_drain(self) -> bool:
        """Whether messages may wait unnoticed (`FrontendLink.needs_drain`)."""
        return self._link.needs_drain

    @property
    def credits_owed(self) -> int:
        """StepOutputs whose credit is not returned yet."""
        return self._credits_owed

    def can_carry(self, num_tokens: int) -> bool:
        """Whether this many tokens fit a message or a slot of the arena."""
        return num_tokens <= max(MAX_INLINE_PROMPT_TOKENS, self._arena.capacity_bytes // 4)

    def has_room(self, message: Generate, pixels: Sequence[bytes], *, when_empty: bool = False) -> bool:
        """Whether `send_prompt` can send these pixels now, or could if it had sent no others."""
        sizes = {picture.digest: len(each) for picture, each in zip(message.pictures, pixels, strict=True)}
        new = [size for digest, size in sizes.items() if when_empty or digest not in self._written]
        return self._arena.has_room(new, when_empty=when_empty)

    def send(self, message: Request) -> bool:
        """Send a whole request: its tokens, if it has any, are in a shared buffer. False while the link is full."""
        return self._link.send(message)

    def send_prompt(
        self, message: Generate | Pool | AskQuote, tokens: array[int], pixels: Sequence[bytes] = ()
    ) -> bool:
        """`send` with these tokens (int32), inline or through the arena, and the pixels of its pictures.

        Raises ArenaFull until the backend has copied an earlier long prompt, or an earlier request with pictures ends.
        """
        if pixels and isinstance(message, Generate):
            return self._send_pictures(message, tokens, pixels)
        payload = tokens.tobytes()
        if len(tokens) <= MAX_INLINE_PROMPT_TOKENS:
            return self._link.send(msgspec.structs.replace(message, tokens=payload))
        ref = self._arena.write(payload)
        if not self._link.send(msgspec.structs.replace(message, tokens=ref)):
            self._arena.free(ref)
            return False
        self._refs[message.request_id] = ref
        self._ledger.acquire("slot", (self.epoch, ref.slot), self.epoch)
        return True

    def _send_pictures(self, message: Generate, tokens: array[int], pixels: Sequence[bytes]) -> bool:
        if not self.has_room(message, pixels):
            raise ArenaFull
        request_id = message.request_id
        for picture, each in zip(message.pictures, pixels, strict=True):
            if picture.digest not in self._written:
                self._written[picture.digest] = self._arena.write_pixels(each)
            self._num_users[picture.digest] += 1
        self._digests[request_id] = [picture.digest for picture in message.pictures]
        self._ledger.acquire("pixels", (self.epoch, request_id), self.epoch)
        pictures = tuple(
            msgspec.structs.replace(picture, pixels=self._written[picture.digest]) for picture in message.pictures
        )
        is_sent = False
        try:
            is_sent = self.send_prompt(msgspec.structs.replace(message, pictures=pictures), tokens)
        finally:
            if not is_sent:
                self.free_pixels(request_id)
        return is_sent

    def free_pixels(self, request_id: int) -> None:
        """Free the slots of the request's pictures, if it has some: it has ended."""
        if digests := self._digests.pop(request_id, None):
            self._num_users.subtract(digests)
            for digest in set(digests):
                if not self._num_users[digest]:
                    del self._num_users[digest]
                    self._arena.free(self._written.pop(digest))
            self._ledger.release("pixels", (self.epoch, request_id))

    def send_pools(self, together: Sequence[tuple[Pool, array[int]]]) -> bool:
        """`send_prompt` of several, all inline and in one message."""
        inputs = (msgspec.structs.replace(message, tokens=tokens.tobytes()) for message, tokens in together)
        return self._link.send(PoolBatch(tuple(inputs)))

    def send_cancel(self, request_id: int, keep: Keep = Keep.NOTHING) -> bool:
        return self._link.send(Cancel(request_id, time.monotonic_ns(), keep))

    def receive(self, max_messages: int | None = None) -> list[StepOutputs]:
        """See `FrontendLink.drain`. Handle the messages before `return_credits`. Raises LinkBroken."""
        outputs = self._link.drain(max_messages)
        self._credits_owed += len(outputs)
        return outputs

    def free_slot(self, request_id: int) -> None:
        """Free the request's slot, if it has one: the backend has answered, so it has copied the tokens."""
        ref = self._refs.pop(request_id, None)
        if ref is not None and self._arena.free(ref):
            self._ledger.release("slot", (self.epoch, ref.slot))

    @property
    def holds_slots(self) -> bool:
        """At least one slot waits for `free_slot`."""
        return bool(self._refs)

    def return_credits(self) -> None:
        """Return a quarter of the window at a time: the backend never runs out, and few messages are needed."""
        if self._credits_owed >= self._credit_batch and self._link.send(Credit(self._credits_owed)):
            self._credits_owed = 0

    def control_ended(self) -> bool:
        """Call when the control socket is readable. Nothing is ever sent there, so anything means the end."""
        try:
            self._control.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _report_buffers_closed(self) -> None:
        """Let the backend free its device memory although this process continues; not while some of it is open here."""
        if self.buffers is None or self.buffers.is_closed:
            with contextlib.suppress(OSError):  # the backend may have ended
                self._control.send(encode(BuffersClosed()))

    def close(self) -> None:
        """Call once. The backend notices at once."""
        self._opened.close()
        self._ledger.release_owner(self.epoch)
        self._ledger.release("session", self.epoch)
