"""`penstock bench mask-cost`: CPU time of a grammar for each row and step.

It has three parts: fill the mask, advance the grammar by the sampled token, and apply the mask to the logits. The
backend's own classes compile, copy and advance the grammars; the answers are synthetic and match the grammar.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer
from rich.table import Table

from penstock.backend.forward_pass import SamplingParams, SlotInit, StepBatch, TokenMasks
from penstock.backend.options import BackendOptions
from penstock.backend.sampling.sampler import HostSampling
from penstock.backend.structured_output.compile_grammar import CompiledGrammar
from penstock.backend.structured_output.compile_pool import CompilePool
from penstock.backend.structured_output.constraints import ConstraintFailed, SequenceConstraints
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.backend.structured_output.grammar_costs import BadGrammar
from penstock.backend.structured_output.late_masks import MaskedRow, fill_masks
from penstock.shm.messages import Constraints, Grammar
from penstock.tools.bench.components.grammar_cases import CASES, GrammarCase
from penstock.tools.bench.components.synthetic_tokenizer import write_tokenizer
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.load_generator.stats import Aim, percentile
from penstock.tools.bench.options import MEASUREMENT, ReportOptions, SeededRounds

NUM_ROWS = 32
LARGE_VOCAB_SIZE = 128_000
NUM_SAMPLINGS = 100
LIMIT_US = 100.0


@MEASUREMENT
@dataclass(frozen=True)
class MaskCostOptions:
    model: str | None = None
    """Checkpoint whose tokenizer is measured: a directory in the Hugging Face layout, or a hub id. Default: the small
    demo model."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    forward_pass: str = "decoder"  # noqa: S105 - a pass, not a password
    """Forward pass that says how large the vocabulary is: an installed one by name, or "package.module:Class"."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """CPU time of the thread per row, in microseconds."""

    p50_us: float
    p99_us: float
    mean_us: float

    @classmethod
    def of(cls, times_us: Sequence[float]) -> RowCost:
        """times_us has at least one entry."""
        return cls(percentile(times_us, 50) or 0.0, percentile(times_us, 99) or 0.0, statistics.mean(times_us))


@dataclass(frozen=True, slots=True)
class MaskCost:
    """One grammar over one vocabulary. The cost of a row is to fill its mask and to advance by the next token."""

    vocab_size: int
    grammar: str
    rows: int
    """Measured rows of each kind."""
    compile_ms: float
    """Median time of a compilation."""
    first: RowCost
    """The first row after each compilation."""
    cold: RowCost
    """All rows of the first answer after each compilation."""
    warm: RowCost
    """Rows of later answers, whose grammar is compiled already."""
    warm_advance: RowCost
    """The part of `warm` that advances the grammar."""
    applied: RowCost
    """Extra time of sampling on the host with masks, per masked row."""

    def total_us(self, row: RowCost) -> float:
        return row.p50_us + self.applied.p50_us


@dataclass(frozen=True, slots=True)
class BenchVocabulary:
    """A tokenizer.json, and the backend's knowledge of it from other files."""

    tokenizer_json: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def mask_cost(
    *,
    options: MaskCostOptions = MaskCostOptions(),
    rounds: SeededRounds = SeededRounds(),
    report: ReportOptions = ReportOptions(),
) -> int:
    with measurement_run(report.json) as run, tempfile.TemporaryDirectory(prefix="penstock-masks-") as directory:
        path = Path(directory) / "tokenizer.json"
        with run.status(f"a tokenizer of {LARGE_VOCAB_SIZE:,} tokens"):
            large = BenchVocabulary(path, LARGE_VOCAB_SIZE, (write_tokenizer(path, LARGE_VOCAB_SIZE, rounds.seed),))
        costs = []
        for vocabulary in (_model_vocabulary(options), large):
            with run.status(f"masks over {vocabulary.vocab_size:,} tokens"):
                costs += measure_masks(vocabulary, rounds.rounds, rounds.seed)
        run.add("mask_cost", costs, mask_table(costs), mask_aims(costs))
    return run.exit_status


def _model_vocabulary(options: MaskCostOptions) -> BenchVocabulary:
    """Raises BenchError, StartupError."""
    from penstock.backend.checkpoint.files.generation_config import read_generation_defaults
    from penstock.backend.forward_pass.plugins import find_forward_pass
    from penstock.backend.start.startup import locate_model, pass_options

    backend = BackendOptions(model=options.model, revision=options.revision, forward_pass=options.forward_pass)
    model_dir = locate_model(backend)
    spec = find_forward_pass(backend.forward_pass).describe(model_dir, pass_options(backend))
    tokenizer_json = model_dir / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise BenchError(f"{model_dir} has no tokenizer.json: its grammars cannot be compiled")
    return BenchVocabulary(tokenizer_json, spec.vocab_size, read_generation_defaults(model_dir).eos_token_ids)


