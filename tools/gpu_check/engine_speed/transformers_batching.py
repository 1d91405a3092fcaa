"""Measures the decode rate of transformers' continuous batching beside ours, on the same weights in one run."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import inspect
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
from penstock.backend.passes.decoder.cuda.workspace_plan import StepSizes
from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.devices.models import RandomWeights
from penstock.tools.gpu_check.devices.steps import Steps
from penstock.tools.gpu_check.engine_speed.end_to_end import time_decode
from penstock.tools.gpu_check.model_configs import LLAMA_8B, rope_theta

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.reporting.results import Results

_PAGE_TOKENS = 32
_PEER_PAGE_TOKENS = 256
MARGIN_S = 3.0
"""Seconds kept to report a peer that takes too long."""
KINDS = {"sdpa": "sdpa", "fa3": "flash_attention_3"}
"""Finding's name → transformers' name of the attention."""


@dataclass(frozen=True)
class TransformersSizes:
    config: DecoderConfig = LLAMA_8B
    dtype: torch.dtype = torch.bfloat16
    rows: int = 64
    prompt_tokens: int = 1024
    new_tokens: int = 32
    batch_tokens: int = 8192
    """Tokens of a peer's step: transformers' own choice when it also chooses the number of blocks."""
    kinds: tuple[str, ...] = tuple(KINDS)


def run(results: Results) -> None:
    measure(results, open_device_context(), TransformersSizes())
    if threading.active_count() > 1:
        # Exit at once: the thread of a peer that timed out would keep the process alive.
        os._exit(0)


def measure(results: Results, context: DeviceContext, sizes: TransformersSizes) -> None:
    results.sizes("peers", f"{sizes.rows} rows of {sizes.prompt_tokens} tokens, {sizes.new_tokens} more, {sizes.dtype}")
    weights = RandomWeights(sizes.config, sizes.dtype, context.torch_device)
    ours = [0.0]
    if not results.attempt("peers.ours", partial(_measure_ours, results, context, weights, sizes, ours)):
        return
    # Free our pass's graphs: tensors that all graphs of a process share would stay in inference mode, and transformers
    # captures its graphs outside of it (torch issue 166792).
    gc.collect()
    context.memory.reset_peak()
    try:
        transformers = importlib.import_module("transformers")
        model = make_model(transformers, sizes.config, weights, sizes.dtype, context.torch_device)
    except Exception as error:  # noqa: BLE001 - a peer's error is recorded, not ours to raise
        results.skipped("peers.transformers", first_line(error))
        return
    results.fact("peers.transformers.version", str(transformers.__version__))
    for kind in sizes.kinds:
        name = f"peers.transformers_{kind}_ratio"
        if results.remaining_s <= 0:
            results.skipped(name, "no time was left")
            continue
        try:
            rate = run_with_timeout(
                results.remaining_s - MARGIN_S,
                partial(measure_transformers, transformers, model, sizes, KINDS[kind]),
            )
        except Exception as error:  # noqa: BLE001
            results.skipped(name, first_line(error))
            continue
        results.fact(f"peers.transformers_{kind}", rate, "tok/s", f"{sizes.rows} rows of {sizes.prompt_tokens} tokens")
        if ours[0]:  # else an earlier run measured ours
            results.fact(name, ours[0] / rate, "x")


def _measure_ours(
    results: Results, context: DeviceContext, weights: RandomWeights, sizes: TransformersSizes, rate: list[float]
) -> None:
    pages = -(-(sizes.prompt_tokens + 64) // _PAGE_TOKENS)
    steps = StepSizes(sizes.rows, max(sizes.rows, 256), pages * _PAGE_TOKENS, choices=context.choices)
    forward_pass = CudaDecoderPass(sizes.config, weights, context.device, sizes.dtype, steps)
    forward_pass.create_cache(sizes.rows * pages, _PAGE_TOKENS, "bf16")
    rows = Steps(sizes.rows, pages)
    rows.context_lens[:] = sizes.prompt_tokens
    step_s, _ = time_decode(forward_pass, rows, sizes.new_tokens)
    forward_pass.close()
    rate[0] = sizes.rows / step_s
    results.fact("peers.ours", rate[0], "tok/s")


def make_model(
    transformers: Any, config: DecoderConfig, weights: RandomWeights, dtype: torch.dtype, device: torch.device
) -> Any:
    """Make a LlamaForCausalLM that shares our weights."""
    if config.tie_embeddings or config.qk_norm:
        raise ValueError("the model has tied embeddings or norms its heads; only Llama is supported here")
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta(config)},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        dtype=dtype,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    model.load_state_dict(make_state_dict(config, weights, dtype), assign=True)
    # Rotary frequencies are not parameters, so they are still on the meta device.
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    model.requires_grad_(False)
    return model.eval()


def make_state_dict(config: DecoderConfig, weights: RandomWeights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Our weights by the names in Llama and Qwen3 checkpoints. lm_head is absent if the embedding is tied."""
    state = {"model.embed_tokens.weight": weights.embedding(dtype), "model.norm.weight": weights.final_norm(dtype)}
    if (lm_head := weights.lm_head(dtype)) is not None:
        state["lm_head.weight"] = lm_head
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index in range(config.num_layers):
        layer = weights.layer(index, dtype)
        q, k, v = torch.split(layer.qkv, [q_rows, kv_rows, kv_rows])
        if layer.gate_up is None:
            raise ValueError(f"layer {index} has no dense MLP")
        gate, up = layer.gate_up.chunk(2)
        tensors = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.mlp_norm,
        }
        state |= {f"model.layers.{index}.{name}.weight": x for name, x in tensors.items() if x is not None}
    return state


