"""Preparations before anything is loaded: settings of the pass, model directory, KV plan, memory checks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.hub import resolve_config, resolve_model
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.kv_cache.budget import CPU_BUDGET_BYTES, KvBudget, KvPlan, auto_budget, host_budget, plan_kv
from penstock.backend.kv_cache.memory import host_memory
from penstock.backend.passes.decoder.cuda.device.device_choice import choose_device, planned_device
from penstock.shm.process.options import format_size

if TYPE_CHECKING:
    from penstock.backend.forward_pass import PassSpec
    from penstock.backend.kv_cache.memory import MemoryInfo
    from penstock.backend.options import BackendOptions

logger = logging.getLogger("penstock.backend")

DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"


def pass_options(options: BackendOptions) -> PassOptions:
    """The settings of the forward pass.

    Raises StartupError for an unknown device, a step with fewer tokens than sequences, or host memory for the CPU.
    """
    device = planned_device(options.gpu) if options.dry_run else choose_device(options.gpu)
    return PassOptions(
        device,
        options.dtype,
        options.max_running,
        options.step_tokens(device),
        options.max_context,
        options.deterministic,
        host_kv_bytes=host_budget(options.host_kv_budget, device, host_memory()),
        quantize=options.quantize,
        cpu_path=options.cpu_path,
    )


def locate_config(options: BackendOptions) -> Path:
    """A directory with the checkpoint's config.json. Of a hub model only that is downloaded. Raises StartupError."""
    return DEMO_MODEL_DIR if options.model is None else resolve_config(options.model, options.revision)


def locate_model(options: BackendOptions, config_dir: Path | None = None) -> Path:
    """The checkpoint's directory. A hub model is downloaded, at config_dir's commit. Raises StartupError."""
    return DEMO_MODEL_DIR if options.model is None else resolve_model(options.model, options.revision, config_dir)


def check_quantization(options: BackendOptions, spec: PassSpec) -> None:
    """Raises StartupError if the pass does not quantise as it was asked to."""
    if spec.quantization != options.quantize:
        raise StartupError(
            f'--quantize is {options.quantize}; forward pass "{options.forward_pass}" has only {spec.quantization}: '
            f"use --quantize {spec.quantization}"
        )


def plan_cache(options: BackendOptions, spec: PassSpec, device: str, memory: MemoryInfo) -> KvPlan:
    """Raises StartupError if the budget cannot hold what the options ask for."""
    budget = options.kv_budget
    if budget is None:
        budget = CPU_BUDGET_BYTES if device == "cpu" else "auto"
    return plan_kv(
        spec,
        budget=auto_budget(spec, memory) if budget == "auto" else KvBudget(budget),
        kv_dtype=options.kv_dtype,
        page_size_tokens=options.page_size,
        max_context_tokens=options.max_context,
        max_running=options.max_running,
    )


def check_memory(plan: KvPlan, memory: MemoryInfo, device: str = "cpu") -> None:
    """Raises StartupError if a GPU has less memory free, or the CPU less in total. If the CPU has less free it warns:
    other programs may give memory back."""
    parts = (
        f"a KV cache of {format_size(plan.num_bytes)}, weights of {format_size(plan.weight_bytes)} and a workspace of "
        f"{format_size(plan.workspace_bytes)}"
    )
    free = f"the {format_size(memory.free_bytes)} that are free on {memory.name}"
    if device != "cpu" and plan.device_bytes > memory.free_bytes:
        raise StartupError(f"{parts} are more than {free}: lower --kv-budget")
    if plan.device_bytes > memory.total_bytes:
        raise StartupError(
            f"{parts} are more than the {format_size(memory.total_bytes)} of {memory.name}: lower --kv-budget"
        )
    if plan.device_bytes > memory.free_bytes:
        logger.warning("%s are more than %s: lower --kv-budget if memory runs short", parts, free)


def check_host_memory(host_kv_bytes: int, memory: MemoryInfo) -> None:
    """Raises StartupError if less is free. Page-locked memory cannot be swapped out."""
    if host_kv_bytes > memory.free_bytes:
        raise StartupError(
            f"--host-kv-budget is {format_size(host_kv_bytes)}; {format_size(memory.free_bytes)} are free on "
            f"{memory.name}: lower --host-kv-budget"
        )
