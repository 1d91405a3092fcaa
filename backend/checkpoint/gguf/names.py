"""Translates names of tensors in GGUF files to those in Hugging Face checkpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backend.checkpoint.decoder_config import TensorNames

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_SINKS = "attn_sinks"
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)", re.ASCII)
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)


class GgufNames:
    """Translates the names of one architecture's tensors."""

    def __init__(self, names: TensorNames) -> None:
        """names are the architecture's names in Hugging Face checkpoints."""
        qkv = ("attn_q", "attn_k", "attn_v") if len(names.qkv) > 1 else ("attn_qkv",)
        gate_up = ("ffn_gate", "ffn_up") if len(names.gate_up) > 1 else ("ffn_up",)
        gate, up = names.expert_gate_up
        modules: dict[str, str | None] = {
            "attn_norm": names.attention_norm,
            # gpt-oss has no norm of attention's output, and its norm before the MLP this name.
            "post_attention_norm": names.attention_output_norm or names.mlp_norm,
            "ffn_norm": names.mlp_norm,
            "post_ffw_norm": names.mlp_output_norm,
            "attn_output": "self_attn.o_proj",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            **dict(zip(qkv, names.qkv, strict=True)),
            **dict(zip(gate_up, names.gate_up, strict=True)),
            "ffn_down": names.down,
            "ffn_gate_inp": names.router,
            "ffn_gate_exps": f"{names.expert}.{gate}",
            "ffn_up_exps": f"{names.expert}.{up}",
            "ffn_down_exps": f"{names.expert}.{names.expert_down}",
            "ffn_gate_inp_shexp": names.shared_gate,
            "ffn_gate_shexp": f"{names.shared_expert}.{gate}",
            "ffn_up_shexp": f"{names.shared_expert}.{up}",
            "ffn_down_shexp": f"{names.shared_expert}.{names.expert_down}",
        }
        self._modules = {name: module for name, module in modules.items() if module is not None}

    def hf_names(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """The names in a checkpoint: one, or one for each expert if the tensor has all experts.

        Empty for a tensor that no model of the architecture has.
        """
        outside = _OUTSIDE.fullmatch(name)
        if outside is not None:
            return [f"{_WHOLE[outside[1]]}.{outside[2]}"] if outside[1] in _WHOLE else []
        match = _LAYER.fullmatch(name)
        if match is not None and match.group(2, 3) == (_SINKS, "weight"):
            return [f"model.layers.{match[1]}.self_attn.sinks"]
        module = None if match is None else self._modules.get(match[2])
        if match is None or module is None:
            return []
        experts = range(shape[0]) if "{}" in module else range(1)
        return [f"model.layers.{match[1]}.{module.format(i)}.{match[3]}" for i in experts]
