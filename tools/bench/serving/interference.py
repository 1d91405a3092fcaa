"""`penstock bench interference`: the effect of a long prompt on the streams that run when it arrives.

Its prefill is cut into steps of --max-batch-tokens, so the longest gap in a stream should be about one such step. That
step is measured first, with a prompt that fills exactly one step together with the running streams. Then the long
prompt arrives. Both are measured from outside, as gaps between the events of the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import uvloop
from rich.table import Table

from penstock.backend.passes.cuda.device.device_choice import choose_device
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.counters import backend_counters
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.harness.server import BenchServer
from penstock.tools.bench.load_generator.sending import follow, send_one
from penstock.tools.bench.load_generator.stats import Aim, ObservedRequest, Outcome, percentile
from penstock.tools.bench.load_generator.target import Target
from penstock.tools.bench.load_generator.workload import Lengths, PlannedRequest, Workload
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    BenchServerOptions,
    PromptLength,
    ReportOptions,
    SeededRounds,
)

NUM_STREAMS = 8
_CYCLES = 4
"""Arrivals of the long prompt in a round."""
_QUIET_EVENTS = 8
"""Events of each stream before anything else arrives."""


@MEASUREMENT
@dataclass(frozen=True)
class InterferenceOptions:
    long_prompt_tokens: AtLeastOne = 2048
    """Length of the prompt that arrives; shorter if the model's context is shorter."""


@dataclass(frozen=True, slots=True)
class InterferenceRound:
    """Gaps between the tokens of the running streams."""

    quiet_itl_ms: float
    """Median gap while nothing arrives."""
    full_step_ms: float
    """Median of the gaps made by one step of the full budget."""
    itl_p50_ms: float
    """Median gap while a long prompt is computed."""
    itl_p99_ms: float
    itl_max_ms: float
    long_ttft_ms: float
    """Median of the long prompts."""

    @property
    def ratio(self) -> float:
        return self.itl_p99_ms / self.full_step_ms


@dataclass(frozen=True, slots=True)
class InterferenceResult:
    streams: int
    long_prompt_tokens: int
    step_tokens: int
    """Token budget of a step."""
    rounds: list[InterferenceRound]

    def aim(self) -> Aim:
        ratio = statistics.median(entry.ratio for entry in self.rounds)
        return Aim("ITL p99 while a long prompt arrives / a full step", ratio, "at most", 2.0)


def interference(
    *,
    options: InterferenceOptions = InterferenceOptions(),
    prompt: PromptLength = PromptLength(),
    rounds: SeededRounds = SeededRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        step_tokens = server.step_tokens(choose_device(server.gpu))
        if min(server.num_running(), step_tokens) <= NUM_STREAMS:
            raise BenchError(
                f"--max-running is {server.num_running()} and --max-batch-tokens {step_tokens}; both must be above the "
                f"{NUM_STREAMS} streams that run in this measurement"
            )
        with run.server(server) as own:
            found = uvloop.run(_measure(run, own, step_tokens, options.long_prompt_tokens, prompt, rounds))
        run.add("interference", found, interference_table(found), [found.aim()])
    return run.exit_status


async def _measure(
    run: MeasurementRun,
    server: BenchServer,
    step_tokens: int,
    long_prompt_tokens: int,
    prompt: PromptLength,
    rounds: SeededRounds,
) -> InterferenceResult:
    async with backend_counters(server) as counters:
        max_context_tokens = counters.max_context_tokens
    long_prompt_tokens = min(long_prompt_tokens, max_context_tokens - 1)
    found = InterferenceResult(NUM_STREAMS, long_prompt_tokens, step_tokens, [])
    async with server.address.connect() as target:
        workload = Workload(prompt.prompt_tokens, Lengths(1, 1), target.vocab_size)
        load = InterferenceLoad(workload, step_tokens, long_prompt_tokens, max_context_tokens)
        for index in range(rounds.rounds):
            with run.status(f"a long prompt among {NUM_STREAMS} streams, round {index + 1}"):
                found.rounds.append(await measure_round(target, load, rounds.seed + 10_000 * index))
    return found


@dataclass(frozen=True, slots=True)
class InterferenceLoad:
    workload: Workload
    step_tokens: int
    long_prompt_tokens: int
    max_context_tokens: int

    def streams(self, seed: int) -> list[PlannedRequest]:
        """Streams that would run to the end of the context; their clients hang up earlier. Raises BenchError."""
        prompt_tokens = self.workload.prompt_tokens.high
        most = self.max_context_tokens - prompt_tokens
        if most < 1:
            raise BenchError(
                f"--prompt-tokens {prompt_tokens} fills the context of {self.max_context_tokens} tokens; lower it"
            )
        return replace(self.workload, output_tokens=Lengths(most, most)).draw(NUM_STREAMS, seed)

    def arrival(self, num_tokens: int, seed: int) -> PlannedRequest:
        """A prompt of num_tokens whose answer is one token."""
        drawn = replace(self.workload, prompt_tokens=Lengths(num_tokens, num_tokens), output_tokens=Lengths(1, 1))
        return drawn.draw(1, seed)[0]


async def measure_round(target: Target, load: InterferenceLoad, seed: int) -> InterferenceRound:
    """Raises BenchError if a request fails."""
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
    """Streams that all have a token when the context begins; it ends by hanging up on them. Raises BenchError."""
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
    """Wait until each request has had its count of events. Raises BenchError if one ends earlier."""
    while any(len(record.event_times_s) < count for record, count in zip(records, counts, strict=True)):
        if ended := next((record for record in records if record.ended_s), None):
            raise BenchError(f"a running stream ended too soon: {ended.error or 'its context is full'}")
        await asyncio.sleep(0.001)


async def _arrive(target: Target, request: PlannedRequest, records: Sequence[ObservedRequest]) -> tuple[float, float]:
    """Send the request; return when it was sent and when its first token came.

    Returns after every running stream has had one more token. Raises BenchError.
    """
    from_s = time.perf_counter()
    arrived = await send_one(target.http, target.encode(request), from_s)
    if arrived.outcome is not Outcome.COMPLETED or not arrived.event_times_s:
        raise BenchError(f"a prompt that arrived was not answered: {arrived.error}")
    await _wait_for_events(records, [len(record.event_times_s) + 1 for record in records])
    return from_s, arrived.event_times_s[0]


def gaps_s(record: ObservedRequest, from_s: float, to_s: float) -> list[float]:
    """Return the gaps between events that overlap this span of time."""
    return [after - before for before, after in pairwise(record.event_times_s) if after > from_s and before < to_s]


def interference_table(found: InterferenceResult) -> Table:
    title = (
        f"{found.streams} running streams, a prompt of {found.long_prompt_tokens:,} tokens arrives, "
        f"steps of at most {found.step_tokens}"
    )
    columns = ["round", "ITL ms,\nundisturbed", "one full\nstep, ms", "ITL ms, disturbed\np50 / p99 / max"]
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
