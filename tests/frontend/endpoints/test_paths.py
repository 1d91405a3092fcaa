"""Paths of other servers' clients: hints for wrong ones, and SageMaker's one path for every request."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock.frontend.generation.models.model_table import ServedModels
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, model_card, model_keeper
from tests.frontend.pooled_backend import PooledBackend, encoder, encoder_card

HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/messages/", "/v1/messages"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/ping", "/ping"),
        ("/api/v1/embeddings", "/v1/embeddings"),
    ],
)
async def test_wrong_path_is_answered_with_the_one_that_is_meant(
    connection: ClientConnection, path: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    refused = await connection.post(path, HI)
    assert (refused.status, refused.error["code"]) == (404, "unknown_url")
    assert refused.error["message"].endswith(f'did you mean "{meant}"?')
    assert f'404 UNKNOWN_PATH POST "{path}"' in caplog.text


async def test_path_that_nobody_means_points_to_the_list(connection: ClientConnection) -> None:
    for path in ("/v1", "/none", "/v1/none/"):
        assert (await connection.request("GET", path)).error["message"].endswith("/docs lists the endpoints")


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (HI, {"object": "chat.completion", "model": "llm"}),
        ({"prompt": "x", "max_tokens": 3}, {"object": "text_completion", "model": "llm"}),
        ({"input": "x"}, {"object": "list", "model": "bert"}),
        ({"query": "x", "documents": ["y"]}, {"model": "reranker"}),
        ({"text_1": "x", "text_2": "y"}, {"object": "list", "model": "reranker"}),
        ({"queries": "x", "documents": "y"}, {"object": "list", "model": "reranker"}),
    ],
)
async def test_invocation_is_answered_by_the_endpoint_for_its_fields(
    body: dict[str, Any], answer: dict[str, Any]
) -> None:
    embedder = PooledBackend(model=encoder_card("bert", ("embed", 8)))
    reranker = PooledBackend(model=encoder_card("reranker", ("classify", 1)))
    llm = FakeBackend(model=model_card(model_id="llm"))
    models = ServedModels(model_keeper(llm), embedding=encoder(embedder), rerank=encoder(reranker))
    connection = ClientConnection(make_app(llm, models=models))
    answered = await connection.post("/invocations", body)
    assert answered.status == 200
    assert answer.items() <= answered.json().items()
    await connection.end()


async def test_invocation_without_a_known_field_is_refused(connection: ClientConnection) -> None:
    refused = await connection.post("/invocations", {"text": "x"})
    assert (refused.status, refused.error["param"]) == (400, "messages")
    assert "or another of messages, prompt, input" in refused.error["message"]
    assert (await connection.post("/invocations", b"{")).status == 400
    streamed = await connection.post("/invocations", {**HI, "stream": True})
    assert streamed.events()[-1] == "[DONE]"


async def test_sagemaker_asks_for_health_at_its_own_path(connection: ClientConnection) -> None:
    assert (await connection.request("GET", "/ping")).status == 200
