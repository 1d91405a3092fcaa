"""Tiny configs of every supported architecture. `tests/checkpoints.py` writes their checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.7 * i for i in range(8)],
}
_INTERLEAVED_MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA_HEADS = {"head_dim": 32, "tie_word_embeddings": True}
_HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_HYBRID_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 112,
}
_GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100_000.0},
    },
}


_GEMMA3N = {
    "head_dim": 32,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 200,
    "laurel_rank": 24,
    "altup_num_inputs": 3,
    "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.0, 0.8, 0.0],
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Preset:
    """A transformers model class, and the settings of its tiny config that differ from COMMON."""

    model: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    text_config: str | None = None
    """The config class of the text model, if the model also reads images."""
    text_model: str | None = None
    """The text model's class, if the whole needs packages that tests do not have: then the checkpoint has it alone."""


COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

PRESETS: dict[str, Preset] = {
    "llama2": Preset("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 4}),
    "llama3": Preset("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "eos_token_id": [2, 3]}),
    "llama-bias": Preset("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Preset("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": Preset("MistralForCausalLM", "MistralConfig", {"sliding_window": 16}),
    "mistral-full": Preset("MistralForCausalLM", "MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": Preset("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen2-window": Preset(
        "Qwen2ForCausalLM", "Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    ),
    "qwen3": Preset("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-moe": Preset(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe": Preset(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 112,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 16,
        },
    ),
    "mixtral": Preset("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4, "sliding_window": 16}),
    "gpt-oss": Preset(
        "GptOssForCausalLM",
        "GptOssConfig",
        # A limit so low that it changes most gates of a random model.
        {
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "swiglu_limit": 0.4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "smollm3": Preset("SmolLM3ForCausalLM", "SmolLM3Config", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3-window": Preset(
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 16},
    ),
    "phi3": Preset("Phi3ForCausalLM", "Phi3Config", {"sliding_window": 16}),
    "phi3-partial": Preset(
        "Phi3ForCausalLM",
        "Phi3Config",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": Preset(
        "Phi3ForCausalLM",
        "Phi3Config",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    ),
    "phi4": Preset(
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0, "partial_rotary_factor": 0.75},
            "hidden_size": 128,
        },
    ),
    "ministral": Preset(
        "MinistralForCausalLM",
        "MinistralConfig",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "ministral3": Preset(
        "Ministral3ForCausalLM",
        "Ministral3Config",
        {
            "head_dim": 32,
            # With a beta and a period at which short prompts change their queries.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "gemma": Preset("GemmaForCausalLM", "GemmaConfig", _GEMMA_HEADS),
    "gemma2": Preset(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        # Caps so low that they change the scores and logits of a random model.
        {
            **_GEMMA_HEADS,
            "sliding_window": 16,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Preset(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_GEMMA_HEADS,
            "num_hidden_layers": 7,
            "sliding_window": 16,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3-vision": Preset(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {**_GEMMA_HEADS, "num_hidden_layers": 3, "sliding_window": 16, "layer_types": _ALTERNATING},
        text_config="Gemma3TextConfig",
    ),
    "idefics3": Preset("Idefics3ForConditionalGeneration", "Idefics3Config", text_config="LlamaConfig"),
    "smolvlm": Preset("SmolVLMForConditionalGeneration", "SmolVLMConfig", text_config="LlamaConfig"),
    "internvl": Preset("InternVLForConditionalGeneration", "InternVLConfig", text_config="Qwen2Config"),
    "llava": Preset("LlavaForConditionalGeneration", "LlavaConfig", text_config="LlamaConfig"),
    "llava-onevision": Preset(
        "LlavaOnevisionForConditionalGeneration", "LlavaOnevisionConfig", text_config="Qwen2Config"
    ),
    "mistral3": Preset(
        "Mistral3ForConditionalGeneration", "Mistral3Config", {"sliding_window": None}, text_config="MistralConfig"
    ),
    "qwen2-vl": Preset(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
        text_config="Qwen2VLTextConfig",
    ),
    "qwen2.5-vl": Preset(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": True,
        },
        text_config="Qwen2_5_VLTextConfig",
    ),
    "qwen3-vl": Preset(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {"head_dim": 32, "rope_parameters": _INTERLEAVED_MROPE},
        text_config="Qwen3VLTextConfig",
    ),
    "qwen3-vl-moe": Preset(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        {
            "head_dim": 32,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
            "rope_parameters": _INTERLEAVED_MROPE,
        },
        text_config="Qwen3VLMoeTextConfig",
    ),
    "qwen3.5": Preset("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _HYBRID),
    "qwen3.5-vision": Preset(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        # The last layer has a delta rule.
        {**_HYBRID, "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
        text_config="Qwen3_5TextConfig",
    ),
    "qwen3-next": Preset(
        "Qwen3NextForCausalLM", "Qwen3NextConfig", {**_HYBRID, **_HYBRID_EXPERTS, "mlp_only_layers": [1]}
    ),
    "qwen3.5-moe-vision": Preset(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        {**_HYBRID, **_HYBRID_EXPERTS},
        text_config="Qwen3_5MoeTextConfig",
    ),
    "qwen3.5-moe": Preset("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**_HYBRID, **_HYBRID_EXPERTS}),
    "gemma3n": Preset("Gemma3nForCausalLM", "Gemma3nTextConfig", _GEMMA3N),
    "gemma3n-vision": Preset(
        "Gemma3nForConditionalGeneration", "Gemma3nConfig", _GEMMA3N, "Gemma3nTextConfig", "Gemma3nForCausalLM"
    ),
    "gemma4-e": Preset(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 256,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4-vision": Preset(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        {**_GEMMA4, "hidden_size_per_layer_input": 0},
        text_config="Gemma4TextConfig",
    ),
    "gemma4": Preset(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
    "gemma4-moe": Preset(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "olmo2": Preset("Olmo2ForCausalLM", "Olmo2Config"),
    "olmo3": Preset("Olmo3ForCausalLM", "Olmo3Config", {"num_hidden_layers": 4, "sliding_window": 16}),
    "granite": Preset(
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
            "attention_bias": True,
        },
    ),
    "glm": Preset("GlmForCausalLM", "GlmConfig", {"head_dim": 32}),
    "glm4": Preset("Glm4ForCausalLM", "Glm4Config", {"head_dim": 32}),
    "cohere": Preset("CohereForCausalLM", "CohereConfig", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "cohere-qk-norm": Preset("CohereForCausalLM", "CohereConfig", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": Preset(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {"num_hidden_layers": 4, "sliding_window": 16, "tie_word_embeddings": True},
    ),
    "starcoder2": Preset(
        "Starcoder2ForCausalLM", "Starcoder2Config", {"sliding_window": 16, "tie_word_embeddings": True}
    ),
}

EXPERT_PRESETS = (
    *("qwen3-moe", "qwen2-moe", "mixtral", "gpt-oss", "qwen3-vl-moe"),
    *("qwen3-next", "qwen3.5-moe", "qwen3.5-moe-vision"),
)
FUSED_EXPERT_PRESETS = ("gpt-oss", "qwen3-vl-moe", "qwen3.5-moe-vision")

VISION = {
    "deepstack_visual_indexes": [0],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
