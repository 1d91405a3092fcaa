"""Invalid bodies: each is refused with the exact status and the named field, and the next request works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.frontend.schemas.generation import MAX_CHOICES
from tests.frontend.endpoints.invalid_bodies import (
    CHAT,
    COMPLETIONS,
    FORBIDDEN_IN_ERRORS,
    MESSAGES,
    NOT_AN_OBJECT,
    NOT_JSON,
    UNSUPPORTED,
    UNSUPPORTED_IN_CHAT,
    WRONG_FIELDS,
    WRONG_INSIDE,
    WRONG_MESSAGES,
    WRONG_PROMPTS,
    WRONG_TOGETHER,
)
from tests.frontend.harness import ClientConnection, FakeBackend, model_card


async def refused(connection: ClientConnection, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Return the error of a refused request; the same connection then answers a valid one."""
    response = await connection.post(path, body)
    assert response.status == status, (response, body)
    assert response.headers["content-type"] == "application/json"
    error = response.error
    assert not FORBIDDEN_IN_ERRORS.search(error["message"])
    assert len(error["message"]) < 400
    good = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    assert (await connection.post(path, good)).status == 200
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: repr(body[:40]))
async def test_body_that_is_not_json_is_refused(connection: ClientConnection, path: str, body: bytes) -> None:
    assert (await refused(connection, path, body))["code"] in (
        "invalid_json",
        "invalid_value",
        "missing_required_parameter",
    )


@pytest.mark.parametrize("body", NOT_AN_OBJECT)
async def test_body_that_is_not_an_object_is_refused(connection: ClientConnection, body: Any) -> None:
    error = await refused(connection, CHAT, json.dumps(body).encode())
    assert "must be a JSON object" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", dict(WRONG_FIELDS))
async def test_field_out_of_bounds_is_named(connection: ClientConnection, path: str, field: str) -> None:
    """One connection for all values of a field: a frontend and a backend for each would take most of the time."""
    for value in (value for name, value in WRONG_FIELDS if name == field):
        body = {"messages": MESSAGES, "prompt": "x", field: value}
        error = await refused(connection, path, body, 404 if value == "unknown" else 400)
        assert error["param"] == field, value
        assert field in error["message"], value


@pytest.mark.parametrize(("field", "value", "param"), WRONG_INSIDE, ids=lambda value: repr(value)[:30])
async def test_value_out_of_bounds_inside_a_field_is_named(
    connection: ClientConnection, field: str, value: Any, param: str
) -> None:
    error = await refused(connection, COMPLETIONS, {"prompt": "x", "stream": True, field: value})
    assert error["param"] == param


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=lambda value: repr(value)[:30])
async def test_unsupported_field_is_refused_by_name(
    connection: ClientConnection, path: str, field: str, value: Any
) -> None:
    error = await refused(connection, path, {"messages": MESSAGES, "prompt": "x", field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED_IN_CHAT, ids=lambda value: repr(value)[:30])
async def test_field_unsupported_in_chat_is_refused_by_name(
    connection: ClientConnection, field: str, value: Any
) -> None:
    error = await refused(connection, CHAT, {"messages": MESSAGES, field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", False),
        ("logprobs", None),
        ("top_logprobs", 0),
        ("echo", False),
        ("best_of", 1),
        ("suffix", ""),
        ("min_tokens", 0),
        ("response_format", {"type": "text"}),
        ("tools", []),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("parallel_tool_calls", True),
        ("modalities", ["text"]),
        ("add_generation_prompt", True),
        ("user", "x"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "auto"),
        ("structured_outputs", {}),
        ("structured_outputs", {"structural_tag": None, "disable_any_whitespace": False}),
        ("guided_json", None),
        ("bad_words", []),
        ("logit_bias", {}),
        ("something_new", {"a": [1]}),
    ],
)
async def test_field_that_requests_nothing_is_accepted(connection: ClientConnection, field: str, value: Any) -> None:
    assert (await connection.post(CHAT, {"messages": MESSAGES, field: value})).status == 200


@pytest.mark.parametrize(("messages", "param"), WRONG_MESSAGES, ids=lambda value: repr(value)[:40])
async def test_invalid_messages_are_named(connection: ClientConnection, messages: Any, param: str) -> None:
    assert (await refused(connection, CHAT, {"messages": messages}))["param"] == param


@pytest.mark.parametrize(("prompt", "param"), WRONG_PROMPTS, ids=lambda value: repr(value)[:40])
async def test_invalid_prompts_are_named(connection: ClientConnection, prompt: Any, param: str) -> None:
    assert (await refused(connection, COMPLETIONS, {"prompt": prompt}))["param"] == param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (None, "prompt: expected str | array, got null"),
        ([None], "prompt[0]: expected int | str | array, got null"),
        (True, "prompt: expected str | array, got bool true"),
        ([1.5], "prompt[0]: expected int | str | array, got float 1.5"),
    ],
)
async def test_wrong_type_is_reported_with_its_value(connection: ClientConnection, prompt: Any, expected: str) -> None:
    assert (await refused(connection, COMPLETIONS, {"prompt": prompt}))["message"] == expected


