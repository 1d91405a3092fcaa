"""The real ollama package, unchanged, on a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import ollama
import pytest

from penstock.frontend.generation.models.model_table import ServedModels
from tests.frontend.clients.test_openai_sdk import serving
from tests.frontend.harness import FakeBackend, make_app, model_keeper, says
from tests.frontend.pooled_backend import PooledBackend, encoder, encoder_card

MODEL = "test/model"
HI = [{"role": "user", "content": "hi"}]


def look(at: str) -> str:
    """Look at something.

    Args:
        at: The thing.
    """
    return f"saw {at}"


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[ollama.AsyncClient]:
    """A server of a model that generates and one that embeds."""
    embedder = PooledBackend(model=encoder_card("bert", ("embed", 16)))
    models = ServedModels(model_keeper(backend), embedding=encoder(embedder))
    async with (
        serving(make_app(backend, models=models)) as url,
        ollama.AsyncClient(host=url.removesuffix("/v1")) as client,
    ):
        yield client


async def test_chat_and_generate_answer_whole_and_in_pieces(client: ollama.AsyncClient) -> None:
    whole = await client.chat(MODEL, HI, options={"temperature": 0, "num_predict": 50}, keep_alive="5m")
    assert (whole.message.content, whole.done_reason, whole.eval_count) == ("Hello, world!", "stop", 14)
    assert whole.total_duration
    pieces = [part async for part in await client.chat(MODEL, HI, stream=True)]
    assert "".join(part.message.content or "" for part in pieces) == "Hello, world!"
    assert [part.done for part in pieces] == [False] * (len(pieces) - 1) + [True]
    first = await client.generate(MODEL, "hi", system="Be.")
    again = [part async for part in await client.generate(MODEL, "hi", context=first.context, stream=True)]
    assert "".join(part.response or "" for part in again) == first.response == "Hello, world!"
    assert again[-1].context[: len(first.context or ())] == first.context  # type: ignore[index]
    loaded = await client.generate(MODEL, keep_alive=0)
    assert (loaded.done, loaded.done_reason) == (True, "unload")


async def test_functions_are_called_and_answered(client: ollama.AsyncClient, backend: FakeBackend) -> None:
    backend.script = says('<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>')
    messages: list[ollama.Message | dict[str, str]] = [*HI]
    called = await client.chat(MODEL, messages, tools=[look])
    (call,) = called.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("look", {"at": "x"})
    streamed = [part async for part in await client.chat(MODEL, messages, tools=[look], stream=True)]
    assert [part.message.tool_calls for part in streamed if part.message.tool_calls] == [called.message.tool_calls]
    backend.script = says("Done.")
    messages += [called.message, {"role": "tool", "content": look(at="x"), "tool_name": "look"}]
    assert (await client.chat(MODEL, messages, tools=[look])).message.content == "Done."


async def test_models_and_embeddings(client: ollama.AsyncClient) -> None:
    listed = await client.list()
    assert [model.model for model in listed.models] == [MODEL, "bert"]
    assert [model.context_length for model in (await client.ps()).models] == [1000, 1000]
    assert (await client.show("bert")).capabilities == ["embedding"]
    assert [part.status async for part in await client.pull(MODEL, stream=True)][-1] == "success"
    two = await client.embed("bert", ["a", "b"])
    assert [len(vector) for vector in two.embeddings] == [16, 16]
    assert len((await client.embeddings("bert", "a")).embedding) == 16


async def test_errors_have_status_and_sentence(client: ollama.AsyncClient) -> None:
    for call in (client.chat("none", HI), client.pull("none"), client.embed("none", "x")):
        with pytest.raises(ollama.ResponseError, match='model: "none"') as raised:
            await call
        assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="is served") as raised:
        await client.delete(MODEL)
    assert raised.value.status_code == 409
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature") as raised:
        _ = [part async for part in await client.chat(MODEL, HI, options={"temperature": 9}, stream=True)]
    assert raised.value.status_code == 400
