"""`penstock bench quantization`: the loss of quality of each form of the weights, on the CPU.

The same text runs through the model in every form, a token of each window in a step, as decodes are served. Perplexity
is counted as llama.cpp's llama-perplexity counts it: of the second half of each window. All else compares a form with
the reference, whose logits are kept in a temporary file.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.formats.stored_formats import PLAIN
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.cpu.forward_pass import CpuDecoderPass, make_cpu_ops
from penstock.process.options import format_size
from penstock.tools.bench.components.lock_step import LockStep
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.report import make_table
from penstock.tools.bench.harness.run import measurement_run
from penstock.tools.bench.options import MEASUREMENT, AtLeastOne, ReportOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

FORMS = {
    "fp32": ("fp32", "none"),
    "bf16": ("bf16", "none"),
    "stored": ("auto", "none"),
    "int8": ("bf16", "int8"),
    "int4": ("bf16", "int4"),
    "int4-128": ("bf16", "int4-128"),
}
"""Name → --dtype and --quantize. fp32 and bf16 dequantise a quantised checkpoint; "stored" serves it as it is."""
_PROMPT_SHARE = 4
_LEAST_WINDOW_TOKENS = 3
"""So that the second half has a token after its first."""


@MEASUREMENT
@dataclass(frozen=True)
class QuantizationOptions:
    model: str | None = None
    """Checkpoint: a directory in the Hugging Face layout, or a hub id. Default: the small demo model."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    text: Path | None = None
    """Text to run through the model. Default: documentation of Python modules that the demo model did not see."""

    reference: Literal["fp32", "bf16"] = "fp32"
    """Form that the others are compared with. fp32 takes 4 bytes of memory for each parameter."""

    windows: AtLeastOne = 32
    """Pieces of the text; all of them run side by side."""

    window_tokens: AtLeastOne = 256
    """Tokens of a piece. A quarter of it is the prompt of a greedy answer."""

    greedy_tokens: AtLeastOne = 64
    """Tokens of a greedy answer."""


@dataclass(frozen=True, slots=True)
class FormQuality:
    """One form of the weights. Logarithms are natural; averages are over the positions of the text."""

    form: str
    weight_bytes: int
    tokens: int
    """Positions of the text."""
    perplexity: float
    """Of the tokens in the second half of each window, but for its first."""
    divergence: float
    """Kullback-Leibler divergence of the form's distribution from the reference's, on average."""
    max_logit_error: float
    mean_logit_error: float
    """Largest and average absolute difference of a logit."""
    same_likeliest: float
    """Share of positions where the likeliest token is the reference's."""
    greedy_equal: float
    """Share of tokens in greedy answers that equal the reference's token at the same place."""
    greedy_first_difference: float
    """Tokens before the first that differs, median of the answers; all of them if none differs."""


def quantization(
    *, options: QuantizationOptions = QuantizationOptions(), report: ReportOptions = ReportOptions()
) -> int:
    from penstock.backend.options import BackendOptions
    from penstock.backend.start.startup import locate_model

    with measurement_run(report.json) as run, tempfile.TemporaryDirectory(prefix="penstock-logits-") as directory:
        model_dir = locate_model(BackendOptions(model=options.model, revision=options.revision))
        measurement = Measurement(options, model_dir, Path(directory) / "logits")
        found = []
        absent = {"fp32", options.reference} | ({"stored"} if read_stored_formats(model_dir) == PLAIN else set())
        for form in (options.reference, *(name for name in FORMS if name not in absent)):
            with run.status(f"{form} weights"):
                try:
                    found.append(measurement.measure(form))
                except StartupError as error:
                    if form == options.reference:
                        raise
                    run.progress.print(f"left out: {error}", markup=False, soft_wrap=True)
        run.add("quantization", found, quality_table(found, options))
    return run.exit_status


