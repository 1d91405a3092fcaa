"""The whole path with the demo model and real clients: streams, and answers that do not depend on other requests."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "penstock-demo"


@pytest.fixture
def url(served_demo: str) -> str:
    return f"{served_demo}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=48, temperature=0)  # type: ignore[call-overload]
    text, usage, finish = "", None, None
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL,
        messages=messages,
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert text.strip()
    assert finish == whole.choices[0].finish_reason
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_streamed_completion_equals_the_whole_one(client: openai.OpenAI) -> None:
    for prompt in ("Return a new list", [20, 30, 40]):
        whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=32, temperature=0)
        stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=32, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text


def test_several_prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    prompts = ["The file", "def main", "import os"]
    together = client.completions.create(model=MODEL, prompt=prompts, max_tokens=12, temperature=0)
    apart = [client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0) for prompt in prompts]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in apart]
    assert [choice.index for choice in together.choices] == [0, 1, 2]


def test_stop_string_ends_the_text_and_is_not_emitted(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="The function", max_tokens=40, temperature=0)
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    expected = text[: text.index(stop)]
    cut = client.completions.create(model=MODEL, prompt="The function", max_tokens=40, temperature=0, stop=[stop])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (expected, "stop")
    stream = client.completions.create(
        model=MODEL, prompt="The function", max_tokens=40, temperature=0, stop=[stop], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == expected


def test_seed_repeats_its_text_and_another_seed_differs(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model=MODEL, prompt="The", max_tokens=24, temperature=1.0, seed=seed).choices[0].text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_prompt_longer_than_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    context = client.models.retrieve(MODEL).max_model_len  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match=f"{context}") as caught:
        client.completions.create(model=MODEL, prompt=[5] * (context + 10), max_tokens=1)
    assert str(context + 10) in caught.value.message
    assert caught.value.code == "context_length_exceeded"


async def stream_of(
    client: openai.AsyncOpenAI, prompt: str, max_tokens: int, seed: int | None = None
) -> tuple[str, float, float]:
    """The text, and the times of its first and last piece."""
    stream = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0.0 if seed is None else 0.9,
        seed=seed,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text, times = "", []
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            text += chunk.choices[0].text
            times.append(time.monotonic())
    return text, times[0], times[-1]


async def test_32_concurrent_streams_equal_their_sequential_results(url: str) -> None:
    prompts = [f"def function_{index}(self, " if index % 2 else f"The {index}th item of" for index in range(32)]
    seeds = [None if index % 3 else index for index in range(32)]
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        together = await asyncio.gather(
            *(stream_of(client, prompt, 20, seed) for prompt, seed in zip(prompts, seeds, strict=True))
        )
        for prompt, seed, (text, _, _) in zip(prompts, seeds, together, strict=True):
            alone, _, _ = await stream_of(client, prompt, 20, seed)
            assert text == alone


async def test_second_stream_begins_before_the_first_one_ends(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        first = asyncio.create_task(stream_of(client, "The first", 200))
        second = asyncio.create_task(stream_of(client, "The second", 200))
        (_, _, req1_last_byte_ts), (_, req2_first_byte_ts, _) = await first, await second
    assert req1_last_byte_ts > req2_first_byte_ts


def test_required_tool_calls_are_made_by_any_model(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    request: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What does os.path.join do?"}],
        "tools": [{"type": "function", "function": {"name": "forecast", "parameters": parameters}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 500,
        "seed": 1,
    }
    for temperature in (0.0, 1.0):
        (choice,) = client.chat.completions.create(**request, temperature=temperature).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "forecast"
        jsonschema.validate(json.loads(call.function.arguments), parameters)
    with client.chat.completions.stream(**request, temperature=0.0) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    (whole,) = client.chat.completions.create(**request, temperature=0.0).choices[0].message.tool_calls
    assert streamed.function.arguments == whole.function.arguments
