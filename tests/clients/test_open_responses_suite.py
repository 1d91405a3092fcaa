"""The 17 cases of Open Responses' compliance suite (openresponses/openresponses), with its library's schema.

Answers are cut, because the demo model does not know when to end; an answer to a picture is refused, because no model
here sees. Where the suite hopes for a call, the call is required.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openresponses_types as schema
import pytest
from demo_models import GENERATION
from test_open_responses import EVENTS
from websockets.sync.client import ClientConnection, connect

Body = dict[str, Any]
END = {"response.completed", "response.incomplete", "response.failed", "error"}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {"type": "object", "properties": {"location": {"enum": ["Oslo"]}}, "required": ["location"]},
}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def said(role: str, content: Any, **fields: Any) -> Body:
    return {"type": "message", "role": role, "content": content, **fields}


def create(text: Any, **fields: Any) -> Body:
    return {"model": GENERATION, "input": text, "max_output_tokens": 12, **fields}


def checked(response: Body) -> Any:
    """Return the response, which has output and has ended, as the schema's type."""
    resource = schema.ResponseResource.model_validate(response)
    assert resource.output
    assert resource.status == "completed" or response["incomplete_details"] == {"reason": "max_output_tokens"}
    return resource


BODIES: dict[str, Body] = {
    "basic-response": create([said("user", "Say hello in exactly 3 words.")]),
    "assistant-phase": create(
        [
            said("assistant", "I should answer with the saved number.", phase="commentary"),
            said("assistant", "The number is four.", phase="final_answer"),
            said("user", "Repeat only the number."),
        ]
    ),
    "system-prompt": create([said("system", "You are a pirate."), said("user", "Say hello.")]),
    "tool-calling": create("What is the weather?", tools=[WEATHER], tool_choice="required", max_output_tokens=100),
    "multi-turn": create(
        [said("user", "My name is Alice."), said("assistant", "Hello Alice!"), said("user", "What is my name?")]
    ),
}


@pytest.fixture
def post(server_url: str) -> Callable[..., httpx.Response]:
    return lambda body, path="": httpx.post(f"{server_url}/v1/responses{path}", json=body, timeout=60)


@pytest.mark.parametrize("case", BODIES)
def test_answer_follows_the_schema(post: Callable[..., httpx.Response], case: str) -> None:
    resource = checked(post(BODIES[case]).json())
    assert (resource.output[0].type == "function_call") == (case == "tool-calling")


def test_phase_of_an_answer_is_in_the_schema(post: Callable[..., httpx.Response]) -> None:
    """response-output-phase-schema: the suite checks a fixture; here it is an answer to which phases are added."""
    answer = post(BODIES["basic-response"]).json()
    answer["output"] = [{**answer["output"][0], "phase": phase} for phase in ("commentary", "final_answer")]
    assert len(checked(answer).output) == 2


def test_streaming_response(post: Callable[..., httpx.Response]) -> None:
    text = post(create([said("user", "Count from 1 to 5.")], stream=True)).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    for event in events:
        EVENTS[event["type"]].model_validate(event)
    checked(events[-1]["response"])


def test_image_input_is_refused_by_name(post: Callable[..., httpx.Response]) -> None:
    picture = {"type": "input_image", "image_url": PICTURE}
    refused = post(create([said("user", [{"type": "input_text", "text": "What is it?"}, picture])]))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input[0].content[1].image_url"


def test_compact_response(post: Callable[..., httpx.Response]) -> None:
    turns = [said("user", "We launch on Tuesday."), said("assistant", "Understood.")]
    compact = post({"model": GENERATION, "prompt_cache_key": "suite", "input": turns}, "/compact").json()
    assert schema.CompactResource.model_validate(compact).object == "response.compaction"
    assert "compaction" in [item["type"] for item in compact["output"]]


def test_compact_missing_model(post: Callable[..., httpx.Response]) -> None:
    refused = post({"input": [said("user", "Compact this conversation.")]}, "/compact")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


@contextmanager
def web_socket(server_url: str) -> Iterator[Callable[..., Body]]:
    """A connection: call it with a body's fields to get the last event of its answer."""
    with connect(server_url.replace("http", "ws", 1) + "/v1/responses") as connection:

        def turn(text: Any, **fields: Any) -> Body:
            connection.send(json.dumps({"type": "response.create", "store": False, **create(text, **fields)}))
            return last_event(connection)

        yield turn


def last_event(connection: ClientConnection) -> Body:
    while True:
        event: Body = json.loads(connection.recv(timeout=60))
        if event["type"] != "error":
            EVENTS[event["type"]].model_validate(event)
        if event["type"] in END:
            return event


def test_web_socket_takes_several_responses_and_continues_one(server_url: str) -> None:
    """websocket-response, websocket-sequential-responses and websocket-continuation."""
    with web_socket(server_url) as turn:
        checked(turn("Reply with exactly: first")["response"])
        second = checked(turn("Remember the code word: cobalt.")["response"])
        third = checked(turn("What is it?", previous_response_id=second.id)["response"])
        assert third.previous_response_id == second.id


def test_web_socket_reconnected_does_not_know_what_was_not_stored(server_url: str) -> None:
    """websocket-reconnect-store-false-recovery and websocket-previous-response-not-found."""
    with web_socket(server_url) as turn:
        first = checked(turn("Remember the code word: copper.")["response"])
    with web_socket(server_url) as turn:
        for unknown in (first.id, "resp_openresponses_missing"):
            refused = turn("Try to continue.", previous_response_id=unknown)
            assert (refused["type"], refused["error"]["code"]) == ("error", "previous_response_not_found")
            assert (refused["status"], refused["error"]["param"]) == (400, "previous_response_id")
        checked(turn([said("user", "Start a new response.")])["response"])


def test_web_socket_forgets_a_response_whose_continuation_fails(server_url: str) -> None:
    """websocket-failed-continuation-evicts-cache."""
    with web_socket(server_url) as turn:
        first = checked(turn("Remember the code word: ember.")["response"])
        orphan = {"type": "function_call_output", "call_id": "call_openresponses_missing", "output": "no such call"}
        failed = turn([orphan], previous_response_id=first.id)
        assert failed["type"] in ("error", "response.failed")
        again = turn("Try to continue.", previous_response_id=first.id)
        assert again["error"]["code"] == "previous_response_not_found"


def test_web_socket_begins_with_a_compacted_conversation(server_url: str, post: Callable[..., httpx.Response]) -> None:
    """websocket-compact-new-chain."""
    turns = [
        said("user", [{"type": "input_text", "text": "Remember the code word: slate."}]),
        said("assistant", [{"type": "output_text", "text": "OK."}]),
        said("user", [{"type": "input_text", "text": "Compress this conversation."}]),
    ]
    output = post({"model": GENERATION, "input": turns}, "/compact").json()["output"]
    with web_socket(server_url) as turn:
        checked(turn([*output, said("user", "Continue from here.")], tools=[])["response"])
