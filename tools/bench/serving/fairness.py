"""`penstock bench fairness`: short requests of one tenant beside another tenant's flood of long ones.

Short requests are sent one at a time to the idle server, and the flood is run alone. Then both come together. A fair
server gives a short request its first token within a few steps, and the flood hardly slows down.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, replace

import uvloop
from rich.table import Table

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.counters import backend_counters
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.harness.server import BenchServer
from penstock.tools.bench.load_generator.sending import run_all, send_one
from penstock.tools.bench.load_generator.stats import Aim, ObservedRequest, Outcome, percentile, ttfts_s
from penstock.tools.bench.load_generator.target import Target
from penstock.tools.bench.load_generator.workload import Lengths, Workload
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, BenchServerOptions, LengthRange, ReportOptions

_KEYS = ("bench-flood", "bench-short")
_MAX_TTFT_RATIO = 3.0
_STEPS_ALLOWED = 2
_PAUSE_STEPS = 10
"""Steps between two short requests, on average: they should wait for the flood, not compete with it."""
_MAX_FLOOD_LOSS = 0.05


@MEASUREMENT
@dataclass(frozen=True)
class FairnessOptions:
    flood_requests: AtLeastOne = 400
    """Requests of the first tenant, all sent at once."""

    flood_prompt_tokens: LengthRange = Lengths(256, 256)  # noqa: RUF009 - frozen
    """Length of their prompts."""

    flood_output_tokens: LengthRange = Lengths(64, 64)  # noqa: RUF009 - frozen
    """Length of their answers."""

    short_requests: AtLeastOne = 50
    """Requests of the second tenant on the idle server, and at most beside the flood."""

    short_prompt_tokens: LengthRange = Lengths(16, 16)  # noqa: RUF009 - frozen
    """Length of their prompts; each answer is two tokens."""

    seed: int = 0
    """Seed of the prompts."""


@dataclass(frozen=True, slots=True)
class ShortRequests:
    """Times to the first token of requests sent one after another."""

    requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, slots=True)
class Flood:
    requests: int
    duration_s: float
    tokens_per_s: float
    """Tokens of prompts and answers."""
    step_ms: float
    """Mean time of a step."""


@dataclass(frozen=True, slots=True)
class FairnessResult:
    idle: ShortRequests
    beside: ShortRequests
    flood_alone: Flood
    flood_beside: Flood

    def aims(self) -> list[Aim]:
        limit_ms = _MAX_TTFT_RATIO * self.idle.ttft_p50_ms + _STEPS_ALLOWED * self.flood_alone.step_ms
        loss = 1.0 - self.flood_beside.tokens_per_s / self.flood_alone.tokens_per_s
        return [
            Aim("TTFT p99 ms of a short request beside the flood", self.beside.ttft_p99_ms, "at most", limit_ms),
            Aim("share of its throughput that the flood loses", loss, "at most", _MAX_FLOOD_LOSS),
        ]


def fairness(
    *,
    options: FairnessOptions = FairnessOptions(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        with run.server(replace(server, api_key=_KEYS)) as own:
            found = uvloop.run(_measure(run, own, options))
        run.add("fairness", found, fairness_table(found), found.aims())
    return run.exit_status


async def _measure(run: MeasurementRun, server: BenchServer, options: FairnessOptions) -> FairnessResult:
    flood_address, short_address = (replace(server.address, api_key=key) for key in _KEYS)
    async with flood_address.connect() as flood_target, short_address.connect() as short_target:
        load = _Load(server, flood_target, short_target, options)
        with run.status("short requests on the idle server"):
            await load.send_shorts(asyncio.Event(), seed=1)
            idle = await load.send_shorts(asyncio.Event(), seed=2)
        with run.status("the flood alone"):
            flood_alone = await load.run_flood(asyncio.Event(), asyncio.Event(), seed=3)
        with run.status("short requests beside the flood"):
            has_begun, is_over = asyncio.Event(), asyncio.Event()
            flood = asyncio.create_task(load.run_flood(has_begun, is_over, seed=4))
            # Its arrival is the frontend's work; what is measured is the backend's.
            await has_begun.wait()
            beside = await load.send_shorts(is_over, seed=5, pause_s=_PAUSE_STEPS * flood_alone.step_ms / 1000)
            flood_beside = await flood
    return FairnessResult(idle, beside, flood_alone, flood_beside)


@dataclass(frozen=True, slots=True)
class _Load:
    server: BenchServer
    flood_target: Target
    short_target: Target
    options: FairnessOptions

    async def run_flood(self, has_begun: asyncio.Event, is_over: asyncio.Event, seed: int) -> Flood:
        """Set has_begun when the backend has all requests. Raises BenchError if a request fails."""
        options, target = self.options, self.flood_target
        workload = Workload(options.flood_prompt_tokens, options.flood_output_tokens, target.vocab_size)
        requests = workload.draw(options.flood_requests, options.seed + seed)
        async with backend_counters(self.server) as counters:
            before, started_s = counters.read(), time.perf_counter()
            try:
                flood = asyncio.create_task(run_all(target, requests))
                while not flood.done() and counters.since(before)["requests_accepted"] < len(requests):  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.01)
                has_begun.set()
                records = await flood
            finally:
                is_over.set()
            duration_s, counted = time.perf_counter() - started_s, counters.since(before)
        _check(records)
        num_tokens = sum(record.prompt_tokens + record.output_tokens for record in records)
        step_ms = 1000 * duration_s / max(1, counted["steps"])
        return Flood(len(records), duration_s, num_tokens / duration_s, step_ms)

    async def send_shorts(self, is_over: asyncio.Event, seed: int, pause_s: float = 0.0) -> ShortRequests:
        """Send short requests one after another, with pauses between, until is_over. Raises BenchError."""
        options, target = self.options, self.short_target
        workload = Workload(options.short_prompt_tokens, Lengths(2, 2), target.vocab_size)
        records: list[ObservedRequest] = []
        for request in workload.draw(options.short_requests, options.seed + seed):
            if is_over.is_set():
                break
            await asyncio.sleep(pause_s)
            records.append(await send_one(target.http, target.encode(request), time.perf_counter()))
        _check(records)
        times_ms = [1000 * ttft_s for ttft_s in ttfts_s(records)]
        return ShortRequests(len(records), statistics.median(times_ms), percentile(times_ms, 99) or 0.0)


def _check(records: list[ObservedRequest]) -> None:
    """Raises BenchError for a request that has failed, or without any."""
    if not records:
        raise BenchError("the flood was over before a short request was sent; raise --flood-requests")
    if failed := [record for record in records if record.outcome is not Outcome.COMPLETED]:
        raise BenchError(f"{len(failed)} of {len(records)} requests failed, the first with: {failed[0].error}")


def fairness_table(found: FairnessResult) -> Table:
    title = f"A tenant's short requests beside another's {found.flood_alone.requests:,} long ones"
    columns = ["", "short\nrequests", "TTFT ms\np50 / p99", "flood,\ntokens/s", "flood, s", "step ms"]
    table = make_table(title, *columns)

    def times(short: ShortRequests) -> tuple[str, str]:
        return str(short.requests), f"{short.ttft_p50_ms:.1f} / {short.ttft_p99_ms:.1f}"

    def rates(flood: Flood) -> tuple[str, str, str]:
        return f"{flood.tokens_per_s:,.0f}", f"{flood.duration_s:.1f}", f"{flood.step_ms:.1f}"

    table.add_row("idle server", *times(found.idle), "", "", "")
    table.add_row("flood alone", "", "", *rates(found.flood_alone))
    table.add_row("both", *times(found.beside), *rates(found.flood_beside))
    return table
