"""Finds the open sequence that an equal request can share.

A request that an earlier backend had begun comes back with the tokens that its stream has received. This backend cannot
check these tokens: the frontend claims them. So only that frontend's streams may receive them from here.
"""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass

from penstock.backend.forward_pass import SamplingParams
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.shm.link.events import Submission
from penstock.shm.messages import Constraints, Pool, PromptHeader, TextHeader

_SALT_BYTES = 16
_MAX_OFFERS = 8
"""Sequences with one key that can be joined. More have contradictory claims, so one of them is false."""


@dataclass(frozen=True, slots=True)
class ShareKey:
    """Everything that the tokens depend on: requests with equal keys get equal tokens. The salt keeps tenants apart."""

    salt: bytes
    prompt: bytes
    sampling: SamplingParams
    constraints: Constraints | None
    excluded_stop_ids: tuple[int, ...]
    """Stop ids that constraints forbid at first, sorted."""

    @classmethod
    def of(
        cls,
        salt: bytes,
        prompt: bytes,
        sampling: SamplingParams,
        constraints: Constraints | None = None,
        stop_ids: tuple[int, ...] = (),
    ) -> ShareKey:
        """The key of a request.

        Stop ids count only if constraints forbid them; otherwise each subscriber has its own. At temperature 0 filters
        and seed change nothing, but penalties and bias do. The reported log probabilities count, because the sequence
        computes them once for all.
        """
        if sampling.temperature == 0.0:
            sampling = SamplingParams(
                temperature=0.0,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                dry_multiplier=sampling.dry_multiplier,
                dry_base=sampling.dry_base,
                dry_allowed_length=sampling.dry_allowed_length,
                dry_penalty_last_n=sampling.dry_penalty_last_n,
                dry_breakers=sampling.dry_breakers,
                logit_bias=sampling.logit_bias,
                num_logprobs=sampling.num_logprobs,
                logprob_token_ids=sampling.logprob_token_ids,
            )
        forbids_stop = constraints is not None and (
            constraints.min_tokens or constraints.grammar_after or constraints.grammar
        )
        excluded_stop_ids = tuple(sorted(stop_ids)) if forbids_stop else ()
        return cls(salt, prompt, sampling, constraints, excluded_stop_ids)

    @classmethod
    def of_request(cls, submission: Submission[TextHeader], sampling: SamplingParams) -> ShareKey | None:
        """None for a request that shares no sequence."""
        message = submission.message
        if not message.may_share or num_prompt_logprobs(submission) >= 0:
            return None
        prompt = submission.tokens[: 4 * message.num_prompt_tokens]
        return cls.of(message.own_salt, prompt, sampling, message.constraints, message.stop_token_ids)


def num_prompt_logprobs(submission: Submission[TextHeader]) -> int:
    """-1 if none are due: the first token has none, and a resumed stream has received them all."""
    message, num_tokens = submission.message, len(submission.tokens) // 4
    return message.num_prompt_logprobs if num_tokens == message.num_prompt_tokens > 1 else -1


@dataclass(frozen=True, slots=True)
class PooledKey:
    """Everything that a vector depends on, except its form: its dimensions, and whether it is normalised."""

    salt: bytes
    tokens: bytes
    kind: str
    second_start: int

    @classmethod
    def of(cls, submission: Submission[Pool]) -> PooledKey | None:
        """None for a request that shares no sequence."""
        message, pooled = submission.message, submission.message.pooled
        if not message.may_share:
            return None
        return cls(message.own_salt, submission.tokens, pooled.kind, pooled.second_start)


@dataclass(frozen=True, slots=True)
class Presented:
    """The tokens of a request that could join a sequence, and the frontend that sent them."""

    frontend: int
    tokens: bytes
    """Packed int32: the prompt, then the tokens that the stream has received according to the frontend."""
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    def agrees_with(self, tokens: array[int]) -> bool:
        """Whether the generated tokens are equal up to the end of the shorter ones. The prompts are equal."""
        first, end = self.num_prompt_tokens, min(self.num_tokens, len(tokens))
        return self.tokens[4 * first : 4 * end] == tokens[first:end].tobytes()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A valid request that has no sequence yet."""

    submission: Submission[PromptHeader]
    subscriber: Subscriber
    sampling: SamplingParams
    rank: float
    key: ShareKey | PooledKey | None
    """None if it shares no sequence."""
    presented: Presented
    joined: Sequence | None
    """An equal request's sequence."""

    @property
    def joinable(self) -> Sequence | None:
        """`joined`, unless that waits behind the rank of this request, which is new and would be delayed."""
        joined = self.joined
        if joined is None or self.submission.message.admitted_ns or joined.slot is not None:
            return joined
        return joined if self.rank >= joined.rank else None

    def new_sequence(self, constraints: SequenceConstraints | None = None) -> Sequence:
        """A sequence of its own, with this request as its only subscriber."""
        message, embeddings = self.submission.message, self.submission.embeddings
        sequence = Sequence(
            self.subscriber,
            self.submission.tokens,
            message.num_prompt_tokens,
            self.sampling,
            # The cache cannot tell embeddings apart: with a random salt no other sequence finds their KV.
            salt=message.own_salt if embeddings is None else secrets.token_bytes(_SALT_BYTES),
            tenant=message.tenant,
            weight=message.weight,
            rank=self.rank,
            admitted_ns=message.admitted_ns,
            constraints=constraints,
        )
        sequence.embeddings = embeddings
        return sequence


