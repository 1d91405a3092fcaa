"""Reads config.json of a Hugging Face checkpoint into a DecoderConfig. Every number is bounded; unsupported features
are refused.

An absent key has the default that transformers 5 gives it, for each architecture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.architectures.families import (
    ACTIVATIONS,
    FAMILIES,
    FUSED_QKV,
    Family,
    no_experts,
)
from penstock.backend.checkpoint.config.architectures.gemma4 import merge_layer_keys
from penstock.backend.checkpoint.config.architectures.hf_config import HfConfig
from penstock.backend.checkpoint.config.architectures.names import (
    SUPPORTED_ARCHITECTURES,
    TEXT_PARTS,
    TextPart,
    decoder_of,
    find_architecture,
)
from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, PositionScale, RopeConfig, TensorNames
from penstock.backend.checkpoint.config.rope_scaling import RopeSettings, compute_rope
from penstock.backend.checkpoint.config.tensors import MTP_FC, MTP_LAYER
from penstock.backend.checkpoint.files.json_file import convert, read_json_object, shorten
from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.checkpoint.formats.declared import parse_stored_formats, read_stored_formats
from penstock.backend.checkpoint.formats.quant_method import declared_method
from penstock.backend.checkpoint.tensor_files.opening import fit_vocab_size, stored_names
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.shm.messages import MAX_CONTEXT_TOKENS

if TYPE_CHECKING:
    from pathlib import Path

_DTYPES = {"float32": Dtype.FP32, "bfloat16": Dtype.BF16, "float16": Dtype.FP16}

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ROPE_KEYS = {"full_attention": "rope_parameters", "sliding_attention": "window_rope_parameters"}
"""Layer type in rope_parameters → key of HfConfig."""


def read_decoder_config(
    model_dir: Path, max_context_tokens: int | None = None, *, with_mtp: bool = False
) -> DecoderConfig:
    """Read and check model_dir's config.json; its vocab_size is corrected by `fit_vocab_size`.

    max_context_tokens limits the context below the model's own, and so it decides between LongRoPE's short and long
    frequencies. with_mtp: if there are weights, these decide whether the model `has_mtp`: files of fine-tuned models
    often lack the head. Raises StartupError naming the field, its value and what is supported.
    """
    path = model_dir / CONFIG_FILE
    values = read_json_object(path)
    try:
        config = parse_decoder_config(values, max_context_tokens)
    except StartupError as error:
        raise StartupError(f"{path}: {error}") from None
    has_mtp = with_mtp and config.has_mtp and _may_have_head(model_dir)
    return replace(config, vocab_size=fit_vocab_size(model_dir, config.vocab_size), has_mtp=has_mtp)


def _may_have_head(model_dir: Path) -> bool:
    """Whether the weights, if there are any, have a head as config.json declares it. Quantisers often copy a head as it
    is, and do not say so."""
    names, formats, linear = stored_names(model_dir), read_stored_formats(model_dir), f"{MTP_LAYER}self_attn.o_proj."
    if names is None:
        return True
    parts = {name for name in names if name.startswith(linear)}
    is_plain = parts == {f"{linear}weight"} and formats.marker is None
    return MTP_FC in names and not (is_plain and formats.of(f"{linear}weight") is not None)


def parse_decoder_config(values: dict[str, Any], max_context_tokens: int | None = None) -> DecoderConfig:
    """Like `read_decoder_config`, from the decoded JSON object."""
    architecture = _architecture(values)
    part = TEXT_PARTS.get(architecture)
    values, family = (values, FAMILIES[architecture]) if part is None else _text_model(values, architecture, part)
    _refuse_unsupported(values, family)
    if declared_method(values) == "mlx":
        values = {**values, "separate_experts": True}
    config = convert(merge_layer_keys(family.key_defaults | _split_rope(values, family)), HfConfig, architecture)
    num_kv_heads = _num_kv_heads(config)
    head_dim = _head_dim(config, family)
    variations = family.variations(config, num_kv_heads, head_dim)
    _, full_head_dim = variations.get("full_heads") or (num_kv_heads, head_dim)
    rope, context_tokens = _rope(config, family, full_head_dim, max_context_tokens)
    rope = _with_axes(rope, config, family, part)
    windows = family.windows(config)
    expert_layers = family.experts(config)
    biased = family.attention_bias if config.attention_bias is None else config.attention_bias
    tied = family.tie_embeddings if config.tie_word_embeddings is None else config.tie_word_embeddings
    uses_bias = family.biases == "use_bias" and config.use_bias
    has_output_bias = uses_bias or (family.biases == "attention_bias" and biased)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=getattr(config, family.eps_key) or family.norm_eps,
        max_context_tokens=context_tokens,
        rope=rope,
        tie_embeddings=tied,
        qkv_bias=has_output_bias or _has_qkv_bias(config, family, biased=biased),
        output_bias=has_output_bias,
        mlp_bias=uses_bias or (family.mlp_bias_allowed and config.mlp_bias),
        norm=family.norm,
        norm_bias=family.norm_bias,
        norm_offset=0.0 if config.norms_have_offset else family.norm_offset,
        qk_norm=family.qk_norm(config),
        sinks=family.sinks,
        gated_attention=family.gated_attention,
        delta_net=family.delta_net(config),
        activation=ACTIVATIONS[_activation(config, family)],
        mlp=family.mlp,
        experts=None if expert_layers is None else expert_layers.experts,
        layer_has_experts=() if expert_layers is None else expert_layers.layers,
        parallel_blocks=family.parallel_blocks,
        scales=family.scales(config),
        names=_names(config, family),
        interleaved_rope=family.interleaved_rope or config.rope_interleave,
        window_rope=_window_rope(config, family, rope.rotary_dim * head_dim // full_head_dim, context_tokens),
        query_rope=_query_rope(config, family, rope, head_dim),
        layer_uses_rope=family.uses_rope(config, windows),
        layer_window_tokens=windows,
        has_mtp=_has_mtp(config, family),
        picture_layers=_num_picture_layers(values, part, config.num_hidden_layers),
        **variations,
    )


def _architecture(values: dict[str, Any]) -> str:
    found = find_architecture(values)
    if isinstance(found, str) and found not in SUPPORTED_ARCHITECTURES:
        found = decoder_of(found.removesuffix("Model")) or found  # saved without its output layer
    if not isinstance(found, str) or found not in SUPPORTED_ARCHITECTURES:
        raise StartupError(
            f"architecture {shorten(found)}: --forward-pass transformers may serve it, the built-in decoder does not "
            "(its architectures are in docs/models.md)"
        )
    return found


def _text_model(values: dict[str, Any], architecture: str, part: TextPart) -> tuple[dict[str, Any], Family]:
    """The keys of the text model, with keys of the whole model that apply to it; and its family."""
    text = values.get("text_config", values if part.may_be_flat else None)
    if not isinstance(text, dict):
        raise StartupError(f"text_config is {shorten(text)}; {architecture} needs an object")
    model_type = text.get("model_type", next(iter(part.families)))
    family = part.families.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise StartupError(
            f"text_config.model_type is {shorten(model_type)}; of {architecture} supported are "
            f"{', '.join(part.families)}"
        )
    whole = {
        key: values[key]
        for key in ("quantization_config", "quantization", "tie_word_embeddings", "vision_config")
        if key in values
    }
    return {**part.defaults, "tie_word_embeddings": part.tie_embeddings, **text, **whole}, family


def _has_mtp(config: HfConfig, family: Family) -> bool:
    """Whether the checkpoint has a head that predicts further tokens. Of several, the first is read."""
    given = family.mtp_layers if config.mtp_num_hidden_layers is None else config.mtp_num_hidden_layers
    return family.mtp_layers is not None and bool(given) and not config.mtp_use_dedicated_embeddings


def _num_picture_layers(values: dict[str, Any], part: TextPart | None, num_layers: int) -> int:
    vision = values.get("vision_config")
    if part is None or not part.picture_layers or not isinstance(vision, dict):
        return 0
    indexes = vision.get("deepstack_visual_indexes")
    count = len(indexes) if isinstance(indexes, list) else part.picture_layers
    if count >= num_layers:
        raise StartupError(
            f"deepstack_visual_indexes of vision_config has {count} entries; "
            f"a model of {num_layers} layers supports up to {num_layers - 1}"
        )
    return count


def _refuse_unsupported(values: dict[str, Any], family: Family) -> None:
    parse_stored_formats(values)
    for key in _EXPERT_COUNTS:
        if family.experts is no_experts and values.get(key):
            raise StartupError(f"{key} is {shorten(values[key])}; this architecture is supported without experts only")
    for key in family.refused_keys:
        if values.get(key):
            raise StartupError(f"{key} is {shorten(values[key])}; this architecture is supported without it only")
    for key in ("rope_parameters", "rope_scaling"):
        settings = values.get(key)
        if isinstance(settings, dict) and any(isinstance(value, dict) for value in settings.values()):
            if family.window_rope_theta is None or key == "rope_scaling":
                raise StartupError(f"{key} is {shorten(settings)}; settings per layer type are not supported")
            for name in settings:
                if name not in _ROPE_KEYS:
                    raise StartupError(f"{key} has {shorten(name)}; supported layer types are {', '.join(_ROPE_KEYS)}")


def _split_rope(values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Move settings per layer type to keys of their own."""
    settings = values.get("rope_parameters")
    own = {key: value for key, value in values.items() if key != "window_rope_parameters"}
    if family.window_rope_theta is None or not isinstance(settings, dict) or not settings.keys() & _ROPE_KEYS.keys():
        return own
    return own | {key: settings.get(name) for name, key in _ROPE_KEYS.items()}


