"""Bad input of every kind: the exact status, the named field, and the next request works."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from penstock.frontend.schemas.generation import MAX_CHOICES
from tests.frontend.harness import VOCAB_SIZE, ClientConnection, FakeBackend, model_card, request_bytes

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
HUGE = 10**400
DEEP = b"[" * 100_000 + b"]" * 100_000
FORBIDDEN_IN_ERRORS = re.compile(r"0x[0-9a-f]{6}|/dev/shm|ipc://|Traceback|File \"|msgspec|jinja2\.|object at ")

NOT_JSON: list[bytes] = [
    b"",
    b" ",
    b"{",
    b"}",
    b"x",
    b"{]",
    b'{"messages":',
    b'{"messages":[}',
    b'{"prompt":"x",}',
    b"{'prompt':'x'}",
    b'{"prompt":"x"} {"prompt":"x"}',
    b'{"prompt":"x"}\x00',
    b'\xef\xbb\xbf{"prompt":"x"}',
    b'\xff\xfe{\x00"\x00',
    b'{"prompt":"\xff"}',
    b'{"prompt":"\xc3"}',
    b'{"prompt":"\xed\xa0\x80"}',
    b'{"prompt":"\\ud800"}',
    b'{"prompt":"\\udc00\\ud800"}',
    b'{"prompt":"\\x41"}',
    b'{"prompt":"a\nb"}',
    b'{"prompt":"x","temperature":NaN}',
    b'{"prompt":"x","temperature":Infinity}',
    b'{"prompt":"x","temperature":-Infinity}',
    b'{"prompt":"x","temperature":.5}',
    b'{"prompt":"x","temperature":1.}',
    b'{"prompt":"x","n":01}',
    b'{"prompt":"x","n":+1}',
    b'{"prompt":"x","n":0x1}',
    b'{"prompt":"x","echo":tru}',
    b'{"prompt":"x","unknown":' + DEEP + b"}",
    b'{"prompt":' + DEEP + b"}",
    b'{"messages":' + DEEP + b"}",
    b'{"prompt":"x","logit_bias":' + b'{"1":' * 50_000 + b"0" + b"}" * 50_000 + b"}",
    DEEP,
]

NOT_AN_OBJECT: list[Any] = [None, [], [1], "x", 1, 1.5, True]

# field, value: each is refused with 400 and the field's name as param, on both endpoints
WRONG_FIELDS: list[tuple[str, Any]] = [
    *(("model", value) for value in (1, True, [], {}, "x" * 513)),
    *(("stream", value) for value in (1, 0, "true", [], {})),
    *(("n", value) for value in (0, -1, 17, 10**9, HUGE, 1.5, 1.0, "1", True, [1])),
    *(("max_tokens", value) for value in (0, -1, 2**24 + 1, 2**63, HUGE, -HUGE, 1.5, "5", True)),
    *(("temperature", value) for value in (-0.01, 2.01, 1e308, HUGE, "1", True, [], {})),
    *(("top_p", value) for value in (0, -0.1, 1.01, HUGE, "1", False)),
    *(("top_k", value) for value in (-2, 2**31, HUGE, 1.5, "1", True)),
    *(("min_p", value) for value in (-0.1, 1.1, "0")),
    *(("repetition_penalty", value) for value in (0, -1, 1e-38, 0.009, 101, "1")),
    *(("presence_penalty", value) for value in (-2.1, 2.1, "0")),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, [])),
    *(("seed", value) for value in (2**63, -(2**63) - 1, HUGE, 0.5, "1", True)),
    *(("stop", value) for value in ("", ["a"] * 17, ["x"] * 200_000, "x" * 257, 1, {}, True)),
    ("stop_token_ids", list(range(33))),
    ("stop_token_ids", 1),
    ("stop_token_ids", "1"),
    ("ignore_eos", 1),
    ("stream_options", {"include_usage": True}),
    ("stream_options", 1),
    ("stream_options", []),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {str(2**31): 1}),
    ("logit_bias", {str(HUGE): 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {str(token): 0 for token in range(301)}),
    ("logit_bias", [1]),
    ("logit_bias", 5),
    *(("typical_p", value) for value in (0, -0.1, 1.01, HUGE, "1", True)),
    *(("min_tokens", value) for value in (-1, 2**24 + 1, HUGE, 1.5, "1", True, 1000)),
    *(("allowed_token_ids", value) for value in ([], [VOCAB_SIZE], list(range(4097)), 5, "5", {})),
    *(("bad_words", value) for value in ("x", 5, ["x"] * 65, {}, [f"{n} words" for n in range(40)])),
    *(("priority", value) for value in (-1001, 1001, HUGE, 0.5, "0", True)),
    *(("timeout_ms", value) for value in (0, -1, 86_400_001, HUGE, 0.5, "1")),
    *(("truncate_prompt_tokens", value) for value in (0, -2, 2**24 + 1, 1.5, "1", True)),
    *(("truncation_side", value) for value in ("middle", "", 1)),
    *(("prompt_logprobs", value) for value in (-1, 21, HUGE, 1.5, "1", True)),
    *(("user", value) for value in (1, "x" * 513, ["x"])),
    *(("safety_identifier", value) for value in (1, "x" * 513)),
    *(("prompt_cache_key", value) for value in (1, "x" * 513)),
    *(("service_tier", value) for value in (1, "x" * 65)),
    *(("metadata", value) for value in (1, [], {"x" * 65: "y"}, {str(n): "" for n in range(17)})),
    *(("response_format", value) for value in (1, "json_object", [])),
    *(("structured_outputs", value) for value in (1, "x", [])),
    *(("guided_choice", value) for value in ([], "x", {}, ["x"] * 1025)),
    *(("guided_regex", value) for value in (1, [], "", "x" * 40_000)),
    *(("guided_grammar", value) for value in (1, {}, "", "x" * 40_000)),
    *(("guided_json", value) for value in (1, [], "", "x", "[1]", "[" * 100_000, '{"a":' * 90 + "1" + "}" * 90)),
    *(
        (field, value)
        for field in (
            "store",
            "return_token_ids",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "add_special_tokens",
            "include_stop_str_in_output",
            "ignore_eos",
        )
        for value in (1, "true", [])
    ),
]

# field, value, param: where the wrong value is inside the field
WRONG_INSIDE: list[tuple[str, Any, str]] = [
    ("stop", [""], "stop[0]"),
    ("stop", ["a", 1], "stop[1]"),
    ("stop", ["a", "b" * 257], "stop[1]"),
    ("stop", [None], "stop[0]"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stop_token_ids", [2**31], "stop_token_ids[0]"),
    ("stop_token_ids", [1, "1"], "stop_token_ids[1]"),
    ("logit_bias", {"1": 101}, "logit_bias[...]"),
    ("logit_bias", {"1": -100.5}, "logit_bias[...]"),
    ("logit_bias", {"1": "1"}, "logit_bias[...]"),
    ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ("stream_options", {"continuous_usage_stats": "x"}, "stream_options.continuous_usage_stats"),
    ("allowed_token_ids", [1, -1], "allowed_token_ids[1]"),
    ("allowed_token_ids", [True], "allowed_token_ids[0]"),
    ("bad_words", ["a", ""], "bad_words[1]"),
    ("bad_words", ["a", "b" * 257], "bad_words[1]"),
    ("bad_words", ["a", "b c d e f g h i j k"], "bad_words[1]"),
    ("metadata", {"a": 1}, "metadata[...]"),
    ("metadata", {"a": "x" * 513}, "metadata[...]"),
    ("response_format", {}, "response_format.type"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema.schema"),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"schema": 5}},
        "response_format.json_schema.schema",
    ),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x" * 513, "schema": {}}},
        "response_format.json_schema.name",
    ),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice"),
    ("structured_outputs", {"choice": ["a", ""]}, "structured_outputs.choice[1]"),
    ("structured_outputs", {"regex": 5}, "structured_outputs.regex"),
    ("structured_outputs", {"json": "not one"}, "structured_outputs.json"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs.choice"),
    ("structured_outputs", {"grammar": "x" * 40_000}, "structured_outputs.grammar"),
    ("structured_outputs", {"json_object": 1}, "structured_outputs.json_object"),
]

UNSUPPORTED: list[tuple[str, Any]] = [
    ("suffix", "x"),
    ("use_beam_search", True),
    ("grammar", "root ::= x"),
    ("json_schema", {"type": "nonsense"}),
    ("prompt_embeds", "AAAA"),
    ("mirostat", 2),
    ("dry_multiplier", 0.8),
    ("xtc_probability", 0.5),
    ("top_n_sigma", 1),
    ("dynatemp_range", 0.5),
    ("logprob_token_ids", [1]),
    ("repetition_detection", {"x": 1}),
    ("return_tokens_as_token_ids", True),
    ("guided_whitespace_pattern", " "),
]

UNSUPPORTED_IN_CHAT: list[tuple[str, Any]] = [
    ("best_of", 2),
    ("echo", True),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("chat_template", "{{ ''.__class__.__mro__ }}"),
    ("chat_template", "{% for i in range(10**9) %}x{% endfor %}"),
    ("modalities", ["audio"]),
    ("audio", {"voice": "x"}),
    ("web_search_options", {"x": 1}),
]

# messages, param
WRONG_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ({}, "messages"),
    ("hi", "messages"),
    (1, "messages"),
    (MESSAGES * 2049, "messages"),
    ([1], "messages[0]"),
    ([None], "messages[0]"),
    ([[]], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"content": "hi"}], "messages[0].role"),
    ([{"role": "robot", "content": "hi"}], "messages[0].role"),
    ([{"role": "", "content": "hi"}], "messages[0].role"),
    ([{"role": 1, "content": "hi"}], "messages[0].role"),
    ([{"role": "User", "content": "hi"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "system", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 1}], "messages[0].content"),
    ([{"role": "user", "content": {}}], "messages[0].content"),
    ([*MESSAGES, {"role": "user", "content": True}], "messages[1].content"),
    ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
     "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "file", "file": {}}]}],
     "messages[0].content[1].type"),
    ([{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}], "messages[0].content"),
    ([{"role": "user", "content": "hi", "name": 5}], "messages[0].name"),
    ([{"role": "user", "content": "hi", "name": "x" * 513}], "messages[0].name"),
    ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
]  # fmt: skip

# prompt, param
WRONG_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt"),
    (1, "prompt"),
    (True, "prompt"),
    ({}, "prompt"),
    ("", "prompt"),
    ([], "prompt"),
    ([""], "prompt"),
    ([[]], "prompt[0]"),
    ([[1], []], "prompt[1]"),
    (["a", 1], "prompt[1]"),
    ([1, "a"], "prompt[1]"),
    ([[1], 1], "prompt[1]"),
    ([[1], "a"], "prompt[1]"),
    ([None], "prompt[0]"),
    ([1.5], "prompt[0]"),
    ([-1], "prompt[0]"),
    ([True], "prompt[0]"),
    ([2**31], "prompt[0]"),
    ([HUGE], "prompt[0]"),
    ([[1, -1]], "prompt[0][1]"),
    ([[1, "a"]], "prompt[0][1]"),
    ([[[1]]], "prompt[0][0]"),
    ([VOCAB_SIZE], "prompt"),
    ([[1], [VOCAB_SIZE]], "prompt[1]"),
    (["a"] * (MAX_CHOICES + 1), "prompt"),
    (["a"] * 100_000, "prompt"),
]


async def refused(connection: ClientConnection, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error that answers it, after which the same connection serves."""
    response = await connection.post(path, body)
    assert response.status == status, response
    assert response.headers["content-type"] == "application/json"
    error = response.error
    assert not FORBIDDEN_IN_ERRORS.search(error["message"])
    assert len(error["message"]) < 400
    good = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    assert (await connection.post(path, good)).status == 200
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("body", NOT_JSON, ids=lambda body: repr(body[:40]))
async def test_what_is_not_json(connection: ClientConnection, path: str, body: bytes) -> None:
    assert (await refused(connection, path, body))["code"] in (
        "invalid_json",
        "invalid_value",
        "missing_required_parameter",
    )


