"""Which sequences in flight a new request may listen to instead of having the same tokens computed again."""

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
    """All that decides which tokens come: requests with equal keys get equal tokens. The salt keeps tenants apart."""

    salt: bytes
    prompt: bytes
    sampling: SamplingParams
    constraints: Constraints | None
    excluded_stop_ids: tuple[int, ...]
    """Stop ids that may not be sampled at first."""

    @classmethod
    def of(
        cls,
        salt: bytes,
        prompt: bytes,
        sampling: SamplingParams,
        constraints: Constraints | None = None,
        stop_ids: tuple[int, ...] = (),
    ) -> ShareKey:
        """Stop ids are each listener's own affair, unless constraints keep them out.

        At temperature 0 neither the filters nor the seed decide anything; penalties and bias do. How many log
        probabilities are told with a token is not the listener's own affair either."""
        if sampling.temperature == 0.0:
            sampling = replace(
                _GREEDY,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                logit_bias=sampling.logit_bias,
                num_logprobs=sampling.num_logprobs,
            )
        keeps_out = constraints is not None and (constraints.min_tokens or constraints.grammar_after)
        excluded_stop_ids = tuple(sorted(stop_ids)) if keeps_out else ()
        return cls(salt, prompt, sampling, constraints, excluded_stop_ids)


class Coalescer:
    """Sequences in flight whose tokens are determined, by what determines them."""

    def __init__(self) -> None:
        self._sequences: dict[ShareKey, Sequence] = {}
        self._keys: dict[Sequence, ShareKey] = {}

    def find(self, key: ShareKey) -> Sequence | None:
        """A sequence that has not ended, and not begun to: one that has sampled its last token takes nobody on."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.ended or sequence.stopped_generation == sequence.generation:
            return None
        return sequence

    def offer(self, key: ShareKey, sequence: Sequence) -> None:
        """From now on the sequence may be found, in place of an older one that is about to end."""
        if (older := self._sequences.get(key)) is not None:
            del self._keys[older]
        self._sequences[key] = sequence
        self._keys[sequence] = key

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence has ended; one that was never offered is no matter."""
        if (key := self._keys.pop(sequence, None)) is not None:
            del self._sequences[key]

    def __len__(self) -> int:
        return len(self._keys)
