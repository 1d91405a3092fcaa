"""Bodies of the Responses and Messages APIs and of the utilities, with an error anywhere in them."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend.app import App
from tests.frontend.endpoints.invalid_bodies import DEEP, FORBIDDEN_IN_ERRORS, NOT_AN_OBJECT, NOT_JSON
from tests.frontend.harness import ClientConnection, FakeBackend
from tests.frontend.model_families import HERMES, Model

MODEL = Model(template=HERMES)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = {"type": "text", "text": "a"}
FULL_BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": [
            {"role": "developer", "content": "x"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
        ],
        "instructions": "be brief",
        "max_output_tokens": 5,
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
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
    "/tokenize": {"messages": [{"role": "user", "content": [TEXT]}], "return_token_strs": True, "model": "test/model"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 1}},
}
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "x" * 600, "\u0000", "\ud7ff", "user", "function", "0x123456 object at Traceback", "猫"]),
    st.sampled_from([[], [[]], {}, {"": {}}, {"type": "function"}, [None], ["x"] * 300, {"type": "text", "text": 1}]),
)


@cache
def app() -> App:
    return MODEL.app(FakeBackend(script=MODEL.says("{}")))


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the places in a body where a value can be replaced."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def mutated(body: dict[str, Any], path: tuple[str | int, ...], junk: Any, *, is_removed: bool) -> dict[str, Any]:
    body = copy.deepcopy(body)
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    if is_removed:
        del holder[path[-1]]
    else:
        holder[path[-1]] = junk
    return body


@contextlib.contextmanager
def body_in_failures(data: Any) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note(f"body: {data!r:.500}")
        raise


async def check(connection: ClientConnection, path: str, body: Any) -> int:
    response = await connection.post(path, body)
    with body_in_failures(body):
        assert response.status in (200, 400, 404), response.body
        if response.status != 200:
            message = response.json()["error"]["message"]
            assert len(message) < 1000
            if "0x123456" not in json.dumps(str(body)):
                assert not FORBIDDEN_IN_ERRORS.search(message), message
    return response.status


@pytest.mark.parametrize("path", FULL_BODIES)
async def test_body_with_every_field_is_answered(path: str) -> None:
    connection = ClientConnection(app())
    assert await check(connection, path, FULL_BODIES[path]) == 200
    await connection.end()


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.parametrize("path", FULL_BODIES)
async def test_no_mutated_body_causes_a_server_error(path: str, data: st.DataObject) -> None:
    body = FULL_BODIES[path]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(places(body))))
        body = mutated(body, place, data.draw(JUNK), is_removed=data.draw(st.booleans()))
        if not body:
            break
    connection = ClientConnection(app())
    await check(connection, path, body)
    await connection.end()


@pytest.mark.parametrize("path", FULL_BODIES)
async def test_body_that_is_not_a_json_object_is_refused(path: str) -> None:
    connection = ClientConnection(app())
    for data in (*NOT_JSON, *(json.dumps(value).encode() for value in NOT_AN_OBJECT)):
        assert await check(connection, path, data) == 400
    await connection.end()


@pytest.mark.parametrize("path", FULL_BODIES)
@pytest.mark.parametrize("depth", [100, 500, 990, 5000])
async def test_deeply_nested_body_is_refused_or_read(path: str, depth: int) -> None:
    connection = ClientConnection(app())
    body = FULL_BODIES[path]
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    for place in places(body):
        data = json.dumps(mutated(body, place, "DEEP", is_removed=False)).encode().replace(b'"DEEP"', deep)
        await check(connection, path, data)
    await check(connection, path, DEEP)
    await connection.end()