@pytest.mark.parametrize("body", NOT_AN_OBJECT)
async def test_what_is_not_an_object(connection: ClientConnection, body: Any) -> None:
    error = await refused(connection, CHAT, json.dumps(body).encode())
    assert "must be a JSON object" in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS, ids=lambda value: repr(value)[:30])
async def test_a_field_out_of_its_bounds(connection: ClientConnection, path: str, field: str, value: Any) -> None:
    body = {"messages": MESSAGES, "prompt": "x", field: value}
    error = await refused(connection, path, body, 404 if value == "unknown" else 400)
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(("field", "value", "param"), WRONG_INSIDE, ids=lambda value: repr(value)[:30])
async def test_a_value_out_of_its_bounds_inside_a_field(
    connection: ClientConnection, field: str, value: Any, param: str
) -> None:
    error = await refused(connection, COMPLETIONS, {"prompt": "x", "stream": True, field: value})
    assert error["param"] == param


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=lambda value: repr(value)[:30])
async def test_what_is_not_offered_is_refused_by_name(
    connection: ClientConnection, path: str, field: str, value: Any
) -> None:
    error = await refused(connection, path, {"messages": MESSAGES, "prompt": "x", field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED_IN_CHAT, ids=lambda value: repr(value)[:30])
async def test_what_is_not_offered_in_chat_is_refused_by_name(
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
        ("dry_multiplier", 0.0),
        ("xtc_probability", 0),
        ("top_n_sigma", -1.0),
        ("dynatemp_range", 0),
        ("structured_outputs", {}),
        ("structured_outputs", {"structural_tag": None, "disable_any_whitespace": False}),
        ("guided_json", None),
        ("bad_words", []),
        ("logit_bias", {}),
        ("something_new", {"a": [1]}),
    ],
)
async def test_what_asks_for_nothing_is_accepted(connection: ClientConnection, field: str, value: Any) -> None:
    assert (await connection.post(CHAT, {"messages": MESSAGES, field: value})).status == 200


