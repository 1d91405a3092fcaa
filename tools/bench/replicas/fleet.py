"""`penstock bench fleet`: how requests find cached prefixes among 10 to 1,000 simulated backends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.shm.memory.prefix_table import MAX_REPLICAS
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, Counts, ReportOptions, SeedOptions, Share
from penstock.tools.bench.replicas.fleet_routing import POLICIES
from penstock.tools.bench.replicas.fleet_simulation import IN_TIME_S, Fleet, FleetResult, Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table


@MEASUREMENT
@dataclass(frozen=True)
class FleetOptions:
    backends: Counts = (10, 100, 1000)
    """Sizes of the fleet, a row of each policy for each."""

    requests: AtLeastOne = 100
    """Requests for each backend."""

    rate: Annotated[float, Parameter(validator=Number(gt=0))] = 60.0
    """Requests a second for each backend, arriving as a Poisson process."""

    groups: AtLeastOne = 8
    """Groups of requests with a common prefix, for each backend. Their sizes follow Zipf's law."""

    deaths: Share = 0.05
    """Share of the backends that die at once, halfway."""


def fleet(
    *,
    options: FleetOptions = FleetOptions(),
    seed: SeedOptions = SeedOptions(),
    report: ReportOptions = ReportOptions(),
) -> int:
    traffic = Traffic(options.requests, options.rate, options.groups)
    with measurement_run(report.json) as run:
        results = []
        for num_backends in options.backends:
            for name, make_policy in POLICIES.items():
                if name == "prefix table" and num_backends > MAX_REPLICAS:
                    continue
                with run.status(f"{num_backends} backends, {name}"):
                    num_deaths = math.ceil(options.deaths * num_backends)
                    world = Fleet(num_backends, make_policy(num_backends), traffic, num_deaths=num_deaths)
                    results.append(world.run(name, seed.seed))
        run.add("fleet", results, fleet_table(results))
    return run.exit_status


def fleet_table(results: Sequence[FleetResult]) -> Table:
    in_time = f"within {1e3 * IN_TIME_S:.0f} ms"
    columns = ("backends", "routing", "hits", "at best", "TTFT p50 ms", "p99 ms", in_time, "max/mean", "moved")
    table = make_table("Simulated backends", *columns, "CPU µs")
    for result in results:
        table.add_row(
            f"{result.backends:,}",
            result.policy,
            f"{result.hit_rate:.1%}",
            f"{result.best_hit_rate:.1%}",
            f"{result.ttft_p50_ms:.0f}",
            f"{result.ttft_p99_ms:.0f}",
            f"{result.in_time:.1%}",
            f"{result.busiest_over_mean:.2f}",
            f"{result.moved:,}",
            f"{result.routing_us:.0f}",
        )
    return table
