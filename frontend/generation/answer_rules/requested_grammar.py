"""Structured output: a JSON schema, regular expression, list of choices or grammar in the body as a backend grammar."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from penstock.frontend.generation.answer_rules.gbnf import is_gbnf, to_lark
from penstock.frontend.generation.answer_rules.lark import lenient
from penstock.frontend.schemas.chat import MAX_SCHEMA_DEPTH, is_shallow
from penstock.frontend.schemas.generation import GenerationBody
from penstock.frontend.transport.errors import invalid
from penstock.shm.messages import MAX_GRAMMAR_CHARACTERS, Grammar

_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def requested_grammar(body: GenerationBody) -> Grammar | None:
    """Return the grammar that the body asks for. Raises ApiError if it asks for two, or for one that is too long."""
    grammars = _requested(body)
    if len(grammars) > 1:
        first, second, *_ = grammars
        invalid(second, f"cannot be combined with {first}")
    for field, grammar in grammars.items():
        _check_length(field, grammar.text)
        return grammar
    return None


def _check_length(field: str, text: str) -> None:
    if not 1 <= len(text) <= MAX_GRAMMAR_CHARACTERS:
        invalid(field, f"{len(text)} characters; must have 1 to {MAX_GRAMMAR_CHARACTERS}")


def grammar_field(body: GenerationBody) -> str | None:
    """Return the body's field that asks for a grammar."""
    return next(iter(_requested(body)), None)


def _requested(body: GenerationBody) -> dict[str, Grammar]:
    """Return the requested grammars by the field that asks for them."""
    return {field: grammar for field, grammar in _grammars(body).items() if grammar is not None}


def _grammars(body: GenerationBody) -> dict[str, Grammar | None]:
    return {
        "response_format": _response_format_grammar(body),
        "guided_json": _schema_grammar("guided_json", body.guided_json),
        "guided_regex": None if body.guided_regex is None else Grammar("regex", body.guided_regex),
        "guided_choice": None if body.guided_choice is None else choice_grammar(body.guided_choice),
        "guided_grammar": _lark_or_gbnf("guided_grammar", body.guided_grammar),
        "regex": None if not body.regex else Grammar("regex", body.regex),
        "ebnf": _gbnf("ebnf", body.ebnf),
        "grammar": _gbnf("grammar", body.grammar),
        "json_schema": _schema_grammar("json_schema", body.json_schema or None),
        **_structured_outputs_grammars(body),
    }


def _response_format_grammar(body: GenerationBody) -> Grammar | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.schema is not None:
        if form.json_schema is not None:
            invalid("response_format.schema", "cannot be combined with response_format.json_schema")
        return _schema_grammar("response_format.schema", form.schema)
    if form.type == "json_object":
        return _ANY_OBJECT
    if form.json_schema is None or form.json_schema.schema is None:
        invalid("response_format.json_schema.schema", "required where type is json_schema")
    schema = form.json_schema.schema if form.json_schema.strict else lenient(form.json_schema.schema)
    return _schema_grammar("response_format.json_schema.schema", schema)


def _structured_outputs_grammars(body: GenerationBody) -> dict[str, Grammar | None]:
    outputs = body.structured_outputs
    if outputs is None:
        return {}
    path = "structured_outputs"
    return {
        f"{path}.json": _schema_grammar(f"{path}.json", outputs.json),
        f"{path}.regex": None if outputs.regex is None else Grammar("regex", outputs.regex),
        f"{path}.choice": None if outputs.choice is None else choice_grammar(outputs.choice),
        f"{path}.grammar": _lark_or_gbnf(f"{path}.grammar", outputs.grammar),
        f"{path}.json_object": _ANY_OBJECT if outputs.json_object else None,
    }


def _lark_or_gbnf(field: str, text: str | None) -> Grammar | None:
    """vLLM takes both."""
    if text is None or is_gbnf(text):
        return _gbnf(field, text)
    return Grammar("lark", text)


def _gbnf(field: str, text: str | None) -> Grammar | None:
    if not text:  # clients of llama.cpp send an empty one for none
        return None
    _check_length(field, text)
    return Grammar("lark", to_lark(field, text))


def _schema_grammar(field: str, schema: dict[str, Any] | str | None) -> Grammar | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        _check_length(field, schema)
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            invalid(field, "not a JSON schema: must be a JSON object")
    text = _encoded(schema)
    if text is not None:
        _check_length(field, text)  # before the depth: finding that of a long schema is slow
    if text is None or not is_shallow(schema, MAX_SCHEMA_DEPTH):
        invalid(field, f"nested more than {MAX_SCHEMA_DEPTH} deep")
    return Grammar("json_schema", text)


def _encoded(schema: dict[str, Any]) -> str | None:
    """Return None if it is nested too deep for the encoder, whose limit is above ours."""
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        return None


def choice_grammar(choices: list[str]) -> Grammar:
    """Return a grammar that matches exactly one of these texts. A JSON string is also a Lark string."""
    return Grammar("lark", "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices)))
