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
    """Return the events' data; each name must be the data's type. A response's [DONE] at the end is left out."""
    assert response.status == 200, response.body
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def names(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the events' types, with runs of the same type collapsed."""
    types = [event["type"] for event in events]
    return [name for index, name in enumerate(types) if index == 0 or types[index - 1] != name]