def measure_masks(vocabulary: BenchVocabulary, num_rounds: int, seed: int) -> list[MaskCost]:
    """Measure each grammar over num_rounds * NUM_ROWS answers, cold and warm. Raises BenchError."""
    compiler = GrammarCache(CompilePool(vocabulary.tokenizer_json, vocabulary.vocab_size, vocabulary.eos_token_ids))
    try:
        text = vocabulary.tokenizer_json.read_text(encoding="utf-8")
        tokenizer = LLTokenizer(text, n_vocab=vocabulary.vocab_size, eos_token=list(vocabulary.eos_token_ids))
        measurement = _Measurement(compiler, tokenizer, vocabulary)
        # The first compilation reads the tokenizer.
        measurement.compile(Grammar("regex", "a"))
        return [measurement.cost(case, num_rounds, random.Random(seed)) for case in CASES]  # noqa: S311
    except (BadGrammar, ConstraintFailed) as error:
        raise BenchError(f"a grammar of the benchmark fails with {vocabulary.tokenizer_json}: {error}") from None
    finally:
        compiler.close()


@dataclass(frozen=True, slots=True)
class _RowTimes:
    """Microseconds, in the order of steps and rows."""

    fill_us: list[float]
    advance_us: list[float]

    @property
    def rows_us(self) -> list[float]:
        return [fill + advance for fill, advance in zip(self.fill_us, self.advance_us, strict=True)]


