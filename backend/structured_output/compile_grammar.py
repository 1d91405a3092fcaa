"""Compiles a grammar with llguidance.

The compiling children and the backend do it in the same way, so a grammar that a child has compiled within the limits
costs the backend the same again. llguidance (https://github.com/guidance-ai/llguidance) cannot serialize a compiled
grammar. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.backend.structured_output.grammar_costs import BadGrammar, Growth, Pace, error_of, one_line
from penstock.backend.structured_output.lark_source import lark_of, relaxed
from penstock.process.native_libraries import LibraryError, guarded
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
    tokenizer: LLTokenizer | None = None
    """The model's, to guess the text that the grammar forces; None for no guesses."""


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
        matcher = guarded(LLMatcher)(tokenizer, lark_of(grammar), log_level=0, limits=_LIMITS)
    except LibraryError as error:
        raise BadGrammar(one_line(str(error))) from None
    if matcher.is_error():
        raise BadGrammar(error_of(matcher))
    if grammar.kind == "json_schema" and (circle := circular_reference(grammar.text)) is not None:
        raise BadGrammar(one_line(circle))
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


_REF = "$ref"


def circular_reference(schema: str) -> str | None:
    """Return a sentence that names the place; None if there is none. The schema is valid JSON."""
    if f'"{_REF}"' not in schema:
        return None
    whole = msgspec.json.decode(schema)
    known_to_end: set[int] = set()
    places: list[tuple[str, Any]] = [("#", whole)]
    while places:
        place, node = places.pop()
        way: dict[int, str] = {}
        current: Any = node
        while isinstance(current, dict) and id(current) not in known_to_end and isinstance(current.get(_REF), str):
            if id(current) in way:
                return f"the {_REF} at {place} goes round in a circle: {' → '.join(way.values())}"
            way[id(current)] = current[_REF]
            current = _at(whole, current[_REF])
        known_to_end.update(way)
        children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        places += [(f"{place}/{key}", child) for key, child in children]
    return None


def _at(whole: Any, reference: str) -> Any:
    """Return the value that a reference within the schema points to."""
    start, *keys = reference.split("/")
    node = whole if start == "#" else None
    for key in keys:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node
