"""`penstock bench failover`: kill one of two replicas under load, or replace the only backend by an upgrade; compare
gaps and texts with an undisturbed run."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
import uvloop
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.table import Table

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.harness.server import BenchServer
from penstock.tools.bench.load_generator.http_client import ConnectionBroken
from penstock.tools.bench.load_generator.target import Target
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, BenchServerOptions, ReportOptions, SeedOptions

_CONNECT_TIMEOUT_S = 60.0


@MEASUREMENT
@dataclass(frozen=True)
class FailoverOptions:
    streams: AtLeastOne = 64
    """Streams that run at once. Half of them are seeded, the others greedy."""

    prompt_tokens: AtLeastOne = 64
    """Tokens of each prompt; no two begin alike."""

    output_tokens: Annotated[int, Parameter(validator=Number(gte=8))] = 128
    """Tokens of each answer. The replica is killed when each stream has a tenth of them."""

    by: Literal["kill", "upgrade"] = "kill"
    """kill: SIGKILL to one of the replicas. upgrade: SIGUSR2 to the server of one backend, which another replaces; the
    answers must last longer than its start."""


@dataclass(slots=True)
class Answer:
    """One stream as its client saw it."""

    tokens: list[str] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    """time.perf_counter() of each event with tokens."""

    def longest_gap_s(self) -> float:
        return max((after - before for before, after in pairwise(self.arrived_s)), default=0.0)


@dataclass(frozen=True, slots=True)
class Failover:
    streams: int
    moved: int
    """Streams that were on the killed replica."""
    equal_answers: int
    """Answers whose tokens are those of the undisturbed run."""
    step_ms: float
    """Median time between the tokens of a stream, undisturbed."""
    gap_undisturbed_ms: tuple[float, float]
    """Median and largest of the streams' longest gaps."""
    gap_of_kill_ms: tuple[float, float]
    """The same for all streams of the disturbed run."""
    gap_of_moved_ms: tuple[float, float]
    """The longest gap that ends after the kill: median and largest of as many streams as moved, those that waited
    longest."""
    first_computation_ms: tuple[float, float]
    """Time to the first token when all prompts were computed for the first time, spread over the replicas."""


def failover(
    *,
    options: FailoverOptions = FailoverOptions(),
    seed: SeedOptions = SeedOptions(),
    server: BenchServerOptions = BenchServerOptions(replicas=2),
    report: ReportOptions = ReportOptions(),
) -> int:
    server = dataclasses.replace(server, replicas=max(2, server.num_replicas) if options.by == "kill" else 1)
    with measurement_run(report.json) as run:
        with run.server(server) as own, run.status(f"{options.streams} streams, twice"):
            found = uvloop.run(_measure(own, server.num_replicas, options, seed.seed))
        run.add("failover", found, failover_table(found, options.by))
        if found.equal_answers < found.streams or not found.moved:
            run.exit_status = 1
    return run.exit_status


async def _measure(server: BenchServer, num_replicas: int, options: FailoverOptions, seed: int) -> Failover:
    async with server.address.connect() as target:
        await _wait_for_replicas(target, num_replicas)
        requests = _requests(target, options, seed)
        begun_s = time.perf_counter()
        first = await _run(target, requests)  # the prompts' first computation, and code that runs for the first time
        ttfts_s = [answer.arrived_s[0] - begun_s for answer in first]
        undisturbed = await _run(target, requests)
        kill_s, moved_before = 0.0, await _num_resumed(target)

        def kill(answers: Sequence[Answer]) -> None:
            nonlocal kill_s
            if not kill_s and min(len(answer.tokens) for answer in answers) >= options.output_tokens / 10:
                if options.by == "kill":
                    os.kill(server.backend_pid(), signal.SIGKILL)
                else:
                    os.kill(server.process.pid, signal.SIGUSR2)
                kill_s = time.perf_counter()

        disturbed = await _run(target, requests, kill)
        if not kill_s:
            raise BenchError("the streams ended before the replica was killed: raise --output-tokens")
        moved = await _num_resumed(target) - moved_before
    return summarize(undisturbed, disturbed, kill_s, moved, ttfts_s)


