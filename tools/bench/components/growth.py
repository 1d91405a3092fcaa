"""`penstock bench growth`: how a decode step grows with the context, with the rows and with the vocabulary.

Models of random weights; steps run on the bare pass in this process, without an engine. With the CPU's native kernels
half of the steps time their operations, so the tables show which part of the step grows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.backend.forward_pass import PassOptions, SamplingParams
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.backend.options import BackendOptions
from penstock.backend.passes.decoder.cpu.native_ops import NativeOps, TimedOperations
from penstock.backend.passes.decoder.cuda.device.device_choice import choose_device
from penstock.tools.bench.harness.decode_steps import commit_cache, decode_steps
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import MeasurementRun, measurement_run
from penstock.tools.bench.harness.step_parts import name_parts
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, Counts, ReportOptions, Sizes
from penstock.tools.random_model import ModelDims, write_random_model

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.backend.forward_pass import IBatchedForwardPass, StepBatch
_WARM_UP_STEPS = 3
MODEL = ModelDims(hidden_size=512, layers=8, heads=8, kv_heads=2, intermediate_size=1536, vocab_size=32_768)
"""The model where context or rows grow."""
PARTS = ("linears", "attention", "logits", "other operations", "Python", "sampling")
_PART_OF = {"qkv": "linears", "o": "linears", "gate and up": "linears", "down": "linears"} | {
    name: name for name in ("attention", "logits")
}


@MEASUREMENT
@dataclass(frozen=True)
class GrowthOptions:
    contexts: Sizes = (1024, 8192, 32_768)
    """Contexts of one sequence, in tokens."""

    rows: Counts = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Sequences that decode together."""

    vocab_sizes: Sizes = (4096, 32_768, 131_072, 262_144)
    """Vocabularies, each with a model of its own."""

    vocab_rows: Counts = (1, 16)
    """Sequences that decode together for each vocabulary."""

    short_context: AtLeastOne = 256
    """Context where rows or vocabulary grow, in tokens."""

    steps: AtLeastOne = 15
    """Measured steps of each point. As many more are timed by operation."""

    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0
    """Temperature of the sampling; 0 is greedy."""

    gpu: str = "auto"
    """Device, as for the backend."""

    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of the weights, as for the backend."""

    kv_dtype: Literal["auto", "fp32", "bf16", "q8_0", "fp8"] = "auto"
    """Type of the cache. auto is the type of the weights."""

    forward_pass: str = "decoder"  # noqa: S105 - a pass, not a password
    """Pass to measure, as for the backend."""

    def model_dims(self, vocab_size: int) -> ModelDims:
        return replace(MODEL, vocab_size=vocab_size, max_context=max(*self.contexts, self.short_context) + 1)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the fullest cache that a point needs, in whole pages."""
        page = BackendOptions().page_tokens()
        widest = max(*self.rows, *self.vocab_rows)
        return max(_round_up(max(self.contexts) + 1, page), widest * _round_up(self.short_context + 1, page))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """One kind of step; times are medians over steps."""

    context_tokens: int
    rows: int
    vocab_size: int
    step_ms: float
    parts_ms: dict[str, float]
    """By PARTS, from steps with timed operations; empty if the pass cannot time them."""

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.rows / self.step_ms

    def share(self, part: str) -> float:
        """The part's share of all parts."""
        return self.parts_ms[part] / sum(self.parts_ms.values())


def growth(*, options: GrowthOptions = GrowthOptions(), report: ReportOptions = ReportOptions()) -> int:
    short = options.short_context
    with measurement_run(report.json) as run:
        by_vocabulary: list[GrowthPoint] = []
        for vocab_size in dict.fromkeys((MODEL.vocab_size, *options.vocab_sizes)):
            with bare_pass(run, options, vocab_size) as bare:
                if vocab_size == MODEL.vocab_size:
                    contexts = [bare.measure(1, context) for context in options.contexts]
                    run.add("contexts", contexts, growth_table("Context of one row", contexts, "context_tokens"))
                    rows = [bare.measure(rows, short) for rows in options.rows]
                    run.add("rows", rows, growth_table(f"Rows at a context of {short}", rows, "rows"))
                if vocab_size in options.vocab_sizes:
                    by_vocabulary += [bare.measure(rows, short) for rows in options.vocab_rows]
        for num_rows in options.vocab_rows:
            points = sorted((p for p in by_vocabulary if p.rows == num_rows), key=lambda point: point.vocab_size)
            title = f"Vocabulary at {num_rows} rows and a context of {short}"
            run.add(f"vocabularies_{num_rows}", points, growth_table(title, points, "vocab_size"))
    return run.exit_status


