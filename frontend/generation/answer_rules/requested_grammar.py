"""Structured output: what a request says its answer must look like → a grammar for the backend."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frontend.schemas.chat import MAX_SCHEMA_DEPTH, is_shallow
from penstock.frontend.transport.errors import invalid
from penstock.shm.messages import MAX_GRAMMAR_CHARACTERS, Grammar

if TYPE_CHECKING:
    from penstock.frontend.schemas.generation import GenerationBody

_ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def requested_grammar(body: GenerationBody) -> Grammar | None:
    """Raises ApiError where a request asks for two at once, or for one that is too long."""
    asked = _asked(body)
    if len(asked) > 1:
        first, second, *_ = asked
        invalid(second, f"cannot be combined with {first}")
    for field, grammar in asked.items():
        _check_length(field, grammar.text)
        return grammar
    return None


def _check_length(field: str, text: str) -> None:
    if not 1 <= len(text) <= MAX_GRAMMAR_CHARACTERS:
        invalid(field, f"{len(text)} characters; from 1 to {MAX_GRAMMAR_CHARACTERS} are allowed")


def grammar_field(body: GenerationBody) -> str | None:
    """The field that asks for a grammar."""
    return next(iter(_asked(body)), None)


def _asked(body: GenerationBody) -> dict[str, Grammar]:
    return {field: grammar for field, grammar in _grammars(body).items() if grammar is not None}


def _grammars(body: GenerationBody) -> dict[str, Grammar | None]:
    """By the field that asks for it."""
    return {
        "response_format": _of_response_format(body),
        "guided_json": _of_schema("guided_json", body.guided_json),
        "guided_regex": None if body.guided_regex is None else Grammar("regex", body.guided_regex),
        "guided_choice": None if body.guided_choice is None else choice_grammar(body.guided_choice),
        "guided_grammar": None if body.guided_grammar is None else Grammar("lark", body.guided_grammar),
        **_of_structured_outputs(body),
    }


def _of_response_format(body: GenerationBody) -> Grammar | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.schema is not None:
        if form.json_schema is not None:
            invalid("response_format.schema", "cannot be combined with response_format.json_schema")
        return _of_schema("response_format.schema", form.schema)
    if form.type == "json_object":
        return _ANY_OBJECT
    if form.json_schema is None or form.json_schema.schema is None:
        invalid("response_format.json_schema.schema", "required where type is json_schema")
    return _of_schema("response_format.json_schema.schema", form.json_schema.schema)


def _of_structured_outputs(body: GenerationBody) -> dict[str, Grammar | None]:
    asked = body.structured_outputs
    if asked is None:
        return {}
    path = "structured_outputs"
    return {
        f"{path}.json": _of_schema(f"{path}.json", asked.json),
        f"{path}.regex": None if asked.regex is None else Grammar("regex", asked.regex),
        f"{path}.choice": None if asked.choice is None else choice_grammar(asked.choice),
        f"{path}.grammar": None if asked.grammar is None else Grammar("lark", asked.grammar),
        f"{path}.json_object": _ANY_OBJECT if asked.json_object else None,
    }


def _of_schema(field: str, schema: dict[str, Any] | str | None) -> Grammar | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        _check_length(field, schema)
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            invalid(field, "not a JSON schema: a JSON object is needed")
    text = _encoded(schema)
    if text is not None:
        _check_length(field, text)  # first, for a long one's depth takes long to find
    if text is None or not is_shallow(schema, MAX_SCHEMA_DEPTH):
        invalid(field, f"nested more than {MAX_SCHEMA_DEPTH} deep")
    return Grammar("json_schema", text)


def _encoded(schema: dict[str, Any]) -> str | None:
    """None where it is nested too deep for the encoder, which takes more than is allowed."""
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        return None


def choice_grammar(choices: list[str]) -> Grammar:
    """One of these texts, exactly. JSON's strings are Lark's, too."""
    return Grammar("lark", "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices)))
