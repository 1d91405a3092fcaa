"""The real openai SDK over real sockets: an in-process server, first over the fake backend, then over the real link."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest

from penstock.frontend.app import App
from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.generation.models.served_model import ModelKeeper
from penstock.frontend.settings import WorkerLimits
from penstock.frontend.transport.serving.server import HttpServer
from penstock.shm.client import BackendClient, TokenBatch
from penstock.shm.messages import Finish
from tests.frontend.harness import (
    END_TOKEN,
    TOKENIZER,
    VOCAB_SIZE,
    FakeBackend,
    FakeStream,
    make_app,
    save_model_files,
    says,
    silent,
    token_ids,
)
from tests.shm.scripted_backend import Script, ScriptedBackend, echoed, expected_tokens, hashed
from tests.shm.scripted_backend import model_card as scripted_card


@contextlib.asynccontextmanager
async def serving(app: App) -> AsyncIterator[str]:
    """Serve the app on a real socket; yield the base URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = HttpServer(app, app.exchanges, listening, drain_timeout_s=5)
    running = asyncio.create_task(server.run())
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.stop()
        server.stop()
        await running


@contextlib.asynccontextmanager
async def sdk(url: str, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, **({"api_key": "none", "max_retries": 0} | options)) as client:
        yield client


@pytest.fixture
async def url(backend: FakeBackend) -> AsyncIterator[str]:
    async with serving(make_app(backend)) as url:
        yield url


MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def test_chat_completion_and_models_work_with_the_sdk(url: str, backend: FakeBackend) -> None:
    backend.script = says("Hello, 猫 🐈!")
    async with sdk(url) as client:
        chat = await client.chat.completions.create(model="test/model", messages=MESSAGES)
        assert chat.choices[0].message.content == "Hello, 猫 🐈!"
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 3
        completion = await client.completions.create(model="test/model", prompt="x")
        assert completion.choices[0].text == "Hello, 猫 🐈!"
        assert [model.id async for model in await client.models.list()] == ["test/model"]
        assert (await client.models.retrieve("test/model")).id == "test/model"


async def test_streams_equal_whole_answers(url: str, backend: FakeBackend) -> None:
    backend.script = says("Hello, 猫 🐈!", batch_size=2)
    async with sdk(url) as client:
        chat = await client.chat.completions.create(
            model="test/model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in chat]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, 猫 🐈!"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(token_ids("Hello, 猫 🐈!")) + 1
        pieces = await client.completions.create(model="test/model", prompt="x", stream=True)
        assert "".join([piece.choices[0].text async for piece in pieces]) == "Hello, 猫 🐈!"


async def test_errors_raise_the_sdks_own_exceptions(url: str, backend: FakeBackend) -> None:
    async with sdk(url) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model="test/model", messages=MESSAGES, temperature=9)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(model="test/model", prompt="x" * (3 << 20))
        assert large.value.status_code == 413
        backend.ready = False
        with pytest.raises(openai.InternalServerError) as unavailable:
            await client.chat.completions.create(model="test/model", messages=MESSAGES)
        assert unavailable.value.status_code == 503


async def test_expired_deadline_is_not_retried(url: str, backend: FakeBackend) -> None:
    backend.script = lambda _: [TokenBatch([], Finish.EXPIRED)]
    async with sdk(url, max_retries=2) as client:
        with pytest.raises(openai.APIStatusError) as expired:
            await client.chat.completions.create(model="test/model", messages=MESSAGES, extra_body={"timeout_ms": 5})
        assert (expired.value.status_code, expired.value.code) == (499, "timeout")
    assert len(backend.streams) == 1


async def test_sdk_shows_whether_an_answer_was_coalesced(url: str, backend: FakeBackend) -> None:
    backend.joins = True
    async with sdk(url) as client:
        raw = await client.chat.completions.with_raw_response.create(model="test/model", messages=MESSAGES)
        assert raw.headers["x-penstock-coalesced"] == "joined"
        usage = raw.parse().usage
        assert usage is not None
        assert usage.model_extra == {"penstock": {"coalesced": True}}


