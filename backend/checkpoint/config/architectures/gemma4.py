"""Reads the settings of config.json that only Gemma 3n and Gemma 4 have."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.architectures.expert_layers import ExpertLayers, checked
from penstock.backend.checkpoint.config.decoder_config import Experts, Streams, TensorNames
from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.architectures.hf_config import HfConfig

GEMMA4_NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
    router="router.proj",
    expert="experts.{}",
    expert_gate_up=("gate_up_proj",),
    fused_experts="experts",
    fused_takes_turns=False,
)
_HEAD_KEYS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def merge_layer_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Move per_layer_config, in which transformers writes the heads of full attention, to keys for all such layers, and
    take one intermediate_size from a list of equal ones.

    Raises StartupError if they say anything else.
    """
    own = {key: value for key, value in values.items() if key != "per_layer_config"}
    if isinstance(widths := own.get("intermediate_size"), list):
        if widths[1:] != widths[:-1] or not widths:
            raise StartupError(f"intermediate_size is {shorten(widths)}; the same in all layers is supported")
        own["intermediate_size"] = widths[0]
    layers, types = values.get("per_layer_config"), values.get("layer_types")
    if not layers:
        return own
    if not isinstance(layers, dict) or not isinstance(types, list):
        raise StartupError(f"per_layer_config is {shorten(layers)}; it must be an object, and layer_types a list")
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    numbers = [int(key) for key in layers if key.isdecimal()]  # with leading zeros from ten layers on
    heads = next(iter(layers.values()))
    if (
        numbers != full
        or len(layers) > len(full)
        or any(other != heads for other in layers.values())
        or not isinstance(heads, dict)
    ):
        raise StartupError(
            f"per_layer_config is {shorten(layers)}; the same for all layers of full_attention is supported"
        )
    for key in heads.keys() - _HEAD_KEYS.keys():
        raise StartupError(f"per_layer_config has {shorten(key)}; {' and '.join(_HEAD_KEYS)} are supported")
    return own | {_HEAD_KEYS[key]: value for key, value in heads.items()} | {"has_layer_config": True}


def gemma4_experts(config: HfConfig) -> ExpertLayers | None:
    if not config.enable_moe_block:
        return None
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if getattr(config, name) is None:
            raise StartupError(f"enable_moe_block is true and {name} is missing")
    experts = Experts(
        count=config.num_experts or 1,
        per_token=config.top_k_experts or 1,
        width=config.moe_intermediate_size or 1,
        normalises=True,
        beside_mlp=True,
    )
    return checked(experts, (True,) * config.num_hidden_layers)


def gemma4_variations(config: HfConfig, num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Fields of `DecoderConfig`. num_kv_heads and head_dim: of layers with a window."""
    if config.use_bidirectional_attention not in (None, False, "vision"):
        raise StartupError(
            f"use_bidirectional_attention is {shorten(config.use_bidirectional_attention)}; text is causal with null "
            'and "vision" only'
        )
    heads = config.num_global_key_value_heads if config.attention_k_eq_v or config.has_layer_config else None
    full_heads = heads or num_kv_heads, config.global_head_dim or (head_dim if config.has_layer_config else 512)
    if config.num_attention_heads % full_heads[0]:
        raise StartupError(
            f"num_global_key_value_heads is {full_heads[0]}; num_attention_heads, {config.num_attention_heads}, is no "
            "multiple of it"
        )
    size = 256 if config.hidden_size_per_layer_input is None else config.hidden_size_per_layer_input
    rows = config.vocab_size_per_layer_input or 262_144
    if size and rows != config.vocab_size:
        raise StartupError(f"vocab_size_per_layer_input is {rows}; it must be vocab_size, {config.vocab_size}")
    types = config.layer_types or ("sliding_attention",) * (config.num_hidden_layers - 1) + ("full_attention",)
    return {
        "full_heads": None if full_heads == (num_kv_heads, head_dim) else full_heads,
        "full_values_are_keys": bool(config.attention_k_eq_v),
        "norms_values": True,
        "num_shared_layers": _num_shared(config, config.num_kv_shared_layers or 0, types),
        "doubles_shared_mlp": config.use_double_wide_mlp,
        "layer_input_size": size,
        "scales_layers": True,
        "pictures_see_whole": "in windows" if config.use_bidirectional_attention == "vision" else "nowhere",
    }


def _num_shared(config: HfConfig, num_shared: int, types: tuple[str, ...]) -> int:
    first = config.num_hidden_layers - num_shared
    if set(types[first:]) - set(types[: max(first, 0)]):
        raise StartupError(f"num_kv_shared_layers is {num_shared}; no layer before these has keys and values for them")
    return num_shared


def gemma3n_variations(config: HfConfig, num_kv_heads: int, head_dim: int) -> dict[str, Any]:  # noqa: ARG001 - as all
    """Fields of `DecoderConfig`."""
    layers = config.num_hidden_layers
    if config.altup_active_idx or not config.altup_correct_scale:
        raise StartupError(
            f"altup_active_idx is {config.altup_active_idx} and altup_correct_scale {config.altup_correct_scale}; "
            "0 and true are supported"
        )
    shares = config.activation_sparsity_pattern
    if shares is None:
        shares = tuple(0.95 if layers > 10 and index < 10 else 0.0 for index in range(layers))
    if len(shares) != layers:
        raise StartupError(f"activation_sparsity_pattern has {len(shares)} entries for {layers} layers")
    types = config.layer_types or tuple(
        "full_attention" if index % 5 == 4 else "sliding_attention" for index in range(layers)
    )
    return {
        "norms_values": True,
        "num_shared_layers": _num_shared(
            config, 15 if config.num_kv_shared_layers is None else config.num_kv_shared_layers, types
        ),
        "layer_input_size": config.hidden_size_per_layer_input or 256,
        "num_layer_inputs": config.vocab_size_per_layer_input or 262_144,
        "streams": Streams(
            count=config.altup_num_inputs or 4,
            laurel_rank=config.laurel_rank or 64,
            gate_cutoffs=tuple(NormalDist().inv_cdf(share) if share else None for share in shares),
        ),
    }
