"""Times steps of whole models with random weights: decodes, prompts, and where their time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, Experts
from penstock.backend.checkpoint.config.tensors import LayerWeights
from penstock.backend.checkpoint.quantization.modes import LM_HEAD, Quantization, find_quantization
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import PendingOutput
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda_pass.model_parts import make_layout
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes, plan_spec
from penstock.tools.gpu.cases.products.quantized import random_weight
from penstock.tools.gpu.devices import device_context
from penstock.tools.gpu.devices.caches import fill_cache
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.devices.steps import Steps, launch
from penstock.tools.gpu.items import Item, short
from penstock.tools.gpu.results import Results
from penstock.tools.gpu.speed import attribution
from penstock.tools.gpu.speed.attribution import GpuProfiler, Profiler
from penstock.tools.random_weights import LLAMA_8B, QWEN3_06B, RandomWeights

PAGE_TOKENS = 32
_SPARE_TOKENS = 64
"""KV slots of a sequence beyond its set length, for the timed steps."""
_RESERVE_BYTES = 1 << 30
"""Device memory reserved for libraries, and for freed blocks that cannot be reused."""


@dataclass(frozen=True)
class ModelPlan:
    """The measurements of one model."""

    config: DecoderConfig
    decode: tuple[tuple[int, int], ...]
    """Rows, and tokens of each."""
    prefill: tuple[int, ...] = ()
    profiled_rows: tuple[int, ...] = ()
    """Rows of the decode steps that are taken apart by kernel; so is the first prompt's, if there are any."""
    kv_dtype: str = "bf16"
    quantize: str = "none"
    deterministic: bool = False
    dtype: torch.dtype = torch.bfloat16
    host_kv_bytes: int = 1 << 30
    num_steps: int = 24


_ROWS = (1, 8, 16, 32, 64, 128, 256)
_QWEN3_30B = replace(
    LLAMA_8B, vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_layers=12, num_kv_heads=4,
    qk_norm="head", experts=Experts(128, 8, 768, normalises=True), layer_has_experts=(True,) * 12,
)  # fmt: skip
"""Twelve of the 48 layers of Qwen3 30B-A3B."""


def _llama(*rows: int, **changes: Any) -> ModelPlan:
    return ModelPlan(LLAMA_8B, tuple((n, 1024) for n in rows), (2048,), **changes)


PLANS: dict[str, ModelPlan] = {
    "llama8b": replace(
        _llama(*_ROWS, profiled_rows=(1, 16, 64, 256)),
        decode=(*((n, 1024) for n in _ROWS), (8, 8192), (64, 8192)),
        prefill=(2048, 512, 1024, 4096, 8192),
    ),
    **{f"llama8b.{name}": _llama(1, 8, 32, 64, 128, 256, quantize=name) for name in ("fp8", "int8", "int4")},
    **{
        f"llama8b.cache_{name}": replace(_llama(kv_dtype=name), decode=((64, 1024), (256, 1024), (64, 8192)))
        for name in ("fp8", "q8_0")
    },
    "qwen06b": ModelPlan(QWEN3_06B, tuple((n, 1024) for n in (1, 8, 16, 64, 256)), (2048, 1024), profiled_rows=(1, 64)),
    "experts": ModelPlan(_QWEN3_30B, ((1, 1024), (8, 1024), (64, 1024), (256, 1024)), (2048,), profiled_rows=(64,)),
    "deterministic": _llama(1, 8, 64, deterministic=True),
}
"""Names of the items `model.*`."""


def run(results: Results, item: Item) -> None:
    context = device_context.open_device_context()
    context = replace(context, choices=replace(context.choices, **dict(item.settings)))
    measure(results, context, GpuProfiler(), item.name, PLANS[item.arguments[0]])


def measure(results: Results, context: DeviceContext, profiler: Profiler, name: str, plan: ModelPlan) -> None:
    _Measurement(results, context, profiler, name, plan).measure()
    context.memory.reset_peak()


class QuantizedWeights:
    """Random weights as --quantize makes them: those of all layers are equal, but a pass packs each of them."""

    def __init__(self, config: DecoderConfig, quantization: Quantization, dtype: torch.dtype) -> None:
        self._config, self._quantization, self._dtype = config, quantization, dtype

    @cache  # noqa: B019 - the weights live as long as their model's measurement
    def _linear(self, name: str, outputs: int, inputs: int) -> Any:
        return random_weight(outputs, inputs, self._quantization.form_of(name, inputs))

    def embedding(self, _dtype: Dtype) -> Any:
        config = self._config
        return self.lm_head(_dtype) if config.tie_embeddings else self._ones(config.vocab_size, config.hidden_size)

    def layer(self, _index: int, _dtype: Dtype) -> LayerWeights[Any]:
        config, heads = self._config, self._config.num_heads + 2 * self._config.num_kv_heads
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        head_norm = self._ones(head_dim) if config.qk_norm == "head" else None
        return LayerWeights(
            qkv=self._linear("qkv", heads * head_dim, hidden),
            o=self._linear("o", hidden, config.num_heads * head_dim),
            gate_up=self._linear("gate_up", 2 * inner, hidden),
            down=self._linear("down", hidden, inner),
            attention_norm=self._ones(hidden), mlp_norm=self._ones(hidden), q_norm=head_norm, k_norm=head_norm,
        )  # fmt: skip

    def final_norm(self, _dtype: Dtype) -> Tensor:
        return self._ones(self._config.hidden_size)

    def lm_head(self, _dtype: Dtype) -> Any:
        return self._linear(LM_HEAD, self._config.vocab_size, self._config.hidden_size)

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=self._dtype)


