"""Structured output in the frontend: the grammar that reaches the backend, and the error for an unusable one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.frontend.generation.answer_rules.gbnf import to_lark
from penstock.frontend.generation.answer_rules.requested_grammar import choice_grammar
from penstock.shm.client import TokenBatch
from penstock.shm.messages import MAX_GRAMMAR_CHARACTERS, Constraints, FailureCode, Finish, Grammar
from tests.frontend.harness import ClientConnection, FakeBackend, token_ids

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"enum": ["é"]}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"), ensure_ascii=False)
LENIENT = f'{TEXT[:-1]},"x-guidance":{{"lenient":true}}}}'
LARK = 'start: "a" "b"*'


GBNF = 'root ::= "a" [b-c]+'
LARK_OF_GBNF = to_lark("grammar", GBNF)


def format_of(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}}


@PATHS
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        (format_of(SCHEMA), Grammar("json_schema", LENIENT)),
        (format_of(SCHEMA, strict=False), Grammar("json_schema", LENIENT)),
        (format_of(SCHEMA, strict=True, description="d"), Grammar("json_schema", TEXT)),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"guided_json": json.dumps(SCHEMA, indent=4)}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"json": TEXT}}, Grammar("json_schema", TEXT)),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", '{"type":"object"}')),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"guided_grammar": LARK}, Grammar("lark", LARK)),
        ({"structured_outputs": {"grammar": LARK}}, Grammar("lark", LARK)),
        ({"guided_grammar": GBNF}, Grammar("lark", LARK_OF_GBNF)),
        ({"structured_outputs": {"grammar": GBNF}}, Grammar("lark", LARK_OF_GBNF)),
        ({"grammar": GBNF}, Grammar("lark", LARK_OF_GBNF)),
        ({"ebnf": GBNF}, Grammar("lark", LARK_OF_GBNF)),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"json_schema": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"json_schema": TEXT}, Grammar("json_schema", TEXT)),
        ({"grammar": "", "ebnf": None, "regex": "", "json_schema": {}}, None),
        ({"guided_choice": ["a", "b", "a"]}, Grammar("lark", 'start: "a" | "b"')),
        ({"structured_outputs": {"choice": ["a"]}, "guided_json": None}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": None}, None),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_requested_grammar_reaches_the_backend(
    connection: ClientConnection, backend: FakeBackend, path: str, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    for stream in (False, True):
        assert (await connection.post(path, {**BODY, **fields, "n": 2, "stream": stream})).status == 200
    constraints = [stream.request.constraints for stream in backend.streams]
    assert constraints == [None if grammar is None else Constraints(grammar=grammar)] * 4


@pytest.mark.parametrize(
    "choice", ["yes", 'say "no"', "back\\slash", "tab\tnew\nline", "猫🐈", "/x/", "\x00\x1f", "a" * 500]
)
def test_any_text_can_be_a_choice(choice: str) -> None:
    grammar = choice_grammar([choice, "other"])
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.text))


@pytest.mark.parametrize("num_characters", [MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_CHARACTERS + 1])
async def test_grammar_longer_than_the_limit_is_refused(connection: ClientConnection, num_characters: int) -> None:
    response = await connection.post(CHAT, {**BODY, "guided_regex": "x" * num_characters})
    assert response.status == (200 if num_characters == MAX_GRAMMAR_CHARACTERS else 400)
    if response.status == 400:
        assert response.error["param"] == "guided_regex"
        assert f"{num_characters} characters" in response.error["message"]


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (format_of(SCHEMA), "response_format"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
@pytest.mark.parametrize("rule", ["", "answer: ", "tool_7_arguments: ", "tool_7_value_12_json: "])
async def test_unusable_grammar_is_reported_by_its_field(
    connection: ClientConnection,
    backend: FakeBackend,
    path: str,
    stream: bool,
    started: bool,
    fields: dict[str, Any],
    param: str,
    rule: str,
) -> None:
    param = "tools[7].function.parameters" if rule.startswith("tool") else param
    text = f'{rule}no "way"\x1b[31m\n' + "x" * 400
    finish = Finish.FAILED if started else Finish.REJECTED
    failure = TokenBatch([], finish, FailureCode.BAD_GRAMMAR, failure_text=text)
    backend.script = lambda _: [*([TokenBatch(token_ids("a"))] if started else []), failure]
    response = await connection.post(path, {**BODY, **fields, "stream": stream})
    if stream and started:
        assert response.status == 200
        error = response.events()[-1]["error"]
    else:
        assert response.status == 400
        error = response.error
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert error["message"].startswith(f'{param}: the grammar cannot be used: "no \\"way\\"')
    assert error["message"].isprintable()
    assert len(error["message"]) < 400
