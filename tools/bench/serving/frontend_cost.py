"""`penstock bench frontend-cost`: CPU time per streamed token, with one frontend and a model that costs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import uvloop
from rich.table import Table

from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.harness.server import BenchServer
from penstock.tools.bench.load_generator.sending import measure, warm_up
from penstock.tools.bench.load_generator.stats import LoadSummary
from penstock.tools.bench.load_generator.target import Target
from penstock.tools.bench.load_generator.workload import Lengths, Workload
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    FakeServerOptions,
    ReportOptions,
    SeededRounds,
)
from penstock.tools.processes import process_use, threads_use

NUM_STREAMS = 64
_PROMPT_TOKENS = Lengths(32, 32)
_OUTPUT_TOKENS = Lengths(256, 256)
_PACED_PASS = "penstock.backend.passes.fake:PacedFakePass"  # noqa: S105 - a pass, not a password
_STEPS = "penstock_steps_total"


@MEASUREMENT
@dataclass(frozen=True)
class FrontendCostOptions:
    requests: AtLeastOne = 8 * NUM_STREAMS
    """Requests of a round; 64 run at once."""

    paced: bool = False
    """Steps of 4 ms instead of steps that cost nothing, so that about one token shares an event."""


@dataclass(frozen=True, slots=True)
class FrontendCost:
    """CPU time, user and system, of all threads of each part, per token that reached a client."""

    streams: int
    output_tokens: int
    tokens_per_s: float
    tokens_per_event: float
    """A frontend that lags behind puts several tokens into one event."""
    frontend_cpu_us_per_token: float
    backend_cpu_us_per_token: float
    loop_cpu_us_per_step: float
    """CPU time of the backend's first thread, which turns the engine's loop."""
    pass_cpu_us_per_step: float
    """CPU time of its other threads, which run the forward pass."""
    generator_cpu_us_per_token: float
    frontend_rss_bytes: int
    """The largest of the frontend's processes, after the run."""
    backend_rss_bytes: int


def frontend_cost(
    *,
    options: FrontendCostOptions = FrontendCostOptions(),
    rounds: SeededRounds = SeededRounds(),
    server: FakeServerOptions = FakeServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    if options.paced:
        server = replace(server, forward_pass=_PACED_PASS)
    with measurement_run(report.json) as run:
        with run.server(server) as own, run.status(f"{NUM_STREAMS} streams over the fake pass"):
            costs, summaries = uvloop.run(_measure(own, options, rounds))
        run.report.rows += summaries
        costs.sort(key=lambda cost: cost.frontend_cpu_us_per_token)
        median = costs[len(costs) // 2]
        run.add("frontend_cost", median, frontend_cost_table(median))
        if any(summary.failed for summary in summaries):
            run.exit_status = 1
    return run.exit_status


async def _measure(
    server: BenchServer, options: FrontendCostOptions, rounds: SeededRounds
) -> tuple[list[FrontendCost], list[LoadSummary]]:
    """Raises BenchError if no request of a round succeeds."""
    costs, summaries = [], []
    async with server.address.connect() as target:
        workload = Workload(_PROMPT_TOKENS, _OUTPUT_TOKENS, target.vocab_size)
        await warm_up(target, workload, NUM_STREAMS, NUM_STREAMS, rounds.seed)
        for number in range(rounds.rounds):
            cost, summary = await _measure_round(target, server, workload, options.requests, rounds.seed + number)
            costs.append(cost)
            summaries.append(summary)
    return costs, summaries


async def _measure_round(
    target: Target, server: BenchServer, workload: Workload, num_requests: int, seed: int
) -> tuple[FrontendCost, LoadSummary]:
    frontend_pids, backend_pid = server.frontend_pids(), server.backend_pid()
    frontend_before = [process_use(pid) for pid in frontend_pids]
    steps_before = await _num_steps(target)
    backend_before, threads_before = process_use(backend_pid), threads_use(backend_pid)
    summary = await measure(target, workload, num_requests, NUM_STREAMS, seed)
    backend_after, threads_after = process_use(backend_pid), threads_use(backend_pid)
    frontend_after = [process_use(pid) for pid in frontend_pids]
    num_steps = max(await _num_steps(target) - steps_before, 1)
    frontend_s = sum(after.cpu_s - before.cpu_s for before, after in zip(frontend_before, frontend_after, strict=True))
    tokens = max(summary.output_tokens, 1)
    cost = FrontendCost(
        streams=NUM_STREAMS,
        output_tokens=summary.output_tokens,
        tokens_per_s=summary.output_tokens_per_s,
        tokens_per_event=summary.output_tokens / max(summary.events, 1),
        frontend_cpu_us_per_token=1e6 * frontend_s / tokens,
        backend_cpu_us_per_token=1e6 * (backend_after.cpu_s - backend_before.cpu_s) / tokens,
        loop_cpu_us_per_step=1e6 * (threads_after.first_s - threads_before.first_s) / num_steps,
        pass_cpu_us_per_step=1e6 * (threads_after.others_s - threads_before.others_s) / num_steps,
        generator_cpu_us_per_token=summary.generator_cpu_us_per_token,
        frontend_rss_bytes=max(use.rss_bytes for use in frontend_after),
        backend_rss_bytes=backend_after.rss_bytes,
    )
    return cost, summary


async def _num_steps(target: Target) -> int:
    """Raises BenchError if the server does not report its steps."""
    if not (samples := await target.samples(_STEPS)):
        raise BenchError(f"{_STEPS} is not among the server's metrics")
    return int(sum(samples))


def frontend_cost_table(cost: FrontendCost) -> Table:
    title = f"One frontend, {cost.streams} streams: {cost.tokens_per_s:,.0f} tok/s"
    table = make_table(title, "process", "CPU µs / token", "CPU µs / event", "RSS MB")
    for name, us, rss_bytes in (
        ("frontend", cost.frontend_cpu_us_per_token, cost.frontend_rss_bytes),
        ("backend", cost.backend_cpu_us_per_token, cost.backend_rss_bytes),
        ("generator", cost.generator_cpu_us_per_token, None),
    ):
        rss = "" if rss_bytes is None else f"{rss_bytes / 1e6:.0f}"
        table.add_row(name, f"{us:.1f}", f"{us * cost.tokens_per_event:.1f}", rss)
    return table