def summarize(
    undisturbed: Sequence[Answer], disturbed: Sequence[Answer], kill_s: float, moved: int, ttfts_s: list[float]
) -> Failover:
    """Compare the two runs of the same requests. moved streams changed the replica."""
    gaps = [after - before for one in undisturbed for before, after in pairwise(one.arrived_s)]
    after_kill = sorted(
        max((after - before for before, after in pairwise(answer.arrived_s) if after > kill_s), default=0.0)
        for answer in disturbed
    )
    return Failover(
        streams=len(disturbed),
        moved=moved,
        equal_answers=sum(one.tokens == other.tokens for one, other in zip(undisturbed, disturbed, strict=True)),
        step_ms=1e3 * statistics.median(gaps),
        gap_undisturbed_ms=_median_and_largest([answer.longest_gap_s() for answer in undisturbed]),
        gap_of_kill_ms=_median_and_largest([answer.longest_gap_s() for answer in disturbed]),
        gap_of_moved_ms=_median_and_largest(after_kill[-moved:] if moved else [0.0]),
        first_computation_ms=_median_and_largest(ttfts_s),
    )


def _median_and_largest(seconds: list[float]) -> tuple[float, float]:
    return 1e3 * statistics.median(seconds), 1e3 * max(seconds)


def _requests(target: Target, options: FailoverOptions, seed: int) -> list[bytes]:
    if target.vocab_size is None:
        raise BenchError("/v1/models has no vocab_size: this is not a Penstock server")
    drawn = random.Random(seed)  # noqa: S311 - prompts, not secrets
    bodies = []
    for stream in range(options.streams):
        body: dict[str, Any] = {
            "model": target.model,
            "prompt": [drawn.randrange(4, target.vocab_size) for _ in range(options.prompt_tokens)],
            "max_tokens": options.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
            "temperature": stream % 2,
            "seed": stream,
        }
        bodies.append(target.http.encode_post("/v1/completions", msgspec.json.encode(body)))
    return bodies


async def _run(
    target: Target, requests: Sequence[bytes], at_event: Callable[[Sequence[Answer]], None] = lambda _: None
) -> list[Answer]:
    """Run all requests at once. Raises BenchError if one fails."""
    answers = [Answer() for _ in requests]

    async def send(request: bytes, answer: Answer) -> None:
        def take(arrived_s: float, payload: bytes) -> None:
            if payload == b"[DONE]":
                return
            choices = msgspec.json.decode(payload).get("choices") or []
            tokens = [token for choice in choices for token in (choice.get("logprobs") or {}).get("tokens", [])]
            if tokens:
                answer.tokens += tokens
                answer.arrived_s.append(arrived_s)
                at_event(answers)

        reply = await target.http.ask(lambda connection: connection.exchange(request, take))
        if reply.status != 200:
            raise BenchError(f"a stream was refused with status {reply.status}: {reply.body[:200]!r}")

    try:
        await asyncio.gather(*(send(request, answer) for request, answer in zip(requests, answers, strict=True)))
    except ConnectionBroken as error:
        raise BenchError(f"a stream broke: {error}") from None
    return answers


async def _num_resumed(target: Target) -> int:
    return int(sum(await target.samples("penstock_worker_streams_resumed_total")))


async def _wait_for_replicas(target: Target, count: int) -> None:
    """Raises BenchError."""
    deadline_s = time.monotonic() + _CONNECT_TIMEOUT_S
    while sum(await target.samples("penstock_backend_up")) < count:
        if time.monotonic() > deadline_s:
            raise BenchError(f"{count} replicas were not connected after {_CONNECT_TIMEOUT_S:g} s")
        await asyncio.sleep(0.05)


def failover_table(found: Failover, by: str) -> Table:
    what = "One of the replicas killed" if by == "kill" else "The backend replaced by an upgrade"
    title = (
        f"{what} under {found.streams} streams: {found.moved} moved, "
        f"{found.equal_answers} answers equal; a step takes {found.step_ms:.1f} ms"
    )
    table = make_table(title, "longest gap between two tokens of a stream", "median ms", "largest ms")
    for name, (median_ms, largest_ms) in (
        ("undisturbed", found.gap_undisturbed_ms),
        (f"with the {by}, all streams", found.gap_of_kill_ms),
        (f"with the {by}, the streams that moved", found.gap_of_moved_ms),
        ("beside: the first token when all prompts are computed for the first time", found.first_computation_ms),
    ):
        table.add_row(name, f"{median_ms:.1f}", f"{largest_ms:.1f}")
    return table
