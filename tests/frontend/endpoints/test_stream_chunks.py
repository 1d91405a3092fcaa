"""The chunks of a stream: one for each token that arrives alone."""

from __future__ import annotations

import pytest

from tests.frontend.harness import ClientConnection, FakeBackend, says

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_token_is_one_event_and_the_last_one_has_the_finish_reason(
    connection: ClientConnection, backend: FakeBackend, path: str
) -> None:
    backend.script = says("x" * 100)
    answer = await connection.post(path, {**HI, "prompt": "x", "max_tokens": 50, "stream": True})
    events = answer.events()[:-1]
    pieces = [event["choices"][0] for event in events if event["choices"][0].get("delta", {}).get("role") is None]
    assert [piece["text"] if "text" in piece else piece["delta"]["content"] for piece in pieces] == ["x"] * 50
    assert [piece["finish_reason"] for piece in pieces] == [None] * 49 + ["length"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_is_in_every_chunk_only_if_usage_is_requested(connection: ClientConnection, path: str) -> None:
    options = {"continuous_usage_stats": True}
    answer = await connection.post(path, {**HI, "prompt": "x", "stream": True, "stream_options": options})
    assert not any("usage" in event for event in answer.events()[:-1])
