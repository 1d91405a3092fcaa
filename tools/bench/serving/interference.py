"""What a long prompt does to the streams that run when it arrives.

Its prefill is cut into steps of --max-batch-tokens, so that the longest gap in a stream should be about one such step.
That step is measured first, by itself: a prompt that fills exactly one beside the running streams. Then the long one
arrives. Both are seen from outside, as gaps between the streams' events.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import uvloop

from penstock.backend.passes.decoder.cuda.device.device_choice import choose_device
from penstock.tools.bench.harness.counters import backend_counters
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.load_generator.sending import BenchError, Target, follow, send_one
from penstock.tools.bench.load_generator.stats import Aim, ObservedRequest, Outcome, percentile
from penstock.tools.bench.load_generator.workload import Lengths, PlannedRequest, Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.tools.bench.harness.run import Bench
    from penstock.tools.bench.harness.server import BenchServer

NUM_STREAMS = 8
_CYCLES = 4
"""Arrivals in a round."""
_QUIET_EVENTS = 8
"""Of each stream, before anything else arrives."""


@dataclass(frozen=True, slots=True)
class InterferenceRound:
    """Gaps between the running streams' tokens."""

    quiet_itl_ms: float
    """The median while nothing arrives."""
    full_step_ms: float
    """The median of the gaps that one step of the full budget made."""
    itl_p50_ms: float
    """While the long prompts were computed."""
    itl_p99_ms: float
    itl_max_ms: float
    long_ttft_ms: float
    """Of the long prompts, the median."""

    @property
    def ratio(self) -> float:
        return self.itl_p99_ms / self.full_step_ms


@dataclass(frozen=True, slots=True)
class InterferenceResult:
    streams: int
    long_prompt_tokens: int
    step_tokens: int
    """The budget of a step."""
    rounds: list[InterferenceRound]

    def aim(self) -> Aim:
        ratio = statistics.median(entry.ratio for entry in self.rounds)
        return Aim("ITL p99 while a long prompt arrives / a full step", ratio, "at most", 2.0)


def run_interference(bench: Bench, console: Console) -> bool:
    server = bench.server
    step_tokens = server.step_tokens(choose_device(server.gpu))
    if min(server.max_running, step_tokens) <= NUM_STREAMS:
        raise BenchError(
            f"--max-running is {server.max_running} and --max-batch-tokens {step_tokens}; this measurement "
            f"has {NUM_STREAMS} running streams and wants more of both"
        )
    with bench.bench_server() as own:
        found = uvloop.run(_on(bench, own, step_tokens))
    bench.report.sections["interference"] = found
    bench.report.aims.append(found.aim())
    console.print(interference_table(found))
    return True


async def _on(bench: Bench, own: BenchServer, step_tokens: int) -> InterferenceResult:
    async with backend_counters(own) as counters:
        max_context_tokens = counters.max_context_tokens
    long_prompt_tokens = min(bench.options.long_prompt_tokens, max_context_tokens - 1)
    found = InterferenceResult(NUM_STREAMS, long_prompt_tokens, step_tokens, [])
    async with bench.target(own.url) as target:
        load = InterferenceLoad(bench.plain_workload(target), step_tokens, long_prompt_tokens, max_context_tokens)
        for index in range(bench.num_rounds):
            with bench.progress.status(f"a long prompt among {NUM_STREAMS} streams, round {index + 1}"):
                found.rounds.append(await measure_round(target, load, bench.options.seed + 10_000 * index))
    return found


@dataclass(frozen=True, slots=True)
class InterferenceLoad:
    workload: Workload
    step_tokens: int
    long_prompt_tokens: int
    max_context_tokens: int

    def streams(self, seed: int) -> list[PlannedRequest]:
        """They would go on to the context's end; whoever has seen enough hangs up."""
        most = self.max_context_tokens - self.workload.prompt_tokens.high
        if most < 1:
            raise BenchError(f"--prompt-tokens leaves no room for an answer in {self.max_context_tokens} tokens")
        return replace(self.workload, output_tokens=Lengths(most, most)).draw(NUM_STREAMS, seed)

    def arrival(self, num_tokens: int, seed: int) -> PlannedRequest:
        """One that is over with its first token."""
        drawn = replace(self.workload, prompt_tokens=Lengths(num_tokens, num_tokens), output_tokens=Lengths(1, 1))
        return drawn.draw(1, seed)[0]


