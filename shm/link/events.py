"""Events that the backend's link reports to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from penstock.shm.messages import Keep

if TYPE_CHECKING:
    from penstock.shm.buffers.buffer_export import Loan
    from penstock.shm.messages import Submit


@dataclass(frozen=True, slots=True)
class Submission:
    """A request from a frontend, copied and complete; token values and the model's limits are not checked yet.

    tokens are packed int32, at least num_prompt_tokens of them, or empty if the prompt is embeddings. Use them instead
    of submit.tokens. No other open request has this (frontend, request_id).
    """

    __match_args__: ClassVar[tuple[str, ...]] = ("frontend", "request_id", "tokens")

    frontend: int
    submit: Submit
    tokens: bytes
    output: Loan | None = None
    """Receives what `submit.output` asks for; the link ends the loan with the request."""
    embeddings: Loan | None = None
    """The prompt as num_prompt_tokens rows; the link ends the loan with the request."""

    @property
    def request_id(self) -> int:
        return self.submit.request_id


@dataclass(frozen=True, slots=True)
class Cancellation:
    """The client of an open request has cancelled or disconnected. The request is closed: pushes to it do nothing.

    noticed_ns is when its frontend noticed, in CLOCK_MONOTONIC; 0 if unknown. keep is for a request that lingers.
    """

    frontend: int
    request_id: int
    noticed_ns: int = 0
    keep: Keep = Keep.NOTHING


@dataclass(frozen=True, slots=True)
class FrontendDeath:
    """The last event of a frontend. All its open requests are closed."""

    frontend: int


LinkEvent = Submission | Cancellation | FrontendDeath
