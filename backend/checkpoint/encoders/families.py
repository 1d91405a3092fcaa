"""The supported encoders: how each differs from BERT, and its defaults for absent keys of config.json.

A new one is an entry of FAMILIES and a preset of tests/encoder_checkpoints.py, as long as `EncoderConfig` can express
it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.backend.checkpoint.config.architectures.encoder_names import NAMES
from penstock.backend.checkpoint.encoders.encoder_config import Activation, HeadLayer, PoolingMode
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.architectures.encoder_names import EncoderNames
    from penstock.backend.checkpoint.encoders.hf_config import EncoderHfConfig

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
    "tanh": "tanh",
}
SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
"""Endings of an architecture's name, after the family."""
PADDING_POSITION = 1
"""RoBERTa's padding token, if a config.json names none; MPNet's always."""

Layers: TypeAlias = Callable[["EncoderHfConfig"], tuple[HeadLayer, ...]]
Biases: TypeAlias = Literal["all", "none", "by key", "not of the MLP's input"]


def _dense(
    config: EncoderHfConfig, name: str, activation: Activation = "identity", *, outputs: int | None = None
) -> HeadLayer:
    return HeadLayer(f"{name}.weight", f"{name}.bias", config.hidden_size, outputs or config.hidden_size, activation)


def _classifier(config: EncoderHfConfig, name: str = "classifier") -> HeadLayer:
    return _dense(config, name, outputs=config.label_count)


def _token_classifier(config: EncoderHfConfig) -> tuple[HeadLayer, ...]:
    return (_classifier(config),)


def _behind_pooler(pooler: str) -> Layers:
    return lambda config: (_dense(config, pooler, "tanh"), _classifier(config))


def _roberta_classifier(config: EncoderHfConfig) -> tuple[HeadLayer, ...]:
    return _dense(config, "classifier.dense", "tanh"), _classifier(config, "classifier.out_proj")


def _distilbert_classifier(config: EncoderHfConfig) -> tuple[HeadLayer, ...]:
    return _dense(config, "pre_classifier", "relu"), _classifier(config)


def _deberta_classifier(config: EncoderHfConfig) -> tuple[HeadLayer, ...]:
    return _dense(config, "pooler.dense", "gelu"), _classifier(config)


def _modernbert_transform(config: EncoderHfConfig) -> HeadLayer:
    bias = "head.dense.bias" if config.classifier_bias else None
    activation = ACTIVATIONS.get(config.classifier_activation, "gelu")
    size = config.hidden_size
    return HeadLayer("head.dense.weight", bias, size, size, activation, "head.norm", config.norm_bias)


def _modernbert_classifier(config: EncoderHfConfig) -> tuple[HeadLayer, ...]:
    return _modernbert_transform(config), _classifier(config)


def _modernbert_words(config: EncoderHfConfig) -> tuple[HeadLayer, ...]:
    bias = "decoder.bias" if config.decoder_bias else None
    return _modernbert_transform(config), HeadLayer(None, bias, config.hidden_size, config.vocab_size)


def _words(transform: str, norm: str, bias: str, activation: Activation | None = None) -> Layers:
    """A masked language model's head: a linear, its norm, and the product with the table of words."""

    def layers(config: EncoderHfConfig) -> tuple[HeadLayer, ...]:
        size = config.hidden_size
        own = activation or ACTIVATIONS.get(config.hidden_act, "gelu")
        first = HeadLayer(f"{transform}.weight", f"{transform}.bias", size, size, own, norm)
        return first, HeadLayer(None, bias, size, config.vocab_size)

    return layers


def _nomic_words(config: EncoderHfConfig) -> tuple[HeadLayer, ...]:
    # The hub's own code writes mlp_fc1_bias, and its head has biases only with it; transformers writes biases always.
    start, size = "cls.predictions", config.hidden_size
    is_biased = config.mlp_fc1_bias is not False
    norm, activation = f"{start}.transform.layer_norm", ACTIVATIONS.get(config.hidden_act, "silu")
    bias = f"{start}.transform.dense.bias" if is_biased else None
    first = HeadLayer(f"{start}.transform.dense.weight", bias, size, size, activation, norm)
    return first, HeadLayer(None, f"{start}.bias" if is_biased else None, size, config.vocab_size)