async def measure_round(target: Target, load: InterferenceLoad, seed: int) -> InterferenceRound:
    """Raises BenchError where a request fails."""
    quiet_s: list[float] = []
    full_s: list[float] = []
    long_s: list[float] = []
    long_ttfts_s: list[float] = []
    for cycle_seed in range(seed, seed + 3 * _CYCLES, 3):
        async with running_streams(target, load.streams(cycle_seed)) as records:
            counts = [len(record.event_times_s) for record in records]
            from_s = time.perf_counter()
            await _wait_for_events(records, [count + _QUIET_EVENTS for count in counts])
            quiet_s += [gap_s for record in records for gap_s in gaps_s(record, from_s, time.perf_counter())]
            full_step = load.arrival(load.step_tokens - NUM_STREAMS, cycle_seed + 1)
            from_s, to_s = await _arrive(target, full_step, records)
            full_s += [max(gaps_s(record, from_s, to_s)) for record in records]
            from_s, to_s = await _arrive(target, load.arrival(load.long_prompt_tokens, cycle_seed + 2), records)
            long_s += [gap_s for record in records for gap_s in gaps_s(record, from_s, to_s)]
            long_ttfts_s.append(to_s - from_s)
    return InterferenceRound(
        quiet_itl_ms=1000 * statistics.median(quiet_s),
        full_step_ms=1000 * statistics.median(full_s),
        itl_p50_ms=1000 * statistics.median(long_s),
        itl_p99_ms=1000 * (percentile(long_s, 99) or 0.0),
        itl_max_ms=1000 * max(long_s),
        long_ttft_ms=1000 * statistics.median(long_ttfts_s),
    )


@contextlib.asynccontextmanager
async def running_streams(target: Target, requests: Sequence[PlannedRequest]) -> AsyncIterator[list[ObservedRequest]]:
    """Streams that all have a token when the context begins, and are left when it ends. Raises BenchError."""
    records = [ObservedRequest(time.perf_counter()) for _ in requests]
    tasks = [
        asyncio.create_task(follow(target.http, target.encode(request), record))
        for request, record in zip(requests, records, strict=True)
    ]
    try:
        await _wait_for_events(records, [1] * len(records))
        yield records
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_events(records: Sequence[ObservedRequest], counts: Sequence[int]) -> None:
    """Until each has had as many. Raises BenchError where a stream ends meanwhile."""
    while any(len(record.event_times_s) < count for record, count in zip(records, counts, strict=True)):
        if ended := next((record for record in records if record.ended_s), None):
            raise BenchError(f"a running stream ended too soon: {ended.error or 'its context was full'}")
        await asyncio.sleep(0.001)


async def _arrive(target: Target, request: PlannedRequest, records: Sequence[ObservedRequest]) -> tuple[float, float]:
    """When the request was sent and when its first token came; every running stream has had a token since."""
    from_s = time.perf_counter()
    arrived = await send_one(target.http, target.encode(request), from_s)
    if arrived.outcome is not Outcome.COMPLETED or not arrived.event_times_s:
        raise BenchError(f"a prompt that arrived was not answered: {arrived.error}")
    await _wait_for_events(records, [len(record.event_times_s) + 1 for record in records])
    return from_s, arrived.event_times_s[0]


def gaps_s(record: ObservedRequest, from_s: float, to_s: float) -> list[float]:
    """The gaps between events of which any part lies in this span of time."""
    return [after - before for before, after in pairwise(record.event_times_s) if after > from_s and before < to_s]


def interference_table(found: InterferenceResult) -> Table:
    title = (
        f"{found.streams} running streams, a prompt of {found.long_prompt_tokens:,} tokens arrives, "
        f"steps of at most {found.step_tokens}"
    )
    columns = ["round", "ITL ms,\nundisturbed", "one full\nstep, ms", "ITL ms meanwhile\np50 / p99 / max"]
    table = make_table(title, *columns, "p99 by\nfull step", "TTFT ms of the\nlong prompt")
    for number, entry in enumerate(found.rounds, start=1):
        table.add_row(
            str(number),
            f"{entry.quiet_itl_ms:.1f}",
            f"{entry.full_step_ms:.1f}",
            f"{entry.itl_p50_ms:.1f} / {entry.itl_p99_ms:.1f} / {entry.itl_max_ms:.1f}",
            f"{entry.ratio:.2f} ×",
            f"{entry.long_ttft_ms:.0f}",
        )
    return table
