"""Compares the CUDA pass's logits with float64 and with the CPU pass's error, on tiny models of each architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.checkpoint.config.decoder_config import ClampedGate, DecoderConfig, Experts
from penstock.backend.checkpoint.encoders.pooled_decoder import PooledDecoder
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import FROM_EMBEDDINGS, DeviceRows, EmbeddedTokens, PooledRows, ScoredTokens
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda_pass.pooled_pass import PooledCudaPass
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import PassSettings, StepSizes
from penstock.backend.passes.decoder.spec import WeightsWithHead
from penstock.tools.gpu.cases.check import require, require_within
from penstock.tools.gpu.cases.products.stored_forms import STORED_FORMS
from penstock.tools.gpu.checks.float64_model import Float64Model
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.devices.steps import Steps, generate, launch
from penstock.tools.gpu.results import Results
from penstock.tools.random_weights import TINY_FAMILY, QuantizedRandomWeights, RandomWeights

_ROWS, _PROMPT_TOKENS, _NEW_TOKENS, _PAGE_TOKENS, _PAGES = 5, 37, 12, 16, 5
_SIZES = StepSizes(max_rows=_ROWS, max_tokens=256, max_context_tokens=_PAGE_TOKENS * _PAGES)
_NUM_TOP = 4
_SCORE_ERROR = 1e-3
_VECTOR_ERROR = 1e-3
_TIE = 1e-4
"""Largest gap of two logits, relative to the largest logit, that fp32 kernels may reverse."""
_NUM_FED = 4
"""Tokens after each prompt that are given one by one, in decode steps."""
_LEAST_ERROR = {"fp32": 1e-5, "bf16": 0.0, "fp16": 1e-2}
"""An error of a row's logits, relative to their norm, that is allowed whatever the CPU pass's error is. fp16: the CPU
computes with bf16, whose error is larger."""
_TIMES_CPU = 2.0
"""Largest error, as a multiple of the CPU pass's in the same dtype: sums in another order are no worse than that."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_ALL_EXPERTS = replace(
    TINY_FAMILY["gpt-oss"],
    experts=Experts(4, 4, 96, normalises=True, biased=True, clamped_gate=ClampedGate(1.702, 7.0)),
)
"""Every token uses all experts: with fewer, 16-bit activations sometimes choose other experts."""
_QUANTIZED_ERROR = 6e-2


@dataclass
class RowsOnHost:
    """`EmbeddingRows` in host memory."""

    values: NDArray[np.float32]
    device_reads = False

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def read(self) -> NDArray[np.float32]:
        return self.values.copy()

    def copy_to(self, there: DeviceRows) -> None:
        raise TypeError(f"rows in host memory cannot be copied on the device, to {there}")


def check_families(results: Results, context: DeviceContext, names: tuple[str, ...] = tuple(TINY_FAMILY)) -> None:
    """Check the logits of each model."""
    for name in names:
        # With 16 bits, some tokens' experts are others than in float64, in every implementation.
        has_choice = TINY_FAMILY[name].experts is not None
        for dtype in ("fp32",) if has_choice else ("fp32", "bf16"):
            work = partial(_compare_logits, results, context, f"pass.{name}.{dtype}", TINY_FAMILY[name], dtype)
            results.attempt(f"pass.{name}.{dtype}", work)


def check_variations(
    results: Results,
    context: DeviceContext,
    name: str = next(iter(TINY_FAMILY)),
    stored_forms: tuple[str, ...] = tuple(STORED_FORMS),
) -> None:
    """Check one model in other dtypes, with other inputs and outputs, and with quantised weights; then experts."""
    for finding, config, dtype in (
        (f"pass.{name}.fp16", TINY_FAMILY[name], "fp16"),
        ("pass.experts.bf16", _ALL_EXPERTS, "bf16"),
    ):
        results.attempt(finding, partial(_compare_logits, results, context, finding, config, dtype))
    results.attempt(f"pass.{name}.tokens", partial(_compare_tokens, results, context, name))
    results.attempt(f"pass.{name}.scores", partial(_compare_scores, results, context, name))
    results.attempt(f"pass.{name}.embeddings", partial(_compare_embeddings, results, context, name))
    results.attempt(f"pass.{name}.vectors", partial(_compare_vectors, results, context, name))
    for model, config in ((name, TINY_FAMILY[name]), ("experts", _ALL_EXPERTS)):
        for stored in stored_forms:
            work = partial(_compare_quantized, results, context, f"pass.{model}.{stored}", config, stored)
            results.attempt(f"pass.{model}.{stored}", work)


