"""The section "end-to-end": models of random weights in the CUDA pass, by single steps and in the engine's loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.forward_pass import PendingOutput
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda_pass.model_parts import make_layout
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes, plan_spec
from penstock.tools.gpu.devices.caches import fill_cache
from penstock.tools.gpu.devices.device_context import DeviceContext, open_device_context
from penstock.tools.gpu.devices.profiling import GpuProfiler, Profiler
from penstock.tools.gpu.devices.steps import Steps, launch, step_us
from penstock.tools.gpu.results import Results
from penstock.tools.gpu.speed import attribution
from penstock.tools.gpu.speed.engine_runs import LLAMA_ENGINE, QWEN_ENGINE, EnginePlan, measure_engine
from penstock.tools.random_weights import LLAMA_8B, QWEN3_06B, RandomWeights

PAGE_TOKENS = 32
_SPARE_TOKENS = 64
"""KV slots of a sequence beyond its set length, for the timed steps."""
_RESERVE_BYTES = 1 << 30
"""Device memory reserved for libraries, and for freed blocks that cannot be reused."""


@dataclass(frozen=True)
class ModelPlan:
    """The measurements of one model."""

    name: str
    config: DecoderConfig
    decode: tuple[tuple[str, str, int, int], ...]
    """KV dtype, name, rows, tokens per row."""
    prefill: tuple[tuple[str, int], ...]
    engine: EnginePlan
    profiled: tuple[str, ...] = ()
    """Cases of decode whose steps are taken apart by kernel, and of prefill."""
    ttft_tokens: int = 1024
    num_steps: int = 24
    dtype: torch.dtype = torch.bfloat16
    host_kv_bytes: int = 1 << 30
    deterministic: bool = False

    def describe(self) -> str:
        """The sizes that the cases' names omit."""
        config = self.config
        heads = f"{config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}"
        layers = f"{config.num_layers} layers of {config.hidden_size}, {heads}, vocabulary {config.vocab_size}"
        return f"{layers}, {self.dtype}, pages of {PAGE_TOKENS}, ttft of {self.ttft_tokens}; {self.engine}"


LLAMA_PLAN = ModelPlan(
    "llama8b",
    LLAMA_8B,
    (
        *(("bf16", f"{rows}x1k", rows, 1024) for rows in (1, 4, 8, 16, 32, 64, 128, 256)),
        ("bf16", "64x8k", 64, 8192),
        ("bf16", "8x8k", 8, 8192),
        ("q8_0", "64x8k.q8_0", 64, 8192),
        ("q8_0", "256x1k.q8_0", 256, 1024),
        ("fp8", "64x8k.fp8", 64, 8192),
    ),
    (("512", 512), ("1k", 1024), ("2k", 2048), ("4k", 4096), ("8k", 8192)),
    LLAMA_ENGINE,
    ("1x1k", "16x1k", "64x1k", "256x1k", "2k"),
)
QWEN_PLAN = ModelPlan(
    "qwen06b",
    QWEN3_06B,
    tuple(("bf16", f"{rows}x1k", rows, 1024) for rows in (1, 8, 16, 64, 256)),
    (("1k", 1024), ("2k", 2048)),
    QWEN_ENGINE,
    LLAMA_PLAN.profiled,
)
DETERMINISTIC_PLAN = ModelPlan(
    "deterministic",
    LLAMA_8B,
    tuple(("bf16", f"{rows}x1k", rows, 1024) for rows in (1, 8, 64)),
    (("2k", 2048),),
    EnginePlan(num_concurrent=0),
    deterministic=True,
)
"""The first model with `--deterministic`: what it costs."""


def run(results: Results) -> None:
    context = open_device_context()
    total_s = results.remaining_s
    reserves = ((LLAMA_PLAN, 0.4), (QWEN_PLAN, 0.1), (DETERMINISTIC_PLAN, 0.0))
    for plan, share in reserves:
        results.attempt(plan.name, partial(measure_model, results, context, GpuProfiler(), plan, share * total_s))


def measure_model(
    results: Results, context: DeviceContext, profiler: Profiler, plan: ModelPlan, reserve_s: float = 0.0
) -> None:
    """Measure one model. Skips measurements for which at most reserve_s seconds are left."""
    results.sizes(plan.name, plan.describe())
    context.memory.reset_peak()
    weights = RandomWeights(plan.config, plan.dtype, context.torch_device)
    steps = _ModelSteps(results, context, profiler, plan)
    for kv_dtype in dict.fromkeys(kv_dtype for kv_dtype, *_ in plan.decode):
        results.attempt(f"{plan.name}.{kv_dtype}", partial(steps.measure, weights, kv_dtype), reserve_s)
    measure_engine(results, context, plan.name, plan.config, weights, plan.dtype, plan.engine, reserve_s)
    del weights
    context.memory.reset_peak()


