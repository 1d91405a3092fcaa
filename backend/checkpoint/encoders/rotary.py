"""Rotary positions and windows of an encoder's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.rope_scaling import RopeSettings, compute_rope
from penstock.backend.checkpoint.files.json_file import convert, shorten
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import RopeConfig
    from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig
    from penstock.backend.checkpoint.encoders.families import EncoderFamily
    from penstock.backend.checkpoint.encoders.hf_config import EncoderHfConfig

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
