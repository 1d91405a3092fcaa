"""The output of a step: sampled tokens, log probabilities and vectors, which the device may still be computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


NOT_FINITE = -1
"""In `StepOutput.token_ids`: no token, because the row's logits are not finite."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """A step's output on the GPU: float32 [L, n], contiguous. Valid once the work now in the stream is done."""

    pointer: int
    stream: int
    """The driver's handle, as an integer."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities in the raw logits: before bias, penalties, masks and filters."""

    rows: NDArray[np.int32]
    """[K] ascending indices into batch.logit_rows, where num_logprobs is not -1; for scored tokens, all
    their places."""
    chosen: NDArray[np.float32]
    """[K] of the sampled or scored token; NaN for a scored one whose logits are not finite, and then the
    rest is void."""
    ranks: NDArray[np.int32]
    """[K] number of tokens that are at least as likely as that one, itself included."""
    top_ids: NDArray[np.int32]
    """[K, N] the most likely tokens, most likely first, equal ones by id, or a row's logprob_token_ids in their order;
    N is the largest num_reported, or num_top. Entries behind a row's own num_reported are void."""
    top: NDArray[np.float32]
    """[K, N] log probabilities of top_ids."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampled tokens of a step."""

    token_ids: NDArray[np.int32]
    """[L] one per entry of batch.logit_rows; NOT_FINITE for a row whose logits have a NaN or no finite value. Of a row
    with drafts, the token that follows the accepted ones."""
    logprobs: TokenLogprobs | None = None
    """None when no row requests log probabilities."""
    scored: TokenLogprobs | None = None
    """Log probabilities of batch.scored.next_ids; None without batch.scored."""
    pooled: tuple[NDArray[np.float32], ...] | None = None
    """One per entry of batch.pooled.rows: [width], or [tokens, width] of a kind with a vector a token. A value that is
    not finite fails the row's requests. None without batch.pooled."""
    num_accepted: tuple[int, ...] = ()
    """[L] how many of each row's drafts were drawn; empty without batch.drafts."""

    def wait(self) -> StepOutput:
        """Return itself: the output is already complete."""
        return self


class PendingOutput(Protocol):
    """The result of `sample`: tokens that the device may still be computing."""

    def wait(self) -> StepOutput:
        """Block until the step is computed. Another thread than the pass's may call it. Raises DeviceLost."""


@runtime_checkable
class ISkippableOutput(PendingOutput, Protocol):
    """Optional interface of an output."""

    def skip(self) -> None:
        """Nobody needs the step's tokens, or the KV that it has not written yet: they may be anything. Any thread may
        call it, before `wait`."""


class DeviceLost(Exception):
    """The device cannot compute any more in this process: a fault has broken its context. The process must end."""