@pytest.mark.parametrize(("messages", "param"), WRONG_MESSAGES, ids=lambda value: repr(value)[:40])
async def test_wrong_messages(connection: ClientConnection, messages: Any, param: str) -> None:
    assert (await refused(connection, CHAT, {"messages": messages}))["param"] == param


@pytest.mark.parametrize(("prompt", "param"), WRONG_PROMPTS, ids=lambda value: repr(value)[:40])
async def test_wrong_prompts(connection: ClientConnection, prompt: Any, param: str) -> None:
    assert (await refused(connection, COMPLETIONS, {"prompt": prompt}))["param"] == param


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (None, "prompt: expected str | array, got null"),
        ([None], "prompt[0]: expected int | str | array, got null"),
        (True, "prompt: expected str | array, got bool true"),
        ([1.5], "prompt[0]: expected int | str | array, got float 1.5"),
    ],
)
async def test_a_wrong_type_is_told_with_its_value(connection: ClientConnection, prompt: Any, told: str) -> None:
    assert (await refused(connection, COMPLETIONS, {"prompt": prompt}))["message"] == told


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
async def test_an_unknown_model_is_404(connection: ClientConnection, path: str) -> None:
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
async def test_a_context_too_small_names_both_numbers(
    connection: ClientConnection, num_prompt_tokens: int, max_tokens: int | None, status: int
) -> None:
    response = await connection.post(COMPLETIONS, {"prompt": [1] * num_prompt_tokens, "max_tokens": max_tokens})
    assert response.status == status
    if status == 400:
        assert response.error["code"] == "context_length_exceeded"
        assert str(num_prompt_tokens) in response.error["message"]
        assert "1000" in response.error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_text_that_can_never_fit_is_refused_unread(
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


async def test_duplicate_keys_and_nul_characters_are_harmless(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    body = b'{"prompt":"a","prompt":"a\\u0000b","seed":1,"seed":2}'
    assert (await connection.post(COMPLETIONS, body)).status == 200
    assert backend.last.sampling.seed == 2


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_body_that_is_not_said_to_be_json_is_415(connection: ClientConnection, content_type: str) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: {content_type}\r\ncontent-length: 14\r\n\r\n"
    connection.send(head.encode() + b'{"prompt":"x"}')
    assert (await connection.response()).status == 415
    assert (await connection.request("GET", "/health")).status == 200


@pytest.mark.parametrize(("headers", "status"), [("", 200), ("origin: http://evil.example\r\n", 415)])
async def test_a_body_of_no_type_is_json_unless_a_browser_sends_it(
    connection: ClientConnection, headers: str, status: int
) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\n{headers}content-length: 14\r\n\r\n"
    connection.send(head.encode() + b'{"prompt":"x"}')
    assert (await connection.response()).status == status


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
async def test_compressed_bodies_are_415(connection: ClientConnection, encoding: str) -> None:
    response = await connection.request("POST", COMPLETIONS, b"\x1f\x8b", [("content-encoding", encoding)])
    assert response.status == 415
    assert (await connection.request("GET", "/health")).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v1/chat", "/v1/completions/", "//v1/completions", "/V1/completions", "/v1/../health",
             "/health/", "/%00", "/v1/embeddings", "/debug", "/" + "a" * 8000]
)  # fmt: skip
async def test_unknown_paths_are_404(connection: ClientConnection, path: str) -> None:
    for method in ("GET", "POST"):
        response = await connection.request(method, path, {} if method == "POST" else None)
        assert (response.status, response.error["code"]) == (404, "unknown_url")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", COMPLETIONS, "POST"),
        ("OPTIONS", COMPLETIONS, "POST"),
        ("PATCH", COMPLETIONS, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/test/model", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("PROPFIND", "/ready", "GET, HEAD"),
    ],
)
async def test_wrong_methods_are_405_and_say_which_are_right(
    connection: ClientConnection, method: str, path: str, allowed: str
) -> None:
    response = await connection.request(method, path)
    assert (response.status, response.headers["allow"]) == (405, allowed)
    assert (await connection.request("GET", "/health")).status == 200


