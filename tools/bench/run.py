"""`penstock bench`: from options to a report and an exit status."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import uvloop
from rich.console import Console

from shm.cli import fail
from tools.bench.client import HttpClient
from tools.bench.compare import NUM_REQUESTS, compare_static, comparison_table, static_child
from tools.bench.floor import EngineStep, floor_table, measure_bare_steps, measure_engine_step_ms
from tools.bench.frontend_cost import measure_frontend_cost
from tools.bench.load import BenchError, Target, measure, warm_up
from tools.bench.options import BenchOptions
from tools.bench.report import Report, make_console, make_table
from tools.bench.server import OwnServer, own_server
from tools.bench.stats import Summary
from tools.bench.storm import settle
from tools.bench.workload import Workload
from tools.serve import ServeOptions

_STORM_REQUESTS = 500
_OPEN_LOOP_REQUESTS = 64


@dataclass(slots=True)
class Bench:
    """One run: what was asked, where progress goes, and what has been found."""

    options: BenchOptions
    server: ServeOptions
    report: Report
    progress: Console

    @contextlib.contextmanager
    def serving(self, server: ServeOptions | None = None) -> Iterator[tuple[str, OwnServer | None]]:
        """The address under test, and our own server where it is one."""
        if self.options.url is not None:
            yield self.options.url, None
            return
        with contextlib.ExitStack() as stack:
            with self.progress.status("starting penstock serve"):
                own = stack.enter_context(own_server(server or self.server))
            yield own.url, own

    async def target(self, url: str) -> Target:
        api_key = self.server.api_key[0] if self.server.api_key else None
        model = self.server.model if self.options.url is not None else None
        return await Target.discover(HttpClient(url, api_key), self.options.endpoint, model)

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
            drop=options.drop,
            rate_per_s=options.rate,
        )

    async def row(self, target: Target, workload: Workload, num_requests: int, concurrency: int) -> Summary:
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


async def load_rows(bench: Bench, url: str) -> None:
    target = await bench.target(url)
    workload = bench.workload(target)
    if workload.rate_per_s is not None:
        await bench.row(target, workload, bench.options.requests or _OPEN_LOOP_REQUESTS, 1)
        return
    for concurrency in bench.options.concurrency:
        await bench.row(target, workload, bench.options.requests or 4 * concurrency, concurrency)


def run_load(bench: Bench, _console: Console) -> bool:
    with bench.serving() as (url, _):
        uvloop.run(load_rows(bench, url))
    return all(row.failed == 0 for row in bench.report.rows)


def run_storm(bench: Bench, console: Console) -> bool:
    async def storm(url: str) -> bool:
        target = await bench.target(url)
        workload = replace(bench.workload(target), drop=bench.options.drop or 0.5)
        summary = await bench.row(
            target, workload, bench.options.requests or _STORM_REQUESTS, max(bench.options.concurrency)
        )
        aftermath = await settle(target)
        bench.report.sections["aftermath"] = aftermath
        clean = aftermath.clean_after_s is not None
        when = f"after {1000 * (aftermath.clean_after_s or 0):.0f} ms" if clean else "not even after 10 s"
        console.print(
            f"Afterwards {aftermath.running} running, {aftermath.waiting} waiting, {aftermath.pages_used} pages in "
            f"use, {when}.",
            style="green" if clean else "red",
        )
        return clean and summary.failed == 0

    with bench.serving() as (url, _):
        return uvloop.run(storm(url))


def run_compare(bench: Bench, console: Console) -> bool:
    if bench.options.url is not None:
        raise BenchError("--compare static runs on a server of its own: leave --url out")

    async def compare(url: str) -> None:
        target = await bench.target(url)
        workload = replace(bench.workload(target), duplicates=0.0, drop=0.0, rate_per_s=None)
        with (
            bench.progress.status("static and continuous, in turns"),
            static_child(bench.server, NUM_REQUESTS, workload) as child,
        ):
            comparison = await compare_static(
                target,
                child,
                workload,
                num_rounds=max(bench.options.rounds, 3),
                stagger_s=bench.options.stagger_s,
                seed=bench.options.seed,
            )
        bench.report.sections["compare_static"] = comparison
        bench.report.aims += comparison.aims()
        console.print(comparison_table(comparison))

    with bench.serving() as (url, _):
        uvloop.run(compare(url))
    return True


def run_floor(bench: Bench, console: Console) -> bool:
    options = bench.options
    if options.url is not None:
        raise BenchError("--floor runs on a server of its own: leave --url out")
    # Halfway through the answer: the mean context of the steps that are measured.
    context_tokens = options.prompt_tokens.high + options.output_tokens.high // 2
    with bench.progress.status("the bare work of a step"):
        bare = measure_bare_steps(bench.server, options.concurrency, context_tokens)

    async def engine(url: str) -> list[EngineStep]:
        target = await bench.target(url)
        workload = replace(bench.workload(target), duplicates=0.0, drop=0.0, rate_per_s=None)
        await warm_up(target, workload, options.warmup, options.warmup, options.seed)
        steps = []
        for number, step in enumerate(bare):
            first_seed = options.seed + 1000 * number
            seeds = range(first_seed, first_seed + max(options.rounds, 3))
            with bench.progress.status(f"the engine's step, batch {step.batch_size}"):
                steps.append(EngineStep(step, await measure_engine_step_ms(target, workload, step.batch_size, seeds)))
        return steps

    with bench.serving() as (url, _):
        steps = uvloop.run(engine(url))
    bench.report.sections["floor"] = steps
    bench.report.aims += [step.aim() for step in steps]
    console.print(floor_table(steps, context_tokens))
    return True


def run_frontend_cost(bench: Bench, console: Console) -> bool:
    async def cost(url: str, own: OwnServer) -> bool:
        with bench.progress.status("64 streams over the fake pass"):
            found, summary = await measure_frontend_cost(await bench.target(url), own, bench.options.seed)
        bench.report.rows.append(summary)
        bench.report.sections["frontend_cost"] = found
        table = make_table(
            f"One frontend, {found.streams} streams, a pass that costs nothing: {found.tokens_per_s:,.0f} tok/s",
            "process",
            "CPU µs / token",
            "CPU µs / event",
            "RSS MB",
        )
        for name, us, rss_bytes in (
            ("frontend", found.frontend_cpu_us_per_token, found.frontend_rss_bytes),
            ("backend", found.backend_cpu_us_per_token, found.backend_rss_bytes),
            ("generator", found.generator_cpu_us_per_token, None),
        ):
            rss = "" if rss_bytes is None else f"{rss_bytes / 1e6:.0f}"
            table.add_row(name, f"{us:.1f}", f"{us * found.tokens_per_event:.1f}", rss)
        console.print(table)
        return summary.failed == 0

    if bench.options.url is not None:
        raise BenchError("--frontend-cost runs on a server of its own: leave --url out")
    with bench.serving(replace(bench.server, forward_pass="fake", workers=1)) as (url, own):  # noqa: S106
        if own is None:
            raise BenchError("--frontend-cost needs its own server")
        return uvloop.run(cost(url, own))


def run_bench(options: BenchOptions, server: ServeOptions) -> int:
    """Prints the report; returns 0 where every request was answered as it should be, else 1."""
    console = make_console()
    bench = Bench(options, server, Report(["penstock", *sys.argv[1:]]), Console(stderr=True))
    try:
        is_good = _choose_mode(options)(bench, console)
    except (BenchError, ValueError) as error:
        fail("penstock bench", str(error))
    bench.report.print(console)
    if options.json is not None:
        bench.report.write_json(options.json)
    return 0 if is_good else 1


def _choose_mode(options: BenchOptions) -> Callable[[Bench, Console], bool]:
    modes = {
        "--compare": (options.compare is not None, run_compare),
        "--floor": (options.floor, run_floor),
        "--frontend-cost": (options.frontend_cost, run_frontend_cost),
        "--storm": (options.storm, run_storm),
    }
    chosen = {name: run for name, (is_chosen, run) in modes.items() if is_chosen}
    if len(chosen) > 1:
        raise BenchError(f"{' and '.join(chosen)} are different measurements: choose one")
    return next(iter(chosen.values()), run_load)
