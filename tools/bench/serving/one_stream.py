"""`penstock bench one-stream`: a decode step of one stream against reading the model's weights once.

Each round profiles steps on the bare pass, in a process of its own that also reads the weights' memory with the same
threads (`stream_profile`), and then streams one answer from the server. Its prompt has one token: every step decodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import uvloop

from penstock.backend.options import BackendOptions
from penstock.process.options import to_argv
from penstock.serve.options import ServeOptions, select_options
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.counters import Counters, backend_counters
from penstock.tools.bench.harness.job_child import JobChild
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.load_generator.sending import run_open_loop, warm_up
from penstock.tools.bench.load_generator.stats import Aim, ObservedRequest, Outcome
from penstock.tools.bench.load_generator.workload import Lengths, Workload
from penstock.tools.bench.options import (
    MEASUREMENT,
    AtLeastOne,
    BenchServerOptions,
    ReportOptions,
    SeededRounds,
)
from penstock.tools.bench.serving.stream_profile import PartTime, StreamProfile

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.harness.server import BenchServer
    from penstock.tools.bench.load_generator.target import Target


@MEASUREMENT
@dataclass(frozen=True)
class OneStreamOptions:
    answer_tokens: AtLeastOne = 192
    """Tokens of the streamed answer. Steps are profiled at half as many tokens of context."""

    steps: AtLeastOne = 40
    """Profiled steps in each round."""


@dataclass(frozen=True, slots=True)
class ServedStream:
    """One answer over HTTP. Means over the answer; the server's step is from its launch to its result."""

    itl_ms: float
    median_itl_ms: float
    server_step_ms: float


@dataclass(frozen=True, slots=True)
class StreamRound:
    profile: StreamProfile
    served: ServedStream


@dataclass(frozen=True, slots=True)
class OneStream:
    """Ratios are medians of the rounds' ratios."""

    rounds: list[StreamRound]
    step_ratio: float
    itl_ratio: float

    @classmethod
    def of(cls, rounds: Sequence[StreamRound]) -> OneStream:
        return cls(
            list(rounds),
            step_ratio=statistics.median(each.profile.ratio for each in rounds),
            itl_ratio=statistics.median(each.served.itl_ms / each.profile.read_ms for each in rounds),
        )

    @property
    def middle(self) -> StreamRound:
        """The round with the median step time."""
        return sorted(self.rounds, key=lambda each: each.profile.step_ms)[len(self.rounds) // 2]

    def aim(self) -> Aim:
        return Aim("decode step of one row / reading the weights once", self.step_ratio, "at most", 1.15)


def one_stream(
    *,
    options: OneStreamOptions = OneStreamOptions(),
    rounds: SeededRounds = SeededRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        with run.server(server) as own:
            found = uvloop.run(_measure(run, own, server, options, rounds))
        run.add("one_stream", found, stream_table(found), [found.aim()])
    return run.exit_status


async def _measure(
    run: MeasurementRun, server: BenchServer, backend: ServeOptions, options: OneStreamOptions, rounds: SeededRounds
) -> OneStream:
    found = []
    async with server.address.connect() as target, backend_counters(server) as counters:
        workload = Workload(Lengths(1, 1), Lengths(options.answer_tokens, options.answer_tokens), target.vocab_size)
        await warm_up(target, workload, 1, 1, rounds.seed)
        with (
            run.status("profiled steps and streams take turns"),
            ProfilerChild(backend, options.answer_tokens // 2) as child,
        ):
            for seed in range(rounds.seed + 1, rounds.seed + 1 + rounds.rounds):
                profile = child.profile(options.steps)
                found.append(StreamRound(profile, await _stream(target, counters, workload, seed)))
    return OneStream.of(found)


async def _stream(target: Target, counters: Counters, workload: Workload, seed: int) -> ServedStream:
    before = counters.read()
    (record,) = await run_open_loop(target, workload.draw(1, seed))
    did = counters.since(before)
    if did["steps"] == 0:
        raise BenchError("the server answered without a step")
    return replace(stream_times(record), server_step_ms=did["step_us_sum"] / did["steps"] / 1e3)


def stream_times(record: ObservedRequest) -> ServedStream:
    """Raises BenchError."""
    if record.outcome is not Outcome.COMPLETED:
        raise BenchError(f"the request of the measurement failed: {record.error}")
    gaps_ms = 1e3 * np.diff(record.event_times_s)
    if not len(gaps_ms):
        raise BenchError("the answer came in one event; raise --answer-tokens")
    tokens_per_event = record.output_tokens / len(record.event_times_s)
    return ServedStream(float(gaps_ms.mean()) / tokens_per_event, float(np.median(gaps_ms)) / tokens_per_event, 0.0)


class ProfilerChild(JobChild):
    """The process that profiles steps."""

    def __init__(self, options: ServeOptions, context_tokens: int) -> None:
        """Raises BenchError; the child prints the reason on standard error."""
        arguments = ["--context", str(context_tokens), *to_argv(select_options(options, BackendOptions))]
        module = "penstock.tools.bench.serving.stream_profile"
        super().__init__(module, arguments, "the steps of the bare pass could not be profiled")

    def profile(self, num_steps: int) -> StreamProfile:
        """Raises BenchError."""
        return self.ask(b"%d" % num_steps, StreamProfile)


def stream_table(found: OneStream) -> Table:
    """The round with the median step; shares of the time to read the weights once."""
    profile, served = found.middle.profile, found.middle.served
    title = (
        f"One stream: {profile.weight_bytes / 1e6:,.0f} MB of weights, {profile.huge_page_share:.0%} in huge pages, "
        f"read at {profile.gb_per_s:.1f} GB/s by {profile.num_threads} threads"
    )
    table = make_table(title, "", "ms", "/ reading once", "of it threads idle, ms")

    def add(name: str, value_ms: float, idle_ms: float | None = None) -> None:
        idle = "" if idle_ms is None else f"{idle_ms:.3f}"
        table.add_row(name, f"{value_ms:.3f}", f"{value_ms / profile.read_ms:.3f} ×", idle)

    add("reading the weights once", profile.read_ms)
    for part in _merge_small(profile.parts):
        add(part.name, part.elapsed_ms, part.idle_ms)
    add("Python around the operations", profile.python_ms)
    add("sampling", profile.sampling_ms)
    add("step on the bare pass", profile.step_ms)
    add("step in the server", served.server_step_ms)
    add("between the server's steps", served.itl_ms - served.server_step_ms)
    add("ITL over HTTP, mean", served.itl_ms)
    add("ITL over HTTP, median", served.median_itl_ms)
    return table


def _merge_small(parts: Sequence[PartTime]) -> list[PartTime]:
    """Show the copies of single rows as one line."""
    copies = [part for part in parts if part.name in ("embedding", "last tokens")]
    others = [part for part in parts if part not in copies]
    elapsed_ms, idle_ms = sum(part.elapsed_ms for part in copies), sum(part.idle_ms for part in copies)
    return [*others, PartTime("embedding, last tokens", elapsed_ms, idle_ms)]
