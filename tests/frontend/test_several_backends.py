"""One worker serves the models of several backends: which of them answers, and what the others notice of its end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.generation.models.served_model import ModelKeeper
from penstock.frontend.settings import WorkerLimits, WorkerSettings
from penstock.frontend.worker import served_models
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import ModelCard, PooledWidth
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, model_card, model_keeper, save_model_files
from tests.serve.test_command_line import PANICKING

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def encoder_card(name: str, *pooled: tuple[Any, int]) -> ModelCard:
    return model_card(model_id=name, generates=False, pooled=tuple(PooledWidth(*each) for each in pooled))


@pytest.fixture
def llm() -> FakeBackend:
    return FakeBackend(model=model_card(model_id="llm"))


@pytest.fixture
def embedder() -> FakeBackend:
    return FakeBackend(model=encoder_card("bert", ("embed", 8), ("token_embed", 8)))


@pytest.fixture
def models(llm: FakeBackend, embedder: FakeBackend) -> ServedModels:
    return ServedModels(model_keeper(llm), embedding=model_keeper(embedder))


@pytest.fixture
async def connection(llm: FakeBackend, models: ServedModels) -> ClientConnection:
    return ClientConnection(make_app(llm, models=models))


async def test_all_models_are_listed_with_what_they_can_do(connection: ClientConnection) -> None:
    listed = (await connection.request("GET", "/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["llm", "bert"]
    assert [model["capabilities"]["embeddings"] for model in listed] == [False, True]
    assert [model["capabilities"]["chat"] for model in listed] == [True, False]
    assert [model["embedding_dimensions"] for model in listed] == [None, 8]
    assert (await connection.request("GET", "/v1/models/bert")).json() == listed[1]


async def test_generation_goes_to_the_model_that_generates(
    connection: ClientConnection, llm: FakeBackend, embedder: FakeBackend
) -> None:
    for named in ({}, {"model": "llm"}):
        assert (await connection.post(CHAT, {**HI, **named})).json()["model"] == "llm"
    assert (len(llm.streams), len(embedder.streams)) == (2, 0)
    wrong = await connection.post(CHAT, {**HI, "model": "bert"})
    assert (wrong.status, wrong.error["code"], wrong.error["param"]) == (400, "model_not_capable", "model")
    assert "needs one that can generate text" in wrong.error["message"]
    assert '"bert" can compute embeddings and compute embeddings of tokens' in wrong.error["message"]
    missing = await connection.post(CHAT, {**HI, "model": "other"})
    assert missing.status == 404
    assert 'this server has "llm", "bert"' in missing.error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HI),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {**HI, "max_tokens": 4}),
    ],
)
async def test_an_encoder_alone_refuses_to_generate(embedder: FakeBackend, path: str, body: dict[str, Any]) -> None:
    connection = ClientConnection(make_app(embedder))
    response = await connection.post(path, body)
    assert response.status == 400
    assert '"bert" can compute embeddings' in response.json()["error"]["message"]
    assert (await connection.request("GET", "/ready")).status == 200


async def test_a_name_of_one_model_goes_before_any_name_of_another(embedder: FakeBackend) -> None:
    llm = FakeBackend(model=model_card(model_id="llm", aliases=("*",)))
    models = ServedModels(model_keeper(llm), embedding=model_keeper(embedder))
    connection = ClientConnection(make_app(llm, models=models))
    assert (await connection.post(CHAT, {**HI, "model": "whatever"})).status == 200
    assert (await connection.post(CHAT, {**HI, "model": "bert"})).error["code"] == "model_not_capable"
    missing = await connection.post("/v1/embeddings", {"input": "x", "model": "whatever"})
    assert missing.error["code"] == "model_not_found"


async def test_tokens_are_those_of_the_named_model(connection: ClientConnection) -> None:
    for name in ("llm", "bert"):
        assert (await connection.post("/tokenize", {"prompt": "x", "model": name})).status == 200
    assert (await connection.post("/tokenize", {"prompt": "x", "model": "other"})).status == 404


async def test_a_dead_backend_leaves_the_other_models_alone(
    connection: ClientConnection, embedder: FakeBackend
) -> None:
    embedder.ready = False
    assert (await connection.post(CHAT, HI)).status == 200
    assert (await connection.request("GET", "/ready?model=llm")).status == 200
    refused = await connection.request("GET", "/ready")
    assert refused.status == 503
    assert refused.error["message"].startswith('"bert": the backend is not connected')
    assert (await connection.request("GET", "/ready?model=bert")).status == 503
    assert (await connection.request("GET", "/ready?model=other")).status == 404


async def test_a_model_that_never_comes_is_waited_for_only_by_its_own_requests(llm: FakeBackend) -> None:
    absent = FakeBackend(model=None, ready=False)
    keeper = ModelKeeper(absent)  # type: ignore[arg-type]
    models = ServedModels(model_keeper(llm), embedding=keeper)
    connection = ClientConnection(make_app(llm, models=models, hold_timeout_s=0.01))
    assert (await connection.post(CHAT, {**HI, "model": "llm"})).status == 200
    listed = (await connection.request("GET", "/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["llm"]
    late = await connection.post(CHAT, {**HI, "model": "bert"})
    assert (late.status, late.error["code"]) == (503, "backend_unavailable")


async def test_metrics_have_the_model_as_a_label(
    connection: ClientConnection, llm: FakeBackend, embedder: FakeBackend
) -> None:
    board = BackendBoard.create()
    llm.backend_counters = embedder.backend_counters = board.values()
    board.close()
    embedder.ready, embedder.backend_counters = False, None
    await connection.post(CHAT, HI)
    page = (await connection.request("GET", "/metrics")).body.decode()
    families = {family.name: family.samples for family in text_string_to_metric_families(page)}
    assert len(families) == page.count("# TYPE ")
    up = {sample.labels["model"]: sample.value for sample in families["penstock_backend_up"]}
    assert up == {"llm": 1, "bert": 0}
    assert {sample.labels["model"] for sample in families["penstock_steps"]} == {"llm"}
    answers = families["penstock_worker_http_responses"]
    counted = {sample.labels["model"]: sample.value for sample in answers if sample.labels["status"] == "200"}
    assert counted == {"llm": 1, "bert": 0}


async def test_a_path_that_is_named_twice_is_one_backend() -> None:
    fields: dict[str, Any] = {field.name: None for field in msgspec.structs.fields(WorkerSettings)}
    fields |= {"limits": WorkerLimits(), "resume_timeout_s": 1.0, "socket_path": "/x/a", "replica_socket_paths": ()}
    fields |= {"prefixes_fd": -1, "replica_dir": None}
    models = served_models(WorkerSettings(**fields | {"embedding_socket_path": "/x/b", "rerank_socket_path": "/x/b"}))
    assert len(models.keepers) == 2
    assert models.in_order("rerank")[0] is models.in_order("embed")[0]
    assert models.in_order("generate")[0] is models.generation
    alone = served_models(WorkerSettings(**fields | {"embedding_socket_path": "/x/a"}))
    assert alone.keepers == (alone.generation,)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", PANICKING, "Precompiled: "),
        ("chat_template.jinja", "{{ 9 ** (9 ** 9) }}", "line 1: a power has more than the limit of 4096 bits"),
    ],
)
async def test_model_with_damaged_texts_is_503_with_the_reason_and_the_other_is_served(
    llm: FakeBackend, tmp_path: Path, file: str, content: str, reason: str
) -> None:
    save_model_files(tmp_path)
    (tmp_path / file).write_text(content)
    damaged = FakeBackend(model=model_card(model_id="damaged", model_dir=str(tmp_path)))
    client: Any = damaged
    keeper = ModelKeeper(client, name="damaged")
    connection = ClientConnection(make_app(llm, models=ServedModels(model_keeper(llm), others=[keeper])))
    watching = asyncio.create_task(keeper.watch())
    refused = await connection.post(CHAT, {**HI, "model": "damaged"})
    assert (refused.status, refused.error["code"], "retry-after" in refused.headers) == (
        503,
        "backend_unavailable",
        True,
    )
    assert refused.error["message"].startswith("the model cannot be used: ")
    assert reason in refused.error["message"]
    assert (await connection.post(CHAT, {**HI, "model": "llm"})).status == 200
    listed = {model["id"]: model for model in (await connection.request("GET", "/v1/models")).json()["data"]}
    assert reason in listed["damaged"]["last_error"]
    watching.cancel()