def measure_transformers(transformers: Any, model: Any, sizes: TransformersSizes, attention: str) -> float:
    """Tokens per second while all rows decode, from the timestamps that transformers records."""
    known = known_options()
    # 5.17 replaces sdpa with an installed FlashAttention unless given paged|sdpa; later versions have an option.
    model.set_attn_implementation(attention if "auto_switch_to_flash" in known else f"paged|{attention}")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, sizes.config.vocab_size, sizes.prompt_tokens).tolist() for _ in range(sizes.rows)]
    generation = transformers.GenerationConfig(
        max_new_tokens=sizes.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    blocks_per_row = -(-(sizes.prompt_tokens + sizes.new_tokens) // _PEER_PAGE_TOKENS) + 1
    requested: dict[str, Any] = {
        "auto_switch_to_flash": False,
        "allow_block_sharing": False,
        "safety_margin": 0.0,  # all rows fit, so none should wait
        "max_batch_tokens": sizes.batch_tokens,
        "num_blocks": sizes.rows * blocks_per_row,
        "page_size": _PEER_PAGE_TOKENS,
    }
    options = {
        "continuous_batching_config": batching_options(requested, known),
        "record_timestamps": True,
        "progress_bar": False,
    }
    taken = inspect.signature(model.generate_batch).parameters
    options = {name: value for name, value in options.items() if name in taken}
    outputs = model.generate_batch(inputs=prompts, generation_config=generation, **options)
    times = [output.timestamps for output in outputs.values() if output.timestamps and not output.error]
    if len(times) < sizes.rows:
        raise RuntimeError(f"only {len(times)} of {sizes.rows} requests ended")
    all_decode_s, first_ends_s = max(row[0] for row in times), min(row[-1] for row in times)
    counted = sum(all_decode_s < at_s <= first_ends_s for row in times for at_s in row)
    if first_ends_s <= all_decode_s or not counted:
        raise RuntimeError("the rows never decoded all at once")
    return float(counted / (first_ends_s - all_decode_s))


def run_with_timeout(seconds: float, work: Callable[[], float]) -> float:
    """Return or raise what work does. Raises TimeoutError after `seconds`, and leaves work's thread running."""
    done: Future[float] = Future()

    def run_it() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            done.set_exception(error)

    threading.Thread(target=run_it, daemon=True).start()
    try:
        return done.result(max(seconds, 0.0))
    except TimeoutError as error:
        raise TimeoutError(f"did not end within {seconds:.0f} s") from error


def known_options() -> frozenset[str]:
    """Options of continuous batching in the installed version."""
    return frozenset(field.name for field in dataclasses.fields(_options_class()))


def batching_options(requested: dict[str, Any], known: frozenset[str]) -> Any:
    """Make the options object from the requested options that are known. Up to 5.17 a page is called a block."""
    if "page_size" not in known:
        requested = requested | {"block_size": requested["page_size"]}
    return _options_class()(**{name: value for name, value in requested.items() if name in known})


def _options_class() -> Any:
    return importlib.import_module("transformers.generation.configuration_utils").ContinuousBatchingConfig


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:250]}"