class BarePass:
    """A pass with a random model, and a cache for the largest step."""

    def __init__(self, forward_pass: IBatchedForwardPass, options: GrowthOptions) -> None:
        self._pass, self._options = forward_pass, options
        self._page_size_tokens = BackendOptions().page_tokens()
        kv_dtypes = forward_pass.spec.kv_bytes_per_token
        kv_dtype = next(iter(kv_dtypes)) if options.kv_dtype == "auto" else options.kv_dtype
        forward_pass.create_cache(options.num_cached_tokens // self._page_size_tokens, self._page_size_tokens, kv_dtype)
        ops = getattr(forward_pass, "ops", None)
        self._native_ops = ops if isinstance(ops, NativeOps) else None
        commit_cache(ops)

    def measure(self, rows: int, context_tokens: int) -> GrowthPoint:
        """Plain steps and steps with timed operations take turns."""
        num_turns = _WARM_UP_STEPS + self._options.steps
        sampling = SamplingParams(temperature=self._options.temperature)
        batches = decode_steps(rows, context_tokens, self._page_size_tokens, 2 * num_turns, sampling)
        steps_ms: list[float] = []
        parts: list[dict[str, float]] = []
        for plain, timed in zip(batches, batches, strict=True):
            steps_ms.append(sum(self._step_ms(plain)))
            if self._native_ops is not None:
                parts.append(self._timed_parts_ms(self._native_ops, timed))
        median = statistics.median
        return GrowthPoint(
            context_tokens=context_tokens,
            rows=rows,
            vocab_size=self._pass.spec.vocab_size,
            step_ms=median(steps_ms[_WARM_UP_STEPS:]),
            parts_ms={part: median(each[part] for each in parts[_WARM_UP_STEPS:]) for part in PARTS if parts},
        )

    def _step_ms(self, batch: StepBatch) -> tuple[float, float]:
        """Return the ms of forward, and of sampling with the wait for it."""
        started_s = time.perf_counter()
        logits = self._pass.forward(batch)
        computed_s = time.perf_counter()
        self._pass.sample(logits, batch).wait()
        return 1e3 * (computed_s - started_s), 1e3 * (time.perf_counter() - computed_s)

    def _timed_parts_ms(self, ops: NativeOps, batch: StepBatch) -> dict[str, float]:
        timed: list[TimedOperations] = []
        ops.timed = timed
        forward_ms, sampling_ms = self._step_ms(batch)
        ops.timed = None
        parts: defaultdict[str, float] = defaultdict(float)
        for run in timed:
            for name, taken in zip(name_parts(run.operations), run.times, strict=True):
                parts[_PART_OF.get(name, "other operations")] += taken.elapsed_ns / 1e6
        parts["Python"] = forward_ms - sum(parts.values())
        parts["sampling"] = sampling_ms
        return parts


@contextmanager
def bare_pass(run: MeasurementRun, options: GrowthOptions, vocab_size: int) -> Iterator[BarePass]:
    """Raises StartupError."""
    dims = options.model_dims(vocab_size)
    widest = max(*options.rows, *options.vocab_rows)
    settings = PassOptions(choose_device(options.gpu), options.dtype, widest, widest, dims.max_context)
    with tempfile.TemporaryDirectory(prefix="penstock-growth-") as directory:
        with run.status(f"a model with a vocabulary of {vocab_size:,}"):
            write_random_model(Path(directory), dims)
            forward_pass = find_forward_pass(options.forward_pass).load(Path(directory), settings)
        with closing(forward_pass), run.status(f"steps with a vocabulary of {vocab_size:,}"):
            yield BarePass(forward_pass, options)


def growth_table(title: str, points: Sequence[GrowthPoint], grown: str) -> Table:
    """grown: the field that differs. Shares are those of steps with timed operations."""
    table = make_table(title, grown.replace("_", " "), "step ms", "/ row above", "tok/s", *(f"{p}, %" for p in PARTS))
    above = None
    for point in points:
        table.add_row(
            f"{getattr(point, grown):,}",
            f"{point.step_ms:.2f}",
            "" if above is None else f"{point.step_ms / above.step_ms:.2f} ×",
            f"{point.tokens_per_s:,.0f}",
            *(f"{100 * point.share(part):.0f}" if point.parts_ms else "–" for part in PARTS),
        )
        above = point
    return table
