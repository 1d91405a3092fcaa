"""Reads the files of an encoder into an EncoderConfig. Every number is bounded; unsupported features are refused.

An absent key has the default that transformers 5 gives it, for each architecture.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from penstock.backend.checkpoint.config.decoder_config import RopeConfig
from penstock.backend.checkpoint.config.rope_scaling import RopeSettings, compute_rope
from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig, Head, PoolingMode
from penstock.backend.checkpoint.encoders.families import (
    ACTIVATIONS,
    FAMILIES,
    PADDING_POSITION,
    SUFFIXES,
    EncoderFamily,
    split_architecture,
)
from penstock.backend.checkpoint.encoders.hf_config import EncoderHfConfig
from penstock.backend.checkpoint.encoders.sentence_transformers import Modules, read_max_tokens, read_modules
from penstock.backend.checkpoint.files.json_file import convert, read_json_object, shorten
from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.checkpoint.tensor_files.opening import fit_vocab_size
from penstock.backend.errors import StartupError

GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0
"""ModernBERT's bases if its config.json gives none: for layers with full attention, and with a window."""


def rotary_layers(
    own: EncoderHfConfig, family: EncoderFamily, config: EncoderConfig, context_tokens: int
) -> dict[str, Any]:
    """The fields ropes, layer_ropes and layer_windows of EncoderConfig. Raises StartupError."""
    match family.positions:
        case "rope":
            settings = own.rope_scaling or _settings(own.rope_parameters, "rope_parameters")
            rope = _rope(settings, own.rope_theta or family.rope_theta, config, context_tokens)
            return {"ropes": (rope,), "layer_ropes": (0,) * config.num_layers}
        case "rope by layer type":
            return _by_layer_type(own, config, context_tokens)
    return {}


