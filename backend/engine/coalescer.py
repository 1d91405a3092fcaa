"""Finds the sequence in flight that an equal new request can share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.backend.forward_pass import SamplingParams

if TYPE_CHECKING:
    from penstock.backend.sequences.sequence import Sequence
    from penstock.shm.messages import Constraints

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class ShareKey:
    """All that decides the tokens: requests with equal keys get equal tokens. The salt keeps tenants apart."""

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
        """The key of a request. Stop ids count only if constraints forbid them; otherwise each subscriber has its own.

        At temperature 0 filters and seed change nothing, penalties and bias do. The number of log probabilities counts,
        because the sequence computes them once for all.
        """
        if sampling.temperature == 0.0:
            sampling = replace(
                _GREEDY,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                logit_bias=sampling.logit_bias,
                num_logprobs=sampling.num_logprobs,
            )
        forbids_stop = constraints is not None and (constraints.min_tokens or constraints.grammar_after)
        excluded_stop_ids = tuple(sorted(stop_ids)) if forbids_stop else ()
        return cls(salt, prompt, sampling, constraints, excluded_stop_ids)


class Coalescer:
    """Sequences that can be joined, by key."""

    def __init__(self) -> None:
        self._sequences: dict[ShareKey, Sequence] = {}
        self._keys: dict[Sequence, ShareKey] = {}

    def find(self, key: ShareKey) -> Sequence | None:
        """The sequence with this key, unless it has ended or has already sampled its last token."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.ended or sequence.stopped_generation == sequence.generation:
            return None
        return sequence

    def offer(self, key: ShareKey, sequence: Sequence) -> None:
        """Make the sequence joinable. It replaces an older one that is about to end."""
        if (older := self._sequences.get(key)) is not None:
            del self._keys[older]
        self._sequences[key] = sequence
        self._keys[sequence] = key

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence has ended. It need not have been offered."""
        if (key := self._keys.pop(sequence, None)) is not None:
            del self._sequences[key]

    def __len__(self) -> int:
        return len(self._keys)