def _compare_tokens(results: Results, context: DeviceContext, name: str) -> None:
    """Compare tokens in fp32, where kernels differ in ties only, with whole prompts and with chunks of 7."""
    config = TINY_FAMILY[name]
    expected = _tokens(_on_cpu(config), config)
    for chunk in (1 << 30, 7):
        found = _tokens(_on_gpu(context, config, torch.float32, "fp32"), config, chunk)
        require_same_tokens(config, found, expected)
    results.check(f"pass.{name}.tokens", True, f"{_ROWS} rows of {_NEW_TOKENS} tokens equal the CPU pass's, or tie")


def require_same_tokens(config: DecoderConfig, found: NDArray[np.int32], expected: NDArray[np.int32]) -> None:
    """Raise Mismatch if the first other token of a row is less likely than the expected one, by more than a tie."""
    for row, prompt in enumerate(_prompts(config)):
        differing = np.flatnonzero(found[row] != expected[row])
        if not len(differing):
            continue
        first = int(differing[0])
        forward_pass = _on_cpu(config)
        batch = Steps(1, _PAGES).prefill([np.concatenate([prompt, expected[row, :first]])])
        logits = forward_pass.host_logits(forward_pass.forward(batch))[0]
        forward_pass.close()
        gap = float(logits[expected[row, first]] - logits[found[row, first]]) / float(np.abs(logits).max())
        require_within(f"row {row} has another token {first}; the gap of its logit", gap, _TIE)


def _compare_logits(
    results: Results, context: DeviceContext, finding: str, config: DecoderConfig, dtype_name: str
) -> None:
    """Compare logits of prompts, whole and in chunks of 7, and of tokens after them with float64."""
    dtype, kv_dtype = _DTYPES[dtype_name], "fp32" if dtype_name == "fp32" else "bf16"
    computed = torch.float32 if dtype_name == "fp32" else torch.bfloat16
    weights = RandomWeights(config, dtype, torch.device("cpu"))
    reference = Float64Model(config, weights)
    expected = np.stack([reference.logits(tokens)[_PROMPT_TOKENS - 1 :] for tokens in _sequences(config)])
    on_cpu = largest_error(_fed_logits(_on_cpu(config, weights=weights, computed=computed), config), expected)
    on_gpu = [
        largest_error(_fed_logits(_on_gpu(context, config, dtype, kv_dtype, weights), config, chunk), expected)
        for chunk in (_PROMPT_TOKENS, 7)
    ]
    limit = max(_TIMES_CPU * on_cpu, _LEAST_ERROR[dtype_name])
    detail = (
        f"error to float64 of a row's logits: {on_gpu[0]:.2g}, in chunks {on_gpu[1]:.2g}; the CPU's is {on_cpu:.2g}"
    )
    require_within(detail, max(on_gpu), limit)
    results.check(finding, True, detail, max(on_gpu))


