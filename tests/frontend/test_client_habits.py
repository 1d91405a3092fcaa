"""What clients send by habits of other servers: other names for a field, longer names of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontend.dialects import HERMES, Model
from tests.frontend.harness import FakeBackend
from tests.frontend.test_responses import talking

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
LONG_NAME = "mcp__plugin_" + "x" * 116


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**HI, "tools": [{"type": "function", "function": {"name": LONG_NAME}}]}),
        ("/v1/messages", {**HI, "max_tokens": 500, "tools": [{"name": LONG_NAME, "input_schema": {"type": "object"}}]}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": LONG_NAME}]}),
    ],
)
async def test_a_tools_name_may_hold_its_servers(path: str, body: dict[str, Any]) -> None:
    call = f'<tool_call>\n{{"name": "{LONG_NAME}", "arguments": {{"a": 1}}}}\n</tool_call>'
    backend = FakeBackend(script=Model(HERMES).says(call))
    async with talking(backend, Model(HERMES)) as connection:
        told = await connection.post(path, body)
        assert told.status == 200
        assert f'"{LONG_NAME}"'.encode() in told.body
        too_long = json.loads(json.dumps(body).replace(LONG_NAME, LONG_NAME + "x"))
        assert (await connection.post(path, too_long)).status == 400
