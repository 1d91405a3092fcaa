"""GET /v1/models, /health, /ready, /version and /v1/load."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from penstock.shm.messages import Adapter
from tests.frontend.harness import (
    ClientConnection,
    FakeBackend,
    make_app,
    model_card,
)

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_models_are_listed_and_described(connection: ClientConnection) -> None:
    listed = (await connection.request("GET", "/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == "test/model"
    assert (model["max_model_len"], model["quantization"]) == (1000, "int8")
    assert {name for name, has in model["capabilities"].items() if has} == {"chat", "tool_calls", "structured_output"}
    assert model["tools"] == "generic"
    assert set(model["capabilities"].values()) == {True, False}
    assert (await connection.request("GET", "/v1/models/test/model")).json() == model
    assert (await connection.request("GET", "/v1/models/test%2Fmodel")).json() == model
    assert (await connection.request("GET", "/v1/models/test%252Fmodel")).status == 404
    assert (model["kv_cache_tokens"], model["max_tokens_per_second"]) == (None, None)
    missing = await connection.request("GET", "/v1/models/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_cache_and_speed_come_from_the_backends_board() -> None:
    counters = {"pages_total": 10, "page_size_tokens": 16, "token_step_us": 4000}
    connection = ClientConnection(make_app(FakeBackend(backend_counters=counters)))
    (model,) = (await connection.request("GET", "/v1/models")).json()["data"]
    assert (model["kv_cache_tokens"], model["max_tokens_per_second"]) == (160, 250.0)
    await connection.end()


async def test_aliases_are_listed_and_answered_by_the_model() -> None:
    connection = ClientConnection(make_app(FakeBackend(model=model_card(model_id="m", aliases=("gpt-4o", "sonnet")))))
    listed = (await connection.request("GET", "/v1/models")).json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [("m", "m"), ("gpt-4o", "m"), ("sonnet", "m")]
    assert (await connection.request("GET", "/v1/models/sonnet")).json()["id"] == "sonnet"
    for name in ("m", "gpt-4o", "sonnet"):
        assert (await connection.post(CHAT, {**HI, "model": name})).json()["model"] == "m"
    refused = await connection.post(CHAT, {**HI, "model": "*"})
    assert refused.status == 404
    assert 'this server has "m", "gpt-4o", "sonnet"' in refused.error["message"]
    await connection.end()


async def test_adapters_are_models_that_answer_by_their_own_names() -> None:
    """Also beside a model that takes any name. The request names the adapter's weights."""
    adapters = (Adapter("sql", "id-1", 8, created=7), Adapter("chat", "id-2", 4))
    backend = FakeBackend(model=model_card(model_id="m", aliases=("*",), adapters=adapters))
    connection = ClientConnection(make_app(backend))
    listed = (await connection.request("GET", "/v1/models")).json()["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        ("m", "m", None), ("sql", "sql", "m"), ("chat", "chat", "m")
    ]  # fmt: skip
    assert (listed[1]["created"], listed[1]["created_at"]) == (7, "1970-01-01T00:00:07Z")
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        (CHAT, HI), ("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {**HI, "max_tokens": 5}), ("/v1/quote", HI),
    )  # fmt: skip
    for path, body in bodies:
        for name, adapter, answered in (("sql", "id-1", "sql"), ("chat", "id-2", "chat"), ("any", "", "m")):
            response = await connection.post(path, {**body, "model": name})
            assert (response.status, response.json()["model"]) == (200, answered)
            assert backend.streams[-1].request.adapter == adapter
    refused = await connection.post("/v1/embeddings", {"input": "x", "model": "sql"})
    assert (refused.status, refused.error["param"]) == (400, "model")
    await connection.end()


async def test_star_takes_any_name_but_is_not_listed() -> None:
    connection = ClientConnection(make_app(FakeBackend(model=model_card(model_id="m", aliases=("*",)))))
    assert [model["id"] for model in (await connection.request("GET", "/v1/models")).json()["data"]] == ["m"]
    for path, body in ((CHAT, HI), ("/v1/messages", {**HI, "max_tokens": 5}), ("/tokenize", {"prompt": "x"})):
        assert (await connection.post(path, {**body, "model": "claude-sonnet-4"})).status == 200
    await connection.end()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HI),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/messages", {**HI, "max_tokens": 5}),
        ("/v1/messages/count_tokens", HI),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/apply-template", HI),
    ],
)
async def test_model_may_be_omitted_or_null_everywhere(
    connection: ClientConnection, path: str, body: dict[str, Any]
) -> None:
    for named in ({}, {"model": None}, {"model": "test/model"}):
        response = await connection.post(path, {**body, **named})
        assert response.status == 200
        if "model" in response.json():
            assert response.json()["model"] == "test/model"
    refused = await connection.post(path, {**body, "model": ""})
    assert refused.status == 404


async def test_ready_follows_the_backend_and_health_does_not(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    ready = await connection.request("GET", "/ready")
    assert (ready.status, ready.json()) == (200, {"status": "ready", "running": 2, "pages_used": 5})
    backend.ready = False
    not_ready = await connection.request("GET", "/ready")
    assert not_ready.status == 503
    assert int(not_ready.headers["retry-after"]) >= 1
    assert (await connection.request("GET", "/health")).status == 200
    refused = await connection.post(CHAT, HI)
    assert (refused.status, refused.error["code"]) == (503, "backend_unavailable")


async def test_only_health_is_200_before_the_model_is_known(backend: FakeBackend) -> None:
    backend.model = None
    connection = ClientConnection(make_app(backend))
    assert (await connection.request("GET", "/health")).status == 200
    for path in ("/ready", "/v1/models", "/v1/models/x"):
        response = await connection.request("GET", path)
        assert response.status == 503
        assert "retry-after" in response.headers
    assert (await connection.post(CHAT, HI)).status == 503
    await connection.end()


async def test_version_and_load_are_reported(connection: ClientConnection) -> None:
    assert (await connection.request("GET", "/version")).json() == {"version": importlib.metadata.version("penstock")}
    assert (await connection.request("GET", "/v1/load")).json() == {"server_load": 0, "running": 2, "pages_used": 5}


async def test_load_without_a_backend_is_the_workers_own(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.backend_counters = None
    assert (await connection.request("GET", "/v1/load")).json() == {"server_load": 0}