@dataclass(frozen=True)
class _Measurement:
    results: Results
    context: DeviceContext
    profiler: Profiler
    name: str
    plan: ModelPlan

    def measure(self) -> None:
        """Measure with one pass, made for the largest steps."""
        plan, results, memory, device = self.plan, self.results, self.context.memory, self.context.device
        quantization = find_quantization(plan.quantize)
        weights: Any = (
            RandomWeights(plan.config, plan.dtype, self.context.torch_device)
            if quantization is None
            else QuantizedWeights(plan.config, quantization, plan.dtype)
        )
        longest = max(*(tokens + _SPARE_TOKENS for _, tokens in plan.decode), *plan.prefill)
        sizes = StepSizes(
            max(rows for rows, _ in plan.decode), max(*plan.prefill, 256), _pages(longest) * PAGE_TOKENS,
            plan.deterministic, self.context.choices,
        )  # fmt: skip
        spec = plan_spec(plan.config, plan.dtype, sizes, quantization)
        memory.reset_peak()
        needed = {(rows, tokens): rows * _pages(tokens + _SPARE_TOKENS) for rows, tokens in plan.decode}
        room = memory.free_bytes() - _RESERVE_BYTES - spec.workspace_bytes - (spec.weight_bytes if quantization else 0)
        page_bytes = make_layout(plan.config, 1, PAGE_TOKENS, plan.kv_dtype).num_bytes
        num_pages = min(max(_pages(longest), *needed.values()), room // page_bytes)
        cases = [case for case, pages in needed.items() if pages <= num_pages]
        for case in needed.keys() - set(cases):
            reason = f"its {needed[case]} pages do not fit the {room / 1e9:.1f} GB that are left"
            results.skipped(f"{self.name}.decode.{_case(*case)}", reason)
        started_s = time.perf_counter()
        made = CudaDecoderPass(plan.config, weights, device, plan.dtype, sizes, plan.host_kv_bytes, quantization)
        made.create_cache(num_pages, PAGE_TOKENS, plan.kv_dtype)
        results.fact(f"{self.name}.ready", time.perf_counter() - started_s, "s")
        try:
            layout, peak_bytes = make_layout(plan.config, num_pages, PAGE_TOKENS, plan.kv_dtype), memory.peak_bytes()
            fill_cache(made._ops.cache.view(-1), layout)
            memory.reset_peak()  # filling the cache is not the pass's memory use
            kv_bytes = layout.num_bytes / num_pages / PAGE_TOKENS
            for rows, tokens in cases:
                work = partial(self._decode, made, rows, tokens, spec.weight_bytes, kv_bytes)
                results.attempt(f"{self.name}.decode.{_case(rows, tokens)}", work)
            for tokens in plan.prefill:
                results.attempt(f"{self.name}.prefill.{tokens}", partial(self._prefill, made, tokens))
            if quantization is None:  # quantised ones are made on the way
                planned, peak = spec.weight_bytes + spec.workspace_bytes + layout.num_bytes, memory.peak_bytes()
                peak, detail = max(peak_bytes, peak), f"GB peak, {planned / 1e9:.2f} planned before anything is loaded"
                results.check(f"{self.name}.memory", peak <= planned, detail, peak / 1e9)
            self._take_apart(made, cases)
        finally:
            made.close()

    def _decode(self, made: CudaDecoderPass, rows: int, tokens: int, weight_bytes: int, kv_bytes: float) -> None:
        steps, name = _decoding(rows, tokens), f"{self.name}.decode.{_case(rows, tokens)}"
        for _ in range(3):
            launch(made, steps.decode()).wait()
        wall_s, host_s = time_decode(made, steps, self.plan.num_steps)
        num_bytes = read_bytes(self.plan.config, weight_bytes, rows) + rows * tokens * kv_bytes
        flop = step_flop(self.plan.config, rows, rows, rows * tokens)
        self.results.timed(name, wall_s * 1e6, num_bytes, flop, f"{rows / wall_s:,.0f} tok/s")
        self.results.fact(f"{name}.launch", statistics.median(host_s) * 1e6, "us", "median of the host's launches")

    def _prefill(self, made: CudaDecoderPass, tokens: int) -> None:
        """Time prompts launched one step ahead, and the first token of one alone."""
        prompt, repeats, seconds = self._prompt(tokens), 3, []
        for _ in range(5):
            started_s = time.perf_counter()
            _prefill_once(made, prompt)
            seconds.append(time.perf_counter() - started_s)
        pending: PendingOutput | None = None
        started_s = time.perf_counter()
        for _ in range(repeats):
            following = launch(made, Steps(1, _pages(tokens)).prefill([prompt]))
            if pending is not None:
                pending.wait()
            pending = following
        if pending is not None:
            pending.wait()
        wall_s, name = (time.perf_counter() - started_s) / repeats, f"{self.name}.prefill.{tokens}"
        flop = step_flop(self.plan.config, tokens, 1, tokens * (tokens + 1) / 2)
        self.results.timed(name, wall_s * 1e6, flop=flop, detail=f"{tokens / wall_s:,.0f} tok/s")
        self.results.fact(f"{name}.first_token", statistics.median(seconds) * 1e3, "ms")

    def _take_apart(self, made: CudaDecoderPass, cases: list[tuple[int, int]]) -> None:
        """Record the kernels of the profiled steps."""
        plan, steps = self.plan, self.plan.num_steps
        works: dict[str, tuple[Callable[[], object], int, int]] = {
            _case(rows, tokens): (partial(time_decode, made, _decoding(rows, tokens), steps), steps + 1, rows * tokens)
            for rows, tokens in cases
            if rows in plan.profiled_rows and tokens == cases[0][1]
        }
        if plan.profiled_rows and plan.prefill:
            tokens = plan.prefill[0]
            works["prefill"] = partial(_prefill_once, made, self._prompt(tokens)), 1, 0
        for case, (work, num_steps, num_cached) in works.items():
            name, num_bytes = f"{self.name}.parts.{case}", attribution.step_bytes(plan.config, num_cached)
            record = partial(attribution.record, self.results, self.profiler, name, work, num_steps, num_bytes)
            self.results.attempt(name, record)

    def _prompt(self, num_tokens: int) -> NDArray[np.int32]:
        rng = np.random.default_rng(num_tokens)
        return rng.integers(0, self.plan.config.vocab_size, num_tokens).astype(np.int32)


def read_bytes(config: DecoderConfig, weight_bytes: int, rows: int) -> float:
    """Bytes of weights that a step of so many tokens reads: no embedding, and experts that some token chose."""
    unread = 0.0 if config.tie_embeddings else 2.0 * config.vocab_size * config.hidden_size
    if (experts := config.experts) is not None:
        all_bytes = 2.0 * sum(config.layer_has_experts) * experts.count * 3 * experts.width * config.hidden_size
        unread += all_bytes * (1 - experts.per_token / experts.count) ** rows
    return weight_bytes - unread


def step_flop(config: DecoderConfig, tokens: int, num_logits: int, num_pairs: float) -> float:
    """Operations of a step. num_pairs: of a query and a key, in all rows."""
    heads, hidden = config.num_heads + 2 * config.num_kv_heads, config.hidden_size
    per_layer = (heads + config.num_heads) * config.head_dim * hidden
    dense = config.num_layers - sum(config.layer_has_experts)
    inner = dense * config.intermediate_size
    if (experts := config.experts) is not None:
        inner += sum(config.layer_has_experts) * experts.per_token * experts.width
    products = tokens * (config.num_layers * per_layer + 3 * inner * hidden) + num_logits * config.vocab_size * hidden
    return 2.0 * products + 4.0 * num_pairs * config.num_layers * config.num_heads * config.head_dim


def _prefill_once(made: CudaDecoderPass, prompt: NDArray[np.int32]) -> None:
    launch(made, Steps(1, _pages(len(prompt))).prefill([prompt])).wait()


def _decoding(rows: int, tokens: int) -> Steps:
    steps = Steps(rows, _pages(tokens + _SPARE_TOKENS))
    steps.context_lens[:] = tokens - 1
    return steps


def time_decode(forward_pass: CudaDecoderPass, steps: Steps, num_steps: int) -> tuple[float, list[float]]:
    """Seconds per step, and the host's launch seconds of each. Launches one step ahead, as the executor does."""
    host_s, pending = [], launch(forward_pass, steps.decode())
    started_s = time.perf_counter()
    for _ in range(num_steps):
        batch = steps.decode()
        before_s = time.perf_counter()
        following = launch(forward_pass, batch)
        host_s.append(time.perf_counter() - before_s)
        pending.wait()
        pending = following
    wall_s = (time.perf_counter() - started_s) / num_steps
    pending.wait()
    return wall_s, host_s


def _case(rows: int, tokens: int) -> str:
    return f"{rows}x{short(tokens)}"


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
