"""Reads config.json of a Hugging Face checkpoint into a DecoderConfig. Every number is bounded; unsupported features
are refused.

An absent key has the default that transformers 5 gives it, for each architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.backend.checkpoint.decoder_config import DecoderConfig
from penstock.backend.checkpoint.json_file import convert, read_json_object, shorten
from penstock.backend.checkpoint.layout import CONFIG_FILE
from penstock.backend.checkpoint.rope_scaling import RopeSettings, compute_rope
from penstock.backend.errors import StartupError
from penstock.shm.messages import MAX_CONTEXT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_Width = Annotated[int, Meta(ge=1, le=1 << 20)]
_Heads = Annotated[int, Meta(ge=1, le=4096)]
_HeadDim = Annotated[int, Meta(ge=2, le=1024)]
_Positions = Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
_PerLayer = Meta(max_length=4096)


class _HfConfig(Struct, frozen=True):
    """The keys of config.json that change how a supported model computes."""

    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    hidden_size: _Width
    intermediate_size: _Width
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)]
    num_attention_heads: _Heads
    max_position_embeddings: _Positions
    num_key_value_heads: _Heads | None = None
    head_dim: _HeadDim | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    rope_parameters: RopeSettings | None = None
    rope_scaling: RopeSettings | None = None
    rope_theta: Annotated[float, Meta(gt=1.0, le=1e15)] | None = None
    partial_rotary_factor: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    original_max_position_embeddings: Annotated[int, Meta(ge=2, le=MAX_CONTEXT_TOKENS)] | None = None

    sliding_window: _Positions | UnsetType | None = UNSET
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Meta(ge=0, le=4096)] = 28
    layer_types: Annotated[tuple[Literal["full_attention", "sliding_attention"], ...], _PerLayer] | None = None
    no_rope_layers: Annotated[tuple[Literal[0, 1], ...], _PerLayer] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1, le=4096)] = 4


_Windows = tuple[int | None, ...]


def _no_windows(config: _HfConfig) -> _Windows:
    return (None,) * config.num_hidden_layers


def _window_everywhere(config: _HfConfig) -> _Windows:
    window = 4096 if config.sliding_window is UNSET else config.sliding_window
    return (window,) * config.num_hidden_layers


def _window_nowhere_unless_given(config: _HfConfig) -> _Windows:
    return (config.sliding_window or None,) * config.num_hidden_layers


def _windows_of_last_layers(config: _HfConfig) -> _Windows:
    slides = tuple(i >= config.max_window_layers for i in range(config.num_hidden_layers))
    return _layered_windows(config, default_window=4096, default_slides=slides)


def _windows_of_nope_layers(config: _HfConfig) -> _Windows:
    slides = tuple(not uses_rope for uses_rope in _interval_rope(config))
    return _layered_windows(config, default_window=None, default_slides=slides)


def _layered_windows(config: _HfConfig, *, default_window: int | None, default_slides: tuple[bool, ...]) -> _Windows:
    """layer_types decides if given, else default_slides. use_sliding_window switches all windows on or off."""
    window = default_window if config.sliding_window is UNSET else config.sliding_window
    window = window if config.use_sliding_window else None
    if config.layer_types is None:
        return tuple(window if slides else None for slides in default_slides)
    if len(config.layer_types) != config.num_hidden_layers:
        raise StartupError(f"layer_types has {len(config.layer_types)} entries for {config.num_hidden_layers} layers")
    if window is None and "sliding_attention" in config.layer_types:
        raise StartupError(
            "layer_types has sliding_attention, but sliding_window or use_sliding_window gives no window"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _rope_everywhere(config: _HfConfig) -> tuple[bool, ...]:
    return (True,) * config.num_hidden_layers


def _interval_rope(config: _HfConfig) -> tuple[bool, ...]:
    layers = config.num_hidden_layers
    if config.no_rope_layers is None:
        return tuple((i + 1) % config.no_rope_layer_interval != 0 for i in range(layers))
    if len(config.no_rope_layers) < layers:
        raise StartupError(f"no_rope_layers has {len(config.no_rope_layers)} entries for {layers} layers")
    return tuple(bool(flag) for flag in config.no_rope_layers[:layers])


@dataclass(frozen=True, slots=True)
class _Family:
    """Fixed properties of an architecture, and its defaults for absent keys."""

    windows: Callable[[_HfConfig], _Windows]
    uses_rope: Callable[[_HfConfig], tuple[bool, ...]] = _rope_everywhere
    attention_bias: Literal["never", "as configured", "qkv"] = "never"
    mlp_bias_allowed: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    original_max_positions: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family(_no_windows, attention_bias="as configured", mlp_bias_allowed=True),
    "MistralForCausalLM": _Family(_window_everywhere),
    "Qwen2ForCausalLM": _Family(_windows_of_last_layers, attention_bias="qkv"),
    "Qwen3ForCausalLM": _Family(_windows_of_last_layers, attention_bias="as configured", qk_norm=True, head_dim=128),
    "SmolLM3ForCausalLM": _Family(
        _windows_of_nope_layers,
        uses_rope=_interval_rope,
        attention_bias="as configured",
        mlp_bias_allowed=True,
        rope_theta=2_000_000.0,
        tie_embeddings=True,
    ),
    "Phi3ForCausalLM": _Family(_window_nowhere_unless_given, rms_norm_eps=1e-5, original_max_positions=4096),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_decoder_config(model_dir: Path, max_context_tokens: int | None = None) -> DecoderConfig:
    """Read and check model_dir's config.json.

    max_context_tokens limits the context below the model's own, and so it decides between LongRoPE's short and long
    frequencies. Raises StartupError naming the field, its value and what is supported.
    """
    path = model_dir / CONFIG_FILE
    values = read_json_object(path)
    try:
        return parse_decoder_config(values, max_context_tokens)
    except StartupError as error:
        raise StartupError(f"{path}: {error}") from None


def parse_decoder_config(values: dict[str, Any], max_context_tokens: int | None = None) -> DecoderConfig:
    """As `read_decoder_config`, from the decoded JSON object."""
    architecture = _architecture(values)
    _refuse_unsupported(values)
    config = convert(values, _HfConfig, architecture)
    family = _FAMILIES[architecture]
    if config.hidden_act != "silu":
        raise StartupError(f'hidden_act is "{config.hidden_act}"; only "silu" is supported')
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise StartupError(
            f"num_attention_heads is {config.num_attention_heads}, "
            f"not a multiple of num_key_value_heads, {num_kv_heads}"
        )
    head_dim = _head_dim(config, family)
    rope_settings = config.rope_scaling or config.rope_parameters or RopeSettings()
    original_positions = (
        config.original_max_position_embeddings
        or family.original_max_positions
        or rope_settings.original_max_position_embeddings
        or config.max_position_embeddings
    )
    context_tokens = _context_tokens(config, rope_settings, original_positions, max_context_tokens)
    partial = rope_settings.partial_rotary_factor or config.partial_rotary_factor or 1.0
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise StartupError(
            f"head_dim {head_dim} with partial_rotary_factor {partial} rotates {rotary_dim} dimensions; it must be even"
        )
    rope = compute_rope(
        rope_settings,
        theta=rope_settings.rope_theta or config.rope_theta or family.rope_theta,
        rotary_dim=rotary_dim,
        max_position_embeddings=config.max_position_embeddings,
        original_max_positions=original_positions,
        context_tokens=context_tokens,
    )
    as_configured = family.attention_bias == "as configured" and config.attention_bias
    tied = family.tie_embeddings if config.tie_word_embeddings is None else config.tie_word_embeddings
    return DecoderConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps or family.rms_norm_eps,
        max_context_tokens=context_tokens,
        rope=rope,
        tie_embeddings=tied,
        qkv_bias=as_configured or family.attention_bias == "qkv",
        output_bias=as_configured,
        mlp_bias=family.mlp_bias_allowed and config.mlp_bias,
        qk_norm=family.qk_norm,
        layer_uses_rope=family.uses_rope(config),
        layer_window_tokens=family.windows(config),
    )


def _architecture(values: dict[str, Any]) -> str:
    architectures = values.get("architectures")
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(architectures, list) or not architectures:
        raise StartupError(f"architectures is {shorten(architectures)}; it must name one of {supported}")
    architecture = architectures[0]
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise StartupError(f"architecture {shorten(architecture)} is not supported; supported are {supported}")
    return architecture


def _refuse_unsupported(values: dict[str, Any]) -> None:
    quantization = values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise StartupError(
            f"quantization_config (quant_method {shorten(method)}) is not supported; weights must be bf16, fp16 or fp32"
        )
    for key in _EXPERT_COUNTS:
        if values.get(key):
            raise StartupError(f"{key} is {shorten(values[key])}; mixtures of experts are not supported")
    for key in ("rope_parameters", "rope_scaling"):
        settings = values.get(key)
        if isinstance(settings, dict) and any(isinstance(value, dict) for value in settings.values()):
            raise StartupError(f"{key} is {shorten(settings)}; settings per layer type are not supported")


def _head_dim(config: _HfConfig, family: _Family) -> int:
    head_dim = config.head_dim or family.head_dim
    if head_dim is None:
        if config.hidden_size % config.num_attention_heads:
            raise StartupError(
                f"hidden_size is {config.hidden_size}, not a multiple of num_attention_heads, "
                f"{config.num_attention_heads}, and head_dim is not given"
            )
        head_dim = config.hidden_size // config.num_attention_heads
    if head_dim % 2 or head_dim > 1024:
        raise StartupError(f"head_dim is {head_dim}; it must be even and at most 1024")
    return head_dim


def _context_tokens(
    config: _HfConfig, rope: RopeSettings, original_positions: int, max_context_tokens: int | None
) -> int:
    """Only YaRN extends the context beyond max_position_embeddings: by the factor that the operator adds."""
    offered = config.max_position_embeddings
    if rope.kind == "yarn" and rope.factor is not None:
        offered = min(max(offered, int(original_positions * rope.factor)), MAX_CONTEXT_TOKENS)
    if max_context_tokens is None:
        return offered
    if not 1 <= max_context_tokens <= offered:
        raise StartupError(
            f"--max-context is {max_context_tokens}; this model supports 1 to {offered}: lower --max-context"
        )
    return max_context_tokens


def read_declared_dtype(model_dir: Path) -> torch.dtype | None:
    """The dtype that config.json declares (dtype, formerly torch_dtype); None if it declares none."""
    values = read_json_object(model_dir / CONFIG_FILE)
    declared = values.get("dtype") or values.get("torch_dtype")
    return _DTYPES.get(declared) if isinstance(declared, str) else None