async def test_wrong_key_is_an_authentication_error(backend: FakeBackend) -> None:
    async with serving(make_app(backend, api_keys=("right",))) as url:
        async with sdk(url, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with sdk(url, api_key="right") as client:
            assert (await client.chat.completions.create(model="test/model", messages=MESSAGES)).choices


async def test_client_that_closes_its_stream_cancels_it(url: str, backend: FakeBackend) -> None:
    backend.script = silent
    async with sdk(url) as client:
        request = asyncio.create_task(client.completions.create(model="test/model", prompt="x", stream=True))
        await backend.submitted.wait()
        backend.streams[0].push(*token_ids("the"))
        stream = await request
        assert (await anext(stream)).choices[0].text == "the"
        await stream.close()
        async with asyncio.timeout(60):
            await backend.streams[0].cancelled.wait()


async def test_client_that_gives_up_waiting_cancels_it(url: str, backend: FakeBackend) -> None:
    backend.script = silent
    async with sdk(url) as client:
        request = asyncio.create_task(client.completions.create(model="test/model", prompt="x"))
        await backend.submitted.wait()
        request.cancel()
        async with asyncio.timeout(60):
            await backend.streams[0].cancelled.wait()
        await asyncio.gather(request, return_exceptions=True)


async def test_running_stream_survives_the_drain(backend: FakeBackend) -> None:
    backend.script = silent
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    app = make_app(backend)
    server = HttpServer(app, app.exchanges, listening, drain_timeout_s=30)
    running = asyncio.create_task(server.run())
    async with sdk(url) as client:
        request = asyncio.create_task(client.completions.create(model="test/model", prompt="x", stream=True))
        await backend.submitted.wait()
        fed: FakeStream = backend.streams[0]
        fed.push(*token_ids("the"))
        stream = await request
        assert (await anext(stream)).choices[0].text == "the"
        server.stop()
        async with asyncio.timeout(60):
            while True:  # until the server no longer accepts
                try:
                    async with httpx.AsyncClient() as other:
                        await other.get(url + "/models")
                except httpx.TransportError:
                    break
        fed.push(*token_ids(" cat"))
        fed.push(END_TOKEN, finish=Finish.STOP)
        assert "".join([piece.choices[0].text async for piece in stream]) == " cat"
    async with asyncio.timeout(25):  # less than the drain timeout
        await running


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def over_the_link(script: Script, **limits: Any) -> AsyncIterator[tuple[str, ScriptedBackend]]:
    """Run the whole frontend over the real link to a scripted backend."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        save_model_files(Path(directory), marks_turns=False)
        script.card = scripted_card(
            model_dir=directory, model_id="test/model", vocab_size=VOCAB_SIZE, max_context_tokens=20_000
        )
        with ScriptedBackend(Path(directory, "b.sock"), script) as scripted:
            client = BackendClient(Path(directory, "b.sock"))
            await client.start()
            keeper = ModelKeeper(client)
            watching = asyncio.create_task(keeper.watch())
            await until(lambda: keeper.current is not None and client.ready)
            try:
                async with serving(App(ServedModels(keeper), limits=WorkerLimits(**limits))) as url:
                    yield url, scripted
            finally:
                watching.cancel()
                await client.close()
                assert client.balance() == {}


async def test_streams_over_the_link_equal_the_script() -> None:
    async with over_the_link(Script(next_token=hashed)) as (url, _), sdk(url) as client:
        prompts = [f"{number}, the cat sat" for number in range(32)]
        expected = [TOKENIZER.decode(expected_tokens(token_ids(prompt), 40, hashed, VOCAB_SIZE)) for prompt in prompts]

        async def streamed(prompt: str) -> str:
            stream = await client.completions.create(model="test/model", prompt=prompt, max_tokens=40, stream=True)
            return "".join([piece.choices[0].text async for piece in stream])

        async def whole(prompt: str) -> str:
            answer = await client.completions.create(model="test/model", prompt=prompt, max_tokens=40)
            return answer.choices[0].text

        assert await asyncio.gather(*map(streamed, prompts)) == expected
        assert await asyncio.gather(*map(whole, prompts)) == expected
        answer = await client.completions.create(model="test/model", prompt=prompts, max_tokens=40)
        assert [choice.text for choice in answer.choices] == expected


async def test_prompt_too_long_for_a_message_goes_through_the_arena() -> None:
    async with over_the_link(Script(next_token=echoed)) as (url, _), sdk(url) as client:
        text = "the cat sat on the mat " * 1000
        answer = await client.completions.create(model="test/model", prompt=text, max_tokens=30)
        assert answer.choices[0].text == TOKENIZER.decode(token_ids(text)[:30])
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(token_ids(text)) > 4096


async def test_chat_over_the_link_is_answered_and_its_drop_reaches_the_backend() -> None:
    async with over_the_link(Script(next_token=echoed, step_s=0.001)) as (url, scripted), sdk(url) as client:
        chat = await client.chat.completions.create(model="test/model", messages=MESSAGES, max_tokens=10)
        prompt = token_ids("user\nhi\nassistant\n")
        assert chat.choices[0].message.content == TOKENIZER.decode(prompt[:10])
        stream = await client.chat.completions.create(
            model="test/model", messages=MESSAGES, max_tokens=10_000, stream=True
        )
        await anext(stream)
        await stream.close()
        await until(lambda: not scripted.engine.running)
        assert scripted.engine.num_cancellations == 1


async def test_silent_stream_is_kept_alive_by_comments() -> None:
    async with over_the_link(Script(next_token=echoed), keep_alive_interval_s=0.02) as (url, scripted):
        scripted.engine.paused = True
        body = {"prompt": "the cat", "max_tokens": 3, "stream": True}
        async with httpx.AsyncClient() as client, client.stream("POST", url + "/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            scripted.engine.paused = False
            data = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        texts = [json.loads(chunk)["choices"][0]["text"] for chunk in data]
        assert "".join(texts) == TOKENIZER.decode((token_ids("the cat") * 3)[:3])


async def test_nothing_is_left_after_many_dropped_requests() -> None:
    """Drop half of 500 requests at random moments; the others get their whole answers."""
    random = Random(5)
    prompt = "the cat sat"
    expected = TOKENIZER.decode((token_ids(prompt) * 10)[:20])

    async def request(port: int, number: int) -> None:
        stream = number % 3 > 0
        body = json.dumps({"prompt": prompt, "max_tokens": 20, "stream": stream, "n": 1 + number % 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            if number % 2:
                writer.write(head + body[: random.randrange(len(body) * 4)])
                await writer.drain()
                await asyncio.sleep(random.random() * 0.05)
                writer.transport.abort()
                return
            writer.write(head + body)
            data = await reader.readuntil(b"[DONE]\n\n" if stream else b'"penstock":{"coalesced":false}}}')
            if stream:
                chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
                assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
            else:
                assert json.loads(data.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async with over_the_link(Script(next_token=echoed, step_s=0.001)) as (url, scripted):
        port = httpx.URL(url).port
        assert port is not None
        for _ in range(5):
            await asyncio.gather(*(request(port, number) for number in range(100)))
        await until(lambda: not scripted.engine.running)
        async with httpx.AsyncClient() as client:
            assert (await client.get(url + "/models")).status_code == 200