class Measurement:
    """Measures forms of one model on one text, the reference first."""

    def __init__(self, options: QuantizationOptions, model_dir: Path, logits_file: Path) -> None:
        """Raises BenchError if the text is too short, or missing."""
        self._options = options
        self._model_dir = model_dir
        self._windows = read_windows(options, model_dir)
        self._logits_file = logits_file
        self._reference: NDArray[np.float32] | None = None
        """[tokens of a window, windows, vocabulary], in a file."""
        self._greedy = np.zeros((0, 0), np.int32)

    def measure(self, form: str) -> FormQuality:
        """Raises BenchError, StartupError."""
        options = self._options
        num_rows, num_tokens = self._windows.shape
        longest = max(num_tokens, num_tokens // _PROMPT_SHARE + options.greedy_tokens)
        dtype, mode = FORMS[form]
        settings = PassOptions("cpu", dtype, num_rows, num_rows, quantize=mode)
        load = load_dequantized if form in ("fp32", "bf16") else CpuDecoderPass.load
        with closing(load(self._model_dir, settings)) as forward_pass:
            context = forward_pass.spec.max_context_tokens
            if context < longest:
                raise BenchError(f"the model has a context of {context} tokens; {longest} are needed")
            steps = LockStep(forward_pass, num_rows, longest)
            if self._reference is None:
                shape = (num_tokens, num_rows, forward_pass.spec.vocab_size)
                self._reference = np.memmap(self._logits_file, np.float32, "w+", shape=shape)
                for place, logits in enumerate(steps.logits(self._windows)):
                    self._reference[place] = logits
                self._greedy = steps.greedy(self._prompts(), options.greedy_tokens)
                return self._compare(form, forward_pass.spec.weight_bytes, iter(self._reference), self._greedy)
            answers = steps.greedy(self._prompts(), options.greedy_tokens)
            return self._compare(form, forward_pass.spec.weight_bytes, steps.logits(self._windows), answers)

    def _prompts(self) -> NDArray[np.int32]:
        return self._windows[:, : max(1, self._windows.shape[1] // _PROMPT_SHARE)]

    def _compare(
        self, form: str, weight_bytes: int, found: Iterator[NDArray[np.float32]], answers: NDArray[np.int32]
    ) -> FormQuality:
        if self._reference is None:
            raise ValueError("the reference is measured first")
        loss: list[NDArray[np.float64]] = []
        divergence: list[NDArray[np.float64]] = []
        largest: list[float] = []
        mean: list[float] = []
        same: list[NDArray[np.bool_]] = []
        for place, (logits, exact) in enumerate(zip(found, self._reference, strict=True)):
            log_p, exact_log_p = log_softmax(logits), log_softmax(exact)
            if self._windows.shape[1] // 2 <= place < self._windows.shape[1] - 1:
                loss.append(-np.take_along_axis(log_p, self._windows[:, place + 1, None], axis=1)[:, 0])
            divergence.append((np.exp(exact_log_p) * (exact_log_p - log_p)).sum(axis=1))
            error = np.abs(logits - exact)
            largest.append(float(error.max()))
            mean.append(float(error.mean()))
            same.append(logits.argmax(axis=1) == exact.argmax(axis=1))
        equal = answers == self._greedy
        first = np.where(equal.all(axis=1), equal.shape[1], equal.argmin(axis=1))
        return FormQuality(
            form=form,
            weight_bytes=weight_bytes,
            tokens=self._windows.size,
            perplexity=math.exp(float(np.mean(loss))),
            divergence=float(np.mean(divergence)),
            max_logit_error=max(largest),
            mean_logit_error=float(np.mean(mean)),
            same_likeliest=float(np.mean(same)),
            greedy_equal=float(equal.mean()),
            greedy_first_difference=float(np.median(first)),
        )


def load_dequantized(model_dir: Path, settings: PassOptions) -> CpuDecoderPass:
    """Raises StartupError."""
    config = read_decoder_config(model_dir)
    with open_weights(model_dir, config) as weights:
        dtype = weights.choose_dtype(settings.dtype)
        ops = make_cpu_ops(config, dtype, settings.max_batch_tokens)
        return CpuDecoderPass(config, weights, ops, dtype, settings.max_running)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Normalise each row, in fp64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def read_windows(options: QuantizationOptions, model_dir: Path) -> NDArray[np.int32]:
    """Consecutive pieces of the text, [windows, window_tokens]. Raises BenchError."""
    if options.window_tokens < _LEAST_WINDOW_TOKENS:
        raise BenchError(f"--window-tokens is {options.window_tokens}; it must be at least {_LEAST_WINDOW_TOKENS}")
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise BenchError(f"{model_dir} has no tokenizer.json: its text cannot be made tokens")
    tokenizer = Tokenizer.from_file(str(path))
    tokens = [token for text in read_texts(options.text) for token in tokenizer.encode(text).ids]
    num_needed = options.windows * options.window_tokens
    if len(tokens) < num_needed:
        raise BenchError(
            f"the text has {len(tokens)} tokens; {options.windows} windows of {options.window_tokens} need "
            f"{num_needed}: lower --windows, or give a longer --text"
        )
    return np.array(tokens[:num_needed], np.int32).reshape(options.windows, options.window_tokens)


def read_texts(path: Path | None) -> list[str]:
    """Raises BenchError."""
    if path is None:
        from penstock.tools.demo_model.corpus import held_out_texts

        return held_out_texts()
    try:
        return [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--text {path} cannot be read: {error}") from None


def quality_table(found: Sequence[FormQuality], options: QuantizationOptions) -> Table:
    title = f"Forms of the weights, compared with {options.reference}"
    columns = ("form", "weights", "perplexity", "KL\ndivergence", "logit error\nmean / max", "same likeliest\ntoken")
    table = make_table(title, *columns, "greedy tokens\nequal", f"greedy, equal\nfirst of {options.greedy_tokens}")
    for row in found:
        table.add_row(
            row.form,
            format_size(row.weight_bytes),
            f"{row.perplexity:.2f}",
            f"{row.divergence:.5f}",
            f"{row.mean_logit_error:.4f} / {row.max_logit_error:.2f}",
            f"{row.same_likeliest:.1%}",
            f"{row.greedy_equal:.1%}",
            f"{row.greedy_first_difference:g}",
        )
    return table
