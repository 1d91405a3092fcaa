"""Encoders in GGUF files, and the pooling of models that return vectors."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.gguf.config import EMBEDDING, dtype_of
from penstock.backend.checkpoint.json_file import shorten
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backend.checkpoint.gguf.config import Metadata
    from penstock.backend.checkpoint.gguf.header import GgufTensor

_POOLING_MODES = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
"""Values of pooling_type → sentence-transformers' names."""
_TYPES = "token_types.weight"
_WHOLE = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    _TYPES: "embeddings.token_type_embeddings.weight",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)", re.ASCII)
_BOTH = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class EncoderArchitecture:
    """A value of general.architecture."""

    name: str
    """In config.json."""
    layer: str
    """Beginning of the names of a layer's tensors in Hugging Face checkpoints."""
    embedding_norm: str
    norms: Mapping[str, str]
    """Name in GGUF files → name in Hugging Face checkpoints, as in linears."""
    linears: Mapping[str, str]
    is_biased: bool
    """The linears have biases."""
    has_positions: bool
    settings: Mapping[str, Any]
    """Keys of config.json that the metadata lack."""

    def hf_names(self, name: str, shape: tuple[int, ...]) -> list[str]:  # noqa: ARG002 - as `GgufNames.hf_names`
        """The name in a checkpoint; empty for a tensor that no model of the architecture has."""
        if name in _WHOLE and (self.has_positions or name != "position_embd.weight"):
            return [_WHOLE[name]]
        stem, _, kind = name.rpartition(".")
        if stem == "token_embd_norm" and kind in _BOTH:
            return [f"{self.embedding_norm}.{kind}"]
        match = _LAYER.fullmatch(name)
        if match is None:
            return []
        module = self.norms.get(match[2]) or (
            self.linears.get(match[2]) if self.is_biased or kind == "weight" else None
        )
        return [] if module is None else [f"{self.layer.format(match[1])}{module}.{kind}"]


ENCODERS = {
    "bert": EncoderArchitecture(
        "BertModel",
        "encoder.layer.{}.",
        "embeddings.LayerNorm",
        {"attn_output_norm": "attention.output.LayerNorm", "layer_output_norm": "output.LayerNorm"},
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
        },
        is_biased=True,
        has_positions=True,
        settings={"hidden_act": "gelu"},
    ),
    "nomic-bert": EncoderArchitecture(
        "NomicBertModel",
        "encoder.layers.{}.",
        "emb_ln",
        {"attn_output_norm": "norm1", "layer_output_norm": "norm2"},
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
        },
        is_biased=False,
        has_positions=False,
        settings={"hidden_act": "silu"},
    ),
}


def encoder_named(config: Mapping[str, Any]) -> EncoderArchitecture | None:
    """The encoder of a config.json that `make_encoder_config` made; None for a decoder's."""
    names = config.get("architectures")
    return next((encoder for encoder in ENCODERS.values() if [encoder.name] == names), None)


def make_encoder_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """config.json without quantization_config. Raises StartupError naming the key or tensor."""
    encoder = ENCODERS[metadata.architecture]
    layers = metadata.required("block_count")
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if not encoder.hf_names(name, tensor.shape) or (match is not None and int(match[1]) >= layers):
            raise StartupError(f"tensor {shorten(name)} has no place in a {encoder.name} of these metadata")
    return {
        **encoder.settings,
        "architectures": [encoder.name],
        "vocab_size": tensors[EMBEDDING].shape[0],
        "hidden_size": metadata.required("embedding_length"),
        "intermediate_size": metadata.required("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": metadata.required("attention.head_count"),
        "max_position_embeddings": metadata.required("context_length"),
        "layer_norm_eps": metadata.own("attention.layer_norm_epsilon", float),
        "type_vocab_size": tensors[_TYPES].shape[0] if _TYPES in tensors else 0,
        **({} if encoder.has_positions else {"rope_theta": metadata.own("rope.freq_base", float)}),
        "dtype": dtype_of(tensors[EMBEDDING]),
    }


def pooling_files(metadata: Metadata) -> dict[str, str]:
    """The files of sentence-transformers' modules, for a model that returns vectors; empty for one that generates.

    Vectors are normalised, as in llama.cpp. An encoder that names no pooling has that of checkpoints without modules.
    """
    kind = metadata.own("pooling_type", int)
    if not kind:
        return {}
    if kind not in _POOLING_MODES:
        raise StartupError(f"{metadata.prefix}pooling_type is {kind}; supported are 1 (mean), 2 (first) and 3 (last)")
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in modules.items()]
    return {
        "modules.json": json.dumps(listed),
        "1_Pooling/config.json": json.dumps({f"pooling_mode_{_POOLING_MODES[kind]}": True}),
    }
