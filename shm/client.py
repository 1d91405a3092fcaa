"""BackendClient: submit, stream, cancel. The frontend uses it, and so may any other asyncio server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shm.wire import FailureCode, Finish, ModelCard, Sampling


@dataclass(slots=True)
class GenerationRequest:
    """What to run. token_ids within the model's context; max_tokens counts generated tokens."""

    token_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class TokenBatch:
    """Tokens that arrived since the last batch, one or more; or none, where the stream ended without a token.

    finish is NONE while the stream goes on. With finish STOP the last token id is the stop token, not part of the text.
    """

    token_ids: list[int]
    finish: Finish = Finish.NONE
    failure: FailureCode | None = None
    failure_limit: int = 0


class BackendUnavailable(Exception):
    """No backend, or none that came back in time. HTTP 503."""


class Overloaded(Exception):
    """The backend's queue is full. HTTP 429."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"overloaded, retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s


class TokenStream:
    """One subscriber's tokens. `async for batch in stream` ends after the batch whose finish is not NONE."""

    cached_tokens: int
    """Prompt tokens served from the prefix cache; known once the first batch has come."""
    queue_s: float
    """Seconds from the backend's receipt to its first step; known once the first batch has come."""

    def __aiter__(self) -> AsyncIterator[TokenBatch]: ...

    def cancel(self) -> None:
        """Idempotent; frees the request in the backend. The iterator, if waiting, ends with finish CANCELLED."""
        ...


class BackendClient:
    """The link to one backend. Survives the backend's death: reconnects by itself, and resubmits what was running."""

    def __init__(self, socket_path: Path, *, resume_timeout_s: float = 30.0) -> None: ...

    async def start(self) -> None:
        """Begins to connect and returns at once; the backend may come later."""
        ...

    async def close(self) -> None: ...

    @property
    def model(self) -> ModelCard | None:
        """The backend's model, None before the first connection; kept over a reconnection."""
        ...

    @property
    def ready(self) -> bool:
        """Connected, and the backend makes progress: its board's heartbeat is younger than 2 s."""
        ...

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Raises BackendUnavailable when not connected, Overloaded when the board shows a full queue."""
        ...
