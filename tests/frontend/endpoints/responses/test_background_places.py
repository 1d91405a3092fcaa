"""Background responses of one key leave places and space to other keys."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.endpoints.responses.test_responses import HI, PATH
from tests.frontend.harness import ClientConnection, FakeBackend, Response, make_app, model_card, says, silent

PLACES = "penstock.frontend.endpoints.responses.background_places"


async def test_background_responses_of_one_key_leave_places_to_other_keys(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{PLACES}.MAX_IN_BACKGROUND", 4)
    backend.script = silent
    app = make_app(backend, api_keys=["one", "two"])
    connection = ClientConnection(app)

    async def statuses(key: str, count: int) -> list[int]:
        headers = [("authorization", f"Bearer {key}")]
        body = {**HI, "background": True}
        return [(await connection.request("POST", PATH, body, headers)).status for _ in range(count)]

    assert await statuses("one", 6) == [200] * 4 + [429] * 2
    assert await statuses("two", 3) == [200, 200, 429]
    app.exchanges.end_all()
    await connection.end()


async def test_background_responses_of_one_key_cannot_fill_the_file(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(f"{PLACES}.MAX_BACKGROUND_BYTES", 4 << 20)
    backend.model = model_card(max_context_tokens=1 << 20)
    backend.script = silent
    app = make_app(
        backend,
        api_keys=["one", "two"],
        response_database=str(tmp_path / "db"),
        max_stored_response_bytes=1 << 20,
        max_response_file_bytes=(2 + 2 * 4) << 20,
    )
    connection = ClientConnection(app)

    async def post(key: str, body: dict[str, Any]) -> Response:
        return await connection.request("POST", PATH, body, [("authorization", f"Bearer {key}")])

    flood = {**HI, "input": "the cat " * 50_000, "background": True}
    answers = [await post("one", flood) for _ in range(12)]
    assert [answer.status for answer in answers] == [200] * 2 + [429] * 10
    assert "the limit is 4194304" in answers[-1].error["message"]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert (await post("two", {**HI, "background": True})).status == 200
    backend.script = says("ok")
    kept = await post("two", HI)
    assert (await post("two", {**HI, "previous_response_id": kept.json()["id"]})).status == 200
    too_large = await post("two", {**flood, "input": "the cat " * 180_000})
    assert (too_large.status, too_large.error["param"]) == (400, "background")
    assert "the limit is 4194304" in too_large.error["message"]
    app.exchanges.end_all()
    await connection.end()
    await asyncio.gather(*app.responses._runs._tasks)
    app.store.close()