def _has_qkv_bias(config: HfConfig, family: Family, *, biased: bool) -> bool:
    match family.biases:
        case "qkv":
            return True
        case "qkv if qkv_bias":
            return config.qkv_bias
        case "qkv if attention_bias":
            return biased
    return False


def _names(config: HfConfig, family: Family) -> TensorNames:
    names = replace(family.names, qkv=FUSED_QKV) if config.fused_qkv else family.names
    if config.separate_gates:
        names = replace(names, delta_in=TensorNames().delta_in)
    return replace(names, fused_experts=None) if config.separate_experts else names


def _activation(config: HfConfig, family: Family) -> str:
    given = getattr(config, family.activation_key)
    if given is None or given in family.activation_aliases:
        return family.activation
    if given != family.activation:
        raise StartupError(f'{family.activation_key} is "{given}"; only "{family.activation}" is supported')
    return family.activation


def _rope_settings(config: HfConfig, family: Family) -> RopeSettings:
    return config.rope_scaling or config.rope_parameters or family.rope


def _original_positions(config: HfConfig, family: Family) -> int:
    return (
        config.original_max_position_embeddings
        or family.original_max_positions
        or _rope_settings(config, family).original_max_position_embeddings
        or config.max_position_embeddings
    )


def _rope(config: HfConfig, family: Family, head_dim: int, max_context_tokens: int | None) -> tuple[RopeConfig, int]:
    """The rotary embeddings of full attention, and the longest sequence."""
    settings = _rope_settings(config, family)
    original_positions = _original_positions(config, family)
    context_tokens = _context_tokens(config, settings, original_positions, max_context_tokens)
    partial = settings.partial_rotary_factor or config.partial_rotary_factor or family.partial_rotary_factor
    # As in transformers, the default of families with two ropes ignores the factor.
    whole_kinds = ("proportional", "default") if family.window_rope_theta is not None else ("proportional",)
    rotary_dim = head_dim if settings.kind in whole_kinds else int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise StartupError(
            f"head_dim {head_dim} with partial_rotary_factor {partial} rotates {rotary_dim} dimensions; it must be even"
        )
    rope = compute_rope(
        settings,
        theta=settings.rope_theta or config.rope_theta or family.rope_theta,
        rotary_dim=rotary_dim,
        max_position_embeddings=config.max_position_embeddings,
        original_max_positions=original_positions,
        context_tokens=context_tokens,
    )
    return rope, context_tokens


