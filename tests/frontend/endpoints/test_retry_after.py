"""Retry-After of every refusal: the backend's own estimate, or the client's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.shm.client import FailureCode, GenerationRequest, Overloaded, TokenBatch
from penstock.shm.messages import Finish
from tests.frontend.harness import ClientConnection, FakeBackend

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
BODY = {"prompt": "the cat", "max_tokens": 3}


@pytest.mark.parametrize("model_is_known", [True, False])
async def test_missing_backend_is_expected_back_when_it_says(
    connect: Callable[..., ClientConnection], backend: FakeBackend, model_is_known: bool
) -> None:
    backend.ready, backend.retry_after_s = False, 17
    if not model_is_known:
        backend.model = None
    connection = connect()
    for answer in (await connection.post(COMPLETIONS, BODY), await connection.request("GET", "/ready")):
        assert (answer.status, answer.headers["retry-after"]) == (503, "17")


@pytest.mark.parametrize(
    ("failure", "own_s", "status", "retry_after"),
    [
        (FailureCode.OVERLOADED, 9, 429, "9"),  # the queue of grammars
        (FailureCode.OVERLOADED, 0, 429, "23"),
        (FailureCode.UNAVAILABLE, 0, 503, "23"),
    ],
)
async def test_refusal_by_the_backend_carries_a_time(
    connection: ClientConnection, backend: FakeBackend, failure: FailureCode, own_s: int, status: int, retry_after: str
) -> None:
    def script(_: GenerationRequest) -> list[TokenBatch]:
        return [TokenBatch([], Finish.REJECTED, failure, retry_after_s=own_s)]

    backend.script, backend.retry_after_s = script, 23
    answer = await connection.post(COMPLETIONS, BODY)
    assert (answer.status, answer.headers["retry-after"]) == (status, retry_after)


async def test_refusal_for_want_of_memory_names_the_limit(connection: ClientConnection, backend: FakeBackend) -> None:
    text = "all grammars in use together take more memory than the limit of 1024 MiB"
    batch = TokenBatch([], Finish.REJECTED, FailureCode.OVERLOADED, failure_text=text, retry_after_s=9)
    backend.script = lambda _: [batch]
    answer = await connection.post(COMPLETIONS, BODY)
    assert (answer.status, answer.headers["retry-after"]) == (429, "9")
    assert text in answer.error["message"]


async def test_a_full_queue_refuses_before_a_prompt_is_encoded(
    connection: ClientConnection, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.full_for_unshared = Overloaded(3, 7)
    greedy = {"temperature": 0}
    for path, body in ((CHAT, HI), (COMPLETIONS, {"prompt": "x"})):
        for shared in (greedy, {"temperature": 1, "seed": 4}):  # an equal request may be running
            assert (await connection.post(path, {**body, **shared})).status == 200

    async def encode(*_: Any, **__: Any) -> Any:
        raise AssertionError("encoded")

    monkeypatch.setattr(ModelTokenizer, "encode", encode)
    for path, body in ((CHAT, HI), (COMPLETIONS, {"prompt": "x"}), ("/v1/messages", {**HI, "max_tokens": 1})):
        headers = [("x-penstock-coalesce", "off")]
        refused = await connection.request("POST", path, {**body, "temperature": 1}, [])
        alone = await connection.request("POST", path, {**body, **greedy}, headers)
        assert {refused.status, alone.status} == {529 if path == "/v1/messages" else 429}
        assert (refused.headers["retry-after"], alone.headers["retry-after"]) == ("3", "3")
