"""`penstock bench workers-scaling`: one frontend worker against two, in front of a model that costs nothing.

Both servers run through the whole measurement and take turns. The load comes from two generator processes, half of the
clients each.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.tools.bench.harness.generator_processes import (
    GeneratorOrder,
    GeneratorProcess,
    WorkerLoad,
    generator_processes,
)
from penstock.tools.bench.harness.processes import process_use
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.load_generator.stats import Aim
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, FakeServerOptions, ReportOptions, SeededRounds

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.bench.harness.server import BenchServer

NUM_CLIENTS = 64
NUM_GENERATORS = 2
MIN_CORES = 4
"""Two workers, the backend and the generators. With fewer cores the second worker has none of its own."""
RATIO_LIMIT = 1.8
_TICK_S = 0.01

LOADS = (
    WorkerLoad("streams of 256 tokens", "completions", prompt_words=32, output_tokens=256, requests_per_client=8),
    WorkerLoad("answers of one token", "chat", prompt_words=16, output_tokens=1, requests_per_client=32),
)


@MEASUREMENT
@dataclass(frozen=True)
class WorkersScalingOptions:
    requests: AtLeastOne | None = None
    """Requests of a round, from 64 clients. Default: 8 for each client, or 32 where answers have one token."""


@dataclass(frozen=True, slots=True)
class WorkersRun:
    """One load on one server. CPU time is user and system, of all threads."""

    workers: int
    duration_s: float
    output_tokens: int
    events: int
    worker_cpu_s: list[float]
    """CPU time of each frontend process: the supervisor first, then the workers."""
    backend_cpu_s: float
    generator_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens per second of the frontend's CPU time, which /proc counts in ticks of 10 ms."""
        return self.output_tokens / max(sum(self.worker_cpu_s), _TICK_S)


@dataclass(frozen=True, slots=True)
class Scaling:
    """The rounds of one load. Ratios are two workers / one, medians over the rounds."""

    load: str
    one: list[WorkersRun]
    two: list[WorkersRun]
    tokens_per_s_ratio: float
    tokens_per_cpu_s_ratio: float

    @classmethod
    def of(cls, load: str, one: list[WorkersRun], two: list[WorkersRun]) -> Scaling:
        pairs = list(zip(one, two, strict=True))
        return cls(
            load,
            one,
            two,
            tokens_per_s_ratio=statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in pairs),
            tokens_per_cpu_s_ratio=statistics.median(b.tokens_per_cpu_s / a.tokens_per_cpu_s for a, b in pairs),
        )


def workers_scaling(
    *,
    options: WorkersScalingOptions = WorkersScalingOptions(),
    rounds: SeededRounds = SeededRounds(),
    server: FakeServerOptions = FakeServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        found = []
        with ExitStack() as stack:
            servers = [
                stack.enter_context(run.server(replace(server, workers=1))),
                stack.enter_context(run.server(replace(server, workers=2))),
            ]
            generators = stack.enter_context(generator_processes(NUM_GENERATORS))
            for load in LOADS:
                num_requests = options.requests or load.requests_per_client * NUM_CLIENTS
                with run.status(f"{load.name}, one worker and two"):
                    found.append(_measure_load(servers, generators, load, num_requests, rounds))
        cores = run.report.machine.cores
        run.add("workers_scaling", found, scaling_table(found), scaling_aims(found, cores))
        if cores < MIN_CORES:
            run.console.print(
                f"The ratio of two workers on free cores is not measurable here: workers, backend and generators need "
                f"{MIN_CORES} cores, and this machine has {cores}.",
                soft_wrap=True,
            )
    return run.exit_status


def _measure_load(
    servers: Sequence[BenchServer],
    generators: Sequence[GeneratorProcess],
    load: WorkerLoad,
    num_requests: int,
    rounds: SeededRounds,
) -> Scaling:
    """Raises BenchError if a request fails."""
    one: list[WorkersRun] = []
    two: list[WorkersRun] = []
    for index in range(-1, rounds.rounds):  # round -1 warms up
        seed = rounds.seed + NUM_GENERATORS * (index + 1)
        for workers, server, runs in ((1, servers[0], one), (2, servers[1], two)):
            share, clients = max(1, num_requests // NUM_GENERATORS), NUM_CLIENTS // NUM_GENERATORS
            orders = [GeneratorOrder(server.address, load, share, clients, seed + n) for n in range(NUM_GENERATORS)]
            run = _measure_run(workers, server, generators, orders)
            if index >= 0:
                runs.append(run)
    return Scaling.of(load.name, one, two)


def _measure_run(
    workers: int, server: BenchServer, generators: Sequence[GeneratorProcess], orders: Sequence[GeneratorOrder]
) -> WorkersRun:
    """Raises BenchError."""
    for order, generator in zip(orders, generators, strict=True):
        generator.prepare(order)
    for generator in generators:
        generator.wait_until_prepared()
    pids = [server.backend_pid(), *server.frontend_pids()]
    before_s = [process_use(pid).cpu_s for pid in pids]
    for generator in generators:
        generator.start()
    results = [generator.result() for generator in generators]
    backend_cpu_s, *worker_cpu_s = (process_use(pid).cpu_s - cpu_s for pid, cpu_s in zip(pids, before_s, strict=True))
    return WorkersRun(
        workers=workers,
        duration_s=max(result.to_s for result in results) - min(result.from_s for result in results),
        output_tokens=sum(result.output_tokens for result in results),
        events=sum(result.num_events for result in results),
        worker_cpu_s=worker_cpu_s,
        backend_cpu_s=backend_cpu_s,
        generator_cpu_s=sum(result.cpu_s for result in results),
    )


def scaling_table(found: Sequence[Scaling]) -> Table:
    """Show the round with the median speed of each side. Cores are CPU seconds per second, over all its processes."""
    columns = ("load", "workers", "output\ntok/s", "tok/\nevent", "tok / CPU s\nof workers")
    table = make_table("One frontend worker and two", *columns, "cores:\nworkers", "backend", "generators")
    for scaling in found:
        for runs in (scaling.one, scaling.two):
            run = sorted(runs, key=lambda run: run.tokens_per_s)[len(runs) // 2]
            cores = (sum(run.worker_cpu_s), run.backend_cpu_s, run.generator_cpu_s)
            table.add_row(
                scaling.load if runs is scaling.one else "",
                str(run.workers),
                f"{run.tokens_per_s:,.0f}",
                f"{run.output_tokens / max(run.events, 1):.1f}",
                f"{run.tokens_per_cpu_s:,.0f}",
                *(f"{cpu_s / run.duration_s:.2f}" for cpu_s in cores),
            )
        ratios = f"{scaling.tokens_per_s_ratio:.2f} ×", "", f"{scaling.tokens_per_cpu_s_ratio:.2f} ×"
        table.add_row("", "2 / 1", *ratios, "", "", "")
    return table


def scaling_aims(found: Sequence[Scaling], cores: int) -> list[Aim]:
    """Return no aims on a machine with too few cores to scale to."""
    if cores < MIN_CORES:
        return []
    name = "two workers / one, tokens per second"
    return [Aim(f"{name}, {item.load}", item.tokens_per_s_ratio, "at least", RATIO_LIMIT) for item in found]