def _with_axes(rope: RopeConfig, config: HfConfig, family: Family, part: TextPart | None) -> RopeConfig:
    if part is None or part.axes is None:
        return rope
    section = _rope_settings(config, family).mrope_section
    return replace(rope, axes=part.axes.of_pairs(section, rope.rotary_dim // 2))


def _window_rope(config: HfConfig, family: Family, rotary_dim: int, context_tokens: int) -> RopeConfig | None:
    """The rotary embeddings of layers with a window, if the architecture has two kinds. rope_scaling does not apply."""
    if family.window_rope_theta is None:
        return None
    settings = config.window_rope_parameters or RopeSettings()
    return compute_rope(
        settings,
        theta=settings.rope_theta or config.rope_local_base_freq or family.window_rope_theta,
        rotary_dim=rotary_dim,
        max_position_embeddings=config.max_position_embeddings,
        original_max_positions=settings.original_max_position_embeddings or config.max_position_embeddings,
        context_tokens=context_tokens,
    )


def _query_rope(config: HfConfig, family: Family, rope: RopeConfig, head_dim: int) -> RopeConfig | None:
    beta = _rope_settings(config, family).llama_4_scaling_beta
    if not family.scales_queries or not beta:
        return None
    if rope.rotary_dim != head_dim:
        raise StartupError(
            f"llama_4_scaling_beta is {beta} and {rope.rotary_dim} of {head_dim} dimensions rotate; "
            "it is supported if all do"
        )
    return replace(rope, scale=PositionScale(beta, _original_positions(config, family)))


def _num_kv_heads(config: HfConfig) -> int:
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise StartupError(
            f"num_attention_heads is {config.num_attention_heads}, "
            f"not a multiple of num_key_value_heads, {num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(config: HfConfig, family: Family) -> int:
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
    config: HfConfig, rope: RopeSettings, original_positions: int, max_context_tokens: int | None
) -> int:
    """Return the longest context. Only YaRN extends it beyond max_position_embeddings: by the factor that the operator
    adds."""
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


def read_declared_dtype(model_dir: Path) -> Dtype | None:
    """The dtype that config.json declares (dtype, formerly torch_dtype); None if it declares none."""
    values = read_json_object(model_dir / CONFIG_FILE)
    declared = values.get("dtype") or values.get("torch_dtype")
    return _DTYPES.get(declared) if isinstance(declared, str) else None


def choose_dtype(requested: str, own: Dtype, fp16_as: Dtype = Dtype.BF16) -> Dtype:
    """The dtype to compute in; "auto" is the checkpoint's own, with fp16_as for fp16. Raises StartupError."""
    match requested:
        case "bf16" | "fp32":
            return Dtype(requested)
        case "auto":
            return fp16_as if own is Dtype.FP16 else own
    raise StartupError(f"dtype is {shorten(requested)}; it must be auto, bf16 or fp32")
