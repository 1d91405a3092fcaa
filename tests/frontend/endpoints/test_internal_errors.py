"""What goes wrong inside: unforeseen errors, texts that cannot be split, templates that take long. In every API."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from penstock.frontend.generation.choices.choice import Choice
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.text.chat_template import ChatTemplate
from penstock.frontend.text.input_encoder import InputEncoder
from penstock.frontend.text.render_budget import FULL, RenderLimits
from penstock.frontend.text.spellings import MarkedText, Spellings
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.process.native_libraries import GuardedTokenizer
from tests.frontend.harness import (
    TOKENIZER,
    ClientConnection,
    FakeBackend,
    make_app,
    model_card,
    model_keeper,
    says,
    served_model,
)
from tests.frontend.named_events import named_events
from tests.frontend.pooled_backend import ENCODER_TOKENIZER, PooledBackend, encoder_card

TEXT = "a" * 45 + "b"
HI = [{"role": "user", "content": "Hello"}]
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v1/responses": {"input": "Hello", "store": False},
}
TOKENIZING: dict[str, dict[str, Any]] = {"/tokenize": {"prompt": "Hello"}, "/v1/quote": {"prompt": "Hello"}}
POOLING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": TEXT},
    "/v2/embed": {"texts": [TEXT], "input_type": "search_query"},
    "/embed": {"inputs": TEXT},
}
Connect = Callable[..., ClientConnection]


def check_error(path: str, answer: Any, status: int, message: str) -> None:
    """Compare an error with the form of its API."""
    error = answer["error"]
    if path == "/embed":
        assert (answer["error_type"], message in error) == ("Backend" if status == 424 else "Validation", True)
        return
    kind = "api_error" if path == "/v1/messages" else "server_error"
    assert error["type"] == (kind if status == 500 else "invalid_request_error")
    assert message in error["message"]


@pytest.mark.parametrize(("path", "body"), [*GENERATING.items(), *TOKENIZING.items()])
async def test_unforeseen_error_is_500_in_each_apis_json_and_one_log_line(
    connection: ClientConnection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    async def fails(*_: object, **_options: object) -> list[list[int]]:
        raise ZeroDivisionError("the detail")

    monkeypatch.setattr(ModelTokenizer, "encode", fails)
    answer = await connection.post(path, body)
    request_id = answer.headers["x-request-id"]
    assert answer.status == 500
    check_error(path, answer.json(), 500, f"an internal error occurred in request {request_id}")
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert request_id in line.getMessage()
    assert line.exc_info is not None


@pytest.mark.parametrize(("path", "body"), GENERATING.items())
async def test_unforeseen_error_in_a_stream_is_its_last_event(
    connection: ClientConnection, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    take, taken = Choice.take, []

    def fails_later(choice: Choice, batch: Any) -> Any:
        taken.append(batch)
        if len(taken) == 3:
            raise ZeroDivisionError
        return take(choice, batch)

    backend.script = says("Hello there")
    monkeypatch.setattr(Choice, "take", fails_later)
    answer = await connection.post(path, body | {"stream": True})
    assert answer.status == 200
    last = named_events(answer)[-1] if path in ("/v1/messages", "/v1/responses") else answer.events()[-1]
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    assert "an internal error occurred in request" in error["message"]


def unlucky(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with an expression that takes exponential time on some texts, which the library gives up."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    expression = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([expression, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


@pytest.mark.parametrize(("path", "body"), [*GENERATING.items(), *TOKENIZING.items()])
async def test_text_that_the_tokenizer_cannot_split_is_400_and_one_log_line(
    backend: FakeBackend,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: Mapping[str, Any],
) -> None:
    keeper = model_keeper(backend, served_model(model_card(), backend, tokenizer=unlucky(TOKENIZER)))
    connection = connect(keeper=keeper)
    changed = (
        {"messages": [{"role": "user", "content": TEXT}]} if "messages" in body else {"prompt": TEXT, "input": TEXT}
    )
    answer = await connection.post(path, {name: changed.get(name, value) for name, value in body.items()})
    assert answer.status == 400
    check_error(path, answer.json(), 400, "the model's tokenizer cannot split a text: one of up to ")
    lines = [record.getMessage() for record in caplog.records if record.name == "penstock.tokenizer"]
    assert [line.startswith("the tokenizer cannot split texts of up to ") for line in lines] == [True]
    assert TEXT not in lines[0]
    assert (await connection.post(path, body)).status == 200


@pytest.mark.parametrize(("path", "body"), POOLING.items())
async def test_both_are_answered_in_the_form_of_the_apis_for_vectors(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    backend = PooledBackend(model=encoder_card("encoder", ("embed", 4)))
    tokenizer = ModelTokenizer(GuardedTokenizer(unlucky(ENCODER_TOKENIZER)), None)
    client: Any = backend
    keeper = model_keeper(backend, ServedModel(encoder_card("encoder", ("embed", 4)), tokenizer, client))
    connection = ClientConnection(make_app(backend, keeper=keeper))
    cannot = await connection.post(path, body)
    monkeypatch.setattr(InputEncoder, "encode", lambda *_, **__: 1 / 0)
    fails = await connection.post(path, body)
    statuses = (422, 424) if path == "/embed" else (400, 500)
    assert (cannot.status, fails.status) == statuses
    check_error(path, cannot.json(), statuses[0], "the model's tokenizer cannot split a text")
    check_error(path, fails.json(), statuses[1], f"in request {fails.headers['x-request-id']}")
    await connection.end()


async def test_template_that_takes_long_is_rendered_beside_the_loop_and_refused_at_its_limit(
    backend: FakeBackend, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = "{% for a in range(999) %}{% for b in range(NUM) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    begun, goes_on = threading.Event(), threading.Event()
    render = ChatTemplate.render_marked

    def slow(template: ChatTemplate, body: Any, spellings: Spellings, limits: RenderLimits = FULL) -> MarkedText:
        if limits is FULL:
            begun.set()
            goes_on.wait()
        return render(template, body, spellings, limits)

    monkeypatch.setattr(ChatTemplate, "render_marked", slow)
    connections = []
    for num, status in (("99", 200), ("99999", 400)):
        served = served_model(model_card(), backend, template=loop.replace("NUM", num))
        connections.append((connect(keeper=model_keeper(backend, served)), status))
    for connection, status in connections:
        begun.clear()
        goes_on.clear()
        answer = asyncio.create_task(connection.post("/v1/chat/completions", {"messages": HI, "max_tokens": 3}))
        await asyncio.to_thread(begun.wait)
        assert (await connect().request("GET", "/health")).status == 200
        goes_on.set()
        assert (await answer).status == status
    error = (await answer).json()["error"]
    assert (error["code"], error["param"]) == ("chat_template_error", "messages")
    assert "line 1: it takes more than the limit of 2" in error["message"]
