"""Chat and text completions as a client sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.shm.client import Overloaded, TokenBatch
from penstock.shm.messages import FailureCode, Finish, Sampling
from tests.frontend.harness import (
    END_TOKEN,
    TOKENIZER,
    ClientConnection,
    FakeBackend,
    make_app,
    model_card,
    request_bytes,
    says,
    silent,
    token_ids,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_chat_is_answered_whole(connection: ClientConnection, backend: FakeBackend) -> None:
    response = await connection.post(CHAT, {**HI, "model": "test/model"})
    answer = response.json()
    assert response.status == 200
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "test/model"
    assert answer["system_fingerprint"] == "fp_test"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(backend.last.token_ids) == token_ids(prompt)
    num_tokens = len(token_ids("Hello, world!")) + 1
    assert answer["usage"] == {
        "prompt_tokens": len(token_ids(prompt)),
        "completion_tokens": num_tokens,
        "total_tokens": len(token_ids(prompt)) + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "penstock": {"coalesced": False},
    }


async def test_completion_is_answered_whole(connection: ClientConnection) -> None:
    answer = (await connection.post(COMPLETIONS, {"prompt": "once"})).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello, world!", "logprobs": None, "finish_reason": "stop"}]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
@pytest.mark.parametrize("text", ["Hello, world!", "été 猫 🐈\n", "x", "猫" * 9])
async def test_stream_is_the_whole_answer_in_pieces(
    connection: ClientConnection, backend: FakeBackend, text: str, batch_size: int
) -> None:
    backend.script = says(text, batch_size=batch_size)
    chat = await connection.post(CHAT, {**HI, "stream": True})
    events = chat.events()
    assert events.pop() == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    assert "\ufffd" not in chat.body.decode()
    assert len({event["id"] for event in events}) == 1
    assert not any("usage" in event for event in events)

    completion = await connection.post(COMPLETIONS, {"prompt": "x", "stream": True})
    assert "".join(event["choices"][0]["text"] for event in completion.events()[:-1]) == text


async def test_requested_usage_comes_last(connection: ClientConnection) -> None:
    body = {**HI, "stream": True, "stream_options": {"include_usage": True}}
    *events, last, done = (await connection.post(CHAT, body)).events()
    assert done == "[DONE]"
    assert last["choices"] == []
    whole = (await connection.post(CHAT, HI)).json()
    assert last["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events)


async def test_tokens_that_arrive_together_are_one_event(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = says("the cat sat on the mat", batch_size=1000)
    events = (await connection.post(COMPLETIONS, {"prompt": "x", "stream": True})).events()
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["the cat sat on the mat"]
    assert events[0]["choices"][0]["finish_reason"] == "stop"


async def test_max_tokens_ends_with_length(connection: ClientConnection) -> None:
    choice = (await connection.post(COMPLETIONS, {"prompt": "x", "max_tokens": 3})).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == TOKENIZER.decode(token_ids("Hello, world!")[:3])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("wor", "Hello, "),
        (["zzz", "ld"], "Hello, wor"),
        (["!"], "Hello, world"),
        ("Hello", ""),
        ("!!", "Hello, world!"),
    ],
)
async def test_stop_string_ends_the_text_and_is_never_sent(
    connection: ClientConnection,
    backend: FakeBackend,
    stop: str | list[str],
    expected: str,
    batch_size: int,
    stream: bool,
) -> None:
    backend.script = says("Hello, world!", batch_size=batch_size, finish=Finish.LENGTH)
    response = await connection.post(
        COMPLETIONS,
        {"prompt": "x", "stop": stop, "stream": stream, "stream_options": {"include_usage": True} if stream else None},
    )
    if stream:
        *events, last, _ = response.events()
        text = "".join(event["choices"][0]["text"] for event in events)
        reason, usage = events[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        choice = response.json()["choices"][0]
        text, reason, usage = choice["text"], choice["finish_reason"], response.json()["usage"]
    assert text == expected
    stopped = expected != "Hello, world!"
    assert reason == ("stop" if stopped else "length")
    ids = token_ids("Hello, world!")
    strings = [stop] if isinstance(stop, str) else stop
    needed = next((n for n in range(1, len(ids) + 1) if any(s in TOKENIZER.decode(ids[:n]) for s in strings)), len(ids))
    assert usage["completion_tokens"] == needed
    if batch_size == 1 and needed < len(ids):
        assert backend.streams[0].cancelled.is_set()


async def test_every_parameter_reaches_the_backend(connection: ClientConnection, backend: FakeBackend) -> None:
    body = {
        "prompt": "x",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.25,
        "logit_bias": {"9": 1.5, "5": -100},
        "seed": 42,
        "stop_token_ids": [8],
        "user": "somebody",
    }
    assert (await connection.post(COMPLETIONS, body)).status == 200
    assert backend.last.max_tokens == 7
    assert backend.last.stop_token_ids == (END_TOKEN, 8)
    assert backend.last.sampling == Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1.0,
        frequency_penalty=0.25,
        logit_bias=((5, -100.0), (9, 1.5)),
        seed=42,
    )


async def test_missing_parameters_take_the_models_defaults(
    connect: Callable[..., ClientConnection], backend: FakeBackend
) -> None:
    backend.model = model_card(default_sampling=Sampling(temperature=0.7, top_p=0.8, top_k=20))
    body = {"prompt": "x", "temperature": None, "top_p": None, "top_k": 5, "stop": None, "seed": None, "n": None}
    assert (await connect().post(COMPLETIONS, body)).status == 200
    sampling = backend.last.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.8, 5)
    assert backend.last.max_tokens == 999


async def test_ignore_eos_leaves_only_the_requests_own_stop_tokens(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    await connection.post(COMPLETIONS, {"prompt": "x", "ignore_eos": True, "stop_token_ids": [4, 4]})
    assert backend.last.stop_token_ids == (4,)


async def test_greedy_requests_that_differ_without_effect_are_the_same(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    for extra in ({}, {"seed": 5}, {"top_p": 0.5, "top_k": 3, "min_p": 0.2}):
        await connection.post(COMPLETIONS, {"prompt": "x", "temperature": 0, **extra})
    assert len({stream.request.sampling for stream in backend.streams}) == 1


async def test_requests_without_a_seed_get_different_seeds(connection: ClientConnection, backend: FakeBackend) -> None:
    for _ in range(3):
        await connection.post(COMPLETIONS, {"prompt": "x"})
    assert len({stream.request.sampling.seed for stream in backend.streams}) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_get_several_choices_each(
    connection: ClientConnection, backend: FakeBackend, stream: bool
) -> None:
    def script(request: Any) -> list[TokenBatch]:
        ids = [*request.token_ids, *token_ids(str(request.sampling.seed % 10))]
        return [TokenBatch([token]) for token in ids] + [TokenBatch([END_TOKEN], Finish.STOP)]

    backend.script = script
    body = {"prompt": ["ab", "cd"], "n": 3, "seed": 7, "stream": stream}
    response = await connection.post(COMPLETIONS, body)
    texts = [""] * 6
    if stream:
        for event in response.events()[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    else:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        texts = [choice["text"] for choice in choices]
        assert response.json()["usage"]["prompt_tokens"] == len(token_ids("ab")) + len(token_ids("cd"))
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    assert [text[:2] for text in texts] == ["ab"] * 3 + ["cd"] * 3
    seeds = [stream.request.sampling.seed for stream in backend.streams]
    assert seeds[0] == 7
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]]), (["a", "b"], [token_ids("a"), token_ids("b")])],
)
async def test_every_form_of_prompt_is_accepted(
    connection: ClientConnection, backend: FakeBackend, prompt: Any, expected: list[list[int]]
) -> None:
    assert (await connection.post(COMPLETIONS, {"prompt": prompt})).status == 200
    assert [list(stream.request.token_ids) for stream in backend.streams] == expected


async def test_content_parts_and_developer_messages_reach_the_template(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert (await connection.post(CHAT, {"messages": messages})).status == 200
    text = TOKENIZER.decode(list(backend.last.token_ids), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>")


async def test_long_prompt_is_encoded_in_a_thread(
    connect: Callable[..., ClientConnection], backend: FakeBackend
) -> None:
    backend.model = model_card(max_context_tokens=1 << 20)
    text = "the cat sat on the mat " * 1000
    assert (await connect().post(COMPLETIONS, {"prompt": text})).status == 200
    assert list(backend.last.token_ids) == token_ids(text)


async def test_full_queue_is_429_with_retry_after(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.refusal = Overloaded(7, 1024)
    response = await connection.post(CHAT, HI)
    assert (response.status, response.headers["retry-after"]) == (429, "7")
    assert response.error["type"] == "rate_limit_error"


async def test_choices_are_submitted_all_or_none(connection: ClientConnection, backend: FakeBackend) -> None:
    def script(request: Any) -> list[TokenBatch]:
        if len(backend.streams) == 2:
            raise Overloaded(1, 1024)
        return []

    backend.script = script
    assert (await connection.post(COMPLETIONS, {"prompt": "x", "n": 4})).status == 429
    assert [stream.cancelled.is_set() for stream in backend.streams] == [True, True]


@pytest.mark.parametrize(
    ("code", "limit", "status", "name"),
    [
        (FailureCode.INTERNAL, 0, 500, "internal_error"),
        (FailureCode.OVERLOADED, 0, 429, "overloaded"),
        (FailureCode.CONTEXT_TOO_LONG, 55, 400, "context_length_exceeded"),
        (FailureCode.BAD_TOKEN, 55, 400, "invalid_value"),
        (FailureCode.NOT_SCORED, 0, 400, "invalid_value"),
        (FailureCode.NOT_SAMPLED, 0, 400, "unsupported_parameter"),
        (FailureCode.BAD_DESCRIPTOR, 0, 500, "internal_error"),
        (FailureCode.SHUTTING_DOWN, 0, 503, "shutting_down"),
        (FailureCode.UNAVAILABLE, 0, 503, "backend_unavailable"),
    ],
)
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_backend_failures_become_errors(
    connection: ClientConnection,
    backend: FakeBackend,
    code: FailureCode,
    limit: int,
    status: int,
    name: str,
    started: bool,
    stream: bool,
) -> None:
    batches = [TokenBatch(token_ids("a"))] if started else []
    failure = TokenBatch([], Finish.FAILED if started else Finish.REJECTED, code, limit)
    backend.script = lambda _: [*batches, failure]
    response = await connection.post(CHAT, {**HI, "stream": stream})
    if stream and started:
        assert response.status == 200
        error = response.events()[-1]["error"]
    else:
        assert response.status == status
        error = response.error
    assert error["code"] == name
    assert str(limit) in error["message"] or not limit
    assert (await connection.request("GET", "/health")).status == 200


async def test_valid_request_id_is_echoed(connection: ClientConnection) -> None:
    for value, echoed in (("abc-1.2:3_x", True), ("a b", False), ("x" * 129, False), ('"><script>', False)):
        response = await connection.request("GET", "/health", headers=[("x-request-id", value)])
        assert (response.headers["x-request-id"] == value) is echoed


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic one", 401),
        ("one", 401),
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Bearer onetwo", 401),
        ("Bearer \u00e9", 401),
    ],
)
async def test_key_is_required_when_there_are_keys(
    connect: Callable[..., ClientConnection], header: str | None, status: int
) -> None:
    connection = connect(api_keys=("one", "two"))
    headers = [] if header is None else [("authorization", header)]
    response = await connection.request("GET", "/v1/models", headers=headers)
    assert response.status == status
    if status == 401:
        assert response.error["code"] == "invalid_api_key"
    assert (await connection.request("GET", "/health")).status == 200
    assert (await connection.request("GET", "/ready")).status == 200


async def test_too_many_open_requests_are_refused_before_their_body(backend: FakeBackend) -> None:
    backend.script = silent
    app = make_app(backend, max_open_requests=1)
    first, second = ClientConnection(app), ClientConnection(app)
    first.send(request_bytes("POST", "/v1/completions", {"prompt": "x"}))
    await backend.submitted.wait()
    second.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2000\r\n\r\n")
    await second.output(b"429 Too Many Requests")
    await second.output(b"retry-after")
    for connection in (first, second):
        connection.transport.reset()
        await connection.idle()
    third = ClientConnection(app)
    assert (await third.request("GET", "/health")).status == 200
    await third.end()


async def test_open_requests_of_one_key_leave_places_to_other_keys(backend: FakeBackend) -> None:
    backend.script = silent
    app = make_app(backend, max_open_requests=4, api_keys=["one", "two"])
    flood = [ClientConnection(app) for _ in range(4)]
    body = {"prompt": "x"}
    for connection in flood:
        backend.submitted.clear()
        connection.send(request_bytes("POST", "/v1/completions", body, [("authorization", "Bearer one")]))
        await backend.submitted.wait()
    backend.script = says("ok")
    last = ClientConnection(app)
    for key, status in (("one", 429), ("two", 200), ("one", 429)):
        response = await last.request("POST", "/v1/completions", body, [("authorization", f"Bearer {key}")])
        assert response.status == status, key
        if status == 429:
            assert "the limit of this worker is 4" in response.error["message"]
            assert 1 <= int(response.headers["retry-after"]) <= 60
    for connection in (*flood, last):
        connection.transport.reset()
        await connection.idle()
    assert app.exchanges.places.num_taken == 0
