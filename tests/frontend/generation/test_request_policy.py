"""Coalescing, tenants, priorities and deadlines of requests, and what clients learn about them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

import pytest

from penstock.frontend.access.api_keys import tenant_salt
from penstock.shm.client import GenerationRequest, TokenBatch
from penstock.shm.messages import Finish, Sampling
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, model_card, request_bytes, silent, token_ids

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
COALESCE = "X-Penstock-Coalesce"
TIMEOUT = "X-Request-Timeout-Ms"
GREEDY = {"prompt": "x", "temperature": 0}
DAY_MS = 86_400_000


# Coalescing


@pytest.mark.parametrize(
    ("fields", "may_share"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0.5, "seed": None}, False),
        ({"temperature": 0.5, "seed": 0}, True),
        ({"temperature": 0.5, "seed": -7}, True),
    ],
)
@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": [{"role": "user", "content": "x"}]}), (COMPLETIONS, {"prompt": "x"})]
)
async def test_request_may_be_coalesced_if_its_tokens_are_deterministic(
    connection: ClientConnection, backend: FakeBackend, path: str, prompt: Any, fields: Any, may_share: bool
) -> None:
    for stream in (False, True):
        await connection.post(path, {**prompt, **fields, "stream": stream, "max_tokens": 5, "stop": ["y"]})
        assert backend.last.may_share is may_share


async def test_model_that_is_greedy_by_default_may_be_coalesced(backend: FakeBackend) -> None:
    backend.model = model_card(default_sampling=Sampling(temperature=0.0))
    connection = ClientConnection(make_app(backend))
    await connection.post(COMPLETIONS, {"prompt": "x"})
    assert backend.last.may_share
    await connection.end()


async def test_output_options_do_not_prevent_coalescing(connection: ClientConnection, backend: FakeBackend) -> None:
    text = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    messages = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}
    await connection.post(CHAT, {**messages, "max_tokens": 3, "stop": "a"})
    await connection.post(CHAT, {**messages, "stream": True, "stop_token_ids": [5], "seed": 9, "top_p": 0.5})
    await connection.post(COMPLETIONS, {"prompt": token_ids(text), "temperature": 0, "ignore_eos": True})

    def compared(request: GenerationRequest) -> tuple[Any, ...]:
        return list(request.token_ids), request.sampling, request.salt, request.may_share

    first, *others = [compared(stream.request) for stream in backend.streams]
    assert first[-1]
    assert others == [first, first]


async def test_equal_choices_share_and_others_have_their_own_seeds(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    await connection.post(COMPLETIONS, {**GREEDY, "n": 3})
    assert len({stream.request.sampling for stream in backend.streams}) == 1
    assert all(stream.request.may_share for stream in backend.streams)
    backend.streams.clear()
    await connection.post(COMPLETIONS, {"prompt": "x", "seed": 4, "n": 3})
    assert len({stream.request.sampling.seed for stream in backend.streams}) == 3
    assert all(stream.request.may_share for stream in backend.streams)


@pytest.mark.parametrize(("value", "may_share"), [("off", False), ("OFF", False), ("on", True), ("On", True)])
async def test_header_disables_coalescing(
    connection: ClientConnection, backend: FakeBackend, value: str, may_share: bool
) -> None:
    response = await connection.request("POST", COMPLETIONS, GREEDY, [(COALESCE, value)])
    assert response.status == 200
    assert backend.last.may_share is may_share


@pytest.mark.parametrize("headers", [[(COALESCE, "")], [(COALESCE, "no")], [(COALESCE, "on"), (COALESCE, "off")]])
async def test_invalid_coalesce_header_is_refused_by_name(
    connection: ClientConnection, backend: FakeBackend, headers: list[tuple[str, str]]
) -> None:
    response = await connection.request("POST", COMPLETIONS, GREEDY, headers)
    assert (response.status, response.error["param"]) == (400, COALESCE)
    assert '"on" or "off"' in response.error["message"]
    assert not backend.streams


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("joins", "expected"), [(True, "joined"), (False, "none")])
async def test_header_usage_and_log_report_whether_the_request_joined(
    connection: ClientConnection,
    backend: FakeBackend,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    joins: bool,
    expected: str,
) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    backend.joins = joins
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await connection.post(COMPLETIONS, {**GREEDY, **options})
    assert response.headers["x-penstock-coalesced"] == expected
    usage = response.events()[-2]["usage"] if stream else response.json()["usage"]
    assert usage["penstock"] == {"coalesced": joins}
    await connection.idle()
    (line,) = [item.message for item in caplog.records if item.name == "penstock.request"]
    assert f" coalesced={expected} " in line


async def test_choices_that_join_their_own_first_choice_are_not_reported_as_coalesced(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    backend.script = silent
    connection.send(request_bytes("POST", COMPLETIONS, {**GREEDY, "n": 2}))
    await backend.submitted.wait()
    assert len(backend.streams) == 2
    backend.streams[1].joins = True
    for stream in backend.streams:
        stream.push(*token_ids("a"), finish=Finish.LENGTH)
    answer = await connection.response()
    assert answer.headers["x-penstock-coalesced"] == "none"
    assert answer.json()["usage"]["penstock"] == {"coalesced": False}


async def test_stream_kept_alive_before_its_first_token_has_no_coalescing_header(
    backend: FakeBackend,
) -> None:
    backend.script, backend.joins = silent, True
    app = make_app(backend)
    connection = ClientConnection(app)
    body = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    connection.send(request_bytes("POST", COMPLETIONS, body))
    await backend.submitted.wait()
    await asyncio.sleep(0)  # a request submits its last prompt, lets others go on, and then begins its stream
    backend.ready = False
    app.exchanges.sweep(time.monotonic() + 2)  # far less than a keep-alive interval
    await connection.output(b": restarting")
    backend.ready = True
    app.exchanges.sweep(float("inf"))
    await connection.output(b": keep-alive")
    backend.streams[0].push(*token_ids("a"), finish=Finish.LENGTH)
    response = await connection.response()
    assert response.headers["x-penstock-request"] == "7"
    assert "x-penstock-coalesced" not in response.headers
    assert response.events()[-2]["usage"]["penstock"] == {"coalesced": True}
    await connection.end()


# Tenants


async def salts_of(backend: FakeBackend, *keys: str, served: tuple[str, ...]) -> list[bytes]:
    connection = ClientConnection(make_app(backend, api_keys=served))
    backend.streams.clear()
    for key in keys:
        headers = [("Authorization", f"Bearer {key}")]
        assert (await connection.request("POST", COMPLETIONS, GREEDY, headers)).status == 200
    await connection.end()
    return [stream.request.salt for stream in backend.streams]


async def test_each_key_has_its_own_salt_in_every_frontend(backend: FakeBackend) -> None:
    one, two, again = await salts_of(backend, "one", "two", "one", served=("one", "two"))
    assert one == again == tenant_salt(b"one")
    assert one != two
    assert len(one) == len(two) == 16
    assert await salts_of(backend, "one", served=("zero", "one")) == [one]
    assert b"one" not in one


async def test_without_keys_all_requests_are_one_tenant(backend: FakeBackend) -> None:
    assert await salts_of(backend, "one", "two", served=()) == [b"", b""]
    connection = ClientConnection(make_app(backend))
    await connection.post(COMPLETIONS, {**GREEDY, "salt": "ab", "tenant": "ab", "may_share": False})
    assert (backend.last.salt, backend.last.may_share) == (b"", True)
    await connection.end()


MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, GREEDY),
        (CHAT, MESSAGES),
        ("/v1/messages", {**MESSAGES, "max_tokens": 5}),
        ("/v1/responses", {"input": "x", "temperature": 0}),
    ],
)
async def test_cache_salt_separates_requests_of_a_tenant(backend: FakeBackend, path: str, body: Any) -> None:
    connection = ClientConnection(make_app(backend, api_keys=["one", "two"]))

    async def salt_of(key: str, cache_salt: str | None) -> bytes:
        headers = [("Authorization", f"Bearer {key}")]
        response = await connection.request("POST", path, {**body, "cache_salt": cache_salt}, headers)
        assert response.status == 200
        assert "x-penstock-ignored" not in response.headers
        return backend.last.salt

    keys, cache_salts = ("one", "two"), (None, "a", "b", "a" * 512, "猫")
    salts = {(key, cache_salt): await salt_of(key, cache_salt) for key in keys for cache_salt in cache_salts}
    assert len(set(salts.values())) == len(salts)
    assert {len(salt) for salt in salts.values()} == {16}
    assert salts["one", None] == tenant_salt(b"one")
    assert await salt_of("one", "a") == salts["one", "a"]
    assert backend.last.may_share
    await connection.end()


@pytest.mark.parametrize(("cache_salt", "shown"), [("", ">= 1"), ("a" * 513, "<= 512"), (5, "str"), (["a"], "str")])
async def test_cache_salt_is_a_text_of_limited_length(
    connection: ClientConnection, backend: FakeBackend, cache_salt: Any, shown: str
) -> None:
    response = await connection.post(COMPLETIONS, {**GREEDY, "cache_salt": cache_salt})
    assert (response.status, response.error["param"]) == (400, "cache_salt")
    assert shown in response.error["message"]
    assert not backend.streams


# Priority and deadline


@pytest.mark.parametrize(("requested", "priority"), [(None, 0), (-1000, -1000), (1000, 1000)])
async def test_priority_reaches_the_backend(
    connection: ClientConnection, backend: FakeBackend, requested: int | None, priority: int
) -> None:
    await connection.post(COMPLETIONS, {**GREEDY, "priority": requested})
    assert backend.last.priority == priority


@pytest.mark.parametrize(
    ("body_ms", "header_ms", "limit_ms"),
    [
        (None, None, None),
        (500, None, 500),
        (None, "700", 700),
        (500, "700", 500),
        (900, "700", 700),
        (1, None, 1),
        (DAY_MS, None, DAY_MS),
        (None, "1", 1),
        (None, str(DAY_MS), DAY_MS),
    ],
)
async def test_smaller_time_limit_applies_from_the_requests_arrival(
    connection: ClientConnection,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    body_ms: int | None,
    header_ms: str | None,
    limit_ms: int | None,
) -> None:
    monkeypatch.setattr("penstock.frontend.transport.exchange.time.monotonic", lambda: 5000.0)
    headers = [] if header_ms is None else [(TIMEOUT, header_ms)]
    response = await connection.request("POST", COMPLETIONS, {**GREEDY, "timeout_ms": body_ms}, headers)
    assert response.status == 200
    assert backend.last.deadline_s == (None if limit_ms is None else 5000.0 + limit_ms / 1000)


@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "soon", "86400001", "9" * 5000, "1, 2", "+5", "٣"])
async def test_invalid_time_limit_header_is_refused_by_name(connection: ClientConnection, value: str) -> None:
    response = await connection.request("POST", COMPLETIONS, GREEDY, [(TIMEOUT, value)])
    assert (response.status, response.error["param"]) == (400, TIMEOUT)
    assert "from 1 to 86400000" in response.error["message"]
    assert len(response.error["message"]) < 300


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_expires_before_its_first_token_is_answered_499(
    connection: ClientConnection, backend: FakeBackend, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    backend.script = lambda _: [TokenBatch([], Finish.EXPIRED)]
    response = await connection.post(COMPLETIONS, {**GREEDY, "stream": stream})
    assert (response.status, response.error["type"], response.error["code"]) == (499, "timeout_error", "timeout")
    assert "retry-after" not in response.headers
    await connection.idle()
    (line,) = [item.message for item in caplog.records if item.name == "penstock.request"]
    assert dict(re.findall(r"(\w+)=(\S+)", line))["finish_reason"] == "timeout"


@pytest.mark.parametrize("in_one_batch", [False, True])
async def test_expired_stream_keeps_its_tokens_and_ends_with_the_error(
    connection: ClientConnection, backend: FakeBackend, in_one_batch: bool
) -> None:
    ids = token_ids("the cat")
    batches = [TokenBatch(ids, Finish.EXPIRED)] if in_one_batch else [TokenBatch(ids), TokenBatch([], Finish.EXPIRED)]
    backend.script = lambda _: batches
    *chunks, last = (await connection.post(COMPLETIONS, {**GREEDY, "stream": True})).events()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the cat"
    assert last["error"]["code"] == "timeout"
    assert f"after {len(ids)} tokens" in last["error"]["message"]


async def test_stop_string_in_the_last_batch_wins_over_the_expiry(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    backend.script = lambda _: [TokenBatch(token_ids("the cat"), Finish.EXPIRED)]
    response = await connection.post(COMPLETIONS, {**GREEDY, "stop": "cat"})
    assert response.status == 200
    assert response.json()["choices"][0] == {
        "index": 0,
        "text": "the ",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "cat",
    }
