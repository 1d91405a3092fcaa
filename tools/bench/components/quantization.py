"""`penstock bench quantization`: the quality and the speed of each form of a model's weights, on the CPU.

The perplexity of a text is counted as llama.cpp's llama-perplexity counts it. The speed is that of decode steps on the
bare pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from tokenizers import Tokenizer

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.formats.stored_formats import PLAIN
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions, SamplingParams, SlotInit, StepBatch
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass, make_cpu_ops
from penstock.process.options import format_size
from penstock.tools.bench.components.scored_model import PAGE_TOKENS, ScoredModel
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, Counts, ReportOptions

FORMS = {
    "fp32": ("fp32", "none"),
    "bf16": ("bf16", "none"),
    "stored": ("auto", "none"),
    "int8": ("bf16", "int8"),
    "int4": ("bf16", "int4"),
    "int4-128": ("bf16", "int4-128"),
}
"""Name → --dtype and --quantize. fp32 and bf16 dequantise a quantised checkpoint; "stored" serves it as it is."""
_LEAST_WINDOW_TOKENS = 3
"""So that the second half has a token after its first."""
_CONTEXT_TOKENS = 128
_WARM_UP_STEPS = 3


@MEASUREMENT
@dataclass(frozen=True)
class QuantizationOptions:
    model: str | None = None
    """Checkpoint: a directory in the Hugging Face layout, or a hub id. Default: the small demo model."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    text: Path | None = None
    """Text to run through the model. Default: documentation of Python modules that the demo model did not see."""

    windows: AtLeastOne = 8
    """Pieces of the text."""

    window_tokens: AtLeastOne = 256
    """Tokens of a piece."""

    rows: Counts = (1, 4, 16)
    """Sequences that decode together, at a context of 128 tokens."""

    steps: AtLeastOne = 30
    """Decode steps of each number of rows."""


@dataclass(frozen=True, slots=True)
class FormQuality:
    """One form of the weights."""

    form: str
    weight_bytes: int
    perplexity: float
    tokens_per_s: dict[int, float]
    """Rows that decode together → tokens per second of all, from the median step."""


def quantization(
    *, options: QuantizationOptions = QuantizationOptions(), report: ReportOptions = ReportOptions()
) -> int:
    from penstock.backend.options import BackendOptions
    from penstock.backend.start.startup import locate_model

    with measurement_run(report.json) as run:
        model_dir = locate_model(BackendOptions(model=options.model, revision=options.revision))
        windows = read_windows(options, model_dir)
        found = []
        for form in FORMS:
            if form == "stored" and read_stored_formats(model_dir) == PLAIN:
                continue
            with run.status(f"{form} weights"):
                try:
                    found.append(measure(options, model_dir, windows, form))
                except StartupError as error:
                    run.progress.print(f"left out: {error}", markup=False, soft_wrap=True)
        if not found:
            raise BenchError("the model cannot run in any form")
        run.add("quantization", found, quality_table(found))
    return run.exit_status


