"""Tiny random checkpoints of families that only the forward pass transformers serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}

_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": (
        "Afmoe",
        _GQA
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
        | {"sliding_window": 16, "global_attn_every_n_layers": 2},
    ),
    "arcee": ("Arcee", _GQA),
    "bamba": ("Bamba", {"num_key_value_heads": 2, "attn_layer_indices": [1]} | _MAMBA),
    "deepseek-v3": (
        "DeepseekV3",
        _LATENT
        | {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "exaone4": ("Exaone4", _GQA | {"sliding_window": 16, "sliding_window_pattern": 3}),
    "gemma4": (
        "Gemma4",
        _GQA
        | {"global_head_dim": 32, "sliding_window": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 512, "layer_types": ["sliding_attention", "full_attention"]}
        | {"num_hidden_layers": 2},
    ),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-oss": (
        "GptOss",
        _GQA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "rope_parameters": None},
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {"num_key_value_heads": 2, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 96}
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | _MAMBA,
    ),
    "mixtral": ("Mixtral", _GQA | {"num_local_experts": 4, "sliding_window": 16}),
    "nemotron": ("Nemotron", _GQA),
    "olmo-hybrid": ("OlmoHybrid", _LINEAR | {"num_key_value_heads": 4}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "qwen2-moe": ("Qwen2Moe", {"num_key_value_heads": 2, "shared_expert_intermediate_size": 32} | _MOE),
    "qwen3-moe": ("Qwen3Moe", _GQA | _MOE),
    "qwen3.5": ("Qwen3_5", _GQA | _LINEAR),
    "qwen3-next": ("Qwen3Next", _GQA | _MOE | _LINEAR | {"shared_expert_intermediate_size": 32}),
    "seed-oss": ("SeedOss", _GQA),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}, "does not let its attention be replaced"),
    "mamba": ("Mamba", {"num_hidden_layers": 2}, "keeps a state and no KV cache"),
}


def make_family(name: str, out: Path) -> Path:
    """Write a checkpoint with every parameter random."""
    kind, settings = (FAMILIES.get(name) or REFUSED[name])[:2]
    config_class = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    config = config_class(**(_COMMON | {k: v for k, v in settings.items() if v is not None}))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in parameter_name else 0.15 * noise)
    model.save_pretrained(out)
    return out
