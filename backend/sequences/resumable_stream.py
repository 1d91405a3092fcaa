"""Streams that outlive their readers: the parts of each, and whether it still runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.shm.messages import ArenaRef, EventLogprobs, Failure, Finish, Picture, Started, StreamName

_CHOICE_BYTES = 512
_ENTRY_BYTES = 256
"""Approximate memory of a token's log probability."""
_TOP_BYTES = 72
"""Memory of each further log probability of that token: an id and a value with their references."""


@dataclass(slots=True, eq=False)
class ResumableChoice:
    """One request of a stream. While it runs its tokens are those of its sequence."""

    stream: ResumableStream
    open_as: tuple[int, int]
    """(frontend, request id) in the table of open requests, while it runs."""
    has_reader: bool = True
    started: Started | None = None
    """Sent with the first token; a later reader receives the same."""
    # Once it has ended
    finish: Finish = Finish.NONE
    failure: Failure | None = None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """All generated tokens."""
    logprobs: list[EventLogprobs] | None = None
    """One entry for each token, if the request asks for log probabilities."""

    def end(
        self, finish: Finish, tokens: array[int], logprobs: list[EventLogprobs] | None, failure: Failure | None = None
    ) -> None:
        self.finish, self.tokens, self.logprobs, self.failure = finish, tokens, logprobs, failure

    @property
    def num_bytes(self) -> int:
        if not self.logprobs:
            return _CHOICE_BYTES + 4 * len(self.tokens)
        entry_bytes = _ENTRY_BYTES + _TOP_BYTES * len(self.logprobs[0].top_ids)  # all have as many
        return _CHOICE_BYTES + 4 * len(self.tokens) + entry_bytes * len(self.logprobs)


@dataclass(slots=True, eq=False)
class ResumableStream:
    """The parts of one client request's stream, by choice."""

    number: int
    name: StreamName
    tenant: bytes
    linger_s: int
    record: bytes = b""
    choices: dict[int, ResumableChoice] = field(default_factory=dict)
    pixels: dict[bytes, memoryview] = field(default_factory=dict)
    """Copies of its pictures' pixels by digest, while a choice runs: the reader may go before they are encoded."""
    expires_s: float | None = None
    """None while a choice has a reader."""

    @property
    def is_read(self) -> bool:
        return any(choice.has_reader for choice in self.choices.values())

    @property
    def has_ended(self) -> bool:
        """No part of it runs or is read."""
        return all(choice.finish is not Finish.NONE for choice in self.choices.values()) and not self.is_read

    @property
    def num_bytes(self) -> int:
        num_pixels = sum(map(len, self.pixels.values()))
        return len(self.record) + num_pixels + sum(choice.num_bytes for choice in self.choices.values())

    def keep_pixels(
        self, pictures: tuple[Picture, ...], read: Callable[[ArenaRef], memoryview]
    ) -> Callable[[ArenaRef], memoryview]:
        """Copy the pixels, and return what reads the copies. Raises DescriptorError."""
        copies = {}
        for picture in pictures:
            if picture.pixels is not None:
                if picture.digest not in self.pixels:
                    self.pixels[picture.digest] = read(picture.pixels)
                copies[picture.pixels] = self.pixels[picture.digest]
        return copies.__getitem__
