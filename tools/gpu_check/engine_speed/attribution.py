"""The section "attribution": which kernels a step's time goes to, what they read, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda.workspace_plan import StepSizes, make_layout
from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.devices.models import RandomWeights
from penstock.tools.gpu_check.devices.profiling import GpuProfiler
from penstock.tools.gpu_check.devices.random_caches import fill_cache
from penstock.tools.gpu_check.devices.steps import Steps, launch
from penstock.tools.gpu_check.engine_speed.mixed_steps import WAYS, MixedLoad, compare, launched_singly
from penstock.tools.gpu_check.model_configs import LLAMA_8B, QWEN3_06B
from penstock.tools.gpu_check.prediction.machine import H200, machine_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.devices.profiling import KernelRun, Profiler
    from penstock.tools.gpu_check.reporting.results import Results

PAGE_TOKENS = 32
_LONGEST_GAP_US = 20.0
"""A longer gap is between steps: the host was late."""


@dataclass(frozen=True)
class AttributionPlan:
    name: str
    config: DecoderConfig
    rows: tuple[int, ...] = (1, 16, 64, 256)
    tokens: int = 1024
    prefill_tokens: int = 2048
    mixed_rows: int = 8
    mixed_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    """Tokens of a prompt beside mixed_rows decodes, in ascending order; the first is taken apart by kernel."""
    num_steps: int = 8
    dtype: torch.dtype = torch.bfloat16


PLANS = (AttributionPlan("llama8b", LLAMA_8B), AttributionPlan("qwen06b", QWEN3_06B))
_CHOOSING = "qwen06b"
"""The model for which `mixed_tokens` is chosen: graphs of mixed steps are for small ones."""


def run(results: Results) -> None:
    context = open_device_context()
    for plan in PLANS:
        results.attempt(f"attribution.{plan.name}", partial(measure, results, context, GpuProfiler(), plan))


def measure(results: Results, context: DeviceContext, profiler: Profiler, plan: AttributionPlan) -> None:
    weights = RandomWeights(plan.config, plan.dtype, context.torch_device)
    pages_per_row = -(-(plan.tokens + 4 * plan.num_steps) // PAGE_TOKENS)
    most_mixed = plan.mixed_tokens[-1]
    mixed_pages_per_row = max(pages_per_row, -(-most_mixed // PAGE_TOKENS))
    longest = max(mixed_pages_per_row * PAGE_TOKENS, plan.prefill_tokens)
    mixed_pages = (plan.mixed_rows + 1) * mixed_pages_per_row
    num_pages = max(max(plan.rows) * pages_per_row, mixed_pages, -(-longest // PAGE_TOKENS))
    longest = -(-longest // PAGE_TOKENS) * PAGE_TOKENS
    most_tokens = max(plan.prefill_tokens, plan.mixed_rows + most_mixed)
    choices = replace(context.choices, mixed_tokens=most_mixed)
    sizes = StepSizes(max(plan.rows), most_tokens, longest, choices=choices, captures_all=True)
    forward_pass = CudaDecoderPass(plan.config, weights, context.device, plan.dtype, sizes)
    try:
        forward_pass.create_cache(num_pages, PAGE_TOKENS, "bf16")
        layout = make_layout(plan.config, num_pages, PAGE_TOKENS, "bf16")
        fill_cache(forward_pass._ops.cache.view(-1), layout)
        for num_rows in plan.rows:
            name = f"attribution.{plan.name}.{num_rows}x{plan.tokens}"
            num_bytes = step_bytes(plan.config, num_rows * plan.tokens)
            decode = partial(_decode, forward_pass, plan, num_rows, pages_per_row)
            results.attempt(name, partial(_record, results, profiler, name, decode, plan.num_steps, num_bytes))
        name, num_bytes = f"attribution.{plan.name}.prefill.{plan.prefill_tokens}", step_bytes(plan.config, 0)
        prefill = partial(_prefill, forward_pass, plan)
        results.attempt(name, partial(_record, results, profiler, name, prefill, 2, num_bytes))
        load = MixedLoad(plan.mixed_rows, plan.tokens, mixed_pages_per_row, plan.config.vocab_size, plan.num_steps)
        _measure_mixed(results, profiler, forward_pass, plan, load)
    finally:
        forward_pass.close()


def _measure_mixed(
    results: Results, profiler: Profiler, forward_pass: CudaDecoderPass, plan: AttributionPlan, load: MixedLoad
) -> None:
    num_bytes, first = step_bytes(plan.config, load.num_rows * load.context_tokens), plan.mixed_tokens[0]
    for way, is_captured in WAYS.items():
        name = f"attribution.{plan.name}.mixed.{load.num_rows}+{first}.{way}"
        run_steps = partial(load.run, forward_pass, first, is_captured=is_captured)
        results.attempt(name, partial(_record, results, profiler, name, run_steps, load.num_steps, num_bytes))
    most = compare(results, plan.name, load, forward_pass, plan.mixed_tokens)
    if plan.name == _CHOOSING:
        results.fact("variant.mixed_tokens", most, "", "graphs are faster up to so many tokens of a prompt")


def step_bytes(config: DecoderConfig, num_cached_tokens: int) -> dict[str, float]:
    """What a step's kernels must read at least, by the kernel's name; the library's products are "library"."""
    heads, layers = config.num_heads + 2 * config.num_kv_heads, config.num_layers
    qkv = 2.0 * layers * heads * config.head_dim * config.hidden_size
    o = 2.0 * layers * config.num_heads * config.head_dim * config.hidden_size
    gate_up = 2.0 * layers * 2 * config.intermediate_size * config.hidden_size
    lm_head = 2.0 * config.vocab_size * config.hidden_size
    return {
        "decode_attention": 4.0 * layers * num_cached_tokens * config.num_kv_heads * config.head_dim,
        "multiply_and_store": qkv,
        "multiply_and_add": o + gate_up / 2,
        "multiply_and_gate": gate_up,
        "multiply_rows": qkv,
        "library": qkv + o + gate_up * 1.5 + lm_head,
        "lm_head": lm_head,
    }


