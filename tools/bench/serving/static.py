"""`penstock bench static`: continuous against static batching, with the same requests on the same machine in one run.

The static side is `static_batch` behind a frontend of ours, so that both sides pay for HTTP. All requests arrive at
once; their answers are streamed, and other requests' come whole.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from penstock.backend.options import BackendOptions
from penstock.process.options import to_argv
from penstock.process.supervisor import module_argv
from penstock.serve.options import ServeOptions, select_options
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.harness.server import bench_frontend
from penstock.tools.bench.harness.server_process import server_process
from penstock.tools.bench.load_generator.sending import run_all, run_whole
from penstock.tools.bench.load_generator.stats import Aim, duration_s
from penstock.tools.bench.options import BenchServerOptions, ReportOptions, RequestLengths, SeededRounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from penstock.tools.bench.load_generator.target import ServerAddress, Target
    from penstock.tools.bench.load_generator.workload import Workload

NUM_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class StaticSide:
    """Output tokens per second of one side in one round."""

    streamed_tokens_per_s: float
    whole_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class StaticComparison:
    """The same number of rounds of both. Ratios above 1 favour continuous batching."""

    requests: int
    continuous: list[StaticSide]
    static: list[StaticSide]

    @property
    def streamed_ratio(self) -> float:
        """The median of the rounds' ratios."""
        pairs = zip(self.continuous, self.static, strict=True)
        return statistics.median(ours.streamed_tokens_per_s / other.streamed_tokens_per_s for ours, other in pairs)

    @property
    def whole_ratio(self) -> float:
        pairs = zip(self.continuous, self.static, strict=True)
        return statistics.median(ours.whole_tokens_per_s / other.whole_tokens_per_s for ours, other in pairs)

    def aims(self) -> list[Aim]:
        name = f"throughput, continuous / static, {self.requests} at once, both over HTTP"
        return [
            Aim(name, self.whole_ratio, "at least", 1.0),
            Aim(f"{name}, streamed", self.streamed_ratio, "at least", 0.97),
        ]


def static(
    *,
    lengths: RequestLengths = RequestLengths(),
    rounds: SeededRounds = SeededRounds(),
    server: BenchServerOptions = BenchServerOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run:
        with (
            run.server(server) as ours,
            run.status("static and continuous batching take turns"),
            static_server(server, lengths) as other,
        ):
            found = uvloop.run(_compare(ours.address, other, lengths, rounds))
        run.add("compare_static", found, comparison_table(found), found.aims())
    return run.exit_status


@contextmanager
def static_server(options: ServeOptions, lengths: RequestLengths) -> Iterator[ServerAddress]:
    """A frontend before a backend that runs static batches. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="penstock-static-") as directory:
        own_options = replace(options, socket=Path(directory) / "backend.sock")
        longest_prompt = lengths.prompt_tokens.high
        sizes = ["--rows", NUM_REQUESTS, "--longest-prompt", longest_prompt]
        sizes += ["--longest-context", longest_prompt + lengths.output_tokens.high]
        arguments = [*map(str, sizes), *to_argv(select_options(own_options, BackendOptions))]
        argv = module_argv("penstock.tools.bench.serving.static_batch", arguments)
        with (
            server_process("the static batch", argv, os.environ) as process,
            bench_frontend(own_options, process) as address,
        ):
            yield address


async def _compare(
    ours: ServerAddress, other: ServerAddress, lengths: RequestLengths, rounds: SeededRounds
) -> StaticComparison:
    async with ours.connect() as target, other.connect() as static_target:
        workload = lengths.workload(target)
        return await compare_static(target, static_target, workload, num_rounds=rounds.rounds, seed=rounds.seed)


async def compare_static(
    ours: Target, other: Target, workload: Workload, *, num_rounds: int, seed: int
) -> StaticComparison:
    """Both sides run in each round, so that a noisy minute hits both. Raises BenchError if a request fails."""
    found = StaticComparison(NUM_REQUESTS, [], [])
    for index in range(-1, num_rounds):  # round -1 warms up
        streamed = workload.draw(NUM_REQUESTS, seed + 2 * index + 2)
        whole = workload.draw(NUM_REQUESTS, seed + 2 * index + 1_000_003)
        num_tokens = sum(request.output_tokens for request in streamed)
        for target, sides in ((other, found.static), (ours, found.continuous)):
            lasted_s = duration_s(await run_all(target, streamed))
            side = StaticSide(num_tokens / lasted_s, await run_whole(target, whole))
            if index >= 0:
                sides.append(side)
    return found


def comparison_table(found: StaticComparison) -> Table:
    table = make_table(f"{found.requests} requests at once", "batching", "output tok/s, streamed", "whole")

    def medians(sides: Sequence[StaticSide]) -> tuple[str, str]:
        streamed = statistics.median(side.streamed_tokens_per_s for side in sides)
        return f"{streamed:.0f}", f"{statistics.median(side.whole_tokens_per_s for side in sides):.0f}"

    table.add_row("continuous", *medians(found.continuous))
    table.add_row("static", *medians(found.static))
    table.add_row("median of the ratios", f"{found.streamed_ratio:.2f} ×", f"{found.whole_ratio:.2f} ×")
    return table
