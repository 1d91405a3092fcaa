"""Compiles a grammar with llguidance.

The compiling children and the backend do it in the same way, so a grammar that a child has compiled within the limits
costs the backend the same again. llguidance (https://github.com/guidance-ai/llguidance) cannot serialize a compiled
grammar. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.backend.structured_output.grammar_costs import BadGrammar, Growth, Pace, error_of
from penstock.backend.structured_output.lark_source import lark_of, relaxed

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.shm.messages import Grammar

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # at most about 15 ms in one mask
    step_max_items=10_000,  # of an ambiguous grammar: at most about 0.3 s in one mask; large schemas need under 2,000
    max_lexer_states=50_000,  # 0.6 to 2 kB each; a string of bounded length takes 5 a character
    max_grammar_size=100_000,
    verbose_errors=True,  # they tell the lexer's work: see `Growth`; `error_of` cuts the client's schema off
)
_SLICES = ["[a-z]+", *LLTokenizer.general_slices()]
"""Groups of tokens that are masked at once when all of them are allowed; a token belongs to the first that matches it.
Other tokens are checked one by one: about 1 ms for 100,000. "[a-z]+" is for names and for text that is not JSON."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """matcher is at its beginning. num_bytes is its memory without its growth; 0 if unknown."""

    matcher: LLMatcher
    end_token_id: int
    """A token that ends the text for the matcher."""
    num_bytes: int = 0
    pace: Pace = field(default_factory=Pace)
    growth: Growth = field(default_factory=Growth)


def load_tokenizer(tokenizer_json: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """Takes about 10 µs and 500 bytes a token. Raises OSError, ValueError."""
    text = tokenizer_json.read_text(encoding="utf-8")
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=_SLICES)


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile; releases the GIL.

    Some grammars take exponential time and memory: no limit of llguidance ends its check whether an intersection of
    expressions is empty. Raises BadGrammar.
    """
    matcher = LLMatcher(tokenizer, lark_of(grammar), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise BadGrammar(error_of(matcher))
    return matcher


def compile_or_relax(tokenizer: LLTokenizer, grammar: Grammar) -> tuple[LLMatcher, Grammar]:
    """Compile the grammar, or else what is left of it without the keywords of lenient schemas that do not compile.

    Raises BadGrammar.
    """

    def reason_of(part: Grammar) -> str:
        try:
            compile_grammar(tokenizer, part)
        except BadGrammar as error:
            return str(error)
        return ""

    try:
        return compile_grammar(tokenizer, grammar), grammar
    except BadGrammar:
        if (left := relaxed(grammar, reason_of)) is None:
            raise
    return compile_grammar(tokenizer, left), left
