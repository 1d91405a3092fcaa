"""The real anthropic SDK over real sockets. Its import takes seconds, so tests do it themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from penstock.shm.client import Overloaded
from tests.frontend.clients.test_openai_sdk import Script, over_the_link, serving, until
from tests.frontend.harness import FakeBackend, make_app, says, silent, token_ids
from tests.frontend.model_families import MODELS, THINKING_HERMES, Model
from tests.frontend.named_events import REASONED_CALLS
from tests.shm.scripted_backend import echoed, hashed

if TYPE_CHECKING:
    import anthropic
    from anthropic.types import Message

MODEL = Model(template=THINKING_HERMES)
HI: dict[str, Any] = {
    "model": "test/model",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "hi"}],
}
TOOLS: Any = [
    {"name": "get_weather", "input_schema": {"type": "object"}},
    {"name": "get_time", "input_schema": {"type": "object"}},
]


@contextlib.asynccontextmanager
async def sdk(url: str, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    defaults = {"api_key": "none", "max_retries": 0}
    async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), **(defaults | options)) as client:
        yield client


@pytest.fixture
async def url(backend: FakeBackend) -> AsyncIterator[str]:
    async with serving(make_app(backend)) as url:
        yield url


def strictly(message: Message) -> Message:
    """The SDK builds its objects without validating them."""
    return type(message).model_validate(message.model_dump(mode="json", exclude_unset=True))


async def test_message_is_answered_and_its_tokens_counted(url: str, backend: FakeBackend) -> None:
    backend.script = says("Hello, 猫 🐈!")
    async with sdk(url) as client:
        message = await client.messages.create(**HI, system="be brief", extra_body={"temperature": 0.5})
        (block,) = strictly(message).content
        assert block.type == "text"
        assert block.text == "Hello, 猫 🐈!"
        assert message._request_id is not None
        counted = await client.messages.count_tokens(model="test/model", messages=HI["messages"], system="be brief")
        cached = message.usage.cache_read_input_tokens or 0
        assert counted.input_tokens == message.usage.input_tokens + cached


async def test_models_are_listed_for_anthropics_sdk(url: str) -> None:
    async with sdk(url) as client:
        (model,) = [model async for model in client.models.list()]
        assert (model.id, model.type, model.display_name) == ("test/model", "model", "test/model")
        assert model.created_at.timestamp() == 1_700_000_000
        assert (await client.models.retrieve("test/model")).id == "test/model"


@pytest.mark.parametrize("batch_size", [1, 5, 1000])
async def test_stream_helper_assembles_the_answer(backend: FakeBackend, batch_size: int) -> None:
    backend.script = MODEL.says(REASONED_CALLS, batch_size=batch_size)
    thinking: Any = {"type": "enabled", "budget_tokens": 100}
    async with serving(MODEL.app(backend)) as url, sdk(url) as client:
        whole = await client.messages.create(**HI, tools=TOOLS, thinking=thinking)
        async with client.messages.stream(**HI, tools=TOOLS, thinking=thinking) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
    assert "".join(texts) == "I look it up."
    kinds = [block.type for block in strictly(whole).content]
    assert kinds == [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    for whole_block, streamed_block in zip(whole.content, final.content, strict=True):
        if whole_block.type == "tool_use" and streamed_block.type == "tool_use":
            assert (whole_block.name, whole_block.input) == (streamed_block.name, streamed_block.input)
        elif whole_block.type == "thinking" and streamed_block.type == "thinking":
            assert whole_block.thinking == streamed_block.thinking
            assert streamed_block.signature
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage == whole.usage


@pytest.mark.parametrize(
    ("model", "results"),
    [
        (MODEL, ("<tool_response>\nfine",) * 2),
        (MODELS["generic"], ("Result of get_weather:\nfine", "Result of get_time:\nfine")),
    ],
    ids=["hermes", "generic"],
)
async def test_tool_results_are_returned_to_the_model(
    backend: FakeBackend, model: Model, results: tuple[str, str]
) -> None:
    backend.script = model.says(REASONED_CALLS)
    async with serving(model.app(backend)) as url, sdk(url) as client:
        first = await client.messages.create(**HI, tools=TOOLS)
        returned = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "fine"}
            for block in first.content
            if block.type == "tool_use"
        ]
        conversation: Any = [
            *HI["messages"],
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": returned},
        ]
        await client.messages.create(**{**HI, "messages": conversation}, tools=TOOLS)
    _, first_result, rest = model.prompt(backend).partition(results[0])
    assert first_result
    assert results[1] in rest


async def test_errors_raise_the_sdks_own_exceptions(url: str, backend: FakeBackend) -> None:
    import anthropic

    async with sdk(url) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"max_tokens: expected int >= 1, got 0"):
            await client.messages.create(**{**HI, "max_tokens": 0})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**HI, "model": "other"})
        with pytest.raises(anthropic.APIStatusError) as large:
            await client.messages.create(**{**HI, "messages": [{"role": "user", "content": "x" * (3 << 20)}]})
        assert large.value.status_code == 413
        backend.refusal = Overloaded(3, 1024)
        with pytest.raises(anthropic.APIStatusError) as full:
            await client.messages.create(**HI)
        assert (full.value.status_code, full.value.type) == (529, "overloaded_error")


async def test_key_is_sent_in_anthropics_header(backend: FakeBackend) -> None:
    import anthropic

    async with serving(make_app(backend, api_keys=("right",))) as url:
        async with sdk(url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**HI)
        async with sdk(url, api_key="right") as client:
            assert (await client.messages.create(**HI)).content
        async with sdk(url, api_key=None, auth_token="right") as client:
            assert (await client.messages.create(**HI)).content


async def test_closed_stream_is_cancelled(url: str, backend: FakeBackend) -> None:
    backend.script = silent
    async with sdk(url) as client:
        creating = asyncio.create_task(client.messages.create(**HI, stream=True))
        await backend.submitted.wait()
        backend.streams[0].push(*token_ids("the"))
        stream = await creating
        assert (await anext(stream)).type == "message_start"
        await stream.close()
        await asyncio.wait_for(backend.streams[0].cancelled.wait(), 60)


async def test_over_the_link_streams_equal_whole_answers() -> None:
    async with over_the_link(Script(next_token=hashed)) as (url, _), sdk(url) as client:

        async def streamed(text: str) -> str:
            messages: Any = [{"role": "user", "content": text}]
            async with client.messages.stream(model="test/model", max_tokens=30, messages=messages) as stream:
                return await stream.get_final_text()

        async def whole(text: str) -> str:
            messages: Any = [{"role": "user", "content": text}]
            message = await client.messages.create(model="test/model", max_tokens=30, messages=messages)
            assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 30)
            (block,) = message.content
            assert block.type == "text"
            return block.text

        prompts = [f"{number}, the cat sat" for number in range(8)]
        assert await asyncio.gather(*map(streamed, prompts)) == await asyncio.gather(*map(whole, prompts))


async def test_silent_stream_is_kept_alive_and_still_read() -> None:
    async with over_the_link(Script(next_token=echoed), keep_alive_interval_s=0.02) as (url, scripted):
        scripted.engine.paused = True
        async with sdk(url) as client:
            creating = asyncio.create_task(client.messages.create(**{**HI, "max_tokens": 3}, stream=True))
            stream = await asyncio.wait_for(creating, 60)  # the headers came with a comment
            scripted.engine.paused = False
            assert [event.type async for event in stream][-1] == "message_stop"
        await until(lambda: not scripted.engine.running)
