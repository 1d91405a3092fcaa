"""Tools with a real model whose chat template has none: SmolLM2-135M-Instruct.

The SDKs are imported where they are used: together they take two seconds, which each worker of a run would spend.
"""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic import SecretStr

from tests.real_models import download_timeout
from tests.system.processes import Command, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import openai

pytestmark = download_timeout

MODEL = "smollm2"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": WEATHER}
FIRST, SECOND = "What is the weather in Paris?", "What is the weather in Rome?"
GIVEN, SKY, TOLD = {"city": "Paris"}, json.dumps({"sky": "sunny"}), "It is sunny in Paris."
CALLED = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(GIVEN)}}
Calls = list[tuple[str, object]]
ROME: Calls = [("get_weather", {"city": "Rome"})]


@pytest.fixture(scope="module")
def url(real_gguf: Path) -> Iterator[str]:
    options = ("--model", str(real_gguf), "--served-model-name", MODEL, "--gpu", "none", "--port", "0")
    serve = Command("penstock.main", "serve", *options)
    with running(serve):
        yield serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)


def test_model_without_tools_calls_a_function_and_answers_with_its_result(url: str) -> None:
    with httpx.Client(timeout=120) as client:
        (model,) = client.get(f"{url}/v1/models").json()["data"]
        assert (model["tools"], model["capabilities"]["tool_calls"]) == ("generic", True)
        messages: list[dict[str, Any]] = []

        def ask(content: str | None, **fields: Any) -> dict[str, Any]:
            if content is not None:
                messages.append({"role": "user", "content": content})
            body = {"messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 60, **fields}
            answer = client.post(f"{url}/v1/chat/completions", json=body)
            assert answer.headers["x-penstock-tools"] == "generic"
            messages.append(answer.json()["choices"][0]["message"])
            return messages[-1]

        def give(call: dict[str, Any], sky: str) -> None:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"sky": sky})})

        assert "<tool_call>" not in ask("What is 2 + 2?")["content"]
        messages.clear()
        (first,) = ask(FIRST, tool_choice="required", parallel_tool_calls=False)["tool_calls"]
        assert json.loads(first["function"]["arguments"]) == GIVEN
        give(first, "sunny")
        assert "sunny" in ask(None)["content"]
        messages[-1] = {"role": "assistant", "content": TOLD}
        (second,) = ask(SECOND)["tool_calls"]  # by the example of the first
        assert second["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
        give(second, "rainy")
        assert "rainy" in ask(None)["content"]


def by_chat(client: openai.OpenAI, choice: str, *, streams: bool) -> Calls:
    named = {"type": "function", "function": {"name": "get_weather"}}
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": FIRST},
            {"role": "assistant", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": SKY},
            {"role": "assistant", "content": TOLD},
            {"role": "user", "content": SECOND},
        ],
        "tools": [TOOL],
        "tool_choice": named if choice == "named" else choice,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    if streams:
        with client.chat.completions.stream(**body) as stream:
            answer: Any = stream.get_final_completion()
    else:
        answer = client.chat.completions.create(**body)
    calls = answer.choices[0].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def by_responses(client: openai.OpenAI, choice: str, *, streams: bool) -> Calls:
    body: dict[str, Any] = {
        "model": MODEL,
        "input": [
            {"role": "user", "content": FIRST},
            {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": json.dumps(GIVEN)},
            {"type": "function_call_output", "call_id": "call_1", "output": SKY},
            {"role": "assistant", "content": TOLD},
            {"role": "user", "content": SECOND},
        ],
        "tools": [{"type": "function", "strict": False, **WEATHER}],
        "tool_choice": {"type": "function", "name": "get_weather"} if choice == "named" else choice,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    if streams:
        with client.responses.stream(**body) as stream:
            answer: Any = stream.get_final_response()
    else:
        answer = client.responses.create(**body)
    return [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@pytest.mark.parametrize("ask", [by_chat, by_responses])
def test_openai_sdk_calls_a_function_of_a_model_without_tools(url: str, ask: Any, choice: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [ask(client, choice, streams=streams) for streams in (False, True)] == [ROME, ROME]


@pytest.mark.parametrize("choice", ["auto", "any", "tool"])
def test_anthropic_sdk_calls_a_function_of_a_model_without_tools(url: str, choice: str) -> None:
    import anthropic

    named = {"name": "get_weather"} if choice == "tool" else {}
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": FIRST},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": GIVEN}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": SKY}]},
            {"role": "assistant", "content": TOLD},
            {"role": "user", "content": SECOND},
        ],
        "tools": [{"name": "get_weather", "description": WEATHER["description"], "input_schema": PARAMETERS}],
        "tool_choice": {"type": choice, "disable_parallel_tool_use": True, **named},
        "max_tokens": 60,
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole: Any = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed: Any = stream.get_final_message()
    for answer in (whole, streamed):
        blocks = [block for block in answer.content if block.type == "tool_use"]
        assert [(block.name, block.input) for block in blocks] == ROME
        assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize("uses_responses", [False, True])
def test_langchain_calls_a_function_of_a_model_without_tools(url: str, uses_responses: bool) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    messages = [
        HumanMessage(FIRST),
        AIMessage("", tool_calls=[{"id": "call_1", "name": "get_weather", "args": GIVEN}]),
        ToolMessage(SKY, tool_call_id="call_1"),
        AIMessage(TOLD),
        HumanMessage(SECOND),
    ]
    key = SecretStr("none")
    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=key, temperature=0, use_responses_api=uses_responses)
    chat = model.bind_tools([TOOL], parallel_tool_calls=False)
    for answer in (chat.invoke(messages), reduce(add, chat.stream(messages))):
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == ROME
