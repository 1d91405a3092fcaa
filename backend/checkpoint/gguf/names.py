"""Translates names of tensors in GGUF files to those in Hugging Face checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.config.tensors import MTP_LAYER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backend.checkpoint.config.architectures.encoder_names import EncoderNames
    from penstock.backend.checkpoint.config.decoder_config import TensorNames

_MAX_EXPERTS = 4096
_OTHER_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
}
"""Names within a layer of tensors that are no weight or bias of a module."""
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.((?:nextn\.)?\w+(?:\.(?:weight|bias|scale))?)", re.ASCII)
_OF_MTP = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
"""Modules of a head, whose layer is the last."""
_KINDS = ("weight", "bias")


def layer_number(name: str) -> int | None:
    """The number of the layer that a tensor of a GGUF file belongs to, if it belongs to one."""
    match = _LAYER.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class GgufNames:
    """Translates the names of one architecture's tensors, each without .weight or .bias."""

    outside: Mapping[str, str]
    layer: str
    """Beginning of the names of a layer's tensors in Hugging Face checkpoints, with {} for its number."""
    modules: Mapping[str, str | None]
    """Names within a layer. One with {} stands for a tensor of each expert."""
    mtp_layer: int | None = None
    """The number of the layer of `DecoderConfig.has_mtp`."""

    @classmethod
    def of_decoder(cls, names: TensorNames, mtp_layer: int | None = None) -> GgufNames:
        """names are the architecture's names in Hugging Face checkpoints."""
        qkv = ("attn_q", "attn_k", "attn_v") if len(names.qkv) > 1 else ("attn_qkv",)
        gate_up = ("ffn_gate", "ffn_up") if len(names.gate_up) > 1 else ("ffn_up",)
        delta_in = ("attn_qkv", "attn_gate") if len(names.delta_in) > 1 else ("ssm_in",)
        delta_gates = ("ssm_beta", "ssm_alpha") if len(names.delta_gates) > 1 else ("ssm_ba",)
        expert_gate_up = ("ffn_gate_exps", "ffn_up_exps") if len(names.expert_gate_up) > 1 else ("ffn_gate_up_exps",)
        gate, up = names.expert_gate_up[0], names.expert_gate_up[-1]
        modules = {
            **dict(zip(delta_in, names.delta_in, strict=True)),
            **dict(zip(delta_gates, names.delta_gates, strict=True)),
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
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
            **{own: f"{names.expert}.{name}" for own, name in zip(expert_gate_up, names.expert_gate_up, strict=True)},
            "ffn_down_exps": f"{names.expert}.{names.expert_down}",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_correct_coef": "altup.correction_coefs",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
            "ffn_gate_inp_shexp": names.shared_gate,
            "ffn_gate_shexp": f"{names.shared_expert}.{gate}",
            "ffn_up_shexp": f"{names.shared_expert}.{up}",
            "ffn_down_shexp": f"{names.shared_expert}.{names.expert_down}",
        }
        outside = {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
            "cls.output": "score",
        }
        return cls(outside, "model.layers.{}.", modules, mtp_layer)

    @classmethod
    def of_encoder(cls, names: EncoderNames, heads: Mapping[str, str]) -> GgufNames:
        """heads: the modules of a classifier, by their names in GGUF files."""
        qkv = ("attn_q", "attn_k", "attn_v") if len(names.qkv) > 1 else ("attn_qkv",)
        mlp_in = ("ffn_gate", "ffn_up") if len(names.mlp_in) > 1 else ("ffn_up",)
        modules = {
            **dict(zip(qkv, names.qkv, strict=True)),
            "attn_output": names.output,
            "attn_output_norm": names.attention_norm,
            **dict(zip(mlp_in, names.mlp_in, strict=True)),
            "ffn_down": names.mlp_out,
            "layer_output_norm": names.mlp_norm,
        }
        outside = {
            "token_embd": names.words,
            "position_embd": names.positions,
            "token_types": names.token_types,
            "token_embd_norm": names.embedding_norm,
        }
        return cls({**outside, **heads}, names.layer, modules)

    def hf_names(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """The names in a checkpoint: one, or one for each expert if the tensor has all experts. So with other matrices.

        Empty for a tensor that no model of the architecture has.
        """
        stem, _, kind = name.rpartition(".")
        if kind in _KINDS and stem in self.outside:
            return [f"{module}.{kind}" for module in _of_each(self.outside[stem], shape)]
        match = _LAYER.fullmatch(name)
        if match is None:
            return []
        layer, stem = self.layer.format(match[1]), match[2].removesuffix(f".{kind}")
        if int(match[1]) == self.mtp_layer:
            layer = MTP_LAYER
            if stem in _OF_MTP:
                return [f"{_OF_MTP[stem]}.{kind}"]
        if match[2] in _OTHER_NAMES:
            return [layer + _OTHER_NAMES[match[2]]]
        module = self.modules.get(stem)
        if module is None:
            return []
        return [f"{layer}{own}.{kind}" for own in _of_each(module, shape)]


def _of_each(module: str, shape: tuple[int, ...]) -> list[str]:
    if "{}" not in module:
        return [module]
    return [module.format(i) for i in range(shape[0])] if shape[0] <= _MAX_EXPERTS else []
