"""Reads the vision part of a model from the GGUF file that llama.cpp calls mmproj: as transformers' config and names.

Pictures are then processed as transformers does it, which differs from llama.cpp in the resizing of some families.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.architectures.hf_config import MAX_LAYERS
from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.gguf.config import DEEPSTACK
from penstock.backend.checkpoint.gguf.header import read_header
from penstock.backend.checkpoint.gguf.metadata import Metadata
from penstock.backend.checkpoint.gguf.vision_sizes import gemma4_vision, qwen_processor, qwen_vision
from penstock.backend.checkpoint.sources.gguf_files import find_projectors
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.backend.checkpoint.gguf.header import GgufTensor

logger = logging.getLogger("penstock.backend")

VISION_KEY = "vision_model"
"""Return transformers' config of the vision part for config.json; of the text model it has only the hidden_size."""
PROJECTOR_FILE = "vision/mmproj.gguf"
"""In the generated directory."""
_MAX_SIZE = 1 << 16
_TEXT = {
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 8,
}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A value of clip.projector_type."""

    model_type: str
    architecture: str
    text_type: str
    vision_type: str
    names: Mapping[str, str]
    """Beginnings of names of the projector's tensors: transformers' → the file's."""
    eps: float


_MLP = {"linear_1": "mm.0", "linear_2": "mm.2"}
_PIXTRAL = {
    "linear_1": "mm.1",
    "linear_2": "mm.2",
    "norm": "mm.input_norm",
    "patch_merger.merging_layer": "mm.patch_merger",
}
_LLAVA = _Kind("llava", "LlavaForConditionalGeneration", "llama", "clip_vision_model", _MLP, 1e-5)
_KINDS = {
    "idefics3": _Kind("smolvlm", "SmolVLMForConditionalGeneration", "llama", "smolvlm_vision", {}, 1e-6),
    "gemma3": _Kind(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        "siglip_vision_model",
        {"mm_input_projection_weight": "mm.input_projection.weight", "mm_soft_emb_norm": "mm.soft_emb_norm"},
        1e-6,
    ),
    "internvl": _Kind(
        "internvl",
        "InternVLForConditionalGeneration",
        "qwen2",
        "internvl_vision",
        {"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3"},
        1e-6,
    ),
    "mlp": _LLAVA,
    "pixtral": _Kind("llava", "LlavaForConditionalGeneration", "mistral", "pixtral", _PIXTRAL, 1e-5),
    "mistral3": _Kind("mistral3", "Mistral3ForConditionalGeneration", "mistral", "pixtral", _PIXTRAL, 1e-5),
    "qwen2vl_merger": _Kind(
        "qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text", "qwen2_vl_vision", {}, 1e-6
    ),
    "qwen2.5vl_merger": _Kind(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "qwen2_5_vl_vision", {}, 1e-6
    ),
    "qwen3vl_merger": _Kind(
        "qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text", "qwen3_vl_vision", {}, 1e-6
    ),
    "gemma4v": _Kind("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text", "gemma4_vision", {}, 1e-6),
}
_RENAMED = (
    (r"connector\.modality_projection\.proj", "mm.model.fc"),
    (r"embed_vision\.embedding_projection", "mm.input_projection"),
    (r"visual\.merger\.(?:ln_q|norm)\.", "v.post_ln."),
    (r"visual\.merger\.(?:mlp\.0|linear_fc1)", "mm.0"),
    (r"visual\.merger\.(?:mlp\.2|linear_fc2)", "mm.2"),
    (r"(?<=deepstack)(\.\d+\.)linear_", r"\1"),
    (r"vision_(?:model|tower)\.|visual\.", "v."),
    (r"embeddings\.patch_embedding(?:s\.projection)?|patch_conv|patch_embed(?:der\.input_|\.)proj", "patch_embd"),
    (r"embeddings\.position_embeddings$|patch_embedder\.position_embedding_table", "position_embd.weight"),
    (r"embeddings\.position_embedding|pos_embed", "position_embd"),
    (r"embeddings\.(?:class_embedding|cls_token)", "class_embd"),
    (r"pre_layrnorm|ln_pre", "pre_ln"),
    (r"post_layernorm", "post_ln"),
    (r"(?:encoder|transformer)\.layers?\.|blocks\.", "blk."),
    (r"layer_norm1|layernorm_before|attention_norm|input_layernorm|(?<=\d\.)norm1", "ln1"),
    (r"layer_norm2|layernorm_after|ffn_norm|pre_feedforward_layernorm|(?<=\d\.)norm2", "ln2"),
    (r"post_attention_layernorm", "attn_post_norm"),
    (r"post_feedforward_layernorm", "ffn_post_norm"),
    (r"(?:self_attn|attention)\.(?:out_proj|o_proj|projection_layer)|attn\.proj", "attn_out"),
    (r"attn\.qkv", "attn_qkv"),
    (r"(?:self_attn|attention)\.(q_norm|k_norm)", r"attn_\1"),
    (r"(?:self_attn|attention)\.([qkv])_proj", r"attn_\1"),
    (r"mlp\.(?:linear_)?fc1", "ffn_up"),
    (r"mlp\.(?:linear_)?fc2", "ffn_down"),
    (r"(?:mlp|feed_forward)\.(gate|up|down)_proj", r"ffn_\1"),
    (r"\.linear\.", "."),
    (r"lambda_([12])$", r"ls\1.weight"),
)
_DEEPSTACK_PART = re.compile(r"visual\.deepstack_merger_list\.(\d+)\.")
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


