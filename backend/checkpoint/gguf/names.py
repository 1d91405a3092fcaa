"""Names of tensors in GGUF files, and the same in Hugging Face checkpoints."""

from __future__ import annotations

import re

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}
"""Phi3: one matrix with the rows of gate, then up."""
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)", re.ASCII)


def hf_name(name: str, *, has_gate: bool) -> str | None:
    """The name in a checkpoint; None for a tensor that the model does not have there. has_gate: not fused with up."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    modules = _MODULES if has_gate else _MODULES | _FUSED_MLP
    module = modules.get(match[2])
    return None if module is None else f"model.layers.{match[1]}.{module}.{match[3]}"