def _cls(_: EncoderHfConfig) -> PoolingMode:
    return "cls"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """The encoders whose architectures begin with the same name. The functions read what the config.json decides."""

    names: EncoderNames
    keys: dict[str, str] = field(default_factory=dict)
    """Key of this family's config.json → key of EncoderHfConfig."""
    defaults: dict[str, object] = field(default_factory=dict)
    """Key of the config.json → its value if it is absent, for keys that `refused` then checks."""
    positions: Literal["learned", "after padding", "relative", "rope", "rope by layer type"] = "learned"
    padding_id: int | None = None
    """If not None, the padding id is this one, whatever pad_token_id says."""
    token_types: int | None = 2
    """Default of type_vocab_size; None means no token types."""
    norm_eps: float = 1e-12
    has_norm_bias_key: bool = False
    norm_first: bool = False
    biases: Biases = "all"
    is_gated: bool = False
    has_relative_bias: bool = False
    rope_theta: float = 10_000.0
    classifier: Layers
    """The head of ForSequenceClassification."""
    classifier_pooling: Callable[[EncoderHfConfig], PoolingMode] = _cls
    token_classifier: Layers = _token_classifier
    words: Layers | None = None
    """The head of ForMaskedLM; None if there is no such model."""
    refused: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Key of the config.json → its supported values; null is always supported."""


_ROBERTA_WORDS = _words("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "gelu")
_BERT_KEYS: dict[str, tuple[object, ...]] = {"position_embedding_type": ("absolute",), "is_decoder": (False,)}
_ROBERTA = EncoderFamily(
    names=NAMES["Roberta"],
    positions="after padding",
    token_types=2,
    classifier=_roberta_classifier,
    words=_ROBERTA_WORDS,
    refused=_BERT_KEYS,
)

FAMILIES = {
    "Bert": EncoderFamily(
        names=NAMES["Bert"],
        classifier=_behind_pooler("bert.pooler.dense"),
        words=_words("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
        refused=_BERT_KEYS,
    ),
    "DistilBert": EncoderFamily(
        names=NAMES["DistilBert"],
        keys={
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "activation": "hidden_act",
        },
        token_types=None,
        classifier=_distilbert_classifier,
        words=_words("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
    ),
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "MPNet": EncoderFamily(
        names=NAMES["MPNet"],
        positions="after padding",
        padding_id=PADDING_POSITION,
        token_types=None,
        has_relative_bias=True,
        classifier=_roberta_classifier,
        words=_ROBERTA_WORDS,
    ),
    "ModernBert": EncoderFamily(
        names=NAMES["ModernBert"],
        keys={"hidden_activation": "hidden_act", "norm_eps": "layer_norm_eps"},
        positions="rope by layer type",
        token_types=None,
        norm_eps=1e-5,
        has_norm_bias_key=True,
        norm_first=True,
        biases="by key",
        is_gated=True,
        classifier=_modernbert_classifier,
        classifier_pooling=lambda config: config.classifier_pooling,
        token_classifier=_modernbert_classifier,
        words=_modernbert_words,
    ),
    "NomicBert": EncoderFamily(
        names=NAMES["NomicBert"],
        keys={
            "n_embd": "hidden_size",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "layer_norm_eps",
            "rotary_emb_base": "rope_theta",
        },
        positions="rope",
        biases="none",
        is_gated=True,
        rope_theta=1000.0,
        classifier=_behind_pooler("nomic_bert.pooler.dense"),
        words=_nomic_words,
        refused={
            "hidden_act": ("silu", "swiglu"),
            "prenorm": (False,),
            "use_rms_norm": (False,),
            "rotary_emb_fraction": (1, 1.0),
            "rotary_emb_interleaved": (False,),
            "qkv_proj_bias": (False,),
            "mlp_fc1_bias": (False,),
            "mlp_fc2_bias": (False,),
            "num_experts": (0,),
        },
    ),
    "New": EncoderFamily(
        names=NAMES["Gte"],
        positions="rope",
        biases="not of the MLP's input",
        is_gated=True,
        classifier=_behind_pooler("new.pooler.dense"),
        words=_words("lm_head.dense", "lm_head.norm", "lm_head.decoder.bias"),
        refused={
            "position_embedding_type": ("rope",),
            "layer_norm_type": ("layer_norm",),
            "logn_attention_scale": (False,),
            "pack_qkv": (True,),
        },
    ),
    "Gte": EncoderFamily(
        names=NAMES["Gte"],
        positions="rope",
        token_types=1,
        biases="not of the MLP's input",
        is_gated=True,
        rope_theta=160_000.0,
        classifier=_behind_pooler("gte.pooler.dense"),
        words=_words("lm_head.dense", "lm_head.norm", "lm_head.decoder.bias", "gelu"),
    ),
    "DebertaV2": EncoderFamily(
        names=NAMES["DebertaV2"],
        defaults={
            "relative_attention": False,
            "share_att_key": False,
            "position_biased_input": True,
            "pos_att_type": "none",
            "norm_rel_ebd": "none",
            "position_buckets": -1,
        },
        positions="relative",
        token_types=0,
        norm_eps=1e-7,
        classifier=_deberta_classifier,
        refused={
            "relative_attention": (True,),
            "share_att_key": (True,),
            "position_biased_input": (False,),
            "pos_att_type": ("p2c|c2p", "c2p|p2c", ["p2c", "c2p"], ["c2p", "p2c"]),
            "norm_rel_ebd": ("layer_norm",),
            "conv_kernel_size": (0,),
            "pooler_hidden_act": ("gelu",),
        },
    ),
}
_BY_MODEL_TYPE = {name.lower(): name for name in FAMILIES}
REFUSED_FAMILIES = {"Albert": "its layers share one set of weights"}


def split_architecture(values: dict[str, Any]) -> tuple[str, str] | None:
    """The family and suffix of a config.json's architecture, or None if it is not an encoder's.

    Raises StartupError for an encoder that is not supported.
    """
    architectures = values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not architectures and (family := _BY_MODEL_TYPE.get(re.sub("[-_]", "", str(values.get("model_type"))))):
        return family, "Model"
    if not isinstance(name, str):
        return None
    for suffix in SUFFIXES:
        family = name.removesuffix(suffix)
        if family != name and family in FAMILIES:
            if suffix == "ForMaskedLM" and FAMILIES[family].words is None:
                others = ", ".join(each for each in SUFFIXES if each != suffix)
                raise StartupError(f"architecture {name} is not supported; of {family} only {others} are")
            return family, suffix
        if family != name and family in REFUSED_FAMILIES:
            raise StartupError(f"architecture {name} is not supported: {REFUSED_FAMILIES[family]}")
    return None
