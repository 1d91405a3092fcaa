"""`penstock bench static`: continuous against static batching, with the same requests on the same machine in one run.

Continuous is the whole server over HTTP. Static is the bare forward pass (`static_batch`), which favours it, and also
the same batch behind a frontend of ours, so that both sides pay for HTTP.
Throughput: all requests arrive at once. Answers come whole, and once more streamed.
Time to first token (TTFT): requests arrive stagger_s apart, and the static batch starts when the last one has arrived.
`ttft_static_s` counts to the end of the batch, when a server of whole batches shows its first token;
`ttft_static_streaming_s` counts to the end of the batch's prefill, for a static server that streams.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import uvloop
from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.backend.options import BackendOptions
from penstock.process.options import to_argv
from penstock.serve.options import ServeOptions, select_options
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.job_child import JobChild
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.harness.server import bench_frontend
from penstock.tools.bench.load_generator.sending import run_all, run_whole
from penstock.tools.bench.load_generator.stats import Aim, duration_s, ttfts_s
from penstock.tools.bench.options import MEASUREMENT, BenchServerOptions, ReportOptions, RequestLengths, SeededRounds
from penstock.tools.bench.serving.static_batch import StaticJob, StaticTiming

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.harness.run import MeasurementRun
    from penstock.tools.bench.harness.server import BenchServer
    from penstock.tools.bench.load_generator.target import Target
    from penstock.tools.bench.load_generator.workload import PlannedRequest, Workload

NUM_REQUESTS = 8


@MEASUREMENT
@dataclass(frozen=True)
class StaticOptions:
    stagger_s: Annotated[float, Parameter(validator=Number(gt=0))] = 0.1
    """Seconds between arrivals when time to first token is compared."""


@dataclass(frozen=True, slots=True)
class StaticRound:
    """One round of both sides. TTFT is the median over the requests."""

    continuous_tokens_per_s: float
    continuous_whole_tokens_per_s: float
    static_tokens_per_s: float
    static_http_tokens_per_s: float
    static_http_whole_tokens_per_s: float
    ttft_continuous_s: float
    ttft_static_s: float
    ttft_static_streaming_s: float


@dataclass(frozen=True, slots=True)
class StaticComparison:
    """Ratios above 1 favour continuous batching; each is the median of the rounds' ratios.

    Those with http in their name compare with the static batch behind a frontend, the others with the bare one.
    """

    requests: int
    stagger_s: float
    rounds: list[StaticRound]
    throughput_ratio: float
    whole_throughput_ratio: float
    http_throughput_ratio: float
    http_whole_throughput_ratio: float
    ttft_ratio: float
    ttft_streaming_ratio: float

    @classmethod
    def of(cls, rounds: Sequence[StaticRound], num_requests: int, stagger_s: float) -> StaticComparison:
        return cls(
            requests=num_requests,
            stagger_s=stagger_s,
            rounds=list(rounds),
            throughput_ratio=statistics.median(r.continuous_tokens_per_s / r.static_tokens_per_s for r in rounds),
            whole_throughput_ratio=statistics.median(
                r.continuous_whole_tokens_per_s / r.static_tokens_per_s for r in rounds
            ),
            http_throughput_ratio=statistics.median(
                r.continuous_tokens_per_s / r.static_http_tokens_per_s for r in rounds
            ),
            http_whole_throughput_ratio=statistics.median(
                r.continuous_whole_tokens_per_s / r.static_http_whole_tokens_per_s for r in rounds
            ),
            ttft_ratio=statistics.median(r.ttft_static_s / r.ttft_continuous_s for r in rounds),
            ttft_streaming_ratio=statistics.median(r.ttft_static_streaming_s / r.ttft_continuous_s for r in rounds),
        )

    def aims(self) -> list[Aim]:
        return [
            Aim(
                f"throughput, continuous / static, {self.requests} at once",
                self.whole_throughput_ratio,
                "at least",
                1.0,
            ),
            Aim("throughput, the same with answers streamed over HTTP", self.throughput_ratio, "at least", 0.95),
            Aim("the same, both over HTTP", self.http_whole_throughput_ratio, "at least", 1.0),
            Aim("the same, both streamed over HTTP", self.http_throughput_ratio, "at least", 0.97),
            Aim(f"TTFT, static / continuous, {self.stagger_s:g} s apart", self.ttft_ratio, "at least", 4.0),
        ]


def static(
    *,
    options: StaticOptions = StaticOptions(),
    lengths: RequestLengths = RequestLengths(),
    rounds: SeededRounds = SeededRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        with run.server(server) as continuous:
            comparison = uvloop.run(_compare(run, continuous, server, options.stagger_s, lengths, rounds))
        run.add("compare_static", comparison, comparison_table(comparison), comparison.aims())
    return run.exit_status


async def _compare(
    run: MeasurementRun,
    continuous: BenchServer,
    options: ServeOptions,
    stagger_s: float,
    lengths: RequestLengths,
    rounds: SeededRounds,
) -> StaticComparison:
    async with continuous.address.connect() as target:
        workload = lengths.workload(target)
        with (
            run.status("static and continuous batching take turns"),
            static_child(options, NUM_REQUESTS, workload) as child,
            bench_frontend(child.options) as static_address,
        ):
            async with static_address.connect() as static_target:
                sides = Sides(target, child, static_target, workload)
                return await compare_static(sides, num_rounds=rounds.rounds, stagger_s=stagger_s, seed=rounds.seed)


class StaticChild(JobChild):
    """The process that runs the static batch."""

    def __init__(self, options: ServeOptions, num_rows: int, workload: Workload) -> None:
        """It is a backend at options.socket. Raises BenchError if the model does not load; the child prints the reason
        on standard error."""
        self.options = options
        longest_prompt = workload.prompt_tokens.high
        sizes = ["--rows", num_rows, "--longest-prompt", longest_prompt]
        sizes += ["--longest-context", longest_prompt + workload.output_tokens.high]
        arguments = [*map(str, sizes), *to_argv(select_options(options, BackendOptions))]
        super().__init__("penstock.tools.bench.serving.static_batch", arguments, "the static batch did not run")

    def run(self, requests: Sequence[PlannedRequest]) -> StaticTiming:
        """Raises BenchError."""
        prompts = [list(request.prompt) for request in requests if not isinstance(request.prompt, str)]
        job = StaticJob(prompts, [request.output_tokens for request in requests])
        if len(prompts) != len(requests):
            raise BenchError("a static batch needs prompts of token ids; this server offers none")
        return self.ask(msgspec.json.encode(job), StaticTiming)


@contextlib.contextmanager
def static_child(options: ServeOptions, num_rows: int, workload: Workload) -> Iterator[StaticChild]:
    with tempfile.TemporaryDirectory(prefix="penstock-static-") as directory:
        own_options = replace(options, socket=Path(directory) / "backend.sock")
        with StaticChild(own_options, num_rows, workload) as child:
            yield child


@dataclass(frozen=True, slots=True)
class Sides:
    """The two servers that are compared, and the requests."""

    continuous: Target
    child: StaticChild
    static: Target
    """The frontend before the child."""
    workload: Workload


async def compare_static(sides: Sides, *, num_rounds: int, stagger_s: float, seed: int) -> StaticComparison:
    """All sides run in each round, so that a noisy minute hits both. Raises BenchError if a request fails."""
    rounds = []
    for index in range(-1, num_rounds):  # round -1 warms up
        burst = sides.workload.draw(NUM_REQUESTS, seed + 2 * index + 2)
        other_burst = sides.workload.draw(NUM_REQUESTS, seed + 2 * index + 1_000_003)
        staggered = [
            replace(request, due_s=position * stagger_s)
            for position, request in enumerate(sides.workload.draw(NUM_REQUESTS, seed + 2 * index + 3))
        ]
        static_burst, static_late = sides.child.run(burst), sides.child.run(staggered)
        at_once = await run_all(sides.continuous, burst)
        static_at_once = await run_all(sides.static, burst)
        whole = await run_whole(sides.continuous, other_burst)
        static_whole = await run_whole(sides.static, other_burst)
        apart = await run_all(sides.continuous, staggered)
        # The batch starts when the last request arrives.
        waits_s = [staggered[-1].due_s - request.due_s for request in staggered]
        tokens = sum(request.output_tokens for request in burst)
        found = StaticRound(
            continuous_tokens_per_s=tokens / duration_s(at_once),
            continuous_whole_tokens_per_s=whole,
            static_tokens_per_s=tokens / static_burst.total_s,
            static_http_tokens_per_s=tokens / duration_s(static_at_once),
            static_http_whole_tokens_per_s=static_whole,
            ttft_continuous_s=statistics.median(ttfts_s(apart)),
            ttft_static_s=statistics.median(waits_s) + static_late.total_s,
            ttft_static_streaming_s=statistics.median(waits_s) + static_late.prefill_s,
        )
        if index >= 0:
            rounds.append(found)
    return StaticComparison.of(rounds, NUM_REQUESTS, stagger_s)


def comparison_table(comparison: StaticComparison) -> Table:
    title = f"{comparison.requests} requests: at once for throughput, {comparison.stagger_s:g} s apart for TTFT"
    table = make_table(
        title, "round", "batching", "output tok/s, streamed", "whole", "TTFT ms", "TTFT ms, if prefill streams"
    )
    for number, entry in enumerate(comparison.rounds, start=1):
        continuous_ms = f"{1000 * entry.ttft_continuous_s:.0f}"
        table.add_row(
            str(number),
            "continuous",
            f"{entry.continuous_tokens_per_s:.0f}",
            f"{entry.continuous_whole_tokens_per_s:.0f}",
            continuous_ms,
            continuous_ms,
        )
        static_ms = [f"{1000 * value:.0f}" for value in (entry.ttft_static_s, entry.ttft_static_streaming_s)]
        table.add_row("", "static, bare", "", f"{entry.static_tokens_per_s:.0f}", *static_ms)
        http = [entry.static_http_tokens_per_s, entry.static_http_whole_tokens_per_s]
        table.add_row("", "static, HTTP", *(f"{value:.0f}" for value in http))
    ratios = [
        comparison.throughput_ratio,
        comparison.whole_throughput_ratio,
        comparison.ttft_ratio,
        comparison.ttft_streaming_ratio,
    ]
    table.add_row("median", "for continuous", *(f"{ratio:.2f} ×" for ratio in ratios))
    http = [comparison.http_throughput_ratio, comparison.http_whole_throughput_ratio]
    table.add_row("", "the same, static over HTTP", *(f"{ratio:.2f} ×" for ratio in http))
    return table
