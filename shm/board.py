"""One page of named counters per process: one writer, any number of readers, no locks, no messages.

A field is a 64-bit word that is written whole, so a reader sees old or new and never a mixture; fields are not
consistent with one another. Times are CLOCK_MONOTONIC nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from typing import Any, ClassVar, Self

from shm import region

_MAGIC = 0x50_4E_53_54_42_4F_41_31
_HEADER_WORDS = 8
_BOARD_BYTES = 4096


class _Word:
    """A field's place in the page; the annotation that names it is its only declaration."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __get__(self, board: Board | None, owner: type[Board]) -> Any:
        return self if board is None else board._words[self.index]

    def __set__(self, board: Board, value: int) -> None:
        board._words[self.index] = value


class Board:
    """Base of the boards: each annotated field of a subclass is an unsigned 64-bit counter."""

    fields: ClassVar[tuple[str, ...]] = ()
    _layout: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        cls.fields = tuple(cls.__annotations__)
        if (_HEADER_WORDS + len(cls.fields)) * 8 > _BOARD_BYTES:
            raise TypeError(f"{cls.__name__} has more fields than its page has words")
        cls._layout = zlib.crc32(" ".join((cls.__name__, *cls.fields)).encode())
        for index, name in enumerate(cls.fields, start=_HEADER_WORDS):
            setattr(cls, name, _Word(index))

    def __init__(self, mapping: mmap.mmap, fd: int = -1) -> None:
        self._mapping = mapping
        self._words = memoryview(mapping).cast("Q")
        self.fd = fd
        """In the writer: what readers are given. They can map it for reading only."""

    @classmethod
    def create(cls) -> Self:
        """The writer's board; this process owns it and is the only one that can ever write it."""
        fd = cls._new_fd()
        board = cls(mmap.mmap(fd, _BOARD_BYTES), fd)
        region.seal(fd, region.F_SEAL_FUTURE_WRITE)
        return board

    @classmethod
    def create_fd(cls) -> int:
        """An fd, the caller's to close, of a fresh board that another process is going to write."""
        fd = cls._new_fd()
        region.seal(fd)
        return fd

    @classmethod
    def attach(cls, fd: int, *, writable: bool = False) -> Self:
        """Maps a board made elsewhere; the fd stays the caller's. Raises RegionError for anything else."""
        mapping = region.attach(fd, _BOARD_BYTES, writable=writable)
        board = cls(mapping)
        if (board._words[0], board._words[1]) != (_MAGIC, cls._layout):
            board.close()
            raise region.RegionError(f"not a {cls.__name__}, or one of another version")
        return board

    @classmethod
    def _new_fd(cls) -> int:
        fd = region.create("penstock-board", _BOARD_BYTES)
        os.pwrite(fd, struct.pack("=QQ", _MAGIC, cls._layout), 0)
        return fd

    def values(self) -> dict[str, int]:
        return {name: self._words[index] for index, name in enumerate(self.fields, start=_HEADER_WORDS)}

    def close(self) -> None:
        """Idempotent. Other processes keep what they have mapped."""
        if not self._mapping.closed:
            self._words.release()
            self._mapping.close()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


class BackendBoard(Board):
    """What the backend tells of itself. Counters only grow within one backend's life; the rest are present values."""

    pid: int
    heartbeat_ns: int
    """Monotonic time of the loop's last turn: forward progress, not mere life."""
    draining: int
    """1 once the backend accepts nothing new."""
    steps: int
    running: int
    waiting: int
    max_waiting: int
    pages_used: int
    pages_total: int
    requests_accepted: int
    requests_finished: int
    requests_cancelled: int
    requests_rejected: int
    requests_failed: int
    requests_expired: int
    requests_coalesced: int
    """Those that joined a sequence which another had started."""
    pages_idle: int
    """Held by nobody, their content kept for who may ask for it again."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    computed_tokens: int
    """Of prompts and answers, in all steps; what a preempted sequence computes again counts again."""
    wasted_tokens: int
    """Those of computed_tokens whose sequence had ended, or was set back, by the time their step's result was there."""
    preemptions: int
    cancel_to_free_count: int
    """From a frontend's noticing that a client has gone to its pages being free; the buckets below are cumulative."""
    cancel_to_free_sum_us: int
    cancel_to_free_le_1ms: int
    cancel_to_free_le_5ms: int
    cancel_to_free_le_20ms: int
    cancel_to_free_le_100ms: int
    cancel_to_free_le_500ms: int

    def observe_cancel(self, cancel_to_free_us: int) -> None:
        self.cancel_to_free_count += 1
        self.cancel_to_free_sum_us += cancel_to_free_us
        for limit_ms in (1, 5, 20, 100, 500):
            if cancel_to_free_us <= 1000 * limit_ms:
                name = f"cancel_to_free_le_{limit_ms}ms"
                setattr(self, name, getattr(self, name) + 1)

    def beat(self) -> None:
        self.heartbeat_ns = time.monotonic_ns()

    def seconds_since_beat(self) -> float:
        return (time.monotonic_ns() - self.heartbeat_ns) / 1e9


class FrontendBoard(Board):
    """What one frontend tells of itself. requests_open is a present value; the counters outlive a reconnection."""

    pid: int
    requests_open: int
    requests_stop: int
    requests_length: int
    requests_cancelled: int
    requests_rejected: int
    requests_failed: int
    requests_expired: int
    requests_resumed: int
    tokens_streamed: int
