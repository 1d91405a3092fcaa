"""Server-sent events that have a name, as the Responses and Messages APIs send them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.frontend.harness import Response

REASONED_CALLS = (
    "<think>\nHm, 猫.\n</think>\n\nI look it up.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "été 🐈"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
"""Output of a Hermes model that thinks, answers and calls twice."""


def named_events(response: Response) -> list[dict[str, Any]]:
    """Return the events' data; each name must be the data's type."""
    assert response.status == 200, response.body
    assert response.headers["content-type"].startswith("text/event-stream")
    told = []
    for block in response.body.decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def names(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the events' types, with runs of the same type collapsed."""
    types = [event["type"] for event in events]
    return [name for place, name in enumerate(types) if place == 0 or types[place - 1] != name]
