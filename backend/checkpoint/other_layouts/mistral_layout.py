"""Mistral's own layout: params.json and consolidated.safetensors, with names and an order of rows of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from penstock.backend.checkpoint.files.json_file import read_json_object, shorten
from penstock.backend.errors import StartupError

PARAMS_FILE = "params.json"
CONSOLIDATED_FILE = "consolidated.safetensors"
EMBEDDING_NAME = "tok_embeddings.weight"

_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "sliding_window": "sliding_window",
}
_UNUSED = ("model_type", "dtype", "multimodal", "vision_encoder", "causal")
"""Keys that do not change how text is computed."""
_MAX_CONTEXT_TOKENS = 128_000
"""Default if the file names no limit, as in vLLM; mistral-inference has none."""

_NAMES = {
    EMBEDDING_NAME: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "pre_mm_projector_norm.weight": "multi_modal_projector.norm.weight",
}
_PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER_TENSOR = re.compile(r"layers\.(\d+)\.(.+)\.weight")


def write_config(params_file: Path, config_file: Path) -> None:
    """Raises StartupError for a parameter that no key of config.json stands for, OSError."""
    # Null, false and empty values have no effect.
    params = {
        key: value
        for key, value in read_json_object(params_file).items()
        if value or (value == 0 and value is not False)
    }
    if other := sorted(params.keys() - _KEYS.keys() - set(_UNUSED)):
        name = other[0]
        raise StartupError(
            f"{params_file}: {name} is {shorten(params[name])}, which is not served from this layout; use a copy of "
            "the model in Hugging Face's layout, with a config.json"
        )
    config = {_KEYS[name]: value for name, value in params.items() if name in _KEYS}
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu"}
    config |= {"bos_token_id": 1, "eos_token_id": 2}  # of all of Mistral's tokenizers
    config.setdefault("max_position_embeddings", _MAX_CONTEXT_TOKENS)
    config.setdefault("sliding_window", None)  # an absent one would be that of Mistral 7B v0.1
    config["rope_interleave"] = True  # the rows of q and k that rotate together are neighbours
    config_file.write_text(json.dumps(config, indent=1))


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; the name itself of those that only images need."""
    if (match := _LAYER_TENSOR.fullmatch(name)) is not None and match[2] in _PARTS:
        return f"model.layers.{match[1]}.{_PARTS[match[2]]}.weight"
    return _NAMES.get(name, name)