def measure(options: QuantizationOptions, model_dir: Path, windows: NDArray[np.int32], form: str) -> FormQuality:
    """Raises BenchError, StartupError."""
    dtype, mode = FORMS[form]
    most_rows, num_tokens = max(options.rows), windows.shape[1]
    settings = PassOptions("cpu", dtype, most_rows, max(num_tokens, most_rows), quantize=mode)
    load = load_dequantized if form in ("fp32", "bf16") else CpuDecoderPass.load
    with closing(load(model_dir, settings)) as forward_pass:
        context, longest = forward_pass.spec.max_context_tokens, max(num_tokens, _CONTEXT_TOKENS + 1)
        if context < longest:
            raise BenchError(f"the model has a context of {context} tokens; {longest} are needed")
        pages_per_row = -(-(_CONTEXT_TOKENS + 1) // PAGE_TOKENS)
        model = ScoredModel(forward_pass, max(most_rows * pages_per_row, -(-num_tokens // PAGE_TOKENS)))
        speeds = {rows: rows / _median_step_s(forward_pass, rows, options.steps) for rows in options.rows}
        return FormQuality(form, forward_pass.spec.weight_bytes, model.perplexity(windows), speeds)


def _median_step_s(forward_pass: CpuDecoderPass, rows: int, num_steps: int) -> float:
    times_s = []
    for batch in _decode_steps(rows, _WARM_UP_STEPS + num_steps):
        started_s = time.perf_counter()
        forward_pass.sample(forward_pass.forward(batch), batch).wait()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s[_WARM_UP_STEPS:])


def _decode_steps(num_rows: int, num_steps: int) -> Iterator[StepBatch]:
    """Yield the same step num_steps times. Row r owns the pages from r * pages_per_row; their content is arbitrary."""
    pages_per_row = -(-(_CONTEXT_TOKENS + 1) // PAGE_TOKENS)
    rows = np.arange(num_rows, dtype=np.int32)
    page_table = (rows[:, None] * pages_per_row + np.arange(pages_per_row)).astype(np.int32)
    prompt = np.ones(_CONTEXT_TOKENS, np.int32)
    inits = tuple(SlotInit(slot, SamplingParams(temperature=0.0), prompt, _CONTEXT_TOKENS) for slot in range(num_rows))
    for index in range(num_steps):
        yield StepBatch(
            input_ids=rows + 1,
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            context_lens=np.full(num_rows, _CONTEXT_TOKENS, np.int32),
            page_table=page_table,
            slots=rows,
            logit_rows=rows,
            slot_inits=inits if index == 0 else (),
        )


def load_dequantized(model_dir: Path, settings: PassOptions) -> CpuDecoderPass:
    """Raises StartupError."""
    config = read_decoder_config(model_dir)
    with open_weights(model_dir, config) as weights:
        dtype = weights.choose_dtype(settings.dtype)
        ops = make_cpu_ops(config, dtype, settings.max_batch_tokens)
        return CpuDecoderPass(config, weights, ops, dtype, settings.max_running)


def read_windows(options: QuantizationOptions, model_dir: Path) -> NDArray[np.int32]:
    """Consecutive pieces of the text, [windows, window_tokens]. Raises BenchError."""
    if options.window_tokens < _LEAST_WINDOW_TOKENS:
        raise BenchError(f"--window-tokens is {options.window_tokens}; it must be at least {_LEAST_WINDOW_TOKENS}")
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise BenchError(f"{model_dir} has no tokenizer.json: its text cannot be made tokens")
    tokenizer = Tokenizer.from_file(str(path))
    tokens = [token for text in _read_texts(options.text) for token in tokenizer.encode(text).ids]
    num_needed = options.windows * options.window_tokens
    if len(tokens) < num_needed:
        raise BenchError(
            f"the text has {len(tokens)} tokens; {options.windows} windows of {options.window_tokens} need "
            f"{num_needed}: lower --windows, or give a longer --text"
        )
    return np.array(tokens[:num_needed], np.int32).reshape(options.windows, options.window_tokens)


def _read_texts(path: Path | None) -> list[str]:
    """Raises BenchError."""
    if path is None:
        from penstock.tools.demo_model.corpus import held_out_texts

        return held_out_texts()
    try:
        return [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--text {path} cannot be read: {error}") from None


def quality_table(found: Sequence[FormQuality]) -> Table:
    columns = ["form", "weights", "perplexity", *(f"tok/s,\n{rows} rows" for rows in found[0].tokens_per_s)]
    table = make_table("Forms of the weights", *columns)
    for row in found:
        speeds = (f"{speed:,.0f}" for speed in row.tokens_per_s.values())
        table.add_row(row.form, format_size(row.weight_bytes), f"{row.perplexity:.2f}", *speeds)
    return table
