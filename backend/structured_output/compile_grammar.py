"""Compiles a grammar with llguidance.

The compiling children and the backend do it in the same way, so a grammar that a child has compiled within the limits
costs the backend the same again. llguidance (https://github.com/guidance-ai/llguidance) cannot serialize a compiled
grammar. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.backend.structured_output.grammar_costs import Growth, Pace, error_of, one_line
from penstock.backend.structured_output.references import circular_reference
from penstock.process.native_libraries import guarded

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
_WHITESPACE = r" ?|\n {0,24}"
"""Whitespace allowed between the parts of a JSON text: models write one line or indent. Bounded, so it always ends."""
_SLICES = ["[a-z]+", *LLTokenizer.general_slices()]
"""Groups of tokens that are masked at once when all of them are allowed; a token belongs to the first that matches it.
Other tokens are checked one by one: about 1 ms for 100,000. "[a-z]+" is for names and for text that is not JSON."""


class BadGrammar(Exception):
    """The grammar does not compile within the limits. The text explains why, in one line."""


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
    return guarded(LLTokenizer)(text, n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=_SLICES)


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile; releases the GIL.

    Some grammars take exponential time and memory: no limit of llguidance ends its check whether an intersection of
    expressions is empty. Raises BadGrammar.
    """
    try:
        matcher = guarded(LLMatcher)(tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
    except ValueError as error:  # the schema is not a JSON object
        raise BadGrammar(one_line(str(error))) from None
    if matcher.is_error():
        raise BadGrammar(error_of(matcher))
    if grammar.kind == "json_schema" and (circle := circular_reference(grammar.text)) is not None:
        raise BadGrammar(one_line(circle))
    return matcher


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": _WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
