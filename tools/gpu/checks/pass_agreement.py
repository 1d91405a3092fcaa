"""Compares the CUDA pass's logits with the CPU pass's in fp32, on tiny models of each architecture.

The CPU's pass is in plain torch; tests compare it with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.checkpoint.config.decoder_config import ClampedGate, DecoderConfig, Experts
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes
from penstock.tools.gpu.cases.check import require_within
from penstock.tools.gpu.cases.products.stored_forms import STORED_FORMS
from penstock.tools.gpu.devices import device_context
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.devices.steps import Steps
from penstock.tools.gpu.items import Item
from penstock.tools.gpu.results import Results
from penstock.tools.random_weights import TINY_FAMILY, QuantizedRandomWeights, RandomWeights

_ROWS, _PROMPT_TOKENS, _PAGE_TOKENS, _PAGES = 5, 37, 16, 5
_SIZES = StepSizes(max_rows=_ROWS, max_tokens=256, max_context_tokens=_PAGE_TOKENS * _PAGES)
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


def run(results: Results, item: Item) -> None:
    check = check_families if item.arguments == ("families",) else check_variations
    check(results, device_context.open_device_context())


def check_families(results: Results, context: DeviceContext, names: tuple[str, ...] = tuple(TINY_FAMILY)) -> None:
    """Check the logits of each model."""
    for name in names:
        # With 16 bits, some tokens' experts are others than in fp32, in every implementation.
        has_choice = TINY_FAMILY[name].experts is not None
        for dtype in ("fp32",) if has_choice else ("fp32", "bf16"):
            results.agree(f"pass.{name}.{dtype}", partial(compare_logits, context, TINY_FAMILY[name], dtype))


def check_variations(
    results: Results,
    context: DeviceContext,
    name: str = next(iter(TINY_FAMILY)),
    stored_forms: tuple[str, ...] = tuple(STORED_FORMS),
) -> None:
    """Check one model with fp16 and with quantised weights; then experts."""
    config = TINY_FAMILY[name]
    results.agree(f"pass.{name}.fp16", partial(compare_logits, context, config, "fp16"))
    results.agree("pass.experts.bf16", partial(compare_logits, context, _ALL_EXPERTS, "bf16"))
    for model, of in ((name, config), ("experts", _ALL_EXPERTS)):
        for stored in stored_forms:
            results.agree(f"pass.{model}.{stored}", partial(compare_logits, context, of, "bf16", stored))


def require_same_tokens(
    on_cpu: Callable[[], CpuDecoderPass],
    prompts: list[NDArray[np.int32]],
    found: NDArray[np.int32],
    expected: NDArray[np.int32],
    tie: float,
) -> None:
    """Raise Mismatch if the first other token of a row is less likely than the expected one, by more than a tie.

    on_cpu makes a pass, with a cache for a row. tie: relative to the largest logit.
    """
    for row, prompt in enumerate(prompts):
        differing = np.flatnonzero(found[row] != expected[row])
        if not len(differing):
            continue
        first, forward_pass = int(differing[0]), on_cpu()
        tokens = np.concatenate([prompt, expected[row, :first]])
        batch = Steps(1, -(-len(tokens) // _PAGE_TOKENS)).prefill([tokens])
        logits = forward_pass.host_logits(forward_pass.forward(batch))[0]
        forward_pass.close()
        gap = float(logits[expected[row, first]] - logits[found[row, first]]) / float(np.abs(logits).max())
        require_within(f"row {row} has another token {first}; the gap of its logit", gap, tie)


def compare_logits(
    context: DeviceContext, config: DecoderConfig, dtype_name: str, stored: str = ""
) -> tuple[str, float]:
    """Compare logits of prompts, whole and in chunks of 7, and of tokens after them, with fp32 on the CPU.

    stored: one of STORED_FORMS, for quantised weights.
    """
    dtype, kv_dtype = _DTYPES[dtype_name], "fp32" if dtype_name == "fp32" else "bf16"
    weights = plain = RandomWeights(config, dtype, torch.device("cpu"))
    if stored:
        quantize, on_cpu = STORED_FORMS[stored], torch.device("cpu")
        weights = QuantizedRandomWeights(config, dtype, on_cpu, quantize)
        plain = QuantizedRandomWeights(config, dtype, on_cpu, lambda x: quantize(x).dequantize())
    expected, of_cpu = _fed_logits(_on_cpu(config, plain), config), 0.0
    if dtype_name != "fp32":
        of_cpu = largest_error(_fed_logits(_on_cpu(config, plain, torch.bfloat16), config), expected)
    on_gpu = [
        largest_error(_fed_logits(_on_gpu(context, config, dtype, kv_dtype, weights), config, chunk), expected)
        for chunk in (_PROMPT_TOKENS, 7)
    ]
    limit = max(_TIMES_CPU * of_cpu, _LEAST_ERROR[dtype_name])
    detail = f"error of a row's logits: {on_gpu[0]:.2g}, in chunks {on_gpu[1]:.2g}; the CPU's in bf16 is {of_cpu:.2g}"
    return detail, require_within(detail, max(on_gpu), limit)


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
    context: DeviceContext, config: DecoderConfig, dtype: torch.dtype, kv_dtype: str, weights: Any = None
) -> CudaDecoderPass:
    weights = weights or RandomWeights(config, dtype, torch.device("cpu"))
    made = CudaDecoderPass(config, weights, context.device, dtype, _SIZES)
    made.create_cache(_ROWS * _PAGES, _PAGE_TOKENS, kv_dtype)
    return made
