"""The scores of /v1/score with label_token_ids: SGLang's scoring object."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.frontend.formats.base import WholeFormat, encode

if TYPE_CHECKING:
    from penstock.frontend.formats.base import Identity, Usage
    from penstock.frontend.parsing.choice_output import ChoiceOutput


class LabelScoresFormat(WholeFormat):
    """Implements `Format`. Each output is a prompt that ends with a label; the labels of an item are consecutive."""

    def __init__(self, identity: Identity, usage: Usage, num_labels: int, *, is_softmax: bool) -> None:
        """is_softmax: the scores of an item add up to 1; otherwise they are the model's probabilities."""
        self._identity = identity
        self._usage = usage
        self._num_labels = num_labels
        self._is_softmax = is_softmax

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        logprobs = [_last_logprob(output) for output in outputs]
        starts = range(0, len(logprobs), self._num_labels)
        num_tokens = self._usage.prompt_tokens
        return encode(
            {
                "id": self._identity.response_id,
                "object": "scoring",
                "model": self._identity.model,
                "scores": [self._scores(logprobs[start : start + self._num_labels]) for start in starts],
                "usage": {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens},
            }
        )

    def _scores(self, logprobs: list[float]) -> list[float]:
        highest = max(logprobs) if self._is_softmax else 0.0
        if highest == -math.inf:
            return [1.0 / len(logprobs)] * len(logprobs)
        likelihoods = [math.exp(logprob - highest) for logprob in logprobs]
        total = sum(likelihoods) if self._is_softmax else 1.0
        return [likelihood / total for likelihood in likelihoods]


def _last_logprob(output: ChoiceOutput) -> float:
    scored = output.prompt_logprobs or ()
    logprob = scored[-1].logprob if scored else None
    if logprob is None:
        raise ValueError("a prompt of one token has no log probability")
    return logprob
