"""Events that the backend's link reports to the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeGuard, TypeVar

from penstock.shm.buffers.buffer_export import Loan
from penstock.shm.messages import ArenaRef, AskStream, CancelOther, ChangeAdapter, Keep, PromptHeader

MessageT = TypeVar("MessageT", bound=PromptHeader)
MessageT_co = TypeVar("MessageT_co", bound=PromptHeader, covariant=True)


@dataclass(frozen=True, slots=True)
class Submission(Generic[MessageT_co]):
    """A frontend's request with its prompt, copied and complete; token values and the model's limits are not checked.

    tokens are packed int32, at least num_prompt_tokens of them, or empty if the prompt is embeddings. Use them instead
    of message.tokens. No other open request has this (frontend, request_id).
    """

    __match_args__: ClassVar[tuple[str, ...]] = ("frontend", "request_id", "tokens")

    frontend: int
    message: MessageT_co
    tokens: bytes
    output: Loan | None = None
    """Receives what `Generate.output` asks for; the link ends the loan with the request."""
    embeddings: Loan | None = None
    """The prompt as num_prompt_tokens rows; the link ends the loan with the request."""
    read_pixels: Callable[[ArenaRef], memoryview] | None = None
    """Reads the pixels of the request's pictures, on any thread. Raises DescriptorError, surely once it has ended."""

    @property
    def request_id(self) -> int:
        return self.message.request_id

    def deadline_s(self, arrived_s: float) -> float | None:
        """Time at which it expires, if it arrived at arrived_s."""
        return arrived_s + self.message.timeout_ms / 1000 if self.message.timeout_ms else None


def carries(submission: Submission[Any], kind: type[MessageT]) -> TypeGuard[Submission[MessageT]]:
    """Whether the request is of this kind."""
    return isinstance(submission.message, kind)


@dataclass(frozen=True, slots=True)
class Question:
    """A request without a prompt, which runs nothing."""

    frontend: int
    message: CancelOther | AskStream | ChangeAdapter


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


LinkEvent: TypeAlias = Submission[PromptHeader] | Question | Cancellation | FrontendDeath
