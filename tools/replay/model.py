"""Loads the forward pass through which a recording with tokens is replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.backend.checkpoint.files.generation_config import read_generation_defaults
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IBatchedForwardPass
from penstock.backend.forward_pass.plugins import find_forward_pass
from penstock.backend.kv_cache.budget.memory import MemoryInfo, device_memory
from penstock.backend.options import BackendOptions
from penstock.backend.passes.cpu.library.thread_counts import configure_threads
from penstock.backend.start.paging import create_cache
from penstock.backend.start.startup import (
    describe_pass,
    locate_config,
    locate_model,
    pass_name,
    pass_options,
    plan_memory,
)
from penstock.backend.structured_output.compile_pool import CompilePool
from penstock.backend.structured_output.compiler_process import CompileLimits
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.shm.recording.events import BackendStarted


def load_pass(options: BackendOptions, started: BackendStarted) -> tuple[IBatchedForwardPass, GrammarCache | None]:
    """Load the model of the options with the recorded sizes of its cache and steps. Raises StartupError.

    --max-context stays as it is given: it decides on the type of the cached keys and values, and so on the tokens.
    """
    options = replace(
        options,
        max_running=started.max_running,
        max_batch_tokens=started.max_batch_tokens,
        page_size=started.page_size,
        batch_channel_capacity=started.num_plans_ahead,
        host_kv_budget=0,
    )
    options.check()
    configure_threads()
    settings = pass_options(options)
    config_dir = locate_config(options)
    name = pass_name(options, config_dir)
    pass_class = find_forward_pass(name)
    spec, settings = describe_pass(options, name, pass_class, config_dir, settings)
    if not (spec.generates and spec.kv_bytes_per_token):
        raise StartupError("the model computes vectors and no tokens")
    if spec.vocab_size != started.vocab_size:
        raise StartupError(
            f"the recording is of {started.model}, whose vocabulary has {started.vocab_size} tokens; this model's has "
            f"{spec.vocab_size}: give the recorded one as --model"
        )
    if spec.kv_windows != started.kv_windows:
        raise StartupError(
            f"the recording is of a cache with windows {started.kv_windows}; this model's has {spec.kv_windows}: give "
            "the recorded model and --max-context"
        )
    asks_device = not isinstance(options.kv_budget, int)
    memory = device_memory(settings.device) if asks_device else MemoryInfo(0, 0, settings.device)
    kv_dtype = plan_memory(options, spec, settings, memory).kv_dtype
    model_dir = locate_model(options, config_dir)
    forward_pass = pass_class.load(model_dir, settings)
    try:
        create_cache(forward_pass, started.num_pages, started.page_size, kv_dtype, started.num_checkpoints)
    except (MemoryError, OSError, RuntimeError) as error:  # torch raises RuntimeError
        raise StartupError(f"the recorded cache of {started.num_pages} pages cannot be allocated: {error}") from error
    return forward_pass, _create_compiler(model_dir, options, started.vocab_size)


def _create_compiler(model_dir: Path, options: BackendOptions, vocab_size: int) -> GrammarCache | None:
    tokenizer_json = model_dir / "tokenizer.json"
    if not tokenizer_json.is_file():
        return None
    eos_token_ids = read_generation_defaults(model_dir).eos_token_ids
    limits = CompileLimits(options.grammar_timeout_s)
    return GrammarCache(CompilePool(tokenizer_json, vocab_size, eos_token_ids, limits))
