"""Bodies of the Responses and Messages APIs and of the utilities, with an error anywhere in them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend.app import App
from tests.frontend.endpoints.invalid_bodies import DEEP
from tests.frontend.harness import FakeBackend
from tests.frontend.model_families import HERMES, Model
from tests.frontend.mutated_bodies import Sender, mutated, mutations, places

MAX_ERROR_BYTES = 1200
MODEL = Model(template=HERMES)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = {"type": "text", "text": "a"}
GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "a+"}
FULL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": [
            {"role": "developer", "content": "x"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "namespace": "n", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "a"},
            {"type": "compaction", "encrypted_content": "penstock-summary:s"},
        ],
        "instructions": "be brief",
        "max_output_tokens": 5,
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA, "strict": True},
            {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "g", "format": GRAMMAR}]},
            {"type": "web_search"},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "truncation": "auto",
        "temperature": 0,
    },
    "/v1/messages": {
        "max_tokens": 5,
        "system": [TEXT],
        "messages": [
            {"role": "user", "content": [TEXT]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a", "signature": "s"},
                    TEXT,
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT]}]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
    },
    "/v1/responses/compact": {
        "model": "test/model",
        "input": [{"role": "user", "content": "a"}],
        "instructions": "b",
        "temperature": 0,
    },
    "/invocations": {"prompt": "a", "max_tokens": 2, "logit_bias": {"the": 1, "5": False}, "grammar": 'root ::= "a"'},
    "/v1/quote": {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "timeout_ms": 9, "stop": "x"},
    "/tokenize": {"messages": [{"role": "user", "content": [TEXT]}], "return_token_strs": True, "model": "test/model"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 1}},
}


@cache
def app() -> App:
    return MODEL.app(FakeBackend(script=MODEL.says("{}")))


def open_sender(path: str) -> Sender:
    return Sender(app(), path, MAX_ERROR_BYTES)


@pytest.mark.parametrize("path", FULL_BODIES)
async def test_body_with_every_field_is_answered(path: str) -> None:
    async with open_sender(path) as sender:
        assert await sender.status(FULL_BODIES[path]) == 200


@settings(max_examples=100)
@given(st.data())
@pytest.mark.parametrize("path", FULL_BODIES)
async def test_no_mutated_body_causes_a_server_error(path: str, data: st.DataObject) -> None:
    async with open_sender(path) as sender:
        await sender.status(data.draw(mutations(FULL_BODIES[path])))


@pytest.mark.parametrize("path", FULL_BODIES)
async def test_body_that_is_not_a_json_object_is_refused(path: str) -> None:
    async with open_sender(path) as sender:
        await sender.check_not_objects()


@pytest.mark.parametrize("path", FULL_BODIES)
@pytest.mark.parametrize("depth", [100, 500, 990, 5000])
async def test_deeply_nested_body_is_refused_or_read(path: str, depth: int) -> None:
    body = FULL_BODIES[path]
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    async with open_sender(path) as sender:
        for place in places(body):
            data = json.dumps(mutated(body, place, "DEEP", is_removed=False)).encode().replace(b'"DEEP"', deep)
            await sender.status(data)
        await sender.status(DEEP)