class _Measurement:
    """Measures grammars over one vocabulary."""

    def __init__(self, compiler: GrammarCache, tokenizer: LLTokenizer, vocabulary: BenchVocabulary) -> None:
        self._compiler, self._tokenizer, self._vocab_size = compiler, tokenizer, vocabulary.vocab_size
        self._stop_ids = frozenset(vocabulary.eos_token_ids)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, even if the grammar is compiled already. Raises BadGrammar."""
        future = self._compiler.compile(grammar)
        future.exception()  # waits; `finished` raises the error
        return self._compiler.take_result(grammar, future)

    def cost(self, case: GrammarCase, num_rounds: int, rng: random.Random) -> MaskCost:
        compile_ms: list[float] = []
        first_us: list[float] = []
        cold, warm = _RowTimes([], []), _RowTimes([], [])
        for _ in range(num_rounds):
            fresh = []
            for _ in range(NUM_ROWS):
                started_s = time.perf_counter()
                fresh.append(self.compile(case.grammar))
                compile_ms.append(1000 * (time.perf_counter() - started_s))
            num_before = len(cold.fill_us)
            self._answer(self._sequences(case, fresh), self._answers(case, rng), cold)
            first_us += cold.rows_us[num_before : num_before + NUM_ROWS]
            self._answer(self._sequences(case), self._answers(case, rng), warm)
        return MaskCost(
            vocab_size=self._vocab_size,
            grammar=case.grammar.kind,
            rows=len(warm.fill_us),
            compile_ms=statistics.median(compile_ms),
            first=RowCost.of(first_us),
            cold=RowCost.of(cold.rows_us),
            warm=RowCost.of(warm.rows_us),
            warm_advance=RowCost.of(warm.advance_us),
            applied=RowCost.of(self._applied_us(self._masks(case, rng), rng)),
        )

    def _sequences(self, case: GrammarCase, compiled: Sequence[CompiledGrammar] = ()) -> list[SequenceConstraints]:
        """NUM_ROWS sequences with these grammars, or with copies of the compiled one, which later requests get."""
        copies: list[CompiledGrammar | None] = list(compiled)
        copies = copies or [self._compiler.find_compiled(case.grammar) for _ in range(NUM_ROWS)]
        constraints = Constraints(grammar=case.grammar)
        return [SequenceConstraints(constraints, copy, self._stop_ids, self._vocab_size) for copy in copies]

    def _answers(self, case: GrammarCase, rng: random.Random) -> list[list[int]]:
        return [self._tokenizer.greedy_tokenize(case.answer(rng)) for _ in range(NUM_ROWS)]

    def _answer(self, sequences: list[SequenceConstraints], answers: list[list[int]], times: _RowTimes) -> None:
        """Run a row of each sequence in turn until the shortest answer ends. Each row is timed as a step of its own."""
        for step, tokens in enumerate(zip(*answers, strict=False)):
            for constraints, token_id in zip(sequences, tokens, strict=True):
                started_ns = time.thread_time_ns()
                _, faults, _ = fill_masks([MaskedRow(0, step, constraints, [0])], self._vocab_size)
                filled_ns = time.thread_time_ns()
                constraints.advance(token_id)
                times.advance_us.append((time.thread_time_ns() - filled_ns) / 1000)
                times.fill_us.append((filled_ns - started_ns) / 1000)
                if faults:
                    raise BenchError(f"a grammar of the benchmark: {faults[0]}")

    def _masks(self, case: GrammarCase, rng: random.Random) -> TokenMasks:
        """Return the masks of a step whose rows are at different positions in their answers. Raises BenchError."""
        sequences = self._sequences(case)
        rows = []
        for row, (constraints, answer) in enumerate(zip(sequences, self._answers(case, rng), strict=True)):
            num_tokens = row * len(answer) // NUM_ROWS
            for token_id in answer[:num_tokens]:
                constraints.advance(token_id)
            rows.append(MaskedRow(row, num_tokens, constraints, [row]))
        masks, faults, _ = fill_masks(rows, self._vocab_size)
        if masks is None or faults:
            raise BenchError(f"a grammar of the benchmark: {next(iter(faults.values()))}")
        return masks

    def _applied_us(self, masks: TokenMasks, rng: random.Random) -> list[float]:
        """Time per row that masks add to a greedy step. Steps with and without masks take turns."""
        sampler = HostSampling(self._vocab_size, NUM_ROWS)
        batch = _greedy_batch()
        sampler.begin_step(batch)
        logits = np.random.default_rng(rng.getrandbits(32)).random((NUM_ROWS, self._vocab_size), np.float32)

        def sample_ns(given: TokenMasks | None) -> int:
            started_ns = time.thread_time_ns()
            sampler.sample(logits, batch, given)
            return time.thread_time_ns() - started_ns

        pairs = [(sample_ns(None), sample_ns(masks)) for _ in range(NUM_SAMPLINGS)]
        return [(masked - free) / 1000 / NUM_ROWS for free, masked in pairs]


def _greedy_batch() -> StepBatch:
    """One decode step of NUM_ROWS rows whose slots are newly assigned."""
    rows = np.arange(NUM_ROWS, dtype=np.int32)
    prompt = np.ones(1, np.int32)
    greedy = SamplingParams(temperature=0.0)
    return StepBatch(
        input_ids=rows,
        query_starts=np.arange(NUM_ROWS + 1, dtype=np.int32),
        context_lens=np.ones(NUM_ROWS, np.int32),
        page_table=rows[:, None],
        slots=rows,
        logit_rows=rows,
        slot_inits=tuple(SlotInit(slot, greedy, prompt, 1) for slot in range(NUM_ROWS)),
    )


def mask_aims(costs: Sequence[MaskCost]) -> list[Aim]:
    """One aim cold and one warm for each vocabulary: the median sum of all three parts, for its slowest grammar."""
    aims = []
    for vocab_size in dict.fromkeys(cost.vocab_size for cost in costs):
        same_vocabulary = [cost for cost in costs if cost.vocab_size == vocab_size]
        for name, worst_us in (
            ("cold", max(cost.total_us(cost.cold) for cost in same_vocabulary)),
            ("warm", max(cost.total_us(cost.warm) for cost in same_vocabulary)),
        ):
            aims.append(Aim(f"a mask over {vocab_size:,} tokens, {name}, µs a row", worst_us, "at most", LIMIT_US))
    return aims


def mask_table(costs: Sequence[MaskCost]) -> Table:
    columns = ["vocabulary", "grammar", "compile\nms"]
    columns += [f"{name}\np50 / p99" for name in ("first row", "cold row", "warm row", "warm advance", "applied")]
    columns.insert(6, "warm\nmean")
    table = make_table("A grammar's mask, µs a row and step", *columns)
    for cost in costs:
        shown = (cost.first, cost.cold, cost.warm, cost.warm_advance, cost.applied)
        spreads = [f"{entry.p50_us:.0f} / {entry.p99_us:.0f}" for entry in shown]
        spreads.insert(3, f"{cost.warm.mean_us:.0f}")
        table.add_row(f"{cost.vocab_size:,}", cost.grammar, f"{cost.compile_ms:.2f}", *spreads)
    return table
