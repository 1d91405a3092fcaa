"""Measures nano-vllm from --peers beside ours: its own benchmark's workload on a 0.6B model with the same weights.

nano-vllm uses FlashAttention. If only FlashAttention 3 is present, its two functions are adapted to the names and
arguments that nano-vllm expects.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.devices.models import RandomWeights
from penstock.tools.gpu_check.engine_speed.engine_runs import QWEN_ENGINE, EnginePlan, time_offline
from penstock.tools.gpu_check.engine_speed.offline_requests import draw_offline_requests
from penstock.tools.gpu_check.engine_speed.transformers_batching import (
    MARGIN_S,
    first_line,
    make_state_dict,
    run_with_timeout,
)
from penstock.tools.gpu_check.model_configs import QWEN3_06B, rope_theta

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.reporting.results import Results

_MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class NanoVllmSizes:
    config: DecoderConfig = QWEN3_06B
    dtype: torch.dtype = torch.bfloat16
    plan: EnginePlan = QWEN_ENGINE

    def describe(self) -> str:
        return f"{self.plan.requests} requests of {self.plan.shortest} to {self.plan.longest} tokens in and out"


def run(results: Results) -> None:
    if (missing := missing_package()) is not None:
        results.skipped("peers.nano_vllm_ratio", missing)
        return
    measure(results, open_device_context(), NanoVllmSizes())
    # Exit at once: nano-vllm leaves threads and process groups behind.
    sys.stdout.flush()
    os._exit(0)


def missing_package() -> str | None:
    if importlib.util.find_spec("nanovllm") is None:
        return "nanovllm is neither installed nor in --peers"
    if not any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface")):
        return "nano-vllm needs flash_attn or flash_attn_interface, and neither is present"
    return None


def measure(results: Results, context: DeviceContext, sizes: NanoVllmSizes) -> None:
    weights, ours = RandomWeights(sizes.config, sizes.dtype, context.torch_device), [0.0]
    if not results.attempt("peers.nano_vllm.ours", partial(_measure_ours, results, context, weights, sizes, ours)):
        return
    gc.collect()
    context.memory.reset_peak()
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as directory:
            write_checkpoint(Path(directory), sizes.config, weights, sizes.dtype)
            rate = run_with_timeout(results.remaining_s - MARGIN_S, partial(_measure_theirs, Path(directory), sizes))
    except Exception as error:  # noqa: BLE001 - a peer's error is recorded, not ours to raise
        results.skipped("peers.nano_vllm_ratio", first_line(error))
        return
    results.fact("peers.nano_vllm", rate, "tok/s", sizes.describe())
    if ours[0]:  # else an earlier run measured ours
        results.fact("peers.nano_vllm_ratio", ours[0] / rate, "x")


def _measure_ours(
    results: Results, context: DeviceContext, weights: RandomWeights, sizes: NanoVllmSizes, rate: list[float]
) -> None:
    num_tokens, wall_s = time_offline(results, context, sizes.config, weights, sizes.dtype, sizes.plan)
    rate[0] = num_tokens / wall_s
    results.fact("peers.nano_vllm.ours", rate[0], "tok/s")


def _measure_theirs(directory: Path, sizes: NanoVllmSizes) -> float:
    """Generated tokens per second of the whole `generate` call, as nano-vllm's benchmark counts them."""
    install_flash_attention()
    nanovllm: Any = importlib.import_module("nanovllm")
    _without_scaling(importlib.import_module("nanovllm.models.qwen3"))
    plan = sizes.plan
    requests = draw_offline_requests(plan.requests, plan.shortest, plan.longest, sizes.config.vocab_size)
    llm = nanovllm.LLM(str(directory), enforce_eager=False, max_model_len=_MAX_MODEL_LEN)
    sampling = partial(nanovllm.SamplingParams, temperature=0.6, ignore_eos=True)
    llm.generate([[1] * 16], sampling(max_tokens=16), use_tqdm=False)
    started_s = time.perf_counter()
    llm.generate(
        [request.prompt for request in requests],
        [sampling(max_tokens=request.num_new_tokens) for request in requests],
        use_tqdm=False,
    )
    return sum(request.num_new_tokens for request in requests) / (time.perf_counter() - started_s)


def install_flash_attention() -> None:
    """Install FlashAttention 3 as the module `flash_attn`, unless `flash_attn` is present."""
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None:
        return
    fa3: Any = importlib.import_module("flash_attn_interface")
    module: Any = ModuleType("flash_attn")

    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, **named: Any
    ) -> Tensor:
        return _output(fa3.flash_attn_with_kvcache(q, k_cache, v_cache, page_table=block_table, **named))

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        block_table: Tensor | None = None,
        **named: Any,
    ) -> Tensor:
        """With a block table, k and v are pages."""
        if block_table is None:
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return _output(fa3.flash_attn_varlen_func(q, k, v, *lengths, **named))
        lengths_of_keys = cu_seqlens_k.diff().int()
        paged = {"cache_seqlens": lengths_of_keys, "page_table": block_table}
        packed = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        return _output(fa3.flash_attn_with_kvcache(q, k, v, **paged, **packed, **named))

    module.flash_attn_with_kvcache, module.flash_attn_varlen_func = flash_attn_with_kvcache, flash_attn_varlen_func
    sys.modules["flash_attn"] = module


def _output(returned: Any) -> Tensor:
    """The output alone: early versions also return the logarithms of the softmax sums."""
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return output


def _without_scaling(qwen3: Any) -> None:
    """Make `get_rope` ignore rope_scaling: earlier versions of nano-vllm expect None for plain rotary embeddings, but
    transformers 5 gives a dictionary. nano-vllm then uses Qwen3's base frequency by default. Later ones read the
    dictionary themselves, and their `get_rope` has no such parameter."""
    get_rope = qwen3.get_rope
    if "rope_scaling" not in inspect.signature(get_rope).parameters:
        return
    qwen3.get_rope = lambda *args, **named: get_rope(*args, **(named | {"rope_scaling": None}))


def write_checkpoint(directory: Path, config: DecoderConfig, weights: RandomWeights, dtype: torch.dtype) -> None:
    """Write a Qwen3 checkpoint with a tokenizer of one word: the decoded text is not used."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in make_state_dict(config, weights, dtype).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    end = "<|endoftext|>"
    document = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_context_tokens,
        "rope_theta": rope_theta(config),
        "attention_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": 0,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {end: 0}, "unk_token": end},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "unk_token": end}
    for name, content in (("config", document), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
