"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: who may, and several replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import ApiKey
from penstock.frontend.endpoints.server import adapters
from penstock.frontend.generation.models.model_table import ServedModels
from penstock.shm.client import AdapterChange, FailureCode, Finish, TokenBatch
from penstock.shm.messages import Adapter
from tests.frontend.harness import ClientConnection, FakeBackend, Response, make_app, model_card, model_keeper

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CHANGE = AdapterChange("new", "there")
DONE = [TokenBatch([], Finish.STOP)]
KEYS = [ApiKey(b"client", "client"), ApiKey(b"chief", "chief", is_admin=True)]


@pytest.fixture
async def operator(connect: Callable[..., ClientConnection]) -> ClientConnection:
    return connect(admission=Admission(KEYS, admin_key="open-sesame"))


@pytest.fixture
def replicas(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    found = [backend, FakeBackend(model=model_card())]
    monkeypatch.setattr(adapters, "clients_of", lambda _: found)
    for replica in found:
        replica.script = lambda _: DONE
    return found


async def change(connection: ClientConnection, path: str = LOAD, key: str = "open-sesame", **body: Any) -> Response:
    body = body or {"lora_name": "new", "lora_path": "there"}
    return await connection.request("POST", path, body, headers=(("authorization", f"Bearer {key}"),))


@pytest.mark.parametrize(("key", "status"), [("client", 403), ("chief", 200), ("open-sesame", 200), ("none", 401)])
async def test_only_administrators_load(
    operator: ClientConnection, replicas: list[FakeBackend], key: str, status: int
) -> None:
    assert (await change(operator, key=key)).status == status
    assert [replica.questions for replica in replicas] == [[CHANGE] if status == 200 else []] * 2


async def test_adapter_that_one_replica_cannot_load_is_unloaded_from_the_others(
    operator: ClientConnection, replicas: list[FakeBackend]
) -> None:
    text = "lora_path: it is truncated"
    replicas[1].script = lambda _: [TokenBatch([], Finish.REJECTED, FailureCode.BAD_ADAPTER, failure_text=text)]
    answer = await change(operator)
    assert (answer.status, answer.error["message"], answer.error["param"]) == (400, text, "lora_path")
    assert replicas[0].questions == [CHANGE, AdapterChange("new")]


async def test_adapter_that_may_come_after_its_time_limit_is_unloaded(
    operator: ClientConnection, replicas: list[FakeBackend]
) -> None:
    replicas[0].script = lambda _: [TokenBatch([], Finish.EXPIRED)]
    assert (await change(operator)).status == 499
    assert [replica.questions for replica in replicas] == [[CHANGE, AdapterChange("new")], []]


async def test_replica_that_is_not_ready_is_503_and_nothing_is_loaded(
    operator: ClientConnection, replicas: list[FakeBackend]
) -> None:
    replicas[1].ready = False
    assert (await change(operator)).status == 503
    assert replicas[0].questions == []


async def test_change_during_an_upgrade_is_503_with_the_reason(
    operator: ClientConnection, replicas: list[FakeBackend]
) -> None:
    replicas[0].script = lambda _: [TokenBatch([], Finish.REJECTED, FailureCode.UNAVAILABLE, failure_text="not now")]
    answer = await change(operator)
    assert (answer.status, answer.error["message"], "retry-after" in answer.headers) == (503, "not now", True)


async def test_adapter_is_unloaded_from_the_replicas_that_have_it(
    operator: ClientConnection, replicas: list[FakeBackend], backend: FakeBackend
) -> None:
    assert (await change(operator, UNLOAD, lora_name="new")).status == 404
    backend.model = msgspec.structs.replace(model_card(), adapters=(Adapter("new", "an-id", 1),))
    replicas[0].script = lambda _: [TokenBatch([], Finish.REJECTED, FailureCode.NO_ADAPTER)]
    assert (await change(operator, UNLOAD, lora_name="new")).json()["is_loaded"] is False
    assert replicas[1].questions == [AdapterChange("new")]


@pytest.mark.parametrize("body", [{"lora_name": "x"}, {"lora_path": "x"}, {"lora_name": "x", "lora_path": ""}])
async def test_missing_or_empty_field_is_400(
    operator: ClientConnection, replicas: list[FakeBackend], body: dict[str, str]
) -> None:
    assert (await change(operator, **body)).status == 400
    assert replicas[0].questions == []


async def test_name_of_another_model_or_its_adapter_is_400(backend: FakeBackend, replicas: list[FakeBackend]) -> None:
    other = FakeBackend(model=model_card(model_id="other", adapters=(Adapter("its", "an-id", 1),)))
    models = ServedModels(model_keeper(backend), others=[model_keeper(other)])
    connection = ClientConnection(make_app(backend, models=models, admission=Admission(KEYS)))
    for name in ("other", "its"):
        refused = await change(connection, key="chief", lora_name=name, lora_path="there")
        assert (refused.status, refused.error["param"]) == (400, "lora_name")
    assert replicas[0].questions == []
    assert (await change(connection, key="chief")).status == 200


async def test_name_that_another_model_gets_meanwhile_is_given_up(
    backend: FakeBackend, replicas: list[FakeBackend]
) -> None:
    other = FakeBackend(model=model_card(model_id="other"))
    models = ServedModels(model_keeper(backend), others=[model_keeper(other)])
    connection = ClientConnection(make_app(backend, models=models, admission=Admission(KEYS)))

    def load(_: object) -> list[TokenBatch]:
        other.model = msgspec.structs.replace(other.model, adapters=(Adapter("new", "an-id", 1),))
        return DONE

    replicas[1].script = load
    assert (await change(connection, key="chief")).status == 400
    assert [replica.questions for replica in replicas] == [[CHANGE, AdapterChange("new")]] * 2
