"""What every mode of `penstock bench` is given."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

from rich.console import Console

from penstock.tools.bench.harness.report import BenchReport
from penstock.tools.bench.harness.server import BenchServer, bench_server
from penstock.tools.bench.load_generator.http_client import HttpClient
from penstock.tools.bench.load_generator.sending import BenchError, Target, measure, warm_up
from penstock.tools.bench.load_generator.stats import LoadSummary
from penstock.tools.bench.load_generator.workload import Workload
from penstock.tools.bench.options import BenchOptions
from penstock.tools.serve import ServeOptions


@dataclass(slots=True)
class Bench:
    """One run: what was asked, where progress goes, and what has been found."""

    options: BenchOptions
    server: ServeOptions
    report: BenchReport
    progress: Console

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """The address under test: the one given, or that of our own server."""
        if self.options.url is not None:
            yield self.options.url
        else:
            with self.bench_server() as own:
                yield own.url

    @contextlib.contextmanager
    def bench_server(self, server: ServeOptions | None = None) -> Iterator[BenchServer]:
        """For what can only be measured on a server that we start. Raises BenchError where --url names another."""
        self.refuse_url()
        with contextlib.ExitStack() as stack:
            with self.progress.status("starting penstock serve"):
                own = stack.enter_context(bench_server(server or self.server))
            yield own

    def refuse_url(self) -> None:
        """Raises BenchError where --url names a server."""
        if self.options.url is not None:
            raise BenchError("this measurement runs on processes of its own: leave --url out")

    def drop_or(self, share: float) -> float:
        """What --drop says, 0 too."""
        return share if self.options.drop is None else self.options.drop

    @contextlib.asynccontextmanager
    async def target(self, url: str) -> AsyncIterator[Target]:
        """Its idle connections are closed with the context. Raises BenchError."""
        http = HttpClient(url, self.server.api_key[0] if self.server.api_key else None)
        model = self.server.model if self.options.url is not None else None
        try:
            yield await Target.discover(http, self.options.endpoint, model)
        finally:
            http.close()

    def workload(self, target: Target) -> Workload:
        """Prompts of token ids where the endpoint takes them and the vocabulary is known. Raises BenchError."""
        options = self.options
        vocab_size = options.vocab_size or target.vocab_size
        takes_tokens = options.endpoint == "completions" and vocab_size is not None
        if options.prompt_kind == "tokens" and not takes_tokens:
            raise BenchError("prompts of token ids want --endpoint completions and a known --vocab-size")
        return Workload(
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            vocab_size=vocab_size if takes_tokens and options.prompt_kind != "text" else None,
            duplicates=options.duplicates,
            drop=self.drop_or(0.0),
            rate_per_s=options.rate,
        )

    def plain_workload(self, target: Target) -> Workload:
        """The same, but nobody repeats a prompt or hangs up, and no rate says when to send."""
        return replace(self.workload(target), duplicates=0.0, drop=0.0, rate_per_s=None)

    @property
    def num_rounds(self) -> int:
        """Of a comparison, whose sides take turns; the median needs three."""
        return max(self.options.rounds, 3)

    async def row(self, target: Target, workload: Workload, num_requests: int, concurrency: int) -> LoadSummary:
        """The median of the rounds, by throughput. Each has prompts of its own: a cache must not answer for it."""
        seed = self.options.seed + 1_000_003 * len(self.report.rows)
        await warm_up(target, workload, self.options.warmup, concurrency, seed)
        rounds = []
        for index in range(self.options.rounds):
            load = f"{concurrency} clients" if workload.rate_per_s is None else f"{workload.rate_per_s:g} a second"
            with self.progress.status(f"{load}, round {index + 1} of {self.options.rounds}"):
                rounds.append(await measure(target, workload, num_requests, concurrency, seed + index))
        rounds.sort(key=lambda summary: summary.output_tokens_per_s)
        median = rounds[len(rounds) // 2]
        self.report.rows.append(median)
        return median
