"""Preparations before anything is loaded: settings of the pass, model directory, KV plan, memory checks."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

from penstock.backend.checkpoint.encoders.tasks import find_task
from penstock.backend.checkpoint.hub import resolve_config, resolve_model
from penstock.backend.errors import NoRoomBeside, StartupError
from penstock.backend.forward_pass import IBatchedForwardPass, PassOptions, PassSpec
from penstock.backend.forward_pass.extensions import IFindsSharedWeights
from penstock.backend.kv_cache.budget.kv_plan import (
    CPU_BUDGET_BYTES,
    KvBudget,
    KvPlan,
    auto_budget,
    host_budget,
    plan_kv,
)
from penstock.backend.kv_cache.budget.memory import MemoryInfo, host_memory
from penstock.backend.kv_cache.budget.whole_plan import WholePlan, plan_whole
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.model_names import DEMO_MODEL
from penstock.backend.options import BackendOptions
from penstock.backend.passes.cuda.device.device_choice import choose_device, planned_device
from penstock.backend.passes.cuda.device.kernel_choices import adopted_choices
from penstock.backend.scheduling.drafting import MAX_STATE_DRAFTS
from penstock.backend.start.lora_modules import NamedAdapter, read_adapters
from penstock.backend.start.pass_checks import check_adapters, check_groups
from penstock.process.options import format_size

logger = logging.getLogger("penstock.backend")

AUTO = "auto"
_TOKENS_PER_ROW = 8
"""A step of a pass without a KV cache may have one row for this many of its tokens."""
_KINDS_OF_TASK = {
    "embed": ("embed", "token_embed", "sparse"),
    "rerank": ("classify",),
    "classify": ("classify", "token_classify"),
}


def pass_options(options: BackendOptions) -> PassOptions:
    """The settings of the forward pass.

    Raises StartupError for an unknown device, a step with fewer tokens than sequences, or host memory for the CPU.
    """
    device = planned_device(options.gpu) if options.dry_run else choose_device(options.gpu)
    return PassOptions(
        device,
        options.dtype,
        options.num_running(),
        _step_tokens(options, device),
        options.max_context,
        options.deterministic,
        host_kv_bytes=host_budget(options.host_kv_budget, device, host_memory()),
        quantize=options.quantize,
        task=options.task,
        splits_layers=options.persist_kv_fd is None,  # pages of several groups are not kept
        cpu_path=options.cpu_path,
        adapters=tuple(adapter.directory for adapter in named_adapters(options)),
        adapter_budget_bytes=0 if options.lora_dir is None else options.lora_budget,
        may_run_ahead=True,
        guesses_tokens=options.speculation in ("auto", "draft") and options.draft_model is None,
        num_state_drafts=0 if options.speculation == "none" else MAX_STATE_DRAFTS,
        needs_pictures=options.mmproj is not None,
        weights_fds=_pair(options.weights_fds),
    )


def named_adapters(options: BackendOptions) -> tuple[NamedAdapter, ...]:
    """Raises StartupError."""
    return read_adapters(options.lora_modules, (options.model_id(), *options.aliases()))


def _pair(fds: tuple[int, ...]) -> tuple[int, int] | None:
    match fds:
        case ():
            return None
        case (inlet, outlet):
            return inlet, outlet
    raise StartupError(f"--weights-fds has {len(fds)} file descriptors; a mailbox has 2")


def _step_tokens(options: BackendOptions, device: str) -> int:
    choices, _ = adopted_choices(device)
    return options.step_tokens(device, gpu_tokens=choices.step_tokens)


def locate_config(options: BackendOptions) -> Path:
    """Return a directory with the checkpoint's config.json. For a hub model only that file is downloaded.

    Raises StartupError.
    """
    name = DEMO_MODEL if options.model is None else options.model
    return resolve_config(name, options.revision, options.mmproj)


def locate_model(options: BackendOptions, config_dir: Path | None = None) -> Path:
    """The checkpoint's directory. A hub model is downloaded, at config_dir's commit. Raises StartupError."""
    name = DEMO_MODEL if options.model is None else options.model
    return resolve_model(name, options.revision, config_dir, options.mmproj)


def pass_name(options: BackendOptions, config_dir: Path) -> str:
    """--forward-pass, or the pass for the model's files. Raises StartupError for an encoder that is not supported."""
    name = options.forward_pass
    return find_task(config_dir).forward_pass if name == AUTO else name


