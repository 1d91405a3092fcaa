"""Answers on a full disk: they arrive, and say that they are not stored."""

from __future__ import annotations

import pytest

from tests.frontend.endpoints.responses.test_responses import HI, PATH
from tests.frontend.harness import ClientConnection, FakeBackend, make_app
from tests.frontend.named_events import named_events


async def test_answer_says_that_it_is_not_stored_and_the_log_has_one_line(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(backend, max_response_file_bytes=1 << 16, max_stored_response_bytes=1 << 30)
    connection = ClientConnection(app)
    body = {**HI, "metadata": {f"{number}": "x" * 512 for number in range(16)}}
    while "x-penstock-not-stored" not in (await connection.post(PATH, body)).headers:
        pass
    for stream in (False, True):
        answer = await connection.post(PATH, {**body, "stream": stream})
        assert answer.status == 200
        assert answer.headers.get("x-penstock-not-stored") == (None if stream else "the disk is full")
        response_id = (named_events(answer)[-1]["response"] if stream else answer.json())["id"]
        missing = await connection.request("GET", f"{PATH}/{response_id}")
        assert (missing.status, missing.error["code"]) == (404, "response_not_found")
        assert "it was not stored: the disk is full" in missing.error["message"]
    lines = [record.getMessage() for record in caplog.records if record.name == "penstock.responses"]
    assert [line.partition(": ")[0][-10:] for line in lines] == ["ot be used", "not stored"]
    await connection.end()