def _by_layer_type(own: EncoderHfConfig, config: EncoderConfig, context_tokens: int) -> dict[str, Any]:
    types = own.layer_types or tuple(
        "sliding_attention" if i % own.global_attn_every_n_layers else "full_attention"
        for i in range(config.num_layers)
    )
    if len(types) != config.num_layers:
        raise StartupError(f"layer_types has {len(types)} entries; num_hidden_layers is {config.num_layers}")
    by_type = own.rope_parameters or {}
    thetas = {
        "full_attention": own.global_rope_theta or GLOBAL_THETA,
        "sliding_attention": own.local_rope_theta or LOCAL_THETA,
    }
    ropes = tuple(
        _rope(_settings(by_type.get(name), f"rope_parameters.{name}"), theta, config, context_tokens)
        for name, theta in thetas.items()
    )
    is_local = [name == "sliding_attention" for name in types]
    return {
        "ropes": ropes,
        "layer_ropes": tuple(map(int, is_local)),
        "layer_windows": tuple(own.local_attention // 2 if local else None for local in is_local),
    }


def _settings(values: object, where: str) -> RopeSettings:
    if values is None:
        return RopeSettings()
    if not isinstance(values, dict):
        raise StartupError(f"{where} is {shorten(values)}; it must be an object")
    return convert(values, RopeSettings, where)


def _rope(settings: RopeSettings, theta: float, config: EncoderConfig, context_tokens: int) -> RopeConfig:
    theta = settings.rope_theta or theta
    factor = settings.factor
    if settings.kind == "ntk" and factor is None:
        raise StartupError("rope_scaling is of type ntk; it needs a factor")
    if settings.kind == "ntk" and settings.mixed_b is not None:
        raise StartupError(f"rope_scaling.mixed_b is {settings.mixed_b}; only null is supported")
    is_ntk = settings.kind == "ntk" and factor is not None
    if is_ntk:  # fixed NTK scaling (GTE): https://kexue.fm/archives/9706
        theta *= factor or 1.0
        settings = RopeSettings()
    rope = compute_rope(
        settings,
        theta=theta,
        rotary_dim=config.head_dim,
        max_position_embeddings=context_tokens,
        original_max_positions=settings.original_max_position_embeddings or context_tokens,
        context_tokens=context_tokens,
    )
    if not is_ntk:
        return rope
    shrink = (factor or 1.0) ** (2 / config.head_dim)
    return replace(rope, inv_freq=tuple(frequency / shrink for frequency in rope.inv_freq))


DEFAULT_POOLING: tuple[PoolingMode, ...] = ("cls",)
"""The pooling of a checkpoint whose files name none, as in vLLM."""


def read_encoder(model_dir: Path, max_context_tokens: int | None = None) -> EncoderConfig:
    """Read and check config.json, and modules.json with its files if there is one.

    max_context_tokens limits the context below the model's own. Raises StartupError naming the field, its value and
    what is supported.
    """
    path = model_dir / CONFIG_FILE
    values = read_json_object(path)
    try:
        found = split_architecture(values)
        if found is None:
            names = ", ".join(FAMILIES)
            raise StartupError(
                f"architectures is {shorten(values.get('architectures'))}; it must name an encoder: one of "
                f"{names} with {', '.join(SUFFIXES)}"
            )
        config, own = parse_encoder(values, *found)
        words = tuple(f"{prefix}{config.names.words}.weight" for prefix in config.names.prefixes)
        vocab_size = fit_vocab_size(model_dir, own.vocab_size, words)
        config, own = replace(config, vocab_size=vocab_size), structs.replace(own, vocab_size=vocab_size)
        modules = read_modules(model_dir)
        if modules is not None and config.architecture.endswith("Classification"):
            modules = None
        config = _with_heads(config, own, found[1], FAMILIES[found[0]], modules)
        offered = min(config.max_context_tokens, read_max_tokens(model_dir) or config.max_context_tokens)
        if max_context_tokens is not None and not 1 <= max_context_tokens <= offered:
            raise StartupError(
                f"--max-context is {max_context_tokens}; this model supports 1 to {offered}: lower --max-context"
            )
        return replace(config, max_context_tokens=max_context_tokens or offered)
    except StartupError as error:
        message = str(error)
        raise error if message.startswith(str(model_dir)) else StartupError(f"{path}: {message}") from None


def parse_encoder(values: dict[str, Any], family_name: str, suffix: str) -> tuple[EncoderConfig, EncoderHfConfig]:
    """The encoder without its heads, and the keys that heads depend on."""
    family = FAMILIES[family_name]
    architecture = family_name + suffix
    values = family.defaults | _renamed(values, family)
    for key, supported in family.refused.items():
        if values.get(key) is not None and values[key] not in supported:
            allowed = " or ".join(map(repr, supported))
            raise StartupError(f"{key} is {shorten(values[key])}; of {architecture} only {allowed} is supported")
    own = convert(values, EncoderHfConfig, architecture)
    if own.hidden_size % own.num_attention_heads or own.hidden_size // own.num_attention_heads > 1024:
        raise StartupError(
            f"hidden_size is {own.hidden_size}; it must be a multiple of num_attention_heads, "
            f"{own.num_attention_heads}, and at most 1024 times that"
        )
    if own.hidden_act not in ACTIVATIONS:
        raise StartupError(f"hidden_act is {shorten(own.hidden_act)}; supported are {', '.join(ACTIVATIONS)}")
    is_learned = family.positions in ("learned", "after padding")
    padding = PADDING_POSITION if own.pad_token_id is None else own.pad_token_id
    first = (
        0 if family.positions != "after padding" else 1 + (padding if family.padding_id is None else family.padding_id)
    )
    context_tokens = own.max_position_embeddings - first
    if context_tokens < 1:
        raise StartupError(
            f"max_position_embeddings is {own.max_position_embeddings}; positions begin at {first}, behind the padding "
            "token's id"
        )
    if own.rotary_scaling_factor is not None and own.max_trained_positions is not None:
        context_tokens = min(context_tokens, own.max_trained_positions)  # up to there nothing is scaled
    types = own.type_vocab_size
    all_biases, by_key = family.biases != "none", family.biases == "by key"
    config = EncoderConfig(
        architecture=architecture,
        vocab_size=own.vocab_size,
        hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_layers=own.num_hidden_layers,
        num_heads=own.num_attention_heads,
        norm_eps=own.layer_norm_eps or family.norm_eps,
        max_context_tokens=context_tokens,
        activation=ACTIVATIONS[own.hidden_act],
        names=family.names,
        num_positions=own.max_position_embeddings if is_learned else 0,
        first_position=first,
        num_token_types=0 if family.token_types is None else family.token_types if types is None else types,
        norm_first=family.norm_first,
        first_attention_norm=not family.norm_first,
        norm_bias=own.norm_bias if family.has_norm_bias_key else True,
        qkv_bias=own.attention_bias if by_key else all_biases,
        output_bias=own.attention_bias if by_key else all_biases,
        mlp_in_bias=own.mlp_bias if by_key else family.biases == "all",
        mlp_out_bias=own.mlp_bias if by_key else all_biases,
        is_gated=family.is_gated,
        num_relative_buckets=own.relative_attention_num_buckets if family.has_relative_bias else 0,
    )
    if family.positions == "relative":
        config = replace(config, relative_span=own.position_buckets, farthest=_farthest(own))
    return replace(config, **rotary_layers(own, family, config, context_tokens)), own


def _farthest(own: EncoderHfConfig) -> int:
    """Return `EncoderConfig.farthest`. Raises StartupError if no distance is left for the logarithmic rows."""
    farthest = own.max_relative_positions if own.max_relative_positions > 0 else own.max_position_embeddings
    if own.position_buckets // 2 >= farthest - 1:
        raise StartupError(
            f"position_buckets is {own.position_buckets}; half of it must be below {farthest - 1}, the farthest "
            "position"
        )
    return farthest


def with_common_names(values: dict[str, Any]) -> dict[str, Any]:
    """Rename an encoder's keys to those of most architectures; return another config.json unchanged."""
    found = split_architecture(values)
    return values if found is None else _renamed(values, FAMILIES[found[0]])


def _renamed(values: dict[str, Any], family: EncoderFamily) -> dict[str, Any]:
    renamed = {new: values[old] for old, new in family.keys.items() if values.get(old) is not None}
    return {key: value for key, value in values.items() if value is not None} | renamed


def _with_heads(
    config: EncoderConfig, own: EncoderHfConfig, suffix: str, family: EncoderFamily, modules: Modules | None
) -> EncoderConfig:
    heads: tuple[Head, ...]
    match suffix:
        case "ForSequenceClassification":
            heads = (Head("classify", (family.classifier_pooling(own),), family.classifier(own)),)
        case "ForTokenClassification":
            heads = (Head("token_classify", (), family.token_classifier(own)),)
        case _:
            pooling = (modules.pooling if modules is not None else ()) or DEFAULT_POOLING
            heads = (Head("embed", pooling, () if modules is None else modules.dense),)
            splade = modules.is_splade if modules is not None else suffix == "ForMaskedLM"
            if splade and family.words is not None:
                sparse = Head("sparse", (), family.words(own))
                heads = (sparse,) if modules is not None and not modules.pooling else (sparse, *heads)
    for head in heads:
        _check_widths(head, config.hidden_size)
    normalizes = modules is not None and modules.normalizes
    return replace(config, heads=(*heads, Head("token_embed")), normalizes=normalizes)


def _check_widths(head: Head, hidden_size: int) -> None:
    width = hidden_size * max(1, len(head.pooling))
    for layer in head.layers:
        if layer.inputs != width:
            name = layer.weight or "the table of words"
            raise StartupError(f"{name} has {layer.inputs} inputs; what is before it makes {width}")
        width = layer.outputs