@dataclass(frozen=True, slots=True)
class Projector:
    """The generated files' content, by name; and what config.json gets."""

    config: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)


def find_projector(model: Path) -> Path | None:
    """The file with mmproj in its name beside a model's that fits it, of a type that is read; None without one."""
    sizes = {path.name: path.stat().st_size for path in model.parent.glob("*.gguf")}
    for path in map(model.parent.__truediv__, find_projectors(sizes)):
        try:
            metadata = Metadata(read_header(model, keeps_arrays=False).metadata)
            text = {"hidden_size": metadata.required("embedding_length"), DEEPSTACK: metadata.own(DEEPSTACK, int)}
            read_projector(path, text)
        except StartupError as error:
            logger.warning("pictures are not taken: %s", error)
            continue
        return path
    return None


def read_projector(path: Path, text: Mapping[str, Any]) -> Projector:
    """text: config.json of the text model. Raises StartupError."""
    header = read_header(path)
    try:
        return _read(Metadata(header.metadata), header.tensors, text)
    except StartupError as error:
        raise StartupError(f"{path}: {error}") from None


def _read(metadata: Metadata, tensors: Mapping[str, GgufTensor], text: Mapping[str, Any]) -> Projector:
    hidden_size = text["hidden_size"]
    key = "clip.vision.projector_type" if metadata.get("clip.projector_type", str) is None else "clip.projector_type"
    name = metadata.get(key, str)
    if name not in _KINDS or name == "mistral3":
        known = ", ".join(kind for kind in _KINDS if kind != "mistral3")
        raise StartupError(f"{key} is {shorten(name)}; supported are {known}")
    if "model.image_newline" in tensors:
        raise StartupError(
            "tensor model.image_newline is of LLaVA 1.6, which cuts pictures into tiles; 1.5 is supported"
        )
    merge = _size(metadata, "spatial_merge_size", 2 if str(name).startswith("qwen") else 1)
    kind = _KINDS["mistral3" if name == "pixtral" and merge > 1 else name]
    bias = tensors.get("mm.2.bias") if name == "mlp" else None
    projected = _size(metadata, "projection_dim") if bias is None else bias.shape[0]  # of LLaVA the key is CLIP's own
    if projected != hidden_size:
        raise StartupError(f"its embeddings have {projected} numbers; the model's embedding_length is {hidden_size}")
    side, patch, layers = (_size(metadata, key) for key in ("image_size", "patch_size", "block_count"))
    if layers > MAX_LAYERS or any(tensor.startswith(f"v.blk.{layers}.") for tensor in tensors):
        raise StartupError(
            f"clip.vision.block_count is {layers}; the file has more layers, or the limit is {MAX_LAYERS}"
        )
    eps = metadata.own("vision.attention.layer_norm_epsilon", float) or kind.eps
    if not 0 < eps < 1:
        raise StartupError(f"clip.vision.attention.layer_norm_epsilon is {eps}; it is between 0 and 1")
    vision: dict[str, Any] = {
        "model_type": kind.vision_type,
        "hidden_size": _size(metadata, "embedding_length"),
        "intermediate_size": _size(metadata, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": _size(metadata, "attention.head_count"),
        "image_size": side,
        "patch_size": patch,
        "layer_norm_eps": eps,
        "hidden_act": _activation(metadata, kind),
    }
    if vision["hidden_size"] % vision["num_attention_heads"] or patch > side:
        raise StartupError(
            f"clip.vision.embedding_length is {vision['hidden_size']}, patch_size {patch}; the first is a multiple of "
            f"attention.head_count, {vision['num_attention_heads']}, the other at most image_size, {side}"
        )
    config, processor, image = _parts(metadata, tensors, kind, vision, merge, hidden_size)
    whole = {
        "model_type": kind.model_type,
        "architectures": [kind.architecture],
        "vision_config": vision,
        "text_config": _text_config(kind, vision, text),
        **config,
    }
    image |= {
        "image_mean": metadata.numbers("vision.image_mean", 3),
        "image_std": metadata.numbers("vision.image_std", 3),
    }
    return Projector(
        {VISION_KEY: whole, "vision_config": vision},
        {"preprocessor_config.json": json.dumps(image), "processor_config.json": json.dumps(processor)},
    )


def _text_config(kind: _Kind, vision: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    added, layers = len(vision.get("deepstack_visual_indexes", ())), text.get(DEEPSTACK) or 0
    if added != layers:
        raise StartupError(f"clip.vision.is_deepstack_layers has {added} layers; the model's {DEEPSTACK} is {layers}")
    own = {key: text[key] for key in ("hidden_size", "use_bidirectional_attention") if key in text}
    return _TEXT | own | {"model_type": kind.text_type}


def _parts(
    metadata: Metadata,
    tensors: Mapping[str, GgufTensor],
    kind: _Kind,
    vision: dict[str, Any],
    merge: int,
    hidden_size: int,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The family's keys of the config, of the processor's settings and of the image processor's."""
    side, patch = vision["image_size"], vision["patch_size"]
    scale = _size(metadata, "projector.scale_factor", 4 if kind.model_type == "gemma3" else 2)
    if side // patch % scale and kind.model_type in ("smolvlm", "gemma3", "internvl"):
        raise StartupError(
            f"clip.vision.projector.scale_factor is {scale}; it must divide {side // patch} patches a side"
        )
    per_side = side // patch // scale
    square: dict[str, Any] = {"size": {"height": side, "width": side}}
    match kind.model_type:
        case "smolvlm":
            longest = _size(metadata, "preproc_image_size", 4 * side)
            sizes = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
            return {"scale_factor": scale}, {"image_seq_len": per_side**2}, sizes
        case "gemma3":
            vision["vision_use_head"] = False
            return {"mm_tokens_per_image": per_side**2}, {"image_seq_length": per_side**2}, square
        case "internvl":
            vision |= {"image_size": [side, side], "patch_size": [patch, patch], "norm_type": "layer_norm"}
            most = _size(metadata, "preproc_max_tiles", 12)
            config: dict[str, Any] = {"downsample_ratio": 1 / scale, "vision_feature_layer": -1}
            return config, {"image_seq_length": per_side**2}, square | {"max_patches": most}
        case "gemma4":
            vision |= gemma4_vision(metadata, tensors, vision)
            cells = {"patch_size": patch, "pooling_kernel_size": vision["pooling_kernel_size"]}
            return {"audio_config": None}, {}, cells
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl":
            vision |= {"spatial_merge_size": merge, "out_hidden_size": hidden_size}
            vision |= qwen_vision(metadata, tensors, kind.model_type, vision)
            return {}, {}, qwen_processor(kind.model_type, patch, merge)
    if kind.vision_type == "pixtral":
        vision["head_dim"] = vision["hidden_size"] // vision["num_attention_heads"]
        config = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "spatial_merge_size": merge}
        size = {"size": {"longest_edge": side}, "patch_size": patch}
        return config, {"patch_size": patch, "spatial_merge_size": merge}, size
    # The file lacks the layer behind the one whose results are used.
    config = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    settings = {"patch_size": patch, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return config, settings, {"size": {"shortest_edge": side}, "crop_size": square["size"]}


def _activation(metadata: Metadata, kind: _Kind) -> str:
    if metadata.get("clip.use_silu", bool):
        return "silu"
    if kind.model_type in ("smolvlm", "gemma3", "gemma4", "qwen3_vl"):
        return "gelu_pytorch_tanh"
    return "gelu" if metadata.get("clip.use_gelu", bool) else "quick_gelu"


def _size(metadata: Metadata, key: str, default: int | None = None) -> int:
    """default: of a file without the key, or with 0."""
    value = metadata.required(f"vision.{key}") if default is None else metadata.own(f"vision.{key}", int) or default
    if not 1 <= value <= _MAX_SIZE:
        raise StartupError(f"clip.vision.{key} is {value}; it is from 1 to {_MAX_SIZE}")
    return value


def projector_name(name: str, config: Any, *, is_swapped: bool = False) -> str:
    """The file's name of a tensor of transformers' model. is_swapped: as old converters name them, up is down."""
    types = config.model_type, config.vision_config.model_type
    own = next(kind.names for kind in _KINDS.values() if (kind.model_type, kind.vision_type) == types)
    if name.startswith("multi_modal_projector."):
        part = name.removeprefix("multi_modal_projector.")
        begin = next((begin for begin in own if part == begin or part.startswith(f"{begin}.")), part)
        return own.get(begin, begin) + part.removeprefix(begin)
    if (found := _DEEPSTACK_PART.match(name)) is not None:
        name = f"visual.deepstack.{config.vision_config.deepstack_visual_indexes[int(found[1])]}.{name[found.end() :]}"
    for pattern, new in _RENAMED:
        name = re.sub(pattern, new, name)
    return re.sub(r"ffn_(?:up|down)", lambda own: _SWAPPED[own[0]], name) if is_swapped else name


def is_rotated(name: str, vision_type: str) -> bool:
    """Whether rows of a tensor are stored so that neighbours rotate together."""
    return vision_type == "pixtral" and re.search(r"\.attn_[qk]\.", name) is not None
