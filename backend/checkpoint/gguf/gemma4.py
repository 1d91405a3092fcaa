"""Keys of config.json of Gemma 3n and 4, whose layers differ, from a GGUF file's metadata."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.backend.checkpoint.gguf.header import GgufTensor
    from penstock.backend.checkpoint.gguf.metadata import Metadata

_NEVER = 1e29
"""Dimensions with at least this factor of their wavelength do not turn; files have 1e30."""


def gemma4_settings(
    metadata: Metadata, tensors: Collection[str], vocab_size: int, layers: int, head_dim: int | None
) -> dict[str, Any]:
    """head_dim: of layers without a window. Raises StartupError naming the key."""
    flags = metadata.integers("attention.sliding_window_pattern", layers)
    own_dim = metadata.required("attention.key_length_swa")
    shared = metadata.own("attention.shared_kv_layers", int) or 0
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        metadata.check_equal(key, own_dim, "attention.key_length_swa")
    metadata.check_equal("rope.dimension_count", head_dim, "attention.key_length")
    widths, kv_heads = (metadata.integers(key, layers) for key in ("feed_forward_length", "attention.head_count_kv"))
    doubled = [widths[0]] * (layers - shared) + [2 * widths[0]] * shared
    if widths not in (doubled, [widths[0]] * layers):
        raise StartupError(f"{metadata.prefix}feed_forward_length is {shorten(widths)}; unknown sizes of layers")
    of_kind = {flag: {heads for heads, own in zip(kv_heads, flags, strict=True) if own == flag} for flag in flags}
    if any(len(heads) > 1 for heads in of_kind.values()):
        raise StartupError(
            f"{metadata.prefix}attention.head_count_kv is {shorten(kv_heads)}; expected one number for layers with a "
            "window and one for the others"
        )
    full = [index for index in range(layers - shared) if not flags[index]]
    experts = metadata.own("expert_count", int) or 0
    own = {"num_experts": experts, "top_k_experts": metadata.own("expert_used_count", int)} if experts else {}
    return own | {
        "enable_moe_block": experts > 0,
        "separate_experts": experts > 0,
        "moe_intermediate_size": metadata.same_in_all_layers("expert_feed_forward_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": shared > 0 and widths == doubled,
        "num_kv_shared_layers": shared,
        "num_key_value_heads": min(of_kind.get(1, {kv_heads[0]})),
        "head_dim": own_dim,
        "global_head_dim": head_dim,
        "num_global_key_value_heads": min(of_kind.get(0, {kv_heads[0]})),
        "has_layer_config": True,
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in tensors for index in full),
        "vocab_size_per_layer_input": vocab_size,
        "hidden_size_per_layer_input": (inputs := metadata.own("embedding_length_per_layer_input", int) or 0),
        # Files do not say it; pictures of models whose layers have inputs of their own, E2B and E4B, are causal.
        "use_bidirectional_attention": None if inputs else "vision",
    }


def gemma3n_settings(metadata: Metadata, tensors: Mapping[str, GgufTensor], layers: int) -> dict[str, Any]:
    """Raises StartupError naming the key or the tensor."""
    table, left = (tensors.get(name) for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight"))
    if table is None or left is None:
        raise StartupError("tensor per_layer_token_embd.weight or blk.0.laurel_l.weight is missing")
    cutoffs = metadata.numbers("activation_sparsity_scale", layers)
    return {
        "altup_num_inputs": metadata.required("altup.num_inputs"),
        "altup_active_idx": metadata.own("altup.active_idx", int) or 0,
        "laurel_rank": left.shape[0],
        "activation_sparsity_pattern": [NormalDist().cdf(cutoff) for cutoff in cutoffs],
        "num_kv_shared_layers": metadata.own("attention.shared_kv_layers", int) or 0,
        "hidden_size_per_layer_input": metadata.required("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table.shape[0],
    }


def proportional_rope(factors: tuple[float, ...]) -> dict[str, Any]:
    """Settings of the rotary embedding in which the first dimensions alone turn. Raises StartupError."""
    turned = factors.count(1.0)
    if not factors or factors[:turned] != (1.0,) * turned or min(factors[turned:], default=_NEVER) < _NEVER:
        raise StartupError(f"tensor rope_freqs.weight is {shorten(list(factors))}; expected ones, then {_NEVER:g}")
    return {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}}
