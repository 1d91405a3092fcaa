"""`penstock bench`: from options to a report and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import uvloop
from rich.console import Console

from penstock.shm.process.options import fail
from penstock.tools.bench.components.channel_sweep import run_channel_sweep
from penstock.tools.bench.components.ipc import run_ipc
from penstock.tools.bench.components.mask_cost import run_mask_cost
from penstock.tools.bench.components.scheduling import run_scheduling
from penstock.tools.bench.harness.report import BenchReport, check_can_write, make_console, make_table
from penstock.tools.bench.harness.run import Bench
from penstock.tools.bench.harness.server import BenchServer
from penstock.tools.bench.load_generator.sending import BenchError, warm_up
from penstock.tools.bench.options import BenchOptions
from penstock.tools.bench.serving.coalescing import run_coalescing
from penstock.tools.bench.serving.floor import (
    BareStep,
    EngineStep,
    floor_table,
    measure_bare_steps,
    measure_engine_step_ms,
)
from penstock.tools.bench.serving.frontend_cost import NUM_STREAMS, measure_frontend_cost
from penstock.tools.bench.serving.interference import run_interference
from penstock.tools.bench.serving.shared_prefix import run_shared_prefix
from penstock.tools.bench.serving.static import NUM_REQUESTS, compare_static, comparison_table, static_child
from penstock.tools.bench.serving.storm import settle
from penstock.tools.bench.serving.workers_scaling import run_workers_scaling
from penstock.tools.serve import ServeOptions

_STORM_REQUESTS = 500
_OPEN_LOOP_REQUESTS = 64
_FRONTEND_COST_REQUESTS = 8 * NUM_STREAMS


async def load_rows(bench: Bench, url: str) -> None:
    async with bench.target(url) as target:
        workload = bench.workload(target)
        if workload.rate_per_s is not None:
            await bench.row(target, workload, bench.options.requests or _OPEN_LOOP_REQUESTS, 1)
            return
        for concurrency in bench.options.concurrency:
            await bench.row(target, workload, bench.options.requests or 4 * concurrency, concurrency)


def run_load(bench: Bench, _console: Console) -> bool:
    with bench.serving() as url:
        uvloop.run(load_rows(bench, url))
    return all(row.failed == 0 for row in bench.report.rows)


def run_storm(bench: Bench, console: Console) -> bool:
    async def storm(url: str) -> bool:
        num_requests = bench.options.requests or _STORM_REQUESTS
        async with bench.target(url) as target:
            workload = replace(bench.workload(target), drop=bench.drop_or(0.5))
            summary = await bench.row(target, workload, num_requests, max(bench.options.concurrency))
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

    with bench.serving() as url:
        return uvloop.run(storm(url))


def run_compare(bench: Bench, console: Console) -> bool:
    async def compare(url: str) -> None:
        async with bench.target(url) as target:
            workload = bench.plain_workload(target)
            with (
                bench.progress.status("static and continuous, in turns"),
                static_child(bench.server, NUM_REQUESTS, workload) as child,
            ):
                comparison = await compare_static(
                    target,
                    child,
                    workload,
                    num_rounds=bench.num_rounds,
                    stagger_s=bench.options.stagger_s,
                    seed=bench.options.seed,
                )
        bench.report.sections["compare_static"] = comparison
        bench.report.aims += comparison.aims()
        console.print(comparison_table(comparison))

    with bench.bench_server() as own:
        uvloop.run(compare(own.url))
    return True


def run_floor(bench: Bench, console: Console) -> bool:
    options = bench.options
    # Halfway through the answer: the mean context of the steps that are measured.
    context_tokens = options.prompt_tokens.high + options.output_tokens.high // 2

    async def engine(url: str, bare: Sequence[BareStep]) -> list[EngineStep]:
        steps = []
        async with bench.target(url) as target:
            workload = bench.plain_workload(target)
            await warm_up(target, workload, options.warmup, options.warmup, options.seed)
            for number, step in enumerate(bare):
                first_seed = options.seed + 1000 * number
                seeds = range(first_seed, first_seed + bench.num_rounds)
                with bench.progress.status(f"the engine's step, batch {step.batch_size}"):
                    engine_ms = await measure_engine_step_ms(target, workload, step.batch_size, seeds)
                steps.append(EngineStep(step, engine_ms))
        return steps

    with bench.progress.status("the bare work of a step"):
        bare = measure_bare_steps(bench.server, options.concurrency, context_tokens)
    with bench.bench_server() as own:
        steps = uvloop.run(engine(own.url, bare))
    bench.report.sections["floor"] = steps
    bench.report.aims += [step.aim() for step in steps]
    console.print(floor_table(steps, context_tokens))
    return True


def run_frontend_cost(bench: Bench, console: Console) -> bool:
    num_requests = bench.options.requests or _FRONTEND_COST_REQUESTS

    async def cost(own: BenchServer) -> bool:
        async with bench.target(own.url) as target:
            with bench.progress.status("64 streams over the fake pass"):
                found, summary = await measure_frontend_cost(target, own, num_requests, bench.options.seed)
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

    with bench.bench_server(replace(bench.server, forward_pass="fake", workers=1)) as own:  # noqa: S106
        return uvloop.run(cost(own))


def run_bench(options: BenchOptions, server: ServeOptions) -> int:
    """Prints the report; returns 0 where every request was answered as it should be, else 1."""
    console = make_console()
    bench = Bench(options, server, BenchReport(["penstock", *sys.argv[1:]]), Console(stderr=True))
    try:
        run = _choose_mode(options)
        if options.json is not None:
            check_can_write(options.json)
        is_good = run(bench, console)
        bench.report.print(console)
        if options.json is not None:
            bench.report.write_json(options.json)
    except (BenchError, ValueError) as error:
        fail("penstock bench", str(error))
    return 0 if is_good else 1


def _choose_mode(options: BenchOptions) -> Callable[[Bench, Console], bool]:
    modes = {
        "--compare": (options.compare is not None, run_compare),
        "--floor": (options.floor, run_floor),
        "--frontend-cost": (options.frontend_cost, run_frontend_cost),
        "--storm": (options.storm, run_storm),
        "--channel-sweep": (options.channel_sweep, run_channel_sweep),
        "--coalescing": (options.coalescing, run_coalescing),
        "--shared-prefix": (options.shared_prefix, run_shared_prefix),
        "--interference": (options.interference, run_interference),
        "--scheduling": (options.scheduling, run_scheduling),
        "--ipc": (options.ipc, run_ipc),
        "--mask-cost": (options.mask_cost, run_mask_cost),
        "--workers-scaling": (options.workers_scaling, run_workers_scaling),
    }
    chosen = {name: run for name, (is_chosen, run) in modes.items() if is_chosen}
    if len(chosen) > 1:
        raise BenchError(f"{' and '.join(chosen)} are different measurements: choose one")
    return next(iter(chosen.values()), run_load)
