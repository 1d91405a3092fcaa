"""Tools and reasoning through the real openai SDK, and its helpers that put streams together."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ParsedFunctionToolCall
from pydantic import BaseModel

from tests.frontend.clients.test_openai_sdk import MESSAGES, sdk, serving
from tests.frontend.harness import FakeBackend
from tests.frontend.model_families import MODELS, THINKING_HERMES, Model
from tests.frontend.parsing.tool_texts import written

MODEL = Model(THINKING_HERMES)
ANSWER = (
    "<think>\nTwo cities.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "été 🐈", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "}", "days": 1}}\n</tool_call>'
)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


TOOLS = [openai.pydantic_function_tool(GetWeather)]


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[openai.AsyncOpenAI]:
    backend.script = MODEL.says(ANSWER, batch_size=3)
    async with serving(MODEL.app(backend)) as url, sdk(url) as client:
        yield client


def check(calls: Any) -> None:
    first, second = calls
    assert isinstance(first, ParsedFunctionToolCall)
    assert first.function.parsed_arguments == GetWeather(city="été 🐈", days=2)
    assert second.function.parsed_arguments == GetWeather(city="}", days=1)
    assert first.id != second.id


async def test_parse_helper_reads_calls_into_models(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(model="test/model", messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    check(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "Two cities."
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens


async def test_stream_helper_assembles_calls(client: openai.AsyncOpenAI) -> None:
    done: list[tuple[str, str]] = []
    deltas: dict[int, str] = {}
    async with client.chat.completions.stream(model="test/model", messages=MESSAGES, tools=TOOLS) as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                deltas[event.index] = deltas.get(event.index, "") + event.arguments_delta
            elif event.type == "tool_calls.function.arguments.done":
                done.append((event.name, event.arguments))
        final = await stream.get_final_completion()
    check(final.choices[0].message.tool_calls)
    assert [name for name, _ in done] == ["GetWeather", "GetWeather"]
    assert [arguments for _, arguments in done] == list(deltas.values())
    assert json.loads(deltas[1]) == {"city": "}", "days": 1}
    assert final.choices[0].message.content == "Let me see."


@pytest.mark.parametrize("name", MODELS)
async def test_stream_helper_works_with_every_tool_format(name: str, backend: FakeBackend) -> None:
    model = MODELS[name]
    form = model.served().syntax.tools
    assert form is not None
    backend.script = model.says(written(form, [("GetWeather", '{"city": "é", "days": 3}')]))
    async with serving(model.app(backend)) as url, sdk(url) as client:
        async with client.chat.completions.stream(model="test/model", messages=MESSAGES, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == GetWeather(city="é", days=3)


async def test_conversation_continues_with_the_returned_message(
    client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    answer = await client.chat.completions.create(model="test/model", messages=MESSAGES, tools=TOOLS)
    message = answer.choices[0].message
    assert message.tool_calls is not None
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    backend.script = MODEL.says("It rains.")
    more = await client.chat.completions.create(
        model="test/model", messages=[*MESSAGES, message, *results], tools=TOOLS
    )
    assert more.choices[0].message.content == "It rains."
    prompt = MODEL.prompt(backend)
    assert '{"name": "GetWeather", "arguments": {"city": "été 🐈", "days": 2}}' in prompt
    assert prompt.count("<tool_response>\nrain\n</tool_response>") == 2


async def test_refused_request_raises_bad_request_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(
            model="test/model",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "unknown"}},
        )
    assert refusal.value.param == "tool_choice.function.name"