async def test_a_declared_body_over_the_limit_is_413_before_it_is_read(
    connect: Callable[..., ClientConnection],
) -> None:
    connection = connect(max_body_bytes=1000)
    connection.send(request_bytes("POST", COMPLETIONS, b"x" * 1001))
    response = await connection.response()
    assert (response.status, response.error["code"]) == (413, "request_too_large")
    assert "1000" in response.error["message"]
    assert (await connection.request("GET", "/health")).status == 200


async def test_a_large_body_over_the_limit_can_be_sent_to_its_end(connect: Callable[..., ClientConnection]) -> None:
    connection = connect(max_body_bytes=1000)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: {1 << 20}\r\n\r\n"
    connection.send(head.encode())
    assert (await connection.response()).status == 413
    for _ in range(16):
        assert not connection.transport.closed
        connection.send(b"x" * (1 << 16))
        await asyncio.sleep(0)
    await connection.closed()


async def test_a_client_that_waits_for_100_is_told_413_instead(connect: Callable[..., ClientConnection]) -> None:
    connection = connect(max_body_bytes=1000)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 5000\r\n\r\n"
    connection.send(head.encode())
    assert (await connection.response()).status == 413
    await connection.closed()
    assert b"100 Continue" not in connection.transport.output


async def test_a_client_that_waits_for_100_gets_it(connection: ClientConnection) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 14\r\n\r\n"
    connection.send(head.encode())
    await connection.output(b"HTTP/1.1 100 Continue\r\n\r\n")
    connection.send(b'{"prompt":"x"}')
    await connection.output(b"HTTP/1.1 200 OK")


