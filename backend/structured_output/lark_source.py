"""Writes grammars as llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).

llguidance takes schemas as they are, apart from integers that a double cannot hold: those become rules
(`exact_integers`). A schema that it refuses is relaxed if the schema says `"x-guidance": {"lenient": true}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher

from penstock.backend.structured_output.exact_integers import ExactIntegers
from penstock.backend.structured_output.grammar_costs import BadGrammar, one_line
from penstock.shm.messages import Grammar

_OPTIONS = '%llguidance {"no_forcing": true}'
"""Otherwise llguidance tokenizes forced text, in which the spelling of a special token becomes that token."""
_WHITESPACE = r" ?|\n {0,24}"
"""Whitespace allowed between the parts of a JSON text: models write one line or indent. Bounded, so it always ends."""
_GUIDANCE = "x-guidance"
_JSON = re.compile(r"%json\s*(?=\{)")
_RULE = re.compile(r"^[ \t]*[?!]?(\w+)[^:\n]*:", re.MULTILINE)
_LONG_NUMBER = re.compile(r"[0-9]{16}")
_decoder = json.JSONDecoder()
_MAX_TRIALS = 200
"""Compilations that relaxing a schema may take."""
_DEFINITIONS = ("$defs", "definitions")
_FIRST_KEYWORDS = frozenset({"required", *_DEFINITIONS})
"""Kept before others: references need the definitions, and what is required stays so."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", *_DEFINITIONS})
_SCHEMAS = frozenset({"items", "additionalProperties"})
_LISTED_SCHEMAS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})


class _Schema(NamedTuple):
    """A schema within Lark: text[start:end] is `%json {…}`."""

    start: int
    end: int
    schema: dict[str, Any]


def lark_of(grammar: Grammar) -> str:
    """Raises BadGrammar."""
    text = _plain_lark(grammar)
    rules: list[str] = []
    if _LONG_NUMBER.search(text) is None:
        return f"{text}\n{_OPTIONS}\n"

    def exact(found: _Schema) -> str | None:
        integers = ExactIntegers(found.schema, f"exact_{len(rules)}")
        value = integers.value(found.schema)
        rules.extend(integers.rules)
        return f"({value})" if integers.rules else None

    return "\n".join((_replaced(text, exact), *rules, _OPTIONS, ""))


def _plain_lark(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            try:
                schema = msgspec.json.decode(grammar.text, type=dict[str, Any])
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                raise BadGrammar(one_line(f"not a JSON object: {error}")) from None
            return f"start: {_json_value(schema, _WHITESPACE)}"
        case "regex":
            (source,) = json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"]
            return str(source["lark_grammar"])
        case "lark":
            return grammar.text


def relaxed(grammar: Grammar, reason_of: Callable[[Grammar], str]) -> Grammar | None:
    """Return the grammar with its lenient schemas relaxed to what compiles; None if every schema compiles alone.

    reason_of compiles a grammar and returns why it does not compile, or nothing. Raises BadGrammar, with the name of
    the schema's rule first, for a schema that is not lenient.
    """
    text = _plain_lark(grammar)

    def kept(found: _Schema) -> str | None:
        reason = reason_of(Grammar("json_schema", _encoded(found.schema)))
        if not reason:
            return None
        options = found.schema.get(_GUIDANCE)
        if not isinstance(options, dict) or options.get("lenient") is not True:
            *_, rule = ["", *_RULE.findall(text, 0, found.start)]
            raise BadGrammar(reason if grammar.kind == "json_schema" else one_line(f"{rule}: {reason}"))
        trials = iter(range(_MAX_TRIALS))

        def fits(schema: Any) -> bool:
            marked = _encoded({**schema, _GUIDANCE: options})
            return next(trials, None) is not None and not reason_of(Grammar("json_schema", marked))

        return _json_value({**_relaxed(found.schema, fits), _GUIDANCE: options})

    relaxed_text = _replaced(text, kept)
    return Grammar("lark", relaxed_text) if relaxed_text != text else None


def _relaxed(schema: Any, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the schema without the keywords, here and below, that do not fit beside those before them."""
    kept: dict[str, Any] = {}
    if not isinstance(schema, dict):
        return kept
    for keyword in sorted(schema, key=lambda keyword: keyword not in _FIRST_KEYWORDS):
        value = schema[keyword]
        if not fits({**kept, keyword: value}):
            value = _relaxed_below(keyword, value, partial(_fits_in, fits, kept, keyword))
            if value is None or not fits({**kept, keyword: value}):
                continue
        kept[keyword] = value
    return kept


def _fits_in(fits: Callable[[Any], bool], members: dict[str, Any], name: str, member: Any) -> bool:
    return fits({**members, name: member})


def _relaxed_below(keyword: str, value: Any, fits: Callable[[Any], bool]) -> Any:
    """Relax the schemas that the keyword's value contains; None if it has none."""
    if keyword in _SCHEMAS and isinstance(value, dict):
        return _relaxed(value, fits)
    if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
        named: dict[str, Any] = {}
        for name, inner in value.items():
            named[name] = inner
            if not fits(named):
                named[name] = _relaxed(inner, partial(_fits_in, fits, named, name))
        return named
    if keyword in _LISTED_SCHEMAS and isinstance(value, list):
        listed: list[Any] = []
        for inner in value:
            whole = fits([*listed, inner])
            listed.append(inner if whole else _relaxed(inner, lambda inner: fits([*listed, inner])))
        return listed
    return None


def _schemas(text: str) -> Iterator[_Schema]:
    position = 0
    while (mark := _JSON.search(text, position)) is not None:
        position = mark.end()
        try:
            schema, position = _decoder.raw_decode(text, position)
        except (ValueError, RecursionError):  # not a schema, or one that llguidance refuses
            continue
        yield _Schema(mark.start(), position, schema)


def _replaced(text: str, replacement: Callable[[_Schema], str | None]) -> str:
    """Replace the schemas for which there is a replacement."""
    pieces: list[str] = []
    position = 0
    for found in _schemas(text):
        if (new := replacement(found)) is not None:
            pieces += (text[position : found.start], new)
            position = found.end
    return "".join((*pieces, text[position:]))


def _json_value(schema: dict[str, Any], whitespace: str = "") -> str:
    options = schema.get(_GUIDANCE)
    if whitespace and (options is None or isinstance(options, dict)):
        schema = {**schema, _GUIDANCE: {**(options or {}), "whitespace_pattern": whitespace}}
    return f"%json {_encoded(schema)}"


def _encoded(schema: dict[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()
