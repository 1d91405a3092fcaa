"""Timings of a request: in the body if requested, and in the Server-Timing header."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.frontend.telemetry.timings import Timings
from penstock.shm.client import GenerationRequest, TokenBatch
from penstock.shm.messages import FailureCode, Finish, Progress
from tests.frontend.harness import ClientConnection, FakeBackend, says, token_ids

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, COMPLETIONS: {"prompt": "the cat"}}
LLAMA_CPP = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}


def server_timing(value: str) -> dict[str, float]:
    """Parse the header as browsers do."""
    entries = [re.fullmatch(r'(\w+);(?:dur=([\d.]+)|desc="([\d.]+)")', entry) for entry in value.split(", ")]
    return {entry[1]: float(entry[2] or entry[3]) for entry in entries if entry is not None}


def test_each_part_of_the_time_is_reported_once() -> None:
    timings = Timings(
        received_s=10.0,
        submitted_s=10.1,
        first_token_s=11.0,
        now_s=13.0,
        queue_s=0.4,
        prompt_tokens=60,
        cached_tokens=10,
        completion_tokens=21,
        num_preemptions=2,
    )
    assert timings.as_dict() == {
        "cache_n": 10,
        "prompt_n": 50,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 10.0,
        "prompt_per_second": 100.0,
        "predicted_n": 21,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 95.238,
        "predicted_per_second": 10.0,
        "queue_ms": 400.0,
        "ttft_ms": 1000.0,
        "total_ms": 3000.0,
        "preemptions": 2,
    }
    header = server_timing(timings.server_timing(is_whole=True).decode())
    assert header["prepare"] + header["queue"] + header["prefill"] == header["ttft"] == 1000.0
    assert header["ttft"] + header["decode"] == header["total"] == 3000.0
    assert (header["tps"], header["preemptions"]) == (10.0, 2.0)
    begun = server_timing(timings.server_timing(is_whole=False).decode())
    assert begun == {name: header[name] for name in ("prepare", "queue", "prefill", "ttft")}


@pytest.mark.parametrize(("completion_tokens", "first_token_s"), [(0, None), (1, 11.0), (0, 10.0)])
def test_unknown_rate_is_null(completion_tokens: int, first_token_s: float | None) -> None:
    timings = Timings(10.0, 10.0, first_token_s, 11.0, 0.0, 5, 5, completion_tokens, 0)
    fields = timings.as_dict()
    assert fields["predicted_per_second"] is None
    assert fields["prompt_per_second"] is None
    assert "tps" not in server_timing(timings.server_timing(is_whole=True).decode())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_timings_are_in_the_body_if_requested_and_always_in_the_header(
    connection: ClientConnection, backend: FakeBackend, path: str
) -> None:
    plain = await connection.post(path, PROMPTS[path])
    assert "timings" not in plain.json()
    assert set(server_timing(plain.headers["server-timing"])) >= {"queue", "prefill", "ttft", "decode", "preemptions"}
    requested = await connection.post(path, {**PROMPTS[path], "return_timings": True})
    timings, usage = requested.json()["timings"], requested.json()["usage"]
    assert set(timings) == LLAMA_CPP | {"queue_ms", "ttft_ms", "total_ms", "preemptions"}
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    del (body := requested.json())["timings"]
    assert set(body) == set(plain.json())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("with_usage", [False, True])
async def test_stream_has_timings_in_its_last_chunk(connection: ClientConnection, path: str, with_usage: bool) -> None:
    body: dict[str, Any] = {**PROMPTS[path], "stream": True, "return_timings": True}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    response = await connection.post(path, body)
    *chunks, last, done = response.events()
    assert done == "[DONE]"
    assert (last["choices"], "usage" in last) == ([], with_usage)
    assert last["timings"]["predicted_n"] == 14
    assert not any("timings" in chunk for chunk in chunks)
    assert all(("usage" in chunk) == with_usage for chunk in chunks)
    header = server_timing(response.headers["server-timing"])
    assert set(header) == {"prepare", "queue", "prefill", "ttft"}


async def test_timings_per_token_are_in_every_chunk_after_the_role(connection: ClientConnection) -> None:
    body = {**PROMPTS[CHAT], "stream": True, "timings_per_token": True}
    role, *chunks, done = (await connection.post(CHAT, body)).events()
    assert "timings" not in role
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1], done) == (1, 14, "[DONE]")


async def test_queue_time_and_preemptions_come_from_the_backend(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    def script(request: GenerationRequest) -> list[TokenBatch]:
        return [TokenBatch(token_ids("ab")), TokenBatch(token_ids("c"), Finish.LENGTH)]

    backend.script = script
    backend.queue_s, backend.num_preemptions = 0.25, 3
    response = await connection.post(COMPLETIONS, {"prompt": "x", "n": 2, "return_timings": True})
    assert response.json()["timings"]["queue_ms"] == 250.0
    assert response.json()["timings"]["preemptions"] == 6
    assert server_timing(response.headers["server-timing"])["queue"] == 250.0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("field", ["return_timings", "timings_per_token"])
async def test_other_endpoints_refuse_the_fields(connection: ClientConnection, path: str, field: str) -> None:
    prompt = {"input": "x"} if path == "/v1/responses" else {"messages": [], "max_tokens": 1}
    assert (await connection.post(path, {**prompt, field: True})).status == 400


async def test_first_chunk_reports_the_progress_of_the_prompt(connection: ClientConnection) -> None:
    body = {**PROMPTS[CHAT], "stream": True, "return_progress": True}
    first, *others = (await connection.post(CHAT, body)).events()[:-1]
    progress = first["prompt_progress"]
    assert progress["total"] == progress["processed"] >= progress["cache"]
    assert progress["time_ms"] >= 0
    assert not any("prompt_progress" in event for event in others)


async def test_chunks_report_the_progress_of_a_long_prompt(connection: ClientConnection, backend: FakeBackend) -> None:
    steps = [Progress(0, 3, 4, 0.5), Progress(0, 3, 8, 0.75)]

    def script(request: GenerationRequest) -> list[TokenBatch]:
        assert request.reports_progress == (len(backend.streams) == 0)  # the first choice stands for all
        return [*(TokenBatch([], progress=step) for step in steps), *says("Hello")(request)]

    backend.script = script
    body = {**PROMPTS[CHAT], "stream": True, "return_progress": True}
    events = (await connection.post(CHAT, body)).events()[:-1]
    found = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    total = found[0]["total"]
    assert [(each["cache"], each["processed"], each["time_ms"]) for each in found[:2]] == [(3, 4, 500.0), (3, 8, 750.0)]
    assert [(each["total"], each["processed"]) for each in found[2:]] == [(total, total)]
    assert [event["choices"][0]["delta"] for event in events[:3]] == [{"role": "assistant", "content": ""}, {}, {}]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "Hello"


async def test_failure_after_progress_is_the_last_event(connection: ClientConnection, backend: FakeBackend) -> None:
    failed = TokenBatch([], Finish.FAILED, FailureCode.INTERNAL)
    backend.script = lambda _: [TokenBatch([], progress=Progress(0, 0, 4, 0.5)), failed]
    response = await connection.post(CHAT, {**PROMPTS[CHAT], "stream": True, "return_progress": True})
    first, last = response.events()[:2]
    assert (response.status, first["prompt_progress"]["processed"]) == (200, 4)
    assert "error" in last


@pytest.mark.parametrize("fields", [{"return_progress": True}, {"stream": True}, {}])
async def test_progress_is_asked_for_only_by_a_stream_with_the_field(
    connection: ClientConnection, backend: FakeBackend, fields: dict[str, bool]
) -> None:
    await connection.post(CHAT, {**PROMPTS[CHAT], **fields})
    assert not backend.last.reports_progress
