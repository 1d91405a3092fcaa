"""The real openai SDK's Responses helpers over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from pydantic import BaseModel

from penstock.shm.messages import Finish
from tests.frontend.clients.test_openai_sdk import Script, over_the_link, sdk, serving
from tests.frontend.harness import END_TOKEN, FakeBackend, make_app, says, silent, token_ids
from tests.frontend.model_families import THINKING_HERMES, Model
from tests.frontend.named_events import REASONED_CALLS
from tests.shm.scripted_backend import hashed

MODEL = Model(template=THINKING_HERMES)
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "get_time", "parameters": {"type": "object"}, "strict": False},
]


@pytest.fixture
async def url(backend: FakeBackend) -> AsyncIterator[str]:
    async with serving(make_app(backend)) as url:
        yield url


def strictly(response: Response) -> Response:
    """The SDK builds its objects without validating them."""
    return Response.model_validate(response.model_dump(mode="json", by_alias=True, exclude_unset=True))


async def test_response_is_created_retrieved_and_continued(url: str, backend: FakeBackend) -> None:
    backend.script = says("Hello, 猫 🐈!")
    async with sdk(url) as client:
        first = await client.responses.create(model="test/model", input="hi", instructions="be brief")
        assert strictly(first).output_text == "Hello, 猫 🐈!"
        assert first.usage is not None
        assert first.usage.input_tokens_details.cached_tokens == 3
        again = await client.responses.retrieve(first.id)
        assert again.output == first.output
        second = await client.responses.create(
            model="test/model", input=[{"role": "user", "content": "more"}], previous_response_id=first.id
        )
        assert second.previous_response_id == first.id
        items = [item async for item in client.responses.input_items.list(second.id)]
        assert [item.type for item in items] == ["message"]
        counted = await client.responses.input_tokens.count(model="test/model", input="hi", instructions="be brief")
        assert counted.input_tokens == first.usage.input_tokens
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.retrieve(first.id)
        assert missing.value.code == "response_not_found"


@pytest.mark.parametrize("batch_size", [1, 5, 1000])
async def test_stream_helper_assembles_the_answer(backend: FakeBackend, batch_size: int) -> None:
    backend.script = MODEL.says(REASONED_CALLS, batch_size=batch_size)
    async with serving(MODEL.app(backend)) as url, sdk(url) as client:
        whole = await client.responses.create(model="test/model", input="hi", tools=TOOLS)
        async with client.responses.stream(model="test/model", input="hi", tools=TOOLS) as stream:
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
    assert "".join(texts) == final.output_text == whole.output_text == "I look it up."
    reasoning, message, weather, time = strictly(whole).output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm, 猫."
    assert isinstance(message, ResponseOutputMessage)
    for call, item in zip((weather, time), final.output[2:], strict=True):
        assert isinstance(call, ResponseFunctionToolCall)
        assert isinstance(item, ResponseFunctionToolCall)
        assert (call.name, call.arguments, call.status) == (item.name, item.arguments, "completed")
    assert final.usage == whole.usage


async def test_schema_is_parsed(url: str, backend: FakeBackend) -> None:
    class Cat(BaseModel):
        name: str

    backend.script = says('{"name": "猫"}')
    async with sdk(url) as client:
        parsed = await client.responses.parse(model="test/model", input="hi", text_format=Cat)
        assert parsed.output_parsed == Cat(name="猫")
        async with client.responses.stream(model="test/model", input="hi", text_format=Cat) as stream:
            assert (await stream.get_final_response()).output_parsed == Cat(name="猫")


async def test_background_response_is_polled_and_cancelled(url: str, backend: FakeBackend) -> None:
    backend.script = silent
    async with sdk(url) as client:
        created = await client.responses.create(model="test/model", input="hi", background=True)
        assert created.status == "queued"
        cancelled = await client.responses.cancel(created.id)
        assert strictly(cancelled).status == "cancelled"
        assert backend.streams[0].cancelled.is_set()
        assert (await client.responses.retrieve(created.id)).status == "cancelled"


async def test_background_stream_is_resumed(url: str, backend: FakeBackend) -> None:
    backend.script = silent
    async with sdk(url) as client:
        creating = asyncio.create_task(
            client.responses.create(model="test/model", input="hi", background=True, stream=True)
        )
        await backend.submitted.wait()
        backend.streams[0].push(*token_ids("the"))
        stream = await creating
        created = await anext(stream)
        assert created.type == "response.created"
        await stream.close()
        backend.streams[0].push(*token_ids(" cat"))
        backend.streams[0].push(END_TOKEN, finish=Finish.STOP)
        rest = await client.responses.retrieve(created.response.id, stream=True, starting_after=0)
        events = [event async for event in rest]
        assert [event.sequence_number for event in events] == list(range(1, 1 + len(events)))
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "the cat"


async def test_closed_stream_is_cancelled(url: str, backend: FakeBackend) -> None:
    backend.script = silent
    async with sdk(url) as client:
        creating = asyncio.create_task(client.responses.create(model="test/model", input="hi", stream=True))
        await backend.submitted.wait()
        backend.streams[0].push(*token_ids("the"))
        stream = await creating
        await anext(stream)
        await stream.close()
        await asyncio.wait_for(backend.streams[0].cancelled.wait(), 60)


async def test_errors_raise_the_sdks_own_exceptions(url: str) -> None:
    async with sdk(url) as client:
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.responses.create(model="test/model", input="hi", tools=[{"type": "mcp", "server_label": "x"}])
        assert wrong.value.param == "tools[0].type"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="hi")


async def test_over_the_link_streams_equal_whole_answers() -> None:
    async with over_the_link(Script(next_token=hashed)) as (url, _), sdk(url) as client:

        async def streamed(text: str) -> str:
            async with client.responses.stream(model="test/model", input=text, max_output_tokens=30) as stream:
                return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

        async def whole(text: str) -> str:
            response = await client.responses.create(model="test/model", input=text, max_output_tokens=30)
            assert (response.status, response.usage and response.usage.output_tokens) == ("incomplete", 30)
            return response.output_text

        prompts = [f"{number}, the cat sat" for number in range(8)]
        assert await asyncio.gather(*map(streamed, prompts)) == await asyncio.gather(*map(whole, prompts))


async def test_responses_run_over_one_web_socket_with_the_sdk(url: str, backend: FakeBackend) -> None:
    backend.script = says("Hello, 猫 🐈!")
    async with sdk(url) as client, client.responses.connect() as connection:
        previous: str | None = None
        for _ in range(2):
            await connection.response.create(
                model="test/model", input="hi", store=False, previous_response_id=previous or openai.omit
            )
            events = [await connection.recv()]
            while events[-1].type != "response.completed":
                events.append(await connection.recv())
            assert strictly(events[-1].response).output_text == "Hello, 猫 🐈!"
            previous = events[-1].response.id
        assert len(backend.last.token_ids) > len(backend.streams[0].request.token_ids)
        await connection.response.create(model="test/model", input="hi", previous_response_id="resp_gone")
        error = await connection.recv()
        assert error.type == "error"
        assert error.to_dict()["error"]["code"] == "previous_response_not_found"
