"""Tiny random checkpoints of every supported encoder, written by transformers, which is also the oracle.

    model = make_encoder("bert", "Model", tmp_path)

Every parameter is random, norms and biases included, so a forgotten one changes the result.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class EncoderPreset:
    """The beginning of the names of transformers' classes, and the settings that differ from COMMON."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)


COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": 3,
}
_DISTIL = {"dim": 64, "hidden_dim": 80, "n_layers": 2, "n_heads": 4}

_DEBERTA = {
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 16,
}

PRESETS: dict[str, EncoderPreset] = {
    "bert": EncoderPreset("Bert"),
    "bert-tanh-gelu": EncoderPreset("Bert", {"hidden_act": "gelu_new"}),
    "bert-heads-of-24": EncoderPreset("Bert", {"hidden_size": 96}),
    "distilbert": EncoderPreset("DistilBert", _DISTIL),
    "roberta": EncoderPreset("Roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": EncoderPreset("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "camembert": EncoderPreset("Camembert", {"pad_token_id": 1, "type_vocab_size": 1}),
    "mpnet": EncoderPreset("MPNet", {"pad_token_id": 1, "relative_attention_num_buckets": 32}),
    "deberta-v2": EncoderPreset("DebertaV2", _DEBERTA),
    "modernbert": EncoderPreset(
        "ModernBert", {"num_hidden_layers": 4, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2}
    ),
    "modernbert-mean": EncoderPreset(
        "ModernBert", {"classifier_pooling": "mean", "classifier_bias": True, "cls_token_id": 1, "sep_token_id": 2}
    ),
    "nomic": EncoderPreset("NomicBert"),
    "gte": EncoderPreset("Gte", {"type_vocab_size": 1}),
}


def encoder_config(preset: EncoderPreset, **settings: Any) -> Any:
    """The tiny transformers config."""
    config_class = getattr(transformers, f"{preset.family}Config")
    values = {**COMMON, **preset.settings, **settings}
    if preset.family == "DistilBert":
        values = {key: value for key, value in values.items() if key not in config_class.attribute_map}
    return config_class(**values)


def make_encoder(preset: str, suffix: str, path: Path, **settings: Any) -> Any:
    """Write a checkpoint of the class that ends with suffix, and return the model, in fp32."""
    chosen = PRESETS[preset]
    torch.manual_seed(7)
    model = getattr(transformers, chosen.family + suffix)(encoder_config(chosen, **settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.lower().endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(path)
    return model


def make_sentence_encoder(preset: str, path: Path, pooling: dict[str, Any], *, dense: int = 0, **settings: Any) -> Any:
    """Like `make_encoder`, in the layout of sentence-transformers. dense: outputs of a Dense behind the pooling."""
    from safetensors.torch import save_file

    model = make_encoder(preset, "Model", path, **settings)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    width = model.config.hidden_size

    def add(folder: str, kind: str, values: dict[str, Any]) -> None:
        (path / folder).mkdir()
        (path / folder / "config.json").write_text(json.dumps(values))
        place = len(modules)
        modules.append(
            {"idx": place, "name": str(place), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        )

    add("1_Pooling", "Pooling", {"word_embedding_dimension": width, **pooling})
    if dense:
        names = {"in_features": width, "out_features": dense, "activation_function": "torch.nn.modules.activation.Tanh"}
        add("2_Dense", "Dense", {**names, "bias": True})
        tensors = {"linear.weight": torch.randn(dense, width) * 0.2, "linear.bias": torch.randn(dense) * 0.2}
        save_file(tensors, path / "2_Dense" / "model.safetensors")
    add("3_Normalize", "Normalize", {})
    (path / "modules.json").write_text(json.dumps(modules))
    return model