@dataclass(frozen=True)
class _ModelSteps:
    """Steps of one model, without an engine."""

    results: Results
    context: DeviceContext
    profiler: Profiler
    plan: ModelPlan

    def measure(self, weights: RandomWeights, kv_dtype: str) -> None:
        """Measure with one pass, made for the largest steps in this KV dtype."""
        plan, results, memory = self.plan, self.results, self.context.memory
        cases = [(name, rows, tokens) for dtype, name, rows, tokens in plan.decode if dtype == kv_dtype]
        longest = max(max(tokens for _, _, tokens in cases) + _SPARE_TOKENS, *(tokens for _, tokens in plan.prefill))
        most_tokens = max(*(tokens for _, tokens in plan.prefill), 256)
        most_rows = max(rows for _, rows, _ in cases)
        longest = _pages(longest) * PAGE_TOKENS
        sizes = StepSizes(most_rows, most_tokens, longest, plan.deterministic, choices=self.context.choices)
        cases = self._fitting(sizes, kv_dtype, cases)
        num_pages = max((rows * _pages(tokens + _SPARE_TOKENS) for _, rows, tokens in cases), default=0)
        num_pages = max(num_pages, _pages(longest))
        started_s = time.perf_counter()
        device = self.context.device
        forward_pass = CudaDecoderPass(plan.config, weights, device, plan.dtype, sizes, plan.host_kv_bytes)
        forward_pass.create_cache(num_pages, PAGE_TOKENS, kv_dtype)
        results.fact(f"{plan.name}.{kv_dtype}.ready", time.perf_counter() - started_s, "s")
        try:
            costs, name = forward_pass.token_costs, f"{plan.name}.{kv_dtype}.host_pages"
            results.fact(f"{name}.copy", costs.copy_s * 1e6, "us", "a token's KV to the host and back")
            results.fact(f"{name}.compute", costs.compute_s * 1e6, "us", "a token in the largest prefill step")
            results.fact(name, forward_pass.num_host_pages, "", "pages on the host; 0: they are computed again")
            layout = make_layout(plan.config, num_pages, PAGE_TOKENS, kv_dtype)
            peak_bytes = memory.peak_bytes()
            fill_cache(forward_pass._ops.cache.view(-1), layout)
            memory.reset_peak()  # filling the cache is not the pass's memory use
            for name, rows, tokens in cases:
                work = partial(self._decode, forward_pass, name, rows, tokens)
                results.attempt(f"{plan.name}.decode.{name}", work)
            if kv_dtype == plan.decode[0][0]:
                for name, tokens in plan.prefill:
                    work = partial(self._prefill, forward_pass, name, tokens)
                    results.attempt(f"{plan.name}.prefill.{name}", work)
                results.attempt(f"{plan.name}.ttft.1k", partial(self._ttft, forward_pass))
                self._check_memory(sizes, layout.num_bytes, max(peak_bytes, memory.peak_bytes()))
                self._take_apart(forward_pass, cases)
        finally:
            forward_pass.close()

    def _fitting(
        self, sizes: StepSizes, kv_dtype: str, cases: list[tuple[str, int, int]]
    ) -> list[tuple[str, int, int]]:
        """The cases whose cache fits the free memory beside the workspace. The others are skipped, with the reason."""
        plan, memory = self.plan, self.context.memory
        memory.reset_peak()
        workspace_bytes = plan_spec(plan.config, plan.dtype, sizes).workspace_bytes
        room = memory.free_bytes() - workspace_bytes - _RESERVE_BYTES
        page_bytes, fitting = make_layout(plan.config, 1, PAGE_TOKENS, kv_dtype).num_bytes, []
        for name, rows, tokens in cases:
            num_bytes = rows * _pages(tokens + _SPARE_TOKENS) * page_bytes
            if num_bytes <= room:
                fitting.append((name, rows, tokens))
            else:
                cache, left = f"its cache of {num_bytes / 1e9:.1f} GB", f"{max(room, 0) / 1e9:.1f} GB that are left"
                self.results.skipped(f"{plan.name}.decode.{name}", f"{cache} does not fit the {left}")
        return fitting

    def _decode(self, forward_pass: CudaDecoderPass, name: str, rows: int, tokens: int) -> None:
        steps, case, fact = _decoding(rows, tokens), f"{self.plan.name}.decode.{name}", self.results.fact
        for _ in range(3):
            launch(forward_pass, steps.decode()).wait()
        wall_s, host_s = time_decode(forward_pass, steps, self.plan.num_steps)
        fact(case, rows / wall_s, "tok/s")
        fact(f"{case}.step", wall_s * 1e3, "ms")
        fact(f"{case}.device", step_us(self.context.clock, forward_pass, steps.decode()) / 1e3, "ms")
        fact(f"{case}.launch_p50", statistics.median(host_s) * 1e3, "ms")

    def _prefill(self, forward_pass: CudaDecoderPass, name: str, tokens: int) -> None:
        """Time steps of one whole prompt each, launched one step ahead."""
        prompt, repeats = self._prompt(tokens), 3
        pending: PendingOutput | None = None
        launch(forward_pass, Steps(1, _pages(tokens)).prefill([prompt])).wait()
        started_s = time.perf_counter()
        for _ in range(repeats):
            following = launch(forward_pass, Steps(1, _pages(tokens)).prefill([prompt]))
            if pending is not None:
                pending.wait()
            pending = following
        if pending is not None:
            pending.wait()
        wall_s = (time.perf_counter() - started_s) / repeats
        self.results.fact(f"{self.plan.name}.prefill.{name}", tokens / wall_s, "tok/s")
        self.results.fact(f"{self.plan.name}.prefill.{name}.time", wall_s * 1e3, "ms")

    def _ttft(self, forward_pass: CudaDecoderPass) -> None:
        tokens, seconds = self.plan.ttft_tokens, []
        prompt = self._prompt(tokens)
        for _ in range(5):
            started_s = time.perf_counter()
            launch(forward_pass, Steps(1, _pages(tokens)).prefill([prompt])).wait()
            seconds.append(time.perf_counter() - started_s)
        self.results.fact(f"{self.plan.name}.ttft.1k", statistics.median(seconds) * 1e3, "ms")

    def _check_memory(self, sizes: StepSizes, cache_bytes: int, peak: int) -> None:
        """Check that torch's peak memory is within the plan that is made before anything is loaded."""
        name, spec = f"{self.plan.name}.memory", plan_spec(self.plan.config, self.plan.dtype, sizes)
        planned = spec.weight_bytes + spec.workspace_bytes + cache_bytes
        self.results.fact(f"{name}.planned", planned / 1e9, "GB")
        self.results.fact(f"{name}.free", self.context.memory.free_bytes() / 1e9, "GB", "free on the device")
        self.results.check(name, peak <= planned, f"GB peak, {planned / 1e9:.2f} planned", peak / 1e9)

    def _take_apart(self, forward_pass: CudaDecoderPass, cases: list[tuple[str, int, int]]) -> None:
        """Record the kernels of the profiled cases' steps."""
        plan = self.plan
        decodes = [(name, rows * n, partial(self._decode_some, forward_pass, rows, n)) for name, rows, n in cases]
        prefills = [(f"prefill.{name}", 0, partial(self._prefill_singly, forward_pass, n)) for name, n in plan.prefill]
        for name, num_cached, work in (*decodes, *prefills):
            if name.removeprefix("prefill.") in plan.profiled:
                finding, num_bytes = f"attribution.{plan.name}.{name}", attribution.step_bytes(plan.config, num_cached)
                num_steps = plan.num_steps + 1 if num_cached else 1
                record = partial(attribution.record, self.results, self.profiler, finding, work, num_steps, num_bytes)
                self.results.attempt(finding, record)

    def _decode_some(self, forward_pass: CudaDecoderPass, rows: int, tokens: int) -> None:
        time_decode(forward_pass, _decoding(rows, tokens), self.plan.num_steps)

    def _prefill_singly(self, forward_pass: CudaDecoderPass, tokens: int) -> None:
        with launched_singly(forward_pass):
            launch(forward_pass, Steps(1, _pages(tokens)).prefill([self._prompt(tokens)])).wait()

    def _prompt(self, num_tokens: int) -> NDArray[np.int32]:
        rng = np.random.default_rng(num_tokens)
        return rng.integers(0, self.plan.config.vocab_size, num_tokens).astype(np.int32)


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


@contextmanager
def launched_singly(forward_pass: CudaDecoderPass) -> Iterator[None]:
    """Launch all steps but decode steps kernel by kernel."""
    graphs = forward_pass._mixed_graphs
    graphs.is_used = False
    try:
        yield
    finally:
        graphs.is_used = True


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
