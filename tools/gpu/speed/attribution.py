"""Takes a step apart: which kernels its time goes to, what they read, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.tools.gpu.devices.profiling import KernelRun, Profiler
    from penstock.tools.gpu.results import Results

_LONGEST_GAP_US = 20.0
"""A longer gap is between steps: the host was late."""


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


def record(
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
    for kernel in sorted(total_us, key=lambda kernel: -total_us[kernel]):
        us = total_us[kernel] / num_steps
        detail = f"{100 * us / step_us:.1f} % of a step, {counts[kernel] / num_steps:g} launches"
        if kernel in num_bytes:
            detail += _rate(num_bytes[kernel], us)
        results.fact(f"{name}.{kernel}", us, "us", detail)
    is_ours = any(kernel.startswith("multiply_and") for kernel in total_us)
    library_us = sum(us for kernel, us in total_us.items() if _is_product(kernel)) / num_steps
    if library_us:
        detail = f"all of the library's products{_rate(num_bytes['lm_head' if is_ours else 'library'], library_us)}"
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


def _rate(num_bytes: float, us: float) -> str:
    return f", {num_bytes / 1e6:,.0f} MB, {num_bytes / us / 1e6:.2f} TB/s"
