"""`penstock bench growth`: the cost of a page of the KV cache against the number of pages and tenants.

All pages are idle, so each page that is taken evicts another. Only the scheduler's tables are measured, no memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.process.garbage_collection import resume_collection
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, Counts, ReportOptions


@MEASUREMENT
@dataclass(frozen=True)
class GrowthOptions:
    pages: Counts = (10, 100, 400, 1000)
    """Thousands of pages of a cache."""

    tenants: Counts = (1, 2, 100)
    """Tenants that take turns."""

    evictions: AtLeastOne = 200_000
    """Measured evictions of each point, after each page was filled once."""


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """CPU time of a page that is taken from a full cache, indexed and given back."""

    tenants: int
    pages: int
    median_us: float
    worst_ms: float


def growth(*, options: GrowthOptions = GrowthOptions(), report: ReportOptions = ReportOptions()) -> int:
    with measurement_run(report.json) as run:
        points = []
        for num_tenants in options.tenants:
            for num_pages in [1000 * count for count in options.pages]:
                with run.status(f"{num_pages:,} pages of {num_tenants} tenants"):
                    points.append(measure(num_pages, num_tenants, options.evictions))
        run.add("growth", points, growth_table(points))
    return run.exit_status


def measure(num_pages: int, num_tenants: int, num_evictions: int) -> GrowthPoint:
    pool = PagePool(num_pages)
    resume_collection()  # as the backend does when it has started
    tenants = [b"tenant %d" % number for number in range(num_tenants)]
    times_ns = []
    for number in range(num_pages + num_evictions):
        # Hashes are spread as real ones are. Every second page begins a prompt.
        page_hash = (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16)
        tenant = tenants[number % num_tenants]
        started_ns = time.thread_time_ns()
        pages = pool.allocate(1)
        parent = tenant if number % 2 else page_hash[::-1]
        pool.index_page(pages[0], page_hash, IndexedPage(page_hash, parent, tenant, tenant=tenant))
        pool.release(pages)
        if number >= num_pages:
            times_ns.append(time.thread_time_ns() - started_ns)
    return GrowthPoint(num_tenants, num_pages, median(times_ns) / 1e3, max(times_ns) / 1e6)


def growth_table(points: Sequence[GrowthPoint]) -> Table:
    table = make_table("A page taken, indexed and given back", "tenants", "pages", "median µs", "worst ms")
    for point in points:
        table.add_row(str(point.tenants), f"{point.pages:,}", f"{point.median_us:.2f}", f"{point.worst_ms:.2f}")
    return table
