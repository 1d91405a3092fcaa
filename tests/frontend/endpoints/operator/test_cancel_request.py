"""POST /admin/requests/FRONTEND.REQUEST/cancel: who may, and how it is answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import named_keys
from penstock.shm.client import FailureCode, Finish, RequestName, TokenBatch
from tests.frontend.harness import ClientConnection, FakeBackend, Response

PATH = "/admin/requests/42.7/cancel"
ADMIN = (("authorization", "Bearer open-sesame"),)


@pytest.fixture
async def operator(connect: Callable[..., ClientConnection]) -> ClientConnection:
    return connect(admission=Admission(named_keys(["client"]), admin_key="open-sesame"))


async def cancel(connection: ClientConnection, path: str = PATH) -> Response:
    return await connection.request("POST", path, headers=ADMIN)


async def test_open_request_is_cancelled_and_logged(
    operator: ClientConnection, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = lambda _: [TokenBatch([], Finish.STOP)]
    caplog.set_level("WARNING", "penstock.admin")
    answer = await cancel(operator)
    assert (answer.status, answer.json()) == (200, {"object": "request.cancelled"})
    assert backend.questions == [RequestName(42, 7)]
    assert not backend.streams
    assert [record.getMessage() for record in caplog.records] == ["the operator cancelled request 7 of frontend 42"]


async def test_request_that_is_not_open_is_404(operator: ClientConnection, backend: FakeBackend) -> None:
    backend.script = lambda _: [TokenBatch([], Finish.REJECTED, FailureCode.NOT_OPEN)]
    answer = await cancel(operator)
    assert (answer.status, answer.error["code"]) == (404, "request_not_found")
    assert "request 42.7 is not open" in answer.error["message"]


async def test_backend_that_is_away_or_does_not_answer_is_said(
    operator: ClientConnection, backend: FakeBackend
) -> None:
    backend.script = lambda _: [TokenBatch([], Finish.EXPIRED)]
    assert (await cancel(operator)).status == 499
    backend.ready = False
    assert (await cancel(operator)).status == 503


@pytest.mark.parametrize("name", ["x", "1", "1.x", "-1.2", "1.2.3", f"{1 << 63}.1", f"1.{1 << 63}", "1.2%00"])
async def test_bad_name_is_400(operator: ClientConnection, backend: FakeBackend, name: str) -> None:
    answer = await cancel(operator, f"/admin/requests/{name}/cancel")
    assert (answer.status, answer.error["param"]) == (400, "request")
    assert not backend.questions


async def test_only_the_admin_key_may_cancel(
    operator: ClientConnection, connect: Callable[..., ClientConnection], backend: FakeBackend
) -> None:
    for key in (None, "client", "open-sesam", ""):
        headers = [] if key is None else [("authorization", f"Bearer {key}")]
        answer = await operator.request("POST", PATH, headers=headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    without = await cancel(connect())
    assert without.status == 401
    assert "no admin key; start it with --admin-key" in without.error["message"]
    assert not backend.questions
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert (await operator.request("POST", "/v1/chat/completions", chat, ADMIN)).status == 401


async def test_cancelled_client_is_told_who_did_it(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = lambda _: [TokenBatch([4]), TokenBatch([], Finish.FAILED, FailureCode.CANCELLED)]
    answer = await connection.post("/v1/completions", {"prompt": "x"})
    assert (answer.status, answer.error["code"]) == (499, "cancelled_by_operator")
    assert "operator cancelled this request, after 1 tokens" in answer.error["message"]