# Who may join. Equal requests have equal tokens, so a request can join at any time and is sent what it has missed. That
# is safe as long as this backend has computed those tokens. A resumed sequence begins with tokens that it has not:
#
#   |--- prompt ---|--- claimed ---|--- computed here ---|
#                  ^ num_prompt    ^ num_claimed
#
# A frontend may lie, so its claims must reach no other frontend. A request that brings all the claimed tokens itself
# learns nothing new, and joins. One with fewer would be sent the rest: it joins only if its own frontend is among the
# claimants. If nothing was claimed, anybody joins. Requests whose tokens contradict the sequence's never join, so each
# claim that contradicts another has a sequence of its own, under the same key.


@dataclass(slots=True, eq=False)
class _Offer:
    """A sequence that can be joined.

    Its first num_claimed tokens came with its requests; this backend did not compute them.
    """

    sequence: Sequence
    num_claimed: int
    claimants: set[int]
    """Frontends that sent all of these tokens."""

    @property
    def is_alive(self) -> bool:
        """Whether more tokens will come: it has not ended, and its last token is not sampled yet."""
        sequence = self.sequence
        return not sequence.ended and sequence.final_generation != sequence.generation

    def accepts(self, presented: Presented) -> bool:
        """Whether the request may join. It receives no tokens that only another frontend has claimed."""
        if not self.is_alive or not presented.agrees_with(self.sequence.tokens):
            return False
        if presented.num_tokens >= self.num_claimed or self.num_claimed == presented.num_prompt_tokens:
            return True
        # Log probabilities of claimed tokens are not known.
        return presented.frontend in self.claimants and self.sequence.past_logprobs is None

    def is_ahead_of(self, presented: Presented) -> bool:
        """Whether the request can join only if the sequence begins with the request's fewer tokens. It is not planned
        yet."""
        return (
            self.sequence.order < 0
            and self.is_alive
            and presented.num_tokens < self.num_claimed
            and presented.agrees_with(self.sequence.tokens)
            and not self.accepts(presented)
        )


class Coalescer:
    """Sequences that can be joined, by key. A key has several only if the tokens that frontends claim differ."""

    def __init__(self) -> None:
        self._offers: dict[ShareKey | PooledKey, list[_Offer]] = {}
        self._keys: dict[Sequence, ShareKey | PooledKey] = {}

    def find(self, key: ShareKey | PooledKey, presented: Presented) -> Sequence | None:
        """The sequence that the request joins from now on."""
        for offer in self._offers.get(key, ()):
            if offer.accepts(presented):
                if presented.num_tokens >= offer.num_claimed:
                    offer.claimants.add(presented.frontend)
                return offer.sequence
        return None

    def find_longer(self, key: ShareKey | PooledKey, presented: Presented) -> Sequence | None:
        """A sequence that is not planned yet and could begin with the request's tokens alone."""
        for offer in self._offers.get(key, ()):
            if offer.is_ahead_of(presented):
                return offer.sequence
        return None

    def note_shortened(self, sequence: Sequence, presented: Presented) -> None:
        """Note that the sequence, which `find_longer` returned, now begins with the request's tokens."""
        for offer in self._offers[self._keys[sequence]]:
            if offer.sequence is sequence:
                offer.num_claimed = presented.num_tokens
                offer.claimants.add(presented.frontend)

    def offer(self, key: ShareKey | PooledKey, sequence: Sequence, presented: Presented) -> None:
        """Make the sequence joinable.

        It is found before others with this key, but after those in the restart grace: more requests of their groups may
        still come. Sequences that have sampled their last token are dropped.
        """
        offers = self._offers.setdefault(key, [])
        for stale in [offer for offer in offers if not offer.is_alive] or offers[_MAX_OFFERS - 1 :]:
            offers.remove(stale)
            del self._keys[stale.sequence]
        num_delayed = sum(offer.sequence.order < 0 for offer in offers)
        offers.insert(num_delayed, _Offer(sequence, presented.num_tokens, {presented.frontend}))
        self._keys[sequence] = key

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence has ended. It need not have been offered."""
        if (key := self._keys.pop(sequence, None)) is not None:
            offers = self._offers[key]
            offers[:] = [offer for offer in offers if offer.sequence is not sequence]
            if not offers:
                del self._offers[key]

    def __len__(self) -> int:
        return len(self._keys)