async def test_missing_fields_are_named(connection: ClientConnection) -> None:
    for path, field in ((CHAT, "messages"), (COMPLETIONS, "prompt")):
        error = await refused(connection, path, {})
        assert (error["param"], error["code"]) == (field, "missing_required_parameter")


async def test_too_many_choices_name_the_limit(connection: ClientConnection) -> None:
    error = await refused(connection, COMPLETIONS, {"prompt": ["a"] * 100, "n": 16})
    assert error["param"] == "n"
    assert "1600" in error["message"]
    assert str(MAX_CHOICES) in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_unknown_model_is_404(connection: ClientConnection, path: str) -> None:
    error = await refused(connection, path, {"messages": MESSAGES, "prompt": "x", "model": "../../etc/passwd"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "../../etc/passwd" in error["message"]
    assert "test/model" in error["message"]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "status"),
    [
        (999, None, 200),
        (1000, None, 400),
        (5000, None, 400),
        (999, 1, 200),
        (999, 2, 400),
        (1, 999, 200),
        (1, 1000, 400),
    ],
)
async def test_too_small_context_is_refused_with_both_numbers(
    connection: ClientConnection, num_prompt_tokens: int, max_tokens: int | None, status: int
) -> None:
    response = await connection.post(COMPLETIONS, {"prompt": [1] * num_prompt_tokens, "max_tokens": max_tokens})
    assert response.status == status
    if status == 400:
        assert response.error["code"] == "context_length_exceeded"
        assert str(num_prompt_tokens) in response.error["message"]
        assert "1000" in response.error["message"]
        assert (response.error["n_prompt_tokens"], response.error["n_ctx"]) == (num_prompt_tokens, 1000)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_text_that_can_never_fit_is_refused_without_tokenizing(
    connection: ClientConnection, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode(*_: object, **__: object) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr("penstock.frontend.text.tokenizer.ModelTokenizer.encode", encode)
    text = "x" * 900_000
    response = await connection.post(path, {"messages": [{"role": "user", "content": text}], "prompt": [text]})
    assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
    least, limit = map(int, re.findall(r"\d+", response.error["message"]))
    assert least > limit == 1000


async def test_too_many_stop_tokens_with_the_models_own_are_refused(
    connect: Callable[..., ClientConnection], backend: FakeBackend
) -> None:
    backend.model = model_card(eos_token_ids=tuple(range(40)))
    connection = connect()
    assert (await connection.post(COMPLETIONS, {"prompt": "x", "stop_token_ids": list(range(32))})).status == 200
    response = await connection.post(COMPLETIONS, {"prompt": "x", "stop_token_ids": list(range(50, 82))})
    assert (response.status, response.error["param"]) == (400, "stop_token_ids")


async def test_half_of_a_surrogate_pair_is_named_wherever_it_is(connection: ClientConnection) -> None:
    for text in (rb"\ud83d", rb"\\\ud83d", rb"\ud83dx", rb"\udc00"):
        for body in (rb'{"prompt":"%b"}', rb'{"prompt":"x","user":"%b"}'):
            assert "surrogate pair" in (await refused(connection, COMPLETIONS, body % text))["message"]
    assert "truncated" in (await refused(connection, COMPLETIONS, rb'{"prompt":"\\ud83d"'))["message"]


async def test_byte_order_mark_duplicate_keys_and_nul_characters_are_harmless(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    body = b'\xef\xbb\xbf{"prompt":"a","prompt":"a\\u0000b","seed":1,"seed":2}'
    assert (await connection.post(COMPLETIONS, body)).status == 200
    assert backend.last.sampling.seed == 2


async def test_messages_refused_by_the_template_are_400(
    connection: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.frontend.text.chat_template import ChatTemplate

    served = connection.protocol.app.context.models.generation.current
    monkeypatch.setattr(
        served.tokenizer, "chat_template", ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    )
    response = await connection.post(CHAT, {"messages": MESSAGES})
    assert (response.status, response.error["param"]) == (400, "messages")
    assert "roles must alternate" in response.error["message"]
    monkeypatch.setattr(served.tokenizer, "chat_template", None)
    response = await connection.post(CHAT, {"messages": MESSAGES})
    assert response.status == 400
    assert "/v1/completions" in response.error["message"]


@pytest.mark.parametrize(("path", "fields", "param", "expected"), WRONG_TOGETHER, ids=lambda value: str(value)[:50])
async def test_fields_that_exclude_each_other_are_refused(
    connection: ClientConnection, path: str, fields: dict[str, Any], param: str, expected: str
) -> None:
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    error = await refused(connection, path, {**body, **fields})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert expected in error["message"]


@pytest.mark.parametrize("depth", [70, 400, 900, 1500, 20_000])
@pytest.mark.parametrize("field", ["guided_json", "response_format"])
async def test_too_deeply_nested_schema_is_refused(connection: ClientConnection, field: str, depth: int) -> None:
    schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    value = schema if field == "guided_json" else f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}'
    body = b'{"messages":[{"role":"user","content":"hi"}],"%b":%b}' % (field.encode(), value.encode())
    error = await refused(connection, CHAT, body)
    assert error["param"] in ("guided_json", "response_format.json_schema.schema", None)
    assert "deep" in error["message"]
