"""POST /v1/models/load and /v1/models/unload, and requests that wait for a model, without processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import ApiKey
from penstock.frontend.generation.models.model_table import ServedModels
from penstock.frontend.generation.models.waking import WakingModel
from penstock.shm.memory.model_table import ModelState, ModelTable
from tests.frontend.access.keys import bearer
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, model_keeper

MODEL = "test/model"
KEYS = (ApiKey(b"boss", "boss", is_admin=True), ApiKey(b"user", "user"))
COMPLETION = {"model": MODEL, "prompt": "x", "max_tokens": 1}


@dataclass
class Setup:
    connection: ClientConnection
    owner: ModelTable
    waking: WakingModel

    async def command(self, name: str, key: str = "boss", model: str = MODEL) -> tuple[int, str]:
        """Return the status, and the state or the error's code."""
        answer = await self.connection.request("POST", f"/v1/models/{name}", {"model": model}, bearer(key))
        return answer.status, answer.json()["state"] if answer.status == 200 else answer.error["code"]


@pytest.fixture
async def setup(backend: FakeBackend) -> AsyncIterator[Setup]:
    fd, owner = ModelTable.create(1)
    keeper = model_keeper(backend)
    waking = WakingModel(MODEL, ModelTable.of_worker(fd, 1, 0), 0, keeper.backend)
    app = make_app(backend, models=ServedModels(keeper), admission=Admission(KEYS), hold_timeout_s=0.2)
    keeper.waking = waking
    yield Setup(ClientConnection(app), owner, waking)
    os.close(fd)


async def test_commands_need_an_admin_key_and_a_model_that_may_sleep(setup: Setup, backend: FakeBackend) -> None:
    assert await setup.command("load", key="user") == (403, "admin_key_required")
    assert await setup.command("load", key="nobody") == (401, "invalid_api_key")
    assert await setup.command("load", model="other") == (404, "model_not_found")
    connection = ClientConnection(make_app(backend, admission=Admission(KEYS)))
    always_awake = Setup(connection, setup.owner, setup.waking)
    assert await always_awake.command("unload") == (400, "model_not_capable")


async def test_model_that_a_request_needs_is_not_unloaded(setup: Setup) -> None:
    setup.owner.set_state(0, ModelState.AWAKE)
    setup.waking.use()
    assert await setup.command("unload") == (409, "model_in_use")
    setup.waking.done()
    assert await setup.command("unload") == (503, "backend_unavailable")  # nobody puts it to sleep here
    setup.owner.set_state(0, ModelState.ASLEEP)
    assert await setup.command("unload") == (200, "asleep")


async def test_request_is_counted_while_it_waits_and_released_when_the_model_does_not_come(setup: Setup) -> None:
    waiting = asyncio.ensure_future(setup.connection.request("POST", "/v1/completions", COMPLETION, bearer("user")))
    while not setup.owner.uses(0)[0]:  # noqa: ASYNC110 - in shared memory
        await asyncio.sleep(0)
    refused = await waiting
    assert (refused.status, refused.error["message"]) == (503, "the model is still loading; retry later")
    assert setup.owner.uses(0)[0] == 0


async def test_failed_wake_answers_with_the_reason_and_the_next_attempt_may_succeed(setup: Setup) -> None:
    setup.owner.fail(0, "no weights", retry_after_s=60.0)
    refused = await setup.connection.request("POST", "/v1/completions", COMPLETION, bearer("user"))
    assert (refused.status, refused.error["message"]) == (503, f'"{MODEL}" could not be loaded: no weights')
    assert 0 < int(refused.headers["retry-after"]) <= 60
    setup.owner.fail(0, "no weights", retry_after_s=0.0)
    setup.owner.set_state(0, ModelState.AWAKE)
    answered = await setup.connection.request("POST", "/v1/completions", COMPLETION, bearer("user"))
    assert answered.status == 200


@pytest.mark.parametrize(
    ("key", "keep_alive", "seconds"),
    [("boss", "10m", 600), ("boss", 0, 0), ("boss", -1, 1e9), ("boss", None, None), ("user", "10m", None)],
)
async def test_keep_alive_is_when_the_model_sleeps_if_the_key_may_decide(
    setup: Setup, key: str, keep_alive: float | str | None, seconds: float | None
) -> None:
    setup.owner.set_state(0, ModelState.AWAKE)
    before_s = time.monotonic()
    body = {"model": MODEL, "prompt": "x", "options": {"num_predict": 1}, "keep_alive": keep_alive}
    assert (await setup.connection.request("POST", "/api/generate", body, bearer(key))).status == 200
    await setup.connection.idle()
    num_open, used_ns, kept_ns = setup.owner.uses(0)
    assert (num_open, used_ns > 0) == (0, True)
    if seconds is None:
        assert kept_ns == 0
    else:
        assert kept_ns / 1e9 - before_s >= seconds
        assert seconds == 1e9 or kept_ns / 1e9 - time.monotonic() <= seconds
    (loaded,) = (await setup.connection.request("GET", "/api/ps", None, bearer(key))).json()["models"]
    assert loaded["expires_at"].startswith("9999") == (seconds in (None, 1e9))


@pytest.mark.parametrize("path", ["chat", "generate", "embed", "embeddings"])
async def test_model_that_sleeps_is_not_loaded_to_be_unloaded(setup: Setup, path: str) -> None:
    """Nor is one that has never been loaded."""
    setup.owner.set_state(0, ModelState.ASLEEP)
    (keeper,) = setup.connection.protocol.app.context.models.keepers
    keeper.settled.clear()
    for served in (keeper.current, None):
        keeper.current = served
        body = {"model": MODEL, "keep_alive": 0}
        answered = await setup.connection.request("POST", f"/api/{path}", body, bearer("boss"))
        assert answered.status == 200
        assert answered.json().get("done_reason", "unload") == "unload"
        await setup.connection.idle()
        assert setup.owner.uses(0) == (0, 0, 0)
