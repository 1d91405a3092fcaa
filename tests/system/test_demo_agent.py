"""An agent with the openai SDK and the shipped model: every request is served, whatever the model answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "penstock-demo"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Current weather of a city.", "parameters": PARAMETERS},
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION: list[Any] = [
    {"role": "system", "content": "You are a weather agent."},
    {"role": "user", "content": "What is the weather in Paris?"},
]


@pytest.fixture
def client(served_demo: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served_demo}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    defaults = {"model": MODEL, "messages": messages, "tools": [WEATHER, TIME], "max_tokens": 300, "temperature": 0.0}
    return client.chat.completions.create(**{**defaults, **options}).choices[0]


@pytest.mark.parametrize("tool_choice", ["auto", "none", openai.omit])
def test_offered_tools_leave_a_chat_that_ends_by_itself(client: openai.OpenAI, tool_choice: Any) -> None:
    choice = ask(client, QUESTION, tool_choice=tool_choice)
    assert choice.finish_reason in ("stop", "tool_calls")
    assert choice.message.content or choice.message.tool_calls


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tool_choice", ["required", NAMED], ids=["required", "named"])
def test_agent_loop_of_two_turns_completes(client: openai.OpenAI, tool_choice: Any, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 1, "parallel_tool_calls": False}
    chosen = ask(client, QUESTION, tool_choice=tool_choice, **options)
    assert chosen.finish_reason == "tool_calls"
    (call,) = chosen.message.tool_calls
    if call.function.name == "get_weather":
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    else:
        assert tool_choice == "required"
        assert call.function.name == "get_time"
        assert isinstance(json.loads(call.function.arguments), dict)
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}
    answer = ask(client, [*QUESTION, chosen.message.model_dump(exclude_none=True), result], **options)
    assert answer.finish_reason in ("stop", "tool_calls")
    assert answer.message.content or answer.message.tool_calls


def test_several_results_are_read_with_and_without_tools(client: openai.OpenAI) -> None:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        for n in range(2)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"} for call in calls]
    messages = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    for tools in ([WEATHER], openai.omit):
        assert ask(client, messages, tools=tools).finish_reason in ("stop", "tool_calls")


def test_streamed_call_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = ask(client, QUESTION, tool_choice=NAMED)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[WEATHER],
        tool_choice=NAMED,
        max_tokens=300,
        temperature=0.0,
        stream=True,
    )  # type: ignore[call-overload]
    parts = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert parts[0].function.name == "get_weather"
    jsonschema.validate(json.loads("".join(part.function.arguments or "" for part in parts)), PARAMETERS)
    jsonschema.validate(json.loads(whole.message.tool_calls[0].function.arguments), PARAMETERS)
