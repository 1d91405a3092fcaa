"""Reads which tokens may be sampled, in the form that the backend receives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.frontend.generation.submission.limits import check_token_id
from penstock.frontend.transport.errors import invalid
from penstock.shm.messages import Constraints

if TYPE_CHECKING:
    from penstock.frontend.generation.answer_rules.rules import AnswerRules
    from penstock.frontend.generation.models.served_model import ServedModel
    from penstock.frontend.schemas.generation import GenerationBody

_MAX_BAD_WORD_TOKENS = 16
_MAX_BAD_WORDS = 64
"""The same limits as in `penstock.shm.messages.Constraints`."""


async def read_constraints(body: GenerationBody, rules: AnswerRules, served: ServedModel) -> Constraints | None:
    """Return the constraints; None if there are none, so that equal requests are equal messages.

    Raises ApiError.
    """
    for token_id in body.allowed_token_ids or ():
        check_token_id("allowed_token_ids", token_id, served.card)
    constraints = Constraints(
        grammar=rules.grammar,
        grammar_after=rules.grammar_after,
        grammar_ends=served.turn_end_ids if rules.grammar is not None and not body.ignore_eos else (),
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=await _bad_words(body, served),
        min_tokens=body.min_tokens or 0,
        thinking_budget_tokens=rules.thinking_budget_tokens,
        thinking_end=rules.thinking_end,
    )
    return None if constraints == Constraints() else constraints


async def _bad_words(body: GenerationBody, served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word at the start of a text and after a space; without duplicates."""
    words = body.bad_words or []
    spellings = [spelling for word in words for spelling in (word, f" {word.lstrip(' ')}")]
    runs = await served.tokenizer.encode(spellings, add_special_tokens=False) if spellings else []
    for position, run in enumerate(runs):
        if len(run) > _MAX_BAD_WORD_TOKENS:
            invalid(f"bad_words[{position // 2}]", f"{len(run)} tokens; the limit is {_MAX_BAD_WORD_TOKENS}")
    distinct = tuple(sorted({tuple(run) for run in runs if run}))
    if len(distinct) > _MAX_BAD_WORDS:
        invalid("bad_words", f"{len(distinct)} token sequences; the limit is {_MAX_BAD_WORDS}")
    return distinct