def largest_error(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """The bound for any row: its error relative to the row's norm. An average would hide a row."""
    return float((np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max())


def _fed_logits(forward_pass: Any, config: DecoderConfig, chunk: int = _PROMPT_TOKENS) -> NDArray[np.float64]:
    """[rows, 1 + _NUM_FED, vocab]: the logits after each prompt, and after each of the tokens behind it."""
    steps, sequences, found = Steps(_ROWS, _PAGES), _sequences(config), []
    ends = [*range(chunk, _PROMPT_TOKENS, chunk), *range(_PROMPT_TOKENS, _PROMPT_TOKENS + _NUM_FED + 1)]
    for first, end in pairwise([0, *ends]):
        logits = forward_pass.forward(steps.prefill([tokens[first:end] for tokens in sequences]))
        if end >= _PROMPT_TOKENS:
            found.append(forward_pass.host_logits(logits).astype(np.float64))
    forward_pass.close()
    return np.stack(found, axis=1)


def _compare_quantized(
    results: Results, context: DeviceContext, finding: str, config: DecoderConfig, stored: str
) -> None:
    """Compare logits of prompts with float64 of the numbers that the quantised weights stand for."""
    weights = QuantizedRandomWeights(config, torch.bfloat16, torch.device("cpu"), STORED_FORMS[stored])
    reference = Float64Model(config, weights)
    expected = np.stack([reference.logits(tokens)[-1] for tokens in _prompts(config)])
    error = largest_error(_last_logits(_on_gpu(context, config, torch.bfloat16, "bf16", weights), config), expected)
    require_within("relative error of the logits", error, _QUANTIZED_ERROR)
    results.check(finding, True, "relative error of the logits", error)


def _compare_scores(results: Results, context: DeviceContext, name: str) -> None:
    """Compare log probabilities of the prompts' tokens in fp32, in a step with and in one without logit rows."""
    config = TINY_FAMILY[name]
    expected, found = (
        _scores(forward_pass, config)
        for forward_pass in (_on_cpu(config), _on_gpu(context, config, torch.float32, "fp32"))
    )
    require_within("error of the log probabilities", float(np.abs(found - expected).max()), _SCORE_ERROR)
    results.check(f"pass.{name}.scores", True, f"{found.size} prompt tokens are scored as by the CPU pass")


def _scores(forward_pass: Any, config: DecoderConfig) -> NDArray[np.float32]:
    """[tokens, 1 + _NUM_TOP]: each token's log probability, and the highest ones."""
    steps, prompts, parts = Steps(_ROWS, _PAGES), _prompts(config), []
    for first, end in ((0, 20), (20, _PROMPT_TOKENS)):
        is_last = end == _PROMPT_TOKENS
        batch = steps.prefill([tokens[first:end] for tokens in prompts], samples=is_last)
        num_scored = end - first - is_last
        places = np.concatenate([np.arange(num_scored) + start for start in batch.query_starts[:-1].tolist()])
        next_ids = np.concatenate([tokens[first + 1 : first + 1 + num_scored] for tokens in prompts])
        batch = replace(batch, scored=ScoredTokens(places.astype(np.int32), next_ids, _NUM_TOP))
        scored = launch(forward_pass, batch).wait().scored
        if scored is None:
            raise RuntimeError("the pass reports no log probabilities of scored tokens")
        parts.append(np.concatenate([scored.chosen[:, None], scored.top], axis=1))
    forward_pass.close()
    return np.concatenate(parts)


def _compare_vectors(results: Results, context: DeviceContext, name: str) -> None:
    """Compare last hidden states in fp32: prompts as a whole, and prompts whose last token comes alone, in a graph."""
    config = replace(TINY_FAMILY[name], tie_embeddings=False, has_lm_head=False)
    weights = RandomWeights(config, torch.float32, torch.device("cpu"))
    cpu = _on_cpu(config, weights=weights)
    expected = cpu.host_hidden_states(cpu.forward(Steps(_ROWS, _PAGES).prefill(_prompts(config))))
    cpu.close()
    settings = PassSettings(torch.float32, _SIZES)
    made = PooledCudaPass(PooledDecoder(config, "embed"), WeightsWithHead(weights, None), context.device, settings)
    made.create_cache(_ROWS * _PAGES, _PAGE_TOKENS, "fp32")
    rows = np.arange(_ROWS, dtype=np.int32)
    for chunk in (_PROMPT_TOKENS, _PROMPT_TOKENS - 1):
        steps = Steps(_ROWS, _PAGES)
        for first in range(0, _PROMPT_TOKENS, chunk):
            batch = steps.prefill([tokens[first : first + chunk] for tokens in _prompts(config)], samples=False)
            if first + chunk >= _PROMPT_TOKENS:
                batch = replace(batch, pooled=PooledRows(rows, ("embed",) * _ROWS, np.zeros_like(rows)))
            output = launch(made, batch).wait()
        error = float(np.abs(np.stack(output.pooled or ()) - expected).max())
        require_within(f"error of the vectors, in chunks of {chunk}", error, _VECTOR_ERROR)
    made.close()
    results.check(f"pass.{name}.vectors", True, f"{_ROWS} vectors are the CPU pass's; error", error)


def _compare_embeddings(results: Results, context: DeviceContext, name: str) -> None:
    """Check that embedding rows from the host give the same logits as their tokens, bit for bit, in two steps."""
    config = TINY_FAMILY[name]
    prompts = _prompts(config)
    table = RandomWeights(config, torch.float32, torch.device("cpu")).embedding(Dtype.FP32).numpy()
    forward_pass = _on_gpu(context, config, torch.float32, "fp32")
    found = []
    for is_embedded in (False, True):
        steps = Steps(_ROWS, _PAGES)
        for part in ([tokens[:20] for tokens in prompts], [tokens[20:] for tokens in prompts]):
            batch = steps.prefill(part)
            if is_embedded:
                rows = RowsOnHost(table[batch.input_ids])
                ids = np.full_like(batch.input_ids, FROM_EMBEDDINGS)
                batch = replace(batch, input_ids=ids, embeddings=(EmbeddedTokens(0, rows),))
            logits = forward_pass.forward(batch)
        found.append(forward_pass.host_logits(logits))
    forward_pass.close()
    require("the logits differ", np.array_equal(found[0], found[1]))
    results.check(f"pass.{name}.embeddings", True, f"{_ROWS} rows of embeddings give the logits of their tokens")


def _tokens(forward_pass: Any, config: DecoderConfig, chunk: int = 1 << 30) -> NDArray[np.int32]:
    tokens = generate(forward_pass, _prompts(config), _NEW_TOKENS, _PAGES, chunk)
    forward_pass.close()
    return tokens


def _last_logits(forward_pass: Any, config: DecoderConfig) -> NDArray[np.float64]:
    batch = Steps(_ROWS, _PAGES).prefill(_prompts(config))
    logits = forward_pass.host_logits(forward_pass.forward(batch)).astype(np.float64)
    forward_pass.close()
    return np.asarray(logits)


def _prompts(config: DecoderConfig) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, config.vocab_size, _PROMPT_TOKENS).astype(np.int32) for _ in range(_ROWS)]