def describe_pass(
    options: BackendOptions,
    name: str,
    pass_class: type[IBatchedForwardPass],
    config_dir: Path,
    settings: PassOptions,
    num_kept: int = 0,
) -> tuple[PassSpec, PassOptions]:
    """Return the pass's spec and its settings. The last num_kept adapters belong to --lora-budget.

    Without a KV cache a step must hold the longest input, and may hold many short ones. Raises StartupError if the pass
    cannot do what the options ask for.
    """
    spec = pass_class.describe(config_dir, settings)
    if not spec.kv_bytes_per_token:
        longest = min(spec.max_context_tokens, settings.max_context_tokens or spec.max_context_tokens)
        step_tokens = options.step_tokens(settings.device, has_cache=False)
        settings = replace(
            settings,
            max_running=max(settings.max_running, step_tokens // _TOKENS_PER_ROW),
            max_batch_tokens=max(step_tokens, longest),
        )
        spec = pass_class.describe(config_dir, settings)
    elif (num_running := _num_running(options, spec, settings.device)) < settings.max_running:
        settings = replace(settings, max_running=num_running)
        spec = pass_class.describe(config_dir, settings)
    if settings.max_batch_tokens < (least := spec.whole_picture_tokens + settings.max_running):
        if options.max_batch_tokens is not None:
            raise StartupError(
                f"--max-batch-tokens is {settings.max_batch_tokens}; this model needs at least {least}: a step "
                f"computes a picture whole, which has up to {spec.whole_picture_tokens} tokens, and one token for each "
                f"of --max-running {settings.max_running}"
            )
        settings = replace(settings, max_batch_tokens=least)
        spec = pass_class.describe(config_dir, settings)
    check_groups(spec)
    check_adapters(spec, len(settings.adapters))
    if options.lora_dir is not None:
        kept_bytes = 0
        if num_kept:
            others = replace(settings, adapters=settings.adapters[:-num_kept])
            kept_bytes = spec.weight_bytes - pass_class.describe(config_dir, others).weight_bytes
        settings = replace(settings, adapter_budget_bytes=max(0, options.lora_budget - kept_bytes))
        spec = replace(spec, workspace_bytes=spec.workspace_bytes + settings.adapter_budget_bytes)
    if spec.quantization != options.quantize:
        raise StartupError(
            f'--quantize is {options.quantize}; forward pass "{name}" has only {spec.quantization}: '
            f"use --quantize {spec.quantization}"
        )
    kinds = _KINDS_OF_TASK.get(options.task, ())
    if (options.task == "generate" and not spec.generates) or (kinds and spec.pooled.keys().isdisjoint(kinds)):
        given = ", ".join([*(["text"] if spec.generates else []), *spec.pooled])
        raise StartupError(
            f'--task is {options.task}; with forward pass "{name}" the model gives {given}: use --task auto'
        )
    return spec, settings


def plan_memory(
    options: BackendOptions, spec: PassSpec, settings: PassOptions, memory: MemoryInfo
) -> KvPlan | WholePlan:
    """Raises StartupError if the memory cannot hold what the options ask for."""
    if spec.kv_bytes_per_token:
        return plan_cache(options, spec, settings.device, memory)
    step_tokens = options.step_tokens(settings.device, has_cache=False)
    return plan_whole(spec, options.max_context, step_tokens, settings.max_running)


def _kv_budget(options: BackendOptions, device: str) -> int | Literal["auto"]:
    if options.kv_budget is not None:
        return options.kv_budget
    return CPU_BUDGET_BYTES if device == "cpu" else "auto"


def _num_running(options: BackendOptions, spec: PassSpec, device: str) -> int:
    budget = _kv_budget(options, device)
    return options.num_running(None if budget == "auto" else budget, spec.state_bytes_per_sequence)


def plan_cache(options: BackendOptions, spec: PassSpec, device: str, memory: MemoryInfo) -> KvPlan:
    """Raises StartupError if the budget cannot hold what the options ask for."""
    budget = _kv_budget(options, device)
    choices, _ = adopted_choices(device)
    groups = KvGroups.of(
        options.page_tokens(choices.page_size_tokens),
        spec.kv_windows,
        _step_tokens(options, device),
        options.batch_channel_capacity,
        keeps_state=spec.state_bytes_per_sequence > 0,
    )
    return plan_kv(
        spec,
        budget=auto_budget(spec, memory) if budget == "auto" else KvBudget(budget),
        kv_dtype=options.kv_dtype,
        groups=groups,
        max_context_tokens=options.max_context,
        max_running=_num_running(options, spec, device),
    )


def find_shared_bytes(pass_class: type[IBatchedForwardPass], config_dir: Path, settings: PassOptions) -> int:
    """Return the size of weights that the pass will only map. Call it before memory is measured: it frees other
    weights."""
    finder: object = pass_class
    if settings.weights_fds is None or not isinstance(finder, IFindsSharedWeights):
        return 0
    return finder.shared_bytes(config_dir, settings)


def check_memory(plan: KvPlan | WholePlan, memory: MemoryInfo, device: str = "cpu") -> None:
    """Raises StartupError if a GPU has less memory free, or the CPU less in total. If the CPU has less free it warns:
    other programs may give memory back."""
    free = f"the {format_size(memory.free_bytes)} that are free on {memory.name}"
    if device != "cpu" and plan.device_bytes > memory.free_bytes:
        raise StartupError(f"{plan.parts} are more than {free}: {plan.remedy}")
    if plan.device_bytes > memory.total_bytes:
        raise StartupError(
            f"{plan.parts} are more than the {format_size(memory.total_bytes)} of {memory.name}: {plan.remedy}"
        )
    if plan.device_bytes > memory.free_bytes:
        logger.warning("%s are more than %s: %s if memory runs short", plan.parts, free, plan.remedy)


def check_room_beside(plan: KvPlan | WholePlan, memory: MemoryInfo, kv_budget: int | str | None, device: str) -> None:
    """Raises NoRoomBeside unless the memory that another backend leaves free is enough.

    An automatic budget also needs that backend's memory.
    """
    if kv_budget == AUTO or (kv_budget is None and device != "cpu"):
        raise NoRoomBeside("an automatic --kv-budget can be computed only when the old backend has ended")
    if plan.device_bytes > memory.free_bytes:
        raise NoRoomBeside(
            f"{plan.parts} are more than the {format_size(memory.free_bytes)} that the old backend leaves free on "
            f"{memory.name}"
        )


def check_host_memory(host_kv_bytes: int, memory: MemoryInfo) -> None:
    """Raises StartupError if less memory is free. Page-locked memory cannot be swapped out."""
    if host_kv_bytes > memory.free_bytes:
        raise StartupError(
            f"--host-kv-budget is {format_size(host_kv_bytes)}; {format_size(memory.free_bytes)} are free on "
            f"{memory.name}: lower --host-kv-budget"
        )
