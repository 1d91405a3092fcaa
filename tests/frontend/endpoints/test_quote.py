"""POST /v1/quote, and requests that are refused because they would be late."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shm.client import FailureCode, Finish, Quote, QuoteTerms, TokenBatch
from tests.frontend.harness import ClientConnection, FakeBackend

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
REFUSE_LATE = "X-Penstock-Refuse-Late"


async def test_quote_tells_position_and_times_of_a_chat_or_completion(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    for body in (CHAT, {"prompt": "hello", "max_tokens": 20}):
        answer = await connection.post("/v1/quote", {**body, "timeout_ms": 60_000})
        quote = answer.json()
        assert answer.status == 200
        assert quote.pop("prompt_tokens") == len(backend.last.token_ids)
        assert quote == {
            "object": "quote",
            "model": "test/model",
            "status": "known",
            "queue_position": 3,
            "cached_tokens": 2,
            "coalesced": False,
            "expected_completion_tokens": 20,
            "expected_ttft_ms": 250,
            "expected_finish_ms": 1500,
            "latest_finish_ms": 4000,
            "meets_deadline": True,
        }
    late = await connection.post("/v1/quote", {**CHAT, "timeout_ms": 1000})
    assert late.json()["meets_deadline"] is False
    assert (await connection.post("/v1/quote", CHAT)).json()["meets_deadline"] is None


async def test_quote_without_a_history_says_that_it_is_unknown(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    backend.quote = Quote(0, 0, 0, is_coalesced=False)
    quote = (await connection.post("/v1/quote", {**CHAT, "timeout_ms": 1000})).json()
    assert quote["status"] == "unknown"
    names = ("expected_ttft_ms", "expected_finish_ms", "latest_finish_ms", "meets_deadline")
    assert [quote[name] for name in names] == [None] * 4


@pytest.mark.parametrize(
    ("body", "num_choices", "num_other_tokens"),
    [
        ({"prompt": "a", "n": 3}, 3, 0),
        ({"prompt": "a", "n": 3, "temperature": 0}, 1, 0),
        ({"prompt": [[1], [2, 3], [4]], "temperature": 0}, 3, 3),
    ],
)
async def test_quote_counts_the_choices_that_are_computed(
    connection: ClientConnection, backend: FakeBackend, body: dict[str, Any], num_choices: int, num_other_tokens: int
) -> None:
    assert (await connection.post("/v1/quote", body)).status == 200
    assert len(backend.streams) == 1
    assert backend.terms == [QuoteTerms(num_choices, num_other_tokens)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x"}, "messages"),
        ({**CHAT, "max_tokens": 10**7}, "max_tokens"),
        ({**CHAT, "timeout_ms": 0}, "timeout_ms"),
        ({"prompt": [], "max_tokens": 1}, "prompt"),
    ],
)
async def test_quote_of_a_bad_request_is_refused_as_the_request_is(
    connection: ClientConnection, backend: FakeBackend, body: dict[str, Any], param: str
) -> None:
    refused = await connection.post("/v1/quote", body)
    assert (refused.status, refused.error["param"]) == (400, param)
    assert not backend.streams


async def test_full_or_missing_backend_gives_no_quote(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.ready = False
    assert (await connection.post("/v1/quote", CHAT)).status == 503


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_request_that_would_be_late_is_refused_with_its_quote(
    connection: ClientConnection, backend: FakeBackend, path: str, *, is_stream: bool
) -> None:
    backend.script = lambda _: [TokenBatch([], Finish.REJECTED, FailureCode.TOO_LATE, retry_after_s=7)]
    headers = [(REFUSE_LATE, "on"), ("X-Request-Timeout-Ms", "1000")]
    refused = await connection.request("POST", path, {**CHAT, "stream": is_stream}, headers)
    assert refused.status == 429
    assert refused.headers["retry-after"] == "7"
    message = refused.json()["error"]["message"]
    assert "is expected to finish in 1500 ms; 3 others wait before it" in message
    assert backend.streams[0].request.refuse_late == QuoteTerms()
    if path != "/v1/messages":
        assert refused.error["code"] == "deadline_not_met"
        assert 0 < refused.error["left_ms"] <= 1000
        quoted = {name: refused.error[name] for name in ("queue_position", "expected_ttft_ms", "latest_finish_ms")}
        assert quoted == {"queue_position": 3, "expected_ttft_ms": 250, "latest_finish_ms": 4000}


async def test_only_the_first_choice_asks_for_all(connection: ClientConnection, backend: FakeBackend) -> None:
    body = {"prompt": "a", "n": 3, "timeout_ms": 50_000}
    assert (await connection.request("POST", "/v1/completions", body, [(REFUSE_LATE, "ON")])).status == 200
    assert [stream.request.refuse_late for stream in backend.streams] == [QuoteTerms(3), None, None]


@pytest.mark.parametrize(("value", "reason"), [("yes", '"on" or "off"'), ("on", "needs a time limit: timeout_ms")])
async def test_bad_wish_to_be_refused_is_named(
    connection: ClientConnection, backend: FakeBackend, value: str, reason: str
) -> None:
    refused = await connection.request("POST", "/v1/chat/completions", CHAT, [(REFUSE_LATE, value)])
    assert (refused.status, refused.error["param"]) == (400, REFUSE_LATE)
    assert reason in refused.error["message"]
    assert not backend.streams
