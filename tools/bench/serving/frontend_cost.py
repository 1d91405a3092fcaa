"""`penstock bench frontend-cost`: CPU time per streamed token, with one frontend and a model that costs nothing.

With `--viewers` also what viewers of the engine page cost: rounds without and with them take turns on one server. The
engine's loop is the first thread of the backend; its CPU time is also compared with that of the other threads,
which run the forward pass: no viewer has a part in it, but it slows down with the loop when others use the core.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import uvloop

from penstock.process.children import process_use, threads_use
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.load_generator.engine_viewers import engine_viewers
from penstock.tools.bench.load_generator.sending import measure, warm_up
from penstock.tools.bench.load_generator.stats import Aim
from penstock.tools.bench.load_generator.workload import Lengths, Workload
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    FakeServerOptions,
    ReportOptions,
    SeededRounds,
    ViewerCounts,
)

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.harness.server import BenchServer
    from penstock.tools.bench.load_generator.stats import LoadSummary
    from penstock.tools.bench.load_generator.target import Target

NUM_STREAMS = 64
_PROMPT_TOKENS = Lengths(32, 32)
_OUTPUT_TOKENS = Lengths(256, 256)
_PACED_PASS = "penstock.backend.passes.fake:PacedFakePass"  # noqa: S105 - a pass, not a password
"""Viewers are compared over steps of 4 ms: a token's cost depends on how many share a step, which is then equal."""
_STEPS = "penstock_steps_total"
_VIEWERS_LIMIT = 1.01
"""The loop's CPU time for a step with viewers, against without."""


@MEASUREMENT
@dataclass(frozen=True)
class FrontendCostOptions:
    requests: AtLeastOne = 8 * NUM_STREAMS
    """Requests of a round; 64 run at once."""

    viewers: ViewerCounts = (0,)
    """Viewers of /engine in a round. Rounds of several counts, such as 0,1,10, take turns, and are compared with the
    first count's."""


@dataclass(frozen=True, slots=True)
class FrontendCost:
    """CPU time, user and system, of all threads of each part, per token that reached a client."""

    streams: int
    viewers: int
    """Viewers of /engine."""
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
    viewer_bytes: int
    """Bytes that all viewers received."""

    @property
    def loop_to_pass(self) -> float:
        return self.loop_cpu_us_per_step / max(self.pass_cpu_us_per_step, 1e-9)


_Figure = Callable[[FrontendCost], float]
_BACKEND: _Figure = attrgetter("backend_cpu_us_per_token")
_LOOP: _Figure = attrgetter("loop_cpu_us_per_step")
_LOOP_TO_PASS: _Figure = attrgetter("loop_to_pass")
_FRONTEND: _Figure = attrgetter("frontend_cpu_us_per_token")


