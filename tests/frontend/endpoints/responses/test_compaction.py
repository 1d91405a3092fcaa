"""POST /v1/responses/compact: a conversation in short, which the next request continues."""

from __future__ import annotations

from typing import Any

import openai.types.responses.response_usage
import pytest

from tests.frontend.endpoints.responses.test_responses import prompt
from tests.frontend.harness import ClientConnection, FakeBackend, says

URL = "/v1/responses"
CONVERSATION = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "the mat"},
]
MODEL = "test/model"
BODY: dict[str, Any] = {"model": MODEL, "input": CONVERSATION}


async def test_users_messages_stay_and_the_rest_becomes_a_summary(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    backend.script = says("It sat.")
    compact = (await connection.post(f"{URL}/compact", BODY | {"instructions": "be brief"})).json()
    openai.types.responses.response_usage.ResponseUsage.model_validate(compact["usage"])
    assert compact["object"] == "response.compaction"
    *kept, summary = compact["output"]
    assert [item["content"][0]["text"] for item in kept] == ["the cat", "the mat"]
    assert summary["type"] == "compaction"
    asked = prompt(backend)
    assert "sat" in asked
    assert "Summarize this conversation" in asked
    await connection.post(URL, {"input": [*compact["output"], {"role": "user", "content": "and now?"}]})
    continued = prompt(backend)
    assert "Summary of the conversation before this message:\n\nIt sat." in continued
    assert continued.index("the mat") < continued.index("It sat.") < continued.index("and now?")


async def test_stored_conversation_is_compacted_and_the_compaction_is_not_stored(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    first = (await connection.post(URL, {"input": "the cat"})).json()
    compact = (await connection.post(f"{URL}/compact", {"model": MODEL, "previous_response_id": first["id"]})).json()
    assert [item["type"] for item in compact["output"]] == ["message", "compaction"]
    assert "Hello, world!" in prompt(backend)
    assert (await connection.request("GET", f"{URL}/{compact['id']}")).status == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (f"{URL}/compact", BODY | {"stream": True}, "stream"),
        (f"{URL}/compact", BODY | {"background": True}, "background"),
        (f"{URL}/compact", {}, "input"),
        (f"{URL}/compact", {"input": "x"}, "model"),
        (URL, {"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
        (URL, {"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
    ],
)
async def test_what_cannot_be_compacted_is_refused(
    connection: ClientConnection, path: str, body: dict[str, Any], param: str
) -> None:
    refused = await connection.post(path, body)
    assert (refused.status, refused.error["param"]) == (400, param)
