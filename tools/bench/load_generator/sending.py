"""Send a workload to an OpenAI endpoint, and record what each client observes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.http_client import (
    ClientConnection,
    ConnectionBroken,
    HttpClient,
    HttpReply,
    HungUp,
)
from penstock.tools.bench.load_generator.stats import LoadSummary, ObservedRequest, Outcome, summarize
from penstock.tools.bench.load_generator.target import Target
from penstock.tools.bench.load_generator.workload import Drop, PlannedRequest, Workload


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    text: str = ""
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk)


async def send_one(http: HttpClient, request: bytes, started_s: float, drop: Drop | None = None) -> ObservedRequest:
    """Send one request; listen until its end, or hang up as drop says."""
    record = ObservedRequest(started_s)
    await follow(http, request, record, drop)
    return record


async def follow(http: HttpClient, request: bytes, record: ObservedRequest, drop: Drop | None = None) -> None:
    """Send one request, and fill in the record as the answer arrives.

    A fault of the server goes into the record and is not raised. A cancelled task hangs up.
    """
    try:
        reply = await http.ask(lambda connection: _stream(connection, request, record, drop))
    except HungUp:
        record.outcome, record.output_tokens = Outcome.DROPPED, len(record.event_times_s)
    except ConnectionBroken as error:
        record.error = str(error)
    else:
        if reply.status != 200:
            record.error = f"status {reply.status}: {reply.body[:300].decode(errors='replace')}"
        elif not record.error:
            record.outcome = Outcome.COMPLETED
    record.ended_s = time.perf_counter()
    record.output_tokens = record.output_tokens or len(record.event_times_s)


async def _stream(
    connection: ClientConnection, request: bytes, record: ObservedRequest, drop: Drop | None
) -> HttpReply:
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    record.times_sent += 1
    record.error = "the stream ended without [DONE]"

    def hang_up_after(num_events: int) -> None:
        """Hang up after the delay, or at the next event if that comes first: a fast stream would end before."""
        nonlocal timer
        if drop is None or num_events < drop.after_events:
            return
        if num_events == drop.after_events:
            timer = loop.call_later(drop.delay_s, connection.hang_up)
        else:
            connection.hang_up()

    def on_event(at_s: float, data: bytes) -> None:
        if data == b"[DONE]":
            record.error = record.error if record.error.startswith("error event") else ""
            if drop is not None:
                connection.hang_up()
            return
        try:
            chunk = _chunk.decode(data)
        except msgspec.MsgspecError:
            chunk = _Chunk(error="not a completion chunk")
        if chunk.error is not None:
            record.error = f"error event: {data[:300].decode(errors='replace')}"
        if chunk.usage is not None:
            record.prompt_tokens, record.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.has_text:
                record.event_times_s.append(at_s)
                hang_up_after(len(record.event_times_s))

    hang_up_after(0)
    try:
        reply = await connection.exchange(request, on_event)
        if reply.status == 200 and not reply.headers.get("content-type", "").startswith("text/event-stream"):
            record.error = "the answer is not an event stream"
    except asyncio.CancelledError:
        connection.close()
        raise
    finally:
        if timer is not None:
            timer.cancel()
    return reply


async def run_closed_loop(
    target: Target, requests: Sequence[PlannedRequest], concurrency: int
) -> list[ObservedRequest]:
    """Run concurrency clients; each sends its next request when its last has ended."""
    remaining = iter([(target.encode(request), request.drop) for request in requests])
    records: list[ObservedRequest] = []

    async def client() -> None:
        for encoded, drop in remaining:
            records.append(await send_one(target.http, encoded, time.perf_counter(), drop))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return records


async def run_all(target: Target, requests: Sequence[PlannedRequest]) -> list[ObservedRequest]:
    """Send each request when it is due, and listen to its end. Raises BenchError if an answer is not of full length."""
    records = await run_open_loop(target, requests)
    for record, request in zip(records, requests, strict=True):
        if record.outcome is not Outcome.COMPLETED or record.output_tokens != request.output_tokens:
            reason = record.error or f"{record.output_tokens} tokens instead of {request.output_tokens}"
            raise BenchError(f"a request did not run as planned: {reason}")
    return records


async def ask_whole(http: HttpClient, request: bytes) -> bytes:
    """The body of the answer to a request that is not streamed. Raises BenchError unless its status is 200."""
    try:
        reply = await http.ask(lambda connection: connection.exchange(request))
    except ConnectionBroken as error:
        raise BenchError(str(error)) from None
    if reply.status != 200:
        raise BenchError(f"status {reply.status}: {reply.body[:300].decode(errors='replace')}")
    return bytes(reply.body)


async def run_open_loop(target: Target, requests: Sequence[PlannedRequest]) -> list[ObservedRequest]:
    """Send each request when it is due, even while others are still running."""
    encoded = [target.encode(request) for request in requests]
    start_s = time.perf_counter()

    async def send_when_due(request: PlannedRequest, data: bytes) -> ObservedRequest:
        due_s = start_s + request.due_s
        await asyncio.sleep(due_s - time.perf_counter())
        return await send_one(target.http, data, due_s, request.drop)

    return await asyncio.gather(*(send_when_due(*pair) for pair in zip(requests, encoded, strict=True)))


async def warm_up(target: Target, workload: Workload, num_requests: int, concurrency: int, seed: int) -> None:
    """Send unmeasured requests, with prompts that the run does not repeat. Raises BenchError if none succeeds."""
    if num_requests == 0:
        return
    requests = [
        PlannedRequest(planned.prompt, planned.output_tokens) for planned in workload.draw(num_requests, seed ^ 0x5EED)
    ]
    records = await run_closed_loop(target, requests, concurrency)
    if all(record.outcome is Outcome.FAILED for record in records):
        raise BenchError(f"the first requests failed: {records[0].error}")


async def measure(target: Target, workload: Workload, num_requests: int, concurrency: int, seed: int) -> LoadSummary:
    """Measure one row of the table: an open loop if the workload has a rate, else a closed loop."""
    requests = workload.draw(num_requests, seed)
    cpu_before_s = time.process_time()
    if workload.rate_per_s is None:
        records = await run_closed_loop(target, requests, concurrency)
        load = f"c={concurrency}"
    else:
        records = await run_open_loop(target, requests)
        load = f"{workload.rate_per_s:g}/s"
    return summarize(load, records, time.process_time() - cpu_before_s)
