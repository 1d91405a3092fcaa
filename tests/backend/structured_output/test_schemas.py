"""What is written under a grammar is what the grammar says: literals, integers and schemas, with real tokenizers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penstock.backend.checkpoint.gguf.directory import gguf_directory
from penstock.backend.structured_output.compile_grammar import compile_or_relax, load_tokenizer
from penstock.backend.structured_output.exact_integers import integer_range
from penstock.backend.structured_output.grammar_costs import BadGrammar
from penstock.shm.messages import Grammar
from tests.backend.structured_output.constrained import EOS, TOKENIZER, TOKENIZER_JSON
from tests.real_models import download_timeout

Write = Callable[..., str]
SNOWFLAKE = 1304857263918450739


def json_grammar(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def writer(tokenizer_json: Path, end: int) -> Write:
    """Return a function that writes a text of a grammar, of tokens drawn at random."""
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    quotes = {token_id for text, token_id in tokenizer.get_vocab().items() if '"' in text}
    compiler = load_tokenizer(tokenizer_json, tokenizer.get_vocab_size(), (end,))

    def write(grammar: Grammar, seed: int = 0) -> str:
        matcher, _ = compile_or_relax(compiler, grammar)
        rng, tokens = random.Random(seed), list[int]()
        while len(tokens) < 600:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            assert not matcher.is_error(), matcher.get_error()
            if end in allowed:
                return tokenizer.decode(tokens, skip_special_tokens=False)
            closing = sorted(quotes.intersection(allowed))  # else texts would be long
            tokens.append(rng.choice(closing if closing and rng.random() < 0.3 else allowed))
            assert matcher.consume_token(tokens[-1])
        raise AssertionError("no end")

    return write


@pytest.fixture(scope="module")
def write() -> Write:
    return writer(TOKENIZER_JSON, EOS)


def check_literals(write: Write, tokenizer: Tokenizer) -> None:
    """The text of each special token is text, wherever a grammar has it."""
    for token in (entry.content for entry in tokenizer.get_added_tokens_decoder().values()):
        text = f"a{token}b"
        once = {"type": "object", "additionalProperties": False}
        assert json.loads(write(json_grammar({"const": text}))) == text
        assert json.loads(write(json_grammar({"enum": [token]}))) == token
        named = json_grammar({**once, "properties": {text: {"const": 1}}, "required": [text]})
        assert json.loads(write(named)) == {text: 1}
        assert write(Grammar("regex", re.escape(text))) == text
        assert write(Grammar("lark", f"start: {json.dumps(text)}")) == text
        call = {**once, "properties": {"x": {"const": text}}, "required": ["x"]}
        lark = f'start: "f(" tool_0_arguments ")"\ntool_0_arguments: %json {json.dumps(call)}'
        assert json.loads(write(Grammar("lark", lark))[2:-1]) == {"x": text}


def test_spelling_of_a_special_token_is_text(write: Write) -> None:
    check_literals(write, TOKENIZER)


@download_timeout
def test_spelling_of_a_special_token_is_text_to_a_real_model(real_gguf: Path) -> None:
    tokenizer_json = gguf_directory(real_gguf) / "tokenizer.json"
    check_literals(writer(tokenizer_json, 2), Tokenizer.from_file(str(tokenizer_json)))


USER = {"type": "integer", "minimum": SNOWFLAKE, "maximum": SNOWFLAKE + 100}
LONG_INTEGERS: list[dict[str, Any]] = [
    {"const": 9007199254740995},
    {"enum": [SNOWFLAKE, SNOWFLAKE + 2]},
    {"enum": ["x", None, -SNOWFLAKE, 5, {"id": SNOWFLAKE}]},
    {"oneOf": [{"const": SNOWFLAKE, "title": "a"}, {"const": 10**30}]},
    {"type": "integer", "minimum": 9223372036854775100, "maximum": (1 << 63) - 1},
    {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
    {"type": "integer", "exclusiveMinimum": (1 << 53) - 1, "maximum": (1 << 53) + 7},
    {"type": "integer", "minimum": (1 << 64) - 6, "exclusiveMaximum": 1 << 64},
    {"type": ["integer", "null"], "maximum": -SNOWFLAKE, "minimum": -SNOWFLAKE - 9},
    {"type": "array", "items": {"$ref": "#/$defs/user"}, "minItems": 1, "maxItems": 3, "$defs": {"user": USER}},
    {
        "type": "object",
        "properties": {
            "const": {"type": "string", "maxLength": 3},
            "minimum": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/user"}]},
            "c": {"type": "array", "items": {"const": {"id": SNOWFLAKE}}, "maxItems": 2},
        },
        "required": ["minimum"],
        "additionalProperties": False,
        "$defs": {"user": USER},
    },
    {
        "type": "object",
        "properties": {"a": {"const": SNOWFLAKE}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "title": "others are allowed",
    },
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"id": USER, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
                "required": ["id", "next"],
                "additionalProperties": False,
            }
        },
    },
]


@pytest.mark.parametrize("schema", LONG_INTEGERS, ids=lambda schema: str(schema)[:60])
def test_integers_beyond_a_doubles_are_exact(write: Write, schema: dict[str, Any]) -> None:
    texts = [write(json_grammar(schema), seed) for seed in range(8)]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    if "enum" in schema or "oneOf" in schema:
        assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("inner", "field"),
    [
        ({"type": "integer", "maximum": SNOWFLAKE, "multipleOf": 7}, "properties.x.multipleOf: "),
        ({"allOf": [{"const": SNOWFLAKE}]}, "properties.x.allOf: "),
        ({"type": "number", "minimum": SNOWFLAKE}, "properties.x.type: "),
        ({"items": {"const": SNOWFLAKE}, "minItems": "1"}, "properties.x.minItems, maxItems: "),
        ({"type": "integer", "minimum": SNOWFLAKE, "maximum": SNOWFLAKE - 1}, "properties.x.minimum: "),
    ],
)
def test_integer_that_has_no_exact_form_is_refused_by_its_field(write: Write, inner: Any, field: str) -> None:
    with pytest.raises(BadGrammar, match=f"^{re.escape(field)}"):
        write(json_grammar({"type": "object", "properties": {"x": inner}, "required": ["x"]}))


@given(st.integers(-3000, 3000) | st.none(), st.integers(-3000, 3000) | st.none(), st.integers(-9999, 9999))
def test_range_of_integers_matches_these_only(least: int | None, most: int | None, number: int) -> None:
    if least is not None and most is not None and least > most:
        least, most = most, least
    expression = re.compile(integer_range(least, most))
    for tried in {number, *(end + step for end in (least, most, 0) if end is not None for step in (-1, 0, 1))}:
        is_within = (least is None or tried >= least) and (most is None or tried <= most)
        assert (expression.fullmatch(str(tried)) is not None) == is_within


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": ({"not": {"type": "null"}}, "not"),
    "another keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "condition": ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
    "format": ({"type": "string", "format": "color"}, "color"),
    "pattern": ({"type": "string", "maxLength": 9, "pattern": "^(?!a)b"}, "look-around"),
    "type": ({"type": "any"}, "any"),
    "null": ({"type": "object", "required": None}, "required"),
    "reference": ({"anyOf": [{"$ref": "http://127.0.0.1/x"}, {"type": "null"}]}, "127.0.0.1"),
    "nothing": ({"type": "string", "minLength": 5, "maxLength": 1}, "required property 'b'"),
    "long integer": ({"type": "integer", "maximum": SNOWFLAKE, "multipleOf": 7}, "multipleOf"),
}


def tools_grammar(odd: dict[str, Any], *, is_lenient: bool) -> Grammar:
    """A call of the tool 1, whose second parameter is odd."""
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {"a": {"const": 1}, "b": inner}, "required": ["a", "b"]}
        for inner in ({}, odd, {})
    ]
    schemas[1] |= {"additionalProperties": False, "x-guidance": {"lenient": is_lenient}}
    rules = [f"tool_{number}_arguments: %json {json.dumps(schema)}" for number, schema in enumerate(schemas)]
    return Grammar("lark", "\n".join(("start: tool_1_arguments", "other: tool_0_arguments tool_2_arguments", *rules)))


@pytest.mark.parametrize("name", ODD)
def test_odd_schema_is_held_as_far_as_it_can_be_expressed(write: Write, name: str) -> None:
    odd, keyword = ODD[name]
    assert json.loads(write(tools_grammar(odd, is_lenient=True)))["a"] == 1
    with pytest.raises(BadGrammar, match=rf"^tool_1_arguments: [^%]*{keyword}[^%]*$"):
        write(tools_grammar(odd, is_lenient=False))


def test_relaxed_schema_keeps_what_compiles() -> None:
    compiler = load_tokenizer(TOKENIZER_JSON, TOKENIZER.get_vocab_size(), (EOS,))
    schema = {
        "properties": {
            "a": {"type": "string", "maxLength": 9, "pattern": "^(?!a)b"},
            "b": {"type": "array", "items": {"type": "any", "title": "t"}, "maxItems": 2},
            "c": {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "OBJECT"}]},
        },
        "required": ["a"],
        "x-guidance": {"lenient": True},
        "type": "object",
    }
    _, left = compile_or_relax(compiler, json_grammar(schema))
    kept = json.loads(left.text.removeprefix("start: %json "))
    del kept["x-guidance"]
    assert kept == {
        "required": ["a"],
        "properties": {
            "a": {"type": "string", "maxLength": 9},
            "b": {"type": "array", "items": {"title": "t"}, "maxItems": 2},
            "c": {"anyOf": [{"type": "integer", "maximum": 5}, {}]},
        },
        "type": "object",
    }
