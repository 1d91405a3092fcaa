"""Limits of a request to the model that is served. Frontends check the same for a better message; these checks
protect the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.backend.engine.pictures.check import BadPicture, words_of
from penstock.backend.forward_pass.extensions import PictureTower
from penstock.shm.link.events import Submission
from penstock.shm.messages import Failure, FailureCode, Pool, PromptHeader, TextHeader

_CUT_KINDS = ("embed", "token_embed")
"""Kinds for which a request may ask for only the first dimensions."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one request, and of the number of open and waiting requests."""

    vocab_size: int
    max_context_tokens: int
    max_waiting: int
    """Sequences that may wait. Tenants with less than their share of the places may exceed it (`tenant_places`)."""
    priority_step_s: float = 0.0
    """Head start of one priority level over later arrivals; 0 is first come, first served."""
    max_open: int = 1 << 16
    """Open requests, including those that share a sequence. Tenants may exceed it as they may exceed max_waiting."""
    max_open_resumed: int = 1 << 17
    """Open requests at which even one that was admitted before is refused: the bound on frontends' claims."""
    scores_prompts: bool = True
    """The forward pass can report log probabilities of prompts."""
    has_llama_cpp_sampling: bool = True
    """The forward pass applies DRY, XTC, top-n-sigma and dynamic temperature."""
    pooled: Mapping[str, int] = field(default_factory=dict)
    """Kinds of vectors that the forward pass computes → values per vector."""
    generates: bool = True
    """The forward pass samples tokens."""
    adapters: Mapping[str, int] = field(default_factory=dict)
    """Id of each adapter → its index in the forward pass."""
    tower: PictureTower | None = None
    """None if the model takes no pictures."""
    unloaded: Collection[str] = ()
    """Ids of adapters that only requests of before may still use."""

    def find_fault(self, submission: Submission[TextHeader]) -> Failure | None:
        """Why the model cannot generate what is requested, whatever else is open; None if it can."""
        message, request_id = submission.message, submission.request_id
        if (fault := self._find_fault_of_prompt(submission, _named_ids(message))) is not None:
            return fault
        if not self.generates:
            return Failure(request_id, FailureCode.NOT_SERVED)
        if message.num_prompt_logprobs >= 0 and not self.scores_prompts:
            return Failure(request_id, FailureCode.NOT_SCORED)
        if not self.has_llama_cpp_sampling and (field_name := message.sampling.llama_cpp_field) is not None:
            return Failure(request_id, FailureCode.NOT_SAMPLED, text=field_name)
        breakers = message.sampling.dry_breakers
        if len(breakers) % 4 or not _are_breakers(np.frombuffer(breakers, np.int32), self.vocab_size):
            return Failure(request_id, FailureCode.BAD_TOKEN, self.vocab_size)
        return None

    def find_fault_of_pool(self, submission: Submission[Pool]) -> Failure | None:
        """`find_fault` for a vector."""
        message, pooled = submission.message, submission.message.pooled
        if (fault := self._find_fault_of_prompt(submission)) is not None:
            return fault
        width = self.pooled.get(pooled.kind)
        if width is None or submission.embeddings is not None:
            return Failure(message.request_id, FailureCode.NOT_SERVED)
        if pooled.num_dimensions > (width if pooled.kind in _CUT_KINDS else 0):
            return Failure(message.request_id, FailureCode.NOT_SERVED, width)
        num_tokens = len(submission.tokens) // 4
        if num_tokens != message.num_prompt_tokens or pooled.second_start >= num_tokens:
            text = "tokens behind the input, or no second text"
            return Failure(message.request_id, FailureCode.INTERNAL, text=text)
        return None

    def _find_fault_of_prompt(
        self, submission: Submission[PromptHeader], named_ids: Iterable[int] = ()
    ) -> Failure | None:
        message, request_id = submission.message, submission.request_id
        try:
            words = words_of(submission, self.tower)
        except BadPicture as error:
            return Failure(request_id, FailureCode.BAD_PICTURE, text=str(error))
        tokens = words.view(np.uint32)  # a negative id is larger than any other
        if not 1 <= message.num_prompt_tokens <= len(tokens) or len(tokens) > self.max_context_tokens:
            return Failure(request_id, FailureCode.CONTEXT_TOO_LONG, self.max_context_tokens)
        highest = int(np.maximum.reduce(tokens)) if submission.embeddings is None else 0
        if max(highest, *named_ids, 0) >= self.vocab_size:
            return Failure(request_id, FailureCode.BAD_TOKEN, self.vocab_size)
        is_gone = message.adapter in self.unloaded and not message.admitted_ns
        if message.adapter and (is_gone or message.adapter not in self.adapters):
            return Failure(request_id, FailureCode.NO_ADAPTER)
        return None


def _are_breakers(ids: NDArray[np.int32], vocab_size: int) -> bool:
    return not len(ids) or bool(ids[-1] == -1 and ids.min() == -1 and ids.max() < vocab_size)


def _named_ids(message: TextHeader) -> Iterator[int]:
    """Token ids in the request's options. Stop ids are left out: one outside the vocabulary is never sampled."""
    yield from (token_id for token_id, _ in message.sampling.logit_bias)
    yield from message.sampling.logprob_token_ids
    if (constraints := message.constraints) is not None:
        yield from constraints.allowed_token_ids
        yield from constraints.thinking_end
        yield from (token_id for run in constraints.bad_words for token_id in run)