def frontend_cost(
    *,
    options: FrontendCostOptions = FrontendCostOptions(),
    rounds: SeededRounds = SeededRounds(),
    server: FakeServerOptions = FakeServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    if len(options.viewers) > 1:
        server = replace(server, forward_pass=_PACED_PASS)
    with measurement_run(report.json) as run:
        with run.server(server) as own, run.status(f"{NUM_STREAMS} streams over the fake pass"):
            costs, summaries = uvloop.run(_measure(own, options, rounds))
        run.report.rows += summaries
        for count in options.viewers:
            cost = _median([cost for cost in costs if cost.viewers == count])
            run.add(
                "frontend_cost" if count == options.viewers[0] else f"viewers_{count}", cost, frontend_cost_table(cost)
            )
        if len(options.viewers) > 1:
            run.add("viewers", costs, viewers_table(costs), viewers_aims(costs))
        if any(summary.failed for summary in summaries):
            run.exit_status = 1
    return run.exit_status


def _median(costs: Sequence[FrontendCost]) -> FrontendCost:
    return sorted(costs, key=lambda cost: cost.frontend_cpu_us_per_token)[len(costs) // 2]


async def _measure(
    server: BenchServer, options: FrontendCostOptions, rounds: SeededRounds
) -> tuple[list[FrontendCost], list[LoadSummary]]:
    """Raises BenchError if no request of a round succeeds."""
    costs, summaries = [], []
    async with server.address.connect() as target:
        workload = Workload(_PROMPT_TOKENS, _OUTPUT_TOKENS, target.vocab_size)
        await warm_up(target, workload, NUM_STREAMS, NUM_STREAMS, rounds.seed)
        num_counts = len(options.viewers)
        for number in range(rounds.rounds * num_counts):
            viewers = options.viewers[(number + number // num_counts) % num_counts]  # each count is first in turn
            found = await _measure_round(target, server, workload, options.requests, viewers, rounds.seed + number)
            costs.append(found[0])
            summaries.append(found[1])
    return costs, summaries


async def _measure_round(
    target: Target, server: BenchServer, workload: Workload, num_requests: int, num_viewers: int, seed: int
) -> tuple[FrontendCost, LoadSummary]:
    frontend_pids, backend_pid = server.frontend_pids(), server.backend_pid()
    async with engine_viewers(target.http, num_viewers) as viewers:
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
        viewers=num_viewers,
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
        viewer_bytes=sum(viewer.num_bytes for viewer in viewers),
    )
    return cost, summary


async def _num_steps(target: Target) -> int:
    """Raises BenchError if the server does not report its steps."""
    for line in (await target.http.get("/metrics")).body.decode().splitlines():
        if line.startswith(_STEPS):
            return int(float(line.rpartition(" ")[2]))
    raise BenchError(f"{_STEPS} is not among the server's metrics")


def frontend_cost_table(cost: FrontendCost) -> Table:
    watched = f", {cost.viewers} viewers" if cost.viewers else ""
    title = f"One frontend, {cost.streams} streams{watched}, a pass that costs nothing: {cost.tokens_per_s:,.0f} tok/s"
    table = make_table(title, "process", "CPU µs / token", "CPU µs / event", "RSS MB")
    for name, us, rss_bytes in (
        ("frontend", cost.frontend_cpu_us_per_token, cost.frontend_rss_bytes),
        ("backend", cost.backend_cpu_us_per_token, cost.backend_rss_bytes),
        ("generator", cost.generator_cpu_us_per_token, None),
    ):
        rss = "" if rss_bytes is None else f"{rss_bytes / 1e6:.0f}"
        table.add_row(name, f"{us:.1f}", f"{us * cost.tokens_per_event:.1f}", rss)
    return table


def viewers_table(costs: Sequence[FrontendCost]) -> Table:
    """Show medians over the rounds. Ratios are to the round before with the first count of viewers."""
    figures = (
        ("loop\nCPU µs / step", _LOOP),
        ("loop /\npass", _LOOP_TO_PASS),
        ("backend\nCPU µs / token", _BACKEND),
        ("frontend\nCPU µs / token", _FRONTEND),
    )
    columns = [column for name, _ in figures for column in (name, "ratio")]
    table = make_table("Viewers of the engine page", "viewers", "output\ntok/s", *columns, "MB to each\nviewer")
    for count in dict.fromkeys(cost.viewers for cost in costs):
        own = [cost for cost in costs if cost.viewers == count]
        table.add_row(
            str(count),
            f"{statistics.median(cost.tokens_per_s for cost in own):,.0f}",
            *(
                text
                for _, figure in figures
                for text in (f"{statistics.median(map(figure, own)):.2f}", f"{_ratio(costs, count, figure):.3f} ×")
            ),
            f"{statistics.median(cost.viewer_bytes for cost in own) / 1e6 / count:.2f}" if count else "",
        )
    return table


def _ratio(costs: Sequence[FrontendCost], count: int, figure: _Figure) -> float:
    """Return the median over the rounds of a figure with this many viewers / with the first count."""
    base = [figure(cost) for cost in costs if cost.viewers == costs[0].viewers]
    own = [figure(cost) for cost in costs if cost.viewers == count]
    return statistics.median(after / before for before, after in zip(base, own, strict=True))


def viewers_aims(costs: Sequence[FrontendCost]) -> list[Aim]:
    first, *others = dict.fromkeys(cost.viewers for cost in costs)
    return [
        Aim(
            f"the loop's CPU per step, {count} viewers / {first}",
            _ratio(costs, count, _LOOP),
            "at most",
            _VIEWERS_LIMIT,
        )
        for count in others
    ]