def _sequences(config: DecoderConfig) -> list[NDArray[np.int32]]:
    """The prompts, and the tokens that follow them."""
    rng = np.random.default_rng(1)
    fed = rng.integers(0, config.vocab_size, (_ROWS, _NUM_FED)).astype(np.int32)
    return [np.concatenate(parts) for parts in zip(_prompts(config), fed, strict=True)]


def _on_cpu(
    config: DecoderConfig, weights: RandomWeights | None = None, computed: torch.dtype = torch.float32
) -> CpuDecoderPass:
    """A CPU pass that computes in a dtype."""
    weights = weights or RandomWeights(config, computed, torch.device("cpu"))
    # Plain torch: it needs no compilation and shares no code with our kernels.
    made = CpuDecoderPass(config, weights, TorchOps(config, computed), Dtype.of(computed), _ROWS)
    made.create_cache(_ROWS * _PAGES, _PAGE_TOKENS, "fp32" if computed == torch.float32 else "bf16")
    return made


def _on_gpu(
    context: DeviceContext,
    config: DecoderConfig,
    dtype: torch.dtype,
    kv_dtype: str,
    weights: RandomWeights | None = None,
) -> CudaDecoderPass:
    weights = weights or RandomWeights(config, dtype, torch.device("cpu"))
    made = CudaDecoderPass(config, weights, context.device, dtype, _SIZES)
    made.create_cache(_ROWS * _PAGES, _PAGE_TOKENS, kv_dtype)
    return made
