"""Estimates the most that a request may use of its key's limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.transport.exchange import PlannedUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.frontend.schemas.decoding import AnsweredBody

ASSUMED_ANSWER_TOKENS = 1024
"""Tokens reserved for each choice if the request does not limit its answer. Further tokens count as they come."""


def planned_use(body: AnsweredBody, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> PlannedUse:
    """max_tokens contains the limit of each prompt's answer."""
    field, requested = body.requested_max_tokens
    is_stated = requested is not None
    limits = max_tokens if is_stated else [min(limit, ASSUMED_ANSWER_TOKENS) for limit in max_tokens]
    return PlannedUse(
        num_sequences=len(prompts) * body.num_candidates,
        sequences_field=_sequences_field(body),
        prompt_tokens=sum(map(len, prompts)),
        answer_tokens=body.num_candidates * sum(limits),
        tokens_field=field if is_stated else body.prompt_field,
        is_stated=is_stated,
    )


def _sequences_field(body: AnsweredBody) -> str:
    if body.num_candidates == 1:
        return body.prompt_field
    is_ranked = isinstance(body, CompletionBody) and body.best_of == body.num_candidates
    return "best_of" if is_ranked else "n"
