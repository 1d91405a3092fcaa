"""The rules for the answers to one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.frontend.parsing.answer_parser import AnswerShape
    from penstock.shm.messages import Grammar


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """The required form of the answers, and how they are parsed. The backend enforces all but the shape."""

    grammar: Grammar | None = None
    grammar_after: tuple[int, ...] = ()
    """Token ids after which the grammar applies; empty: from the start."""
    thinking_budget_tokens: int = 0
    """Tokens of reasoning after which thinking_end is forced; 0 is no limit."""
    thinking_end: tuple[int, ...] = ()
    shape: AnswerShape | None = None
    """How the text is parsed; None: all of it is the answer's text."""
    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that the parser needs."""

    @property
    def text_may_end_answer(self) -> bool:
        """Whether the parser may end the answer before the model does: after a tool call, if one is enough."""
        return self.shape is not None and self.shape.tools is not None