def _decode(forward_pass: CudaDecoderPass, plan: AttributionPlan, num_rows: int, pages_per_row: int) -> None:
    steps = Steps(num_rows, pages_per_row)
    steps.context_lens[:] = plan.tokens - 1
    pending = launch(forward_pass, steps.decode())
    for _ in range(plan.num_steps - 1):
        following = launch(forward_pass, steps.decode())
        pending.wait()
        pending = following
    pending.wait()


def _prefill(forward_pass: CudaDecoderPass, plan: AttributionPlan) -> None:
    """Launched kernel by kernel, as steps of this size are in a server."""
    prompt = np.random.default_rng(1).integers(0, plan.config.vocab_size, plan.prefill_tokens).astype(np.int32)
    with launched_singly(forward_pass):
        for _ in range(2):
            launch(forward_pass, Steps(1, -(-plan.prefill_tokens // PAGE_TOKENS)).prefill([prompt])).wait()


def _record(
    results: Results,
    profiler: Profiler,
    name: str,
    work: Callable[[], object],
    num_steps: int,
    num_bytes: dict[str, float],
) -> None:
    """Record each kernel's time in a step, longest first, and the gaps. Raises ValueError if the profiler saw none."""
    work()  # the first steps load and capture
    runs = profiler.runs(work)
    if not runs:
        raise ValueError("the profiler saw no kernel")
    total_us: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for run in runs:
        total_us[run.name] += run.end_us - run.start_us
        counts[run.name] += 1
    gaps = _gaps_us(runs)
    inside_us = sum(gap for gap in gaps if gap < _LONGEST_GAP_US)
    step_us = (sum(total_us.values()) + inside_us) / num_steps
    results.fact(f"{name}.step", step_us, "us", f"{len(runs) / num_steps:g} kernels and copies")
    results.fact(
        f"{name}.gaps", inside_us / num_steps, "us", f"{100 * inside_us / num_steps / step_us:.1f} % of a step"
    )
    results.fact(f"{name}.late", sum(gap for gap in gaps if gap >= _LONGEST_GAP_US) / num_steps, "us", "between steps")
    is_ours = any(kernel.startswith("multiply_and") for kernel in total_us)
    library = num_bytes["lm_head"] if is_ours else num_bytes["library"]
    library_us = sum(us for kernel, us in total_us.items() if _is_product(kernel)) / num_steps
    for kernel in sorted(total_us, key=lambda kernel: -total_us[kernel]):
        us = total_us[kernel] / num_steps
        detail = f"{100 * us / step_us:.1f} % of a step, {counts[kernel] / num_steps:g} launches"
        if kernel in num_bytes:
            detail += _share_of_limit(num_bytes[kernel], us)
        results.fact(f"{name}.{kernel}", us, "us", detail)
    if library_us:
        detail = f"all of the library's products{_share_of_limit(library, library_us)}"
        results.fact(f"{name}.products", library_us, "us", detail)


def _gaps_us(runs: list[KernelRun]) -> list[float]:
    """Idle times between runs; a kernel that begins early leaves none."""
    gaps, end_us = [], runs[0].end_us
    for _, following in pairwise(runs):
        gaps.append(max(following.start_us - end_us, 0.0))
        end_us = max(end_us, following.end_us)
    return gaps


def _is_product(kernel: str) -> bool:
    """Whether a kernel is a product of cuBLAS or CUTLASS, by the names that they have."""
    return any(part in kernel.lower() for part in ("gemm", "gemv", "nvjet", "cutlass", "splitk"))


def _share_of_limit(num_bytes: float, us: float) -> str:
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    share = num_bytes / (machine_of(name) or H200).bandwidth * 1e6 / us
    return f", {num_bytes / 1e6:,.0f} MB, {num_bytes / us / 1e6:.2f} TB/s, {100 * share:.0f} % of the limit"
