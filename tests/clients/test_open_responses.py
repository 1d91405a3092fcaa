"""Open Responses' schema, as a library generates it from its OpenAPI document, accepts what /v1/responses answers."""

from __future__ import annotations

import inspect
import json
from typing import Any

import httpx
import openresponses_types as schema
import pytest
from demo_models import GENERATION

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "maxProperties": 0}}
BODIES: dict[str, dict[str, Any]] = {
    "text": {"temperature": 0.5, "metadata": {"a": "b"}, "instructions": "Be brief.", "store": False},
    "cut": {"max_output_tokens": 2},
    "log probabilities": {"top_logprobs": 2, "include": ["message.output_text.logprobs"], "max_output_tokens": 4},
    "call": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200},
    "JSON": {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 20},
}
EVENTS = {
    next(iter(kind.model_fields["type"].annotation)).value: kind
    for name, kind in inspect.getmembers(schema, inspect.isclass)
    if name.endswith("StreamingEvent")
}
"""Each event of a stream by its type."""


def ask(server_url: str, body: dict[str, Any], path: str = "/v1/responses") -> httpx.Response:
    answer = httpx.post(server_url + path, json={"model": GENERATION, "input": "What is a list?", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("kind", BODIES)
def test_answer_and_events_follow_the_schema(server_url: str, kind: str) -> None:
    whole = schema.ResponseResource.model_validate(ask(server_url, BODIES[kind]).json())
    assert whole.output
    lines = ask(server_url, {**BODIES[kind], "stream": True}).text.splitlines()
    *events, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    types = []
    for event in map(json.loads, events):
        EVENTS[event["type"]].model_validate(event)
        types.append(event["type"])
    assert types[0] == "response.created"
    assert types[-1] == ("response.incomplete" if whole.status == "incomplete" else "response.completed")
    assert done == "[DONE]"


def test_compaction_follows_the_schema(server_url: str) -> None:
    compact = ask(server_url, {"max_output_tokens": 20}, "/v1/responses/compact")
    assert schema.CompactResource.model_validate(compact.json()).output


def test_conversation_is_continued_and_an_error_is_an_error_of_the_schema(server_url: str) -> None:
    first = ask(server_url, {"max_output_tokens": 4}).json()
    second = ask(server_url, {"previous_response_id": first["id"], "max_output_tokens": 4}).json()
    assert schema.ResponseResource.model_validate(second).previous_response_id == first["id"]
    wrong = httpx.post(f"{server_url}/v1/responses", json={"model": GENERATION, "input": "x", "temperature": "hot"})
    assert wrong.status_code == 400
    error = wrong.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "temperature")
