"""`penstock bench growth`: how a decode step grows with context, rows and vocabulary, and an eviction with the pages.

Models have random weights; their steps run on the bare pass in this process, without an engine. Pages are those of the
scheduler's own pool: all are idle, so each page that is taken evicts another.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.backend.forward_pass import PassOptions, SamplingParams
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.backend.kv_cache.page_index import IndexedPage
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.options import BackendOptions
from penstock.backend.passes.cuda.device.device_choice import choose_device
from penstock.tools.bench.components.decode_steps import commit_cache, decode_steps
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, Counts, ReportOptions, Sizes
from penstock.tools.random_model import ModelDims, write_random_model

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.backend.forward_pass import IBatchedForwardPass

_WARM_UP_STEPS = 3
_SHORT_CONTEXT = 256
"""Where rows or vocabulary grow, in tokens."""
_VOCAB_ROWS = 16
_TENANTS = (1, 2, 16)
_MOST_EVICTIONS = 100_000
MODEL = ModelDims(hidden_size=512, layers=8, heads=8, kv_heads=2, intermediate_size=1536, vocab_size=32_768)
"""The model where context or rows grow."""


@MEASUREMENT
@dataclass(frozen=True)
class GrowthOptions:
    contexts: Sizes = (1024, 8192, 32_768)
    """Contexts of one sequence, in tokens."""

    rows: Counts = (1, 4, 16, 64, 256)
    """Sequences that decode together, at a context of 256."""

    vocab_sizes: Sizes = (4096, 32_768, 131_072, 262_144)
    """Vocabularies, each with a model of its own, at 1 and 16 rows."""

    pages: Sizes = (10_000, 100_000, 1_000_000)
    """Pages of a cache, for 1, 2 and 16 tenants."""

    steps: AtLeastOne = 15
    """Measured steps of each point."""

    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0
    """Temperature of the sampling; 0 is greedy."""

    gpu: str = "auto"
    """Device, as for the backend."""

    forward_pass: str = "decoder"  # noqa: S105 - a pass, not a password
    """Pass to measure, as for the backend."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    context_tokens: int
    rows: int
    vocab_size: int
    step_ms: float
    """Median of the steps."""

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.rows / self.step_ms


@dataclass(frozen=True, slots=True)
class EvictionPoint:
    """The cost of a page that is taken from a full cache, filled and given back."""

    pages: int
    tenants: int
    page_us: float
    """Mean."""
    longest_ms: float


def growth(*, options: GrowthOptions = GrowthOptions(), report: ReportOptions = ReportOptions()) -> int:
    with measurement_run(report.json) as run:
        vocabularies: list[StepPoint] = []
        for vocab_size in dict.fromkeys((MODEL.vocab_size, *options.vocab_sizes)):
            with bare_pass(run, options, vocab_size) as bare:
                if vocab_size == MODEL.vocab_size:
                    contexts = [bare.measure(1, context) for context in options.contexts]
                    rows = [bare.measure(rows, _SHORT_CONTEXT) for rows in options.rows]
                if vocab_size in options.vocab_sizes:
                    vocabularies += [bare.measure(rows, _SHORT_CONTEXT) for rows in (1, _VOCAB_ROWS)]
        for name, points in (("contexts", contexts), ("rows", rows), ("vocabularies", vocabularies)):
            run.add(name, points, steps_table(name, points))
        with run.status("evictions"):
            evictions = [measure_evictions(pages, tenants) for tenants in _TENANTS for pages in options.pages]
        run.add("evictions", evictions, evictions_table(evictions))
    return run.exit_status


class BarePass:
    """A pass with a random model, and a cache for the largest step."""

    def __init__(self, forward_pass: IBatchedForwardPass, options: GrowthOptions) -> None:
        self._pass, self._options = forward_pass, options
        self._page_tokens = BackendOptions().page_tokens()
        widest = max(*options.rows, _VOCAB_ROWS)
        pages = max(self._num_pages(max(options.contexts)), widest * self._num_pages(_SHORT_CONTEXT))
        forward_pass.create_cache(pages, self._page_tokens, next(iter(forward_pass.spec.kv_bytes_per_token)))
        commit_cache(getattr(forward_pass, "ops", None))

    def _num_pages(self, context_tokens: int) -> int:
        return context_tokens // self._page_tokens + 1

    def measure(self, rows: int, context_tokens: int) -> StepPoint:
        sampling = SamplingParams(temperature=self._options.temperature)
        num_steps = _WARM_UP_STEPS + self._options.steps
        times_ms = []
        for batch in decode_steps(rows, context_tokens, self._page_tokens, num_steps, sampling):
            started_s = time.perf_counter()
            self._pass.sample(self._pass.forward(batch), batch).wait()
            times_ms.append(1e3 * (time.perf_counter() - started_s))
        step_ms = statistics.median(times_ms[_WARM_UP_STEPS:])
        return StepPoint(context_tokens, rows, self._pass.spec.vocab_size, step_ms)


@contextmanager
def bare_pass(run: MeasurementRun, options: GrowthOptions, vocab_size: int) -> Iterator[BarePass]:
    """Raises StartupError."""
    longest, widest = max(*options.contexts, _SHORT_CONTEXT) + 1, max(*options.rows, _VOCAB_ROWS)
    dims = replace(MODEL, vocab_size=vocab_size, max_context=longest)
    settings = PassOptions(choose_device(options.gpu), "auto", widest, widest, longest)
    with tempfile.TemporaryDirectory(prefix="penstock-growth-") as directory:
        with run.status(f"a model with a vocabulary of {vocab_size:,}"):
            write_random_model(Path(directory), dims)
            forward_pass = find_forward_pass(options.forward_pass).load(Path(directory), settings)
        with closing(forward_pass), run.status(f"steps with a vocabulary of {vocab_size:,}"):
            yield BarePass(forward_pass, options)


def measure_evictions(num_pages: int, num_tenants: int) -> EvictionPoint:
    """Tenants take turns, so that their shares stay equal."""
    pool = PagePool(num_pages)
    number = 0

    def fill(pages: Sequence[int]) -> None:
        nonlocal number
        for page in pages:
            content, tenant = number.to_bytes(16, "big"), bytes([number % num_tenants])
            pool.index_page(page, content, IndexedPage(content, tenant, tenant, tenant=tenant))
            pool.release([page])
            number += 1

    fill(pool.allocate(num_pages))
    num_evictions = min(num_pages, _MOST_EVICTIONS)
    times_ns = []
    for _ in range(num_evictions):
        started_ns = time.thread_time_ns()
        fill(pool.allocate(1))
        times_ns.append(time.thread_time_ns() - started_ns)
    return EvictionPoint(num_pages, num_tenants, sum(times_ns) / num_evictions / 1e3, max(times_ns) / 1e6)


def steps_table(name: str, points: Sequence[StepPoint]) -> Table:
    table = make_table(f"Decode steps: {name}", "context", "rows", "vocabulary", "step ms", "tok/s")
    for point in points:
        sizes = (f"{size:,}" for size in (point.context_tokens, point.rows, point.vocab_size))
        table.add_row(*sizes, f"{point.step_ms:.2f}", f"{point.tokens_per_s:,.0f}")
    return table


def evictions_table(points: Sequence[EvictionPoint]) -> Table:
    table = make_table("A page taken, filled and given back", "tenants", "pages", "µs a page", "longest, ms")
    for point in points:
        table.add_row(str(point.tenants), f"{point.pages:,}", f"{point.page_us:.2f}", f"{point.longest_ms:.1f}")
    return table
