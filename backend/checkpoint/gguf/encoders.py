"""Encoders in GGUF files, and the pooling of models that return vectors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.architectures.encoder_names import ANSWERS, NAMES
from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.gguf.config import EMBEDDING, dtype_of
from penstock.backend.checkpoint.gguf.names import GgufNames, layer_number
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backend.checkpoint.gguf.header import GgufTensor
    from penstock.backend.checkpoint.gguf.metadata import Metadata

_POOLING_MODES = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
"""Values of pooling_type → sentence-transformers' names."""
_RANK = 4
"""The value of pooling_type for a model that scores pairs of texts."""
_RANKING_DECODERS = ("qwen3",)
ANSWER_HEAD = "cls.output.weight"
_TYPES = "token_types.weight"
_SCORES = {"cls": "bert.pooler.dense", "cls.output": "classifier"}
"""Both linears of BERT's classifier, which RoBERTa's, under other names, equals."""


@dataclass(frozen=True, slots=True)
class EncoderArchitecture:
    """A value of general.architecture."""

    family: str
    """The beginning of the name in config.json."""
    activation: str
    has_rope: bool = False
    may_score: bool = False

    @property
    def names(self) -> GgufNames:
        return GgufNames.of_encoder(NAMES[self.family], _SCORES if self.may_score else {})


ENCODERS = {
    "bert": EncoderArchitecture("Bert", "gelu", may_score=True),
    "nomic-bert": EncoderArchitecture("NomicBert", "silu", has_rope=True),
}


def encoder_names(config: Mapping[str, Any]) -> GgufNames | None:
    """The names of an encoder of a config.json that `make_encoder_config` made; None for a decoder's."""
    (name,) = config["architectures"]
    families = {each.family: each.names for each in ENCODERS.values()}
    return families.get(name.removesuffix("Model").removesuffix("ForSequenceClassification"))


def make_encoder_config(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """config.json without quantization_config. Raises StartupError naming the key or tensor."""
    encoder = ENCODERS[metadata.architecture]
    layers = metadata.required("block_count")
    for name, tensor in tensors.items():
        if not encoder.names.hf_names(name, tensor.shape) or (layer_number(name) or 0) >= layers:
            raise StartupError(f"tensor {shorten(name)} has no place in a {encoder.family} of these metadata")
    return {
        "architectures": [f"{encoder.family}Model"],
        **(_classifier(metadata, tensors) if metadata.own("pooling_type", int) == _RANK else {}),
        "hidden_act": encoder.activation,
        "vocab_size": tensors[EMBEDDING].shape[0],
        "hidden_size": metadata.required("embedding_length"),
        "intermediate_size": metadata.required("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": metadata.required("attention.head_count"),
        "max_position_embeddings": metadata.required("context_length"),
        "layer_norm_eps": metadata.own("attention.layer_norm_epsilon", float),
        "type_vocab_size": tensors[_TYPES].shape[0] if _TYPES in tensors else 0,
        **({"rope_theta": metadata.own("rope.freq_base", float)} if encoder.has_rope else {}),
        "dtype": dtype_of(tensors[EMBEDDING]),
    }


def _classifier(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Raises StartupError for a head that computes something else than BERT's."""
    missing = [name for stem in _SCORES if (name := f"{stem}.weight") not in tensors]
    if missing:
        # llama.cpp's converter leaves BERT's pooler out, without which the scores are not the model's.
        raise StartupError(f"tensor {missing[0]} is missing, which a model with pooling_type {_RANK} needs")
    if _TYPES not in tensors:
        # DistilBERT, whose classifier has ReLU for tanh.
        raise StartupError(f"tensor {_TYPES} is missing: only classifiers of BERT's and RoBERTa's kind are supported")
    labels = metadata.strings("classifier.output_labels")
    count = tensors[ANSWER_HEAD].shape[0]
    return {
        "architectures": ["BertForSequenceClassification"],
        "num_labels": count,
        "id2label": {str(index): label for index, label in enumerate(labels)} if len(labels) == count else None,
    }


def answer_labels(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Keys of config.json for Qwen3-Reranker, a decoder whose head has the rows of two words of lm_head; empty for a
    decoder that does not rank. Raises StartupError for another head."""
    if metadata.own("pooling_type", int) != _RANK:
        return {}
    labels, head = metadata.strings("classifier.output_labels"), tensors.get(ANSWER_HEAD)
    if tuple(labels) != ANSWERS or head is None or head.shape[0] != len(ANSWERS):
        shape = "absent" if head is None else list(head.shape)
        raise StartupError(
            f"{metadata.prefix}pooling_type is {_RANK}, classifier.output_labels is {shorten(labels)} and tensor "
            f"{ANSWER_HEAD} is {shape}; a decoder that ranks must have {list(ANSWERS)} and a row for each"
        )
    return {"model_type": metadata.architecture, "id2label": {str(i): label for i, label in enumerate(labels)}}


def pooling_files(metadata: Metadata) -> dict[str, str]:
    """The files of sentence-transformers' modules, for a model that returns vectors; empty for one that generates, and
    one that scores.

    Vectors are normalised, as in llama.cpp. An encoder that names no pooling has that of checkpoints without modules.
    """
    kind = metadata.own("pooling_type", int)
    encoder = ENCODERS.get(metadata.architecture)
    may_rank = metadata.architecture in _RANKING_DECODERS if encoder is None else encoder.may_score
    if not kind or (kind == _RANK and may_rank):
        return {}
    if kind not in _POOLING_MODES:
        raise StartupError(f"{metadata.prefix}pooling_type is {kind}; supported are 1 (mean), 2 (first) and 3 (last)")
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in modules.items()]
    return {
        "modules.json": json.dumps(listed),
        "1_Pooling/config.json": json.dumps({f"pooling_mode_{_POOLING_MODES[kind]}": True}),
    }