async def test_chunks_over_the_limit_are_413(connect: Callable[..., ClientConnection]) -> None:
    connection = connect(max_body_bytes=1000)
    connection.send(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    for _ in range(11):
        connection.send(b"64\r\n" + b"x" * 100 + b"\r\n")
        await asyncio.sleep(0)
    assert (await connection.response()).status == 413
    connection.send(b"0\r\n\r\n")
    await connection.closed()


async def test_one_byte_at_a_time(connection: ClientConnection) -> None:
    for byte in request_bytes("POST", COMPLETIONS, {"prompt": "x"}):
        connection.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await connection.response()).status == 200


async def test_a_body_in_one_byte_chunks(connection: ClientConnection) -> None:
    connection.send(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    body = json.dumps({"prompt": "x", "unknown": "y" * 20_000}).encode()
    connection.send(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert (await connection.response()).status == 200


async def test_the_template_may_refuse(connection: ClientConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.frontend.text.chat_template import ChatTemplate

    served = connection.protocol.app.context.models.current
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


async def test_our_own_bug_is_a_500_that_says_nothing_and_is_logged(
    connection: ClientConnection, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.refusal = KeyError("secret at 0x7f00deadbeef")
    response = await connection.post(COMPLETIONS, {"prompt": "x"})
    assert (response.status, response.error["code"]) == (500, "internal_error")
    assert b"secret" not in response.body
    assert "secret" in caplog.text
    backend.refusal = None
    assert (await connection.post(COMPLETIONS, {"prompt": "x"})).status == 200


# endpoint, fields that are right one by one, the param named, what is said of it
WRONG_TOGETHER: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of", "at least n, which is 3, got 2"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of", "stream"),
    (COMPLETIONS, {"best_of": 16, "prompt": ["x"] * 9}, "best_of", "at most 128 choices"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", "got 0; 0 is allowed only with echo"),
    (COMPLETIONS, {"max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most 5 tokens"),
    (CHAT, {"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens", "at most 5 tokens"),
    (CHAT, {"continue_final_message": True}, "continue_final_message", "from the assistant"),
    (
        CHAT,
        {"continue_final_message": True, "messages": [*MESSAGES, {"role": "assistant", "tool_calls": []}]},
        "continue_final_message",
        "content",
    ),
    (
        CHAT,
        {
            "continue_final_message": True,
            "add_generation_prompt": True,
            "messages": [*MESSAGES, {"role": "assistant", "content": "so"}],
        },
        "add_generation_prompt",
        "continue_final_message",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex",
        "combined with response_format",
    ),
    (
        COMPLETIONS,
        {"guided_choice": ["a"], "structured_outputs": {"json": {}}},
        "structured_outputs.json",
        "combined with guided_choice",
    ),
    (CHAT, {"guided_json": {"a": {}}, "guided_grammar": "start: x"}, "guided_grammar", "combined with guided_json"),
    (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
    (CHAT, {"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not supp"),
    (COMPLETIONS, {"timeout_ms": 5, "stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
]


@pytest.mark.parametrize(("path", "fields", "param", "told"), WRONG_TOGETHER, ids=lambda value: str(value)[:50])
async def test_what_is_wrong_only_together(
    connection: ClientConnection, path: str, fields: dict[str, Any], param: str, told: str
) -> None:
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    error = await refused(connection, path, {**body, **fields})
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert told in error["message"]


@pytest.mark.parametrize("depth", [70, 400, 900, 1500, 20_000])
@pytest.mark.parametrize("field", ["guided_json", "response_format"])
async def test_a_schema_nested_too_deeply(connection: ClientConnection, field: str, depth: int) -> None:
    schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    value = schema if field == "guided_json" else f'{{"type":"json_schema","json_schema":{{"schema":{schema}}}}}'
    body = b'{"messages":[{"role":"user","content":"hi"}],"%b":%b}' % (field.encode(), value.encode())
    error = await refused(connection, CHAT, body)
    assert error["param"] in ("guided_json", "response_format.json_schema.schema", None)
    assert "deep" in error["message"]
