"""Requests that arrive before a model is loaded: which ones wait for it, and how long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.frontend.app import App
from penstock.frontend.generation.models import served_model as model_module
from penstock.frontend.generation.models.served_model import ModelKeeper
from penstock.frontend.settings import ParserNames
from penstock.shm.messages import MAX_CONTEXT_TOKENS, Sampling
from tests.frontend.access.keys import bearer
from tests.frontend.harness import (
    END_TOKEN,
    TOKENIZER,
    ClientConnection,
    FakeBackend,
    make_app,
    model_card,
    request_bytes,
    save_model_files,
    served_model,
    silent,
)

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def keeper(backend: FakeBackend) -> ModelKeeper:
    """A ModelKeeper as in a worker that has just started."""
    return ModelKeeper(backend)  # type: ignore[arg-type]


@pytest.fixture
def app(backend: FakeBackend, keeper: ModelKeeper) -> App:
    return make_app(backend, keeper=keeper, max_open_requests=1)


@pytest.fixture
async def connect(app: App) -> AsyncIterator[Callable[[], ClientConnection]]:
    connections: list[ClientConnection] = []

    def connect() -> ClientConnection:
        connections.append(ClientConnection(app))
        return connections[-1]

    yield connect
    for connection in connections:
        await connection.end()


def load(keeper: ModelKeeper) -> None:
    backend: Any = keeper.backend
    keeper.current = served_model(model_card(), backend)
    keeper.settled.set()


async def waiting(
    connection: ClientConnection, method: str = "POST", path: str = CHAT, headers: Sequence[tuple[str, str]] = ()
) -> None:
    """Send a request that is now waiting for the model."""
    connection.send(request_bytes(method, path, BODY if method == "POST" else None, headers))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not connection.transport.output


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/models/test/model")])
async def test_request_waits_for_a_model_that_loads(
    connect: Callable[[], ClientConnection], keeper: ModelKeeper, method: str, path: str
) -> None:
    connection, other = connect(), connect()
    await waiting(connection, method, path)
    assert (await other.request("GET", "/ready")).status == 503
    load(keeper)
    assert (await connection.response()).status == 200
    assert (await other.request("GET", "/ready")).status == 200


async def test_requests_over_the_limit_do_not_wait_for_a_model(
    connect: Callable[[], ClientConnection], keeper: ModelKeeper
) -> None:
    first, second = connect(), connect()
    await waiting(first)
    assert (await second.request("POST", CHAT, BODY)).status == 429
    load(keeper)
    assert (await first.response()).status == 200


async def test_waiting_for_a_model_ends_after_the_timeout(backend: FakeBackend, keeper: ModelKeeper) -> None:
    connection = ClientConnection(make_app(backend, keeper=keeper, hold_timeout_s=0.01))
    response = await connection.post(CHAT, BODY)
    assert (response.status, response.error["code"]) == (503, "backend_unavailable")
    assert response.headers["retry-after"] == "1"
    await connection.end()


async def test_only_so_many_requests_wait_for_a_model(backend: FakeBackend, keeper: ModelKeeper) -> None:
    app = make_app(backend, keeper=keeper, max_held_requests=1)
    first, second = ClientConnection(app), ClientConnection(app)
    await waiting(first)
    assert (await second.post(CHAT, BODY)).status == 503
    load(keeper)
    assert (await first.response()).status == 200
    assert app.context.places_to_wait.num_taken == 0
    for connection in (first, second):
        await connection.end()


async def test_tenant_whose_requests_wait_for_a_model_leaves_places_to_others(
    backend: FakeBackend, keeper: ModelKeeper
) -> None:
    app = make_app(backend, keeper=keeper, max_held_requests=1, api_keys=("many", "other"))
    first, second, other = (ClientConnection(app) for _ in range(3))
    await waiting(first, headers=bearer("many"))
    assert (await second.request("POST", CHAT, BODY, bearer("many"))).status == 503
    await waiting(other, headers=bearer("other"))
    load(keeper)
    assert (await first.response()).status == (await other.response()).status == 200
    for connection in (first, second, other):
        await connection.end()


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_stream_that_waits_for_a_model_is_kept_alive_and_told_of_the_end(
    backend: FakeBackend, keeper: ModelKeeper, path: str
) -> None:
    app = make_app(backend, keeper=keeper, hold_timeout_s=0.05)
    connection = ClientConnection(app)
    connection.send(request_bytes("POST", path, BODY | {"stream": True, "max_tokens": 4}))
    for _ in range(10):
        await asyncio.sleep(0)
    app.exchanges.sweep(time.monotonic() + 60.0)
    response = await connection.response()
    assert response.status == 200
    assert response.body.startswith(b": keep-alive\n\n")
    *_, event = response.body.removesuffix(b"\n\n").split(b"\n\n")
    *name, data = event.split(b"\n")
    assert name == ([b"event: error"] if path == "/v1/messages" else [])
    assert msgspec.json.decode(data.removeprefix(b"data: "))["error"]["message"].startswith(
        "the model is still loading"
    )
    await connection.end()


async def test_wrong_body_is_refused_without_a_model(
    connect: Callable[[], ClientConnection], keeper: ModelKeeper
) -> None:
    assert (await connect().post(CHAT, {"messages": 3})).status == 400
    assert keeper.current is None


async def test_hang_up_while_waiting_for_a_model_is_noticed(
    connect: Callable[[], ClientConnection], app: App, backend: FakeBackend, keeper: ModelKeeper
) -> None:
    connection = connect()
    await waiting(connection)
    connection.transport.reset()
    await connection.idle()
    assert len(app.exchanges) == 0
    load(keeper)
    assert not backend.streams


async def test_requests_waiting_for_a_model_get_503_when_the_drain_ends(
    connect: Callable[[], ClientConnection], app: App
) -> None:
    connection = connect()
    await waiting(connection)
    app.exchanges.end_all()
    response = await connection.response()
    assert (response.status, response.error["code"]) == (503, "shutting_down")


async def test_hang_up_after_waiting_for_a_model_is_noticed(
    connect: Callable[[], ClientConnection], backend: FakeBackend, keeper: ModelKeeper
) -> None:
    backend.script = silent
    connection = connect()
    await waiting(connection)
    load(keeper)
    await backend.submitted.wait()
    connection.transport.reset()
    await connection.idle()
    assert backend.streams[0].cancelled.is_set()


@asynccontextmanager
async def watching(keeper: ModelKeeper) -> AsyncIterator[None]:
    task = asyncio.create_task(keeper.watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_supervised_worker_does_not_report_that_no_backend_has_come(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_module, "_EXPECTED_START_S", 0.0)
    caplog.set_level(logging.INFO)
    backend.model = None
    save_model_files(tmp_path)
    keeper = ModelKeeper(backend, reports_absence=False)  # type: ignore[arg-type]
    async with asyncio.timeout(10), watching(keeper):
        await asyncio.sleep(0)  # it has looked once
        backend.model = model_card(model_dir=str(tmp_path))
        await keeper.settled.wait()
    assert "no backend yet" not in caplog.text


async def test_requests_wait_until_a_late_backend_has_come_and_its_model_is_loaded(
    backend: FakeBackend,
    keeper: ModelKeeper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(model_module, "_EXPECTED_START_S", 0.0)
    caplog.set_level(logging.INFO)
    backend.model = None
    save_model_files(tmp_path)
    async with asyncio.timeout(10), watching(keeper):
        while "no backend yet" not in caplog.text:  # noqa: ASYNC110 - it is logged in a turn of the loop
            await asyncio.sleep(0)
        assert not keeper.settled.is_set()
        backend.model = model_card(model_dir=str(tmp_path))
        await keeper.settled.wait()
    assert keeper.current is not None


@pytest.mark.parametrize("has_files", [False, True])
async def test_no_request_waits_for_a_model_that_cannot_be_loaded(
    backend: FakeBackend, keeper: ModelKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_files: bool
) -> None:
    if has_files:
        save_model_files(tmp_path)
        monkeypatch.setattr(model_module, "model_syntax_of", lambda *_: 1 // 0)
    backend.model = model_card(model_dir=str(tmp_path))
    async with asyncio.timeout(10), watching(keeper):
        await keeper.settled.wait()
    assert keeper.current is None


async def test_token_that_closes_turns_in_the_template_ends_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    save_model_files(tmp_path)
    backend = FakeBackend(model=model_card(model_dir=str(tmp_path), default_sampling=Sampling(0.6, 0.9)))
    keeper = ModelKeeper(backend)  # type: ignore[arg-type]
    async with asyncio.timeout(10), watching(keeper):
        await keeper.settled.wait()
    connection = ClientConnection(make_app(backend, keeper=keeper))
    for fields in ({}, {"ignore_eos": True}):
        body = {"messages": [{"role": "user", "content": "cat"}], "structured_outputs": {"regex": "a+"}}
        await connection.post("/v1/chat/completions", body | fields)
    (model,) = (await connection.request("GET", "/v1/models")).json()["data"]
    await connection.end()
    turn_end = TOKENIZER.token_to_id("<|im_end|>")
    usual, endless = (stream.request for stream in backend.streams)
    assert (usual.stop_token_ids, endless.stop_token_ids) == ((END_TOKEN, turn_end), (END_TOKEN, turn_end))
    assert usual.constraints is not None
    assert endless.constraints is not None
    assert (usual.constraints.grammar_ends, endless.constraints.grammar_ends) == ((turn_end,), (turn_end,))
    assert (usual.constraints.min_tokens, endless.constraints.min_tokens) == (0, MAX_CONTEXT_TOKENS)
    assert model["end_tokens"] == [{"id": END_TOKEN, "text": "<|end|>"}, {"id": turn_end, "text": "<|im_end|>"}]
    assert (model["default_sampling"]["temperature"], model["default_sampling"]["min_p"]) == (0.6, 0.0)
    ends = f"<|end|> ({END_TOKEN}), <|im_end|> ({turn_end})"
    assert f"serving test/model, context 1000 tokens; answers end with {ends}" in caplog.text
    assert "requests to test/model sample with temperature 0.6, top_p 0.9, unless they say otherwise" in caplog.text
    assert "names no token" not in caplog.text


async def test_template_of_a_file_replaces_the_models(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model_files(tmp_path)
    own = tmp_path / "own.template"
    own.write_text("the {{ messages[0].content }}", encoding="utf-8")
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    backend = FakeBackend(model=model_card(model_dir=str(tmp_path), eos_token_ids=()))
    for template_file, status in ((own, 200), (None, 400)):
        keeper = ModelKeeper(backend, ParserNames(), template_file)  # type: ignore[arg-type]
        async with asyncio.timeout(10), watching(keeper):
            await keeper.settled.wait()
        connection = ClientConnection(make_app(backend, keeper=keeper))
        answer = await connection.post("/apply-template", {"messages": [{"role": "user", "content": "cat"}]})
        assert answer.status == status
        if status == 200:
            assert answer.json()["prompt"] == "the cat"
        await connection.end()
    assert "start the server with --chat-template FILE" in answer.error["message"]
    assert "has no chat template: only /v1/completions works" in caplog.text
    assert caplog.text.count("test/model names no token that ends an answer") == 2


@pytest.mark.parametrize(
    ("parsers", "expected"),
    [(ParserNames(), ("generic", "think")), (ParserNames("mistral", "none", "tokens"), ("mistral", None))],
)
async def test_parsers_follow_the_template_or_the_options(
    tmp_path: Path, parsers: ParserNames, expected: tuple[str | None, str | None]
) -> None:
    save_model_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<think></think>", encoding="utf-8")
    keeper = ModelKeeper(FakeBackend(model=model_card(model_dir=str(tmp_path))), parsers)  # type: ignore[arg-type]
    watching = asyncio.create_task(keeper.watch())
    try:
        await asyncio.wait_for(keeper.settled.wait(), 60)
    finally:
        watching.cancel()
    assert keeper.current is not None
    assert keeper.current.reads_special_tokens is (parsers.special_tokens == "tokens")
    syntax = keeper.current.syntax
    found = (syntax.tools and syntax.tools.name, syntax.reasoning and syntax.reasoning.name)
    assert found == expected
