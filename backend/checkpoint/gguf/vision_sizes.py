"""Transformers' settings of the vision towers of Qwen and Gemma 4, from the metadata and tensors of a GGUF file."""

from __future__ import annotations

from math import isqrt, prod
from typing import TYPE_CHECKING, Any

from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backend.checkpoint.gguf.header import GgufTensor
    from penstock.backend.checkpoint.gguf.metadata import Metadata

_FRAMES = 2
"""Frames of a patch of Qwen; files have a tensor for each."""
_WINDOW_PIXELS = 112
"""Side of a window of Qwen2.5-VL, which files do not contain."""
_LEAST_TOKENS, _MOST_TOKENS = {"qwen3_vl": 64}, 16384
"""Limits of a picture of Qwen, as in the hub's files. Types that are not named have at least 4 tokens."""


def qwen_vision(
    metadata: Metadata, tensors: Mapping[str, GgufTensor], model_type: str, vision: Mapping[str, Any]
) -> dict[str, Any]:
    """vision: the settings that all towers have. Raises StartupError naming the key or tensor."""
    width, depth = vision["hidden_size"], vision["num_hidden_layers"]
    own = {"depth": depth, "num_heads": vision["num_attention_heads"], "temporal_patch_size": _FRAMES}
    if model_type == "qwen2_vl":  # its feed_forward_length is another number
        inner, rest = divmod(prod(_shape(tensors, "v.blk.0.ffn_up.weight")), width * width)
        if rest:
            raise StartupError(f"tensor v.blk.0.ffn_up.weight is no whole number of times {width} × {width}")
        return own | {"embed_dim": width, "hidden_size": vision["out_hidden_size"], "mlp_ratio": inner}
    if model_type == "qwen2_5_vl":
        period = metadata.required("vision.n_wa_pattern")
        if not 1 <= period <= depth:
            raise StartupError(f"clip.vision.n_wa_pattern is {period}; it is from 1 to block_count, {depth}")
        return own | {"window_size": _WINDOW_PIXELS, "fullatt_block_indexes": list(range(period - 1, depth, period))}
    places = _shape(tensors, "v.position_embd.weight")[0]
    if isqrt(places) ** 2 != places:
        raise StartupError(f"tensor v.position_embd.weight has {places} rows; they are those of a square")
    flags = metadata.integers("vision.is_deepstack_layers", depth, default=0)
    indexes = [index for index, flag in enumerate(flags) if flag]
    return own | {"num_position_embeddings": places, "deepstack_visual_indexes": indexes}


def qwen_processor(model_type: str, patch_size: int, merge: int) -> dict[str, Any]:
    cell = (patch_size * merge) ** 2
    size = {"shortest_edge": _LEAST_TOKENS.get(model_type, 4) * cell, "longest_edge": _MOST_TOKENS * cell}
    return {"patch_size": patch_size, "merge_size": merge, "temporal_patch_size": _FRAMES, "size": size}


def gemma4_vision(metadata: Metadata, tensors: Mapping[str, GgufTensor], vision: Mapping[str, Any]) -> dict[str, Any]:
    """As `qwen_vision`."""
    head_dim = _shape(tensors, "v.blk.0.attn_q.weight")[0] // vision["num_attention_heads"]
    kernel = metadata.own("vision.projector.scale_factor", int) or 3
    most = vision["image_size"] // vision["patch_size"]
    if head_dim < 1 or not 2 <= kernel <= most:
        raise StartupError(
            f"clip.vision.projector.scale_factor is {kernel}, from 2 to {most}; heads have {head_dim} numbers"
        )
    return {
        "head_dim": head_dim,
        "num_key_value_heads": max(1, _shape(tensors, "v.blk.0.attn_k.weight")[0] // head_dim),
        "pooling_kernel_size": kernel,
        "position_embedding_size": _shape(tensors, "v.position_embd.weight")[1],
        "hidden_activation": vision["hidden_act"],
        "rms_norm_eps": vision["layer_norm_eps"],
        "standardize": "v.std_bias" in tensors,
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in tensors,
    }


def _shape(tensors: Mapping[str, GgufTensor], name: str) -> tuple[int, ...]:
    """Return the shape, which has at least two dimensions. Raises StartupError."""
    if name not in tensors or len(tensors[name].shape) < 2:
        raise StartupError(f"tensor {name} is missing, or a vector")
    return tensors[name].shape
