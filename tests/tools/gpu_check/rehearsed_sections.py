"""The sections of the four parts on the emulated device, with small sizes: for rehearsals without a GPU."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.backend.passes.decoder.cuda.device.cubin_cache import CubinCache
from penstock.backend.passes.decoder.cuda.device.launcher import group_by_module
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import CacheLayout
from penstock.backend.passes.decoder.ops import HeadShape
from penstock.tools.gpu_check.cases.catalogue import invariance_checks, small_checks, wgmma_checks
from penstock.tools.gpu_check.checks import (
    compilation,
    correctness,
    deterministic_passes,
    pass_agreement,
    sanitizer,
    sharing,
)
from penstock.tools.gpu_check.engine_speed import attribution, end_to_end, transformers_batching
from penstock.tools.gpu_check.kernel_speed import (
    ceilings,
    kernel_cases,
    kernels,
    product_rows,
    variants,
    weight_products,
)
from penstock.tools.gpu_check.model_configs import TINY
from tests.cuda_emulator import EmulatedLauncher
from tests.tools.gpu_check.device_context import make_device_context
from tests.tools.gpu_check.test_attribution import LaunchProfiler
from tests.tools.gpu_check.test_engine_speed import tiny_plan

if TYPE_CHECKING:
    from penstock.tools.gpu_check.reporting.results import Results

HEADS = HeadShape(4, 2, 64)
KERNEL_SIZES = kernel_cases.KernelSizes(
    heads=HEADS, decode=(("64x1k", 2, 40, "bf16"), ("1x1k", 1, 40, "q8_0")), prefill=(("4k", 0, 40, "bf16"),),
    encoder=(("128x128", 2, 20, None),), encoder_heads=2, sampling_rows=2, vocab_size=300, elementwise_tokens=(5,),
    hidden=128, intermediate=64, product_rows=(1,), fused_rows=(1,), expert_tokens=(), cold_bytes=1, with_peers=False,
)  # fmt: skip


def run_environment(results: Results) -> None:
    results.fact("gpu.name", "emulated")


def run_compile(results: Results) -> None:
    """Open every kernel's cubin, as loading does; with those of --compile-only nothing is compiled."""
    cache = CubinCache("sm_90a")
    groups = group_by_module(compilation.all_kernels())
    for group in groups:
        with cache.opened(group) as path:
            path.read_bytes()
    results.fact("compile.load.compiled", cache.num_compiled)
    results.check("compile.load", True, "modules opened", len(groups))


def run_ceilings(results: Results) -> None:
    sizes = ceilings.CeilingSizes(4096, 32, (64, 32), 3, 4096, 64, CacheLayout(2, 3, 16, 1, 64, "bf16"))
    ceilings.measure(results, make_device_context(), sizes)


def run_correctness(results: Results) -> None:
    correctness.run_checks(results, EmulatedLauncher(), [*small_checks(), *wgmma_checks()], reserve_s=25.0)
    pass_agreement.check_passes(results, make_device_context(), ("llama", "qwen3"), ("int8",))


def run_sharing(results: Results) -> None:
    context = make_device_context()
    sharing.check_graph(results, context)
    sharing.check_host_page_copies(results, context)


def run_kernels(results: Results) -> None:
    kernels.measure(results, make_device_context(), KERNEL_SIZES)


def run_variants(results: Results) -> None:
    context = make_device_context()
    rows = product_rows.RowPlan("tiny", "small_product_rows", TINY, (1, 2), tokens=40, num_steps=2)
    product_rows.measure(results, context, rows)
    variants.measure(results, context, KERNEL_SIZES)
    sizes = weight_products.WeightSizes((("o", 48, 32),), (1, 3), 10_000)
    weight_products.measure(results, context, LaunchProfiler(context), sizes)


def run_attribution(results: Results) -> None:
    context = make_device_context()
    plan = attribution.AttributionPlan(
        "tiny", TINY, (2,), tokens=40, prefill_tokens=48, mixed_rows=1, mixed_tokens=(5,), num_steps=2
    )
    attribution.measure(results, context, LaunchProfiler(context), plan)


def run_end_to_end(results: Results) -> None:
    end_to_end.measure_model(results, make_device_context(), tiny_plan(step_tokens=(16, 32)))


def run_invariance(results: Results) -> None:
    correctness.run_checks(results, EmulatedLauncher(), invariance_checks(), reserve_s=0.5 * results.remaining_s)
    cases = tuple(
        replace(case, num_rows=min(case.num_rows, 9), row=case.row % 9) for case in deterministic_passes.BATCH_CASES
    )
    sizes = deterministic_passes.PassSizes(TINY, torch.float32, ("bf16",), cases, new_tokens=4)
    deterministic_passes.check_passes(results, make_device_context(), sizes)


def run_peers(results: Results) -> None:
    sizes = transformers_batching.TransformersSizes(
        TINY, torch.float32, rows=3, prompt_tokens=20, new_tokens=8, batch_tokens=256
    )
    transformers_batching.measure(results, make_device_context(), sizes)


def run_sanitizer(results: Results) -> None:
    """A script in the place of compute-sanitizer."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "compute-sanitizer")
        path.write_text(f"#!{sys.executable}\nprint('checked 9 of 9\\n========= ERROR SUMMARY: 0 errors')\n")
        path.chmod(0o755)
        for tool in sanitizer.TOOLS:
            sanitizer.run_tool(results, str(path), tool, ["true"])
