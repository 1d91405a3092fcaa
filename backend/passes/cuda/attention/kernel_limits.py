"""Checks which shapes the attention kernels support, and where the segments of a long context begin."""

from __future__ import annotations

import math

from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.ops.interface import KV_BLOCK_VALUES, supports_q8_0

MAX_CONTEXT_TOKENS = 1 << 24
SHORTEST_SEGMENT_TOKENS = 2048
ENOUGH_BLOCKS = 1024
"""Blocks that fill any device. A step with this many tiles is not cut further."""


def segment_starts() -> list[int]:
    """Return the first positions of all segments, as in kernels/prefill/prefill_segments.cuh."""
    starts, step = [], SHORTEST_SEGMENT_TOKENS
    position = 0
    while position < MAX_CONTEXT_TOKENS:
        starts.append(position)
        step = max(step, 1 << (position.bit_length() - 3)) if position else step
        position += step
    return starts


HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_GROUP = 16
"""Most query heads that share a KV head."""
PAGE_SIZES_TOKENS = (16, 32, 64)


def check_shape(layout: CacheLayout, num_heads: int) -> None:
    """Raises ValueError for a shape that no kernel supports."""
    _require_one_of("head_dim", layout.head_dim, HEAD_DIMS)
    _require_one_of("kv_dtype", layout.kv_dtype, tuple(KV_MACRO))
    _require_one_of("page_size_tokens", layout.page_size_tokens, PAGE_SIZES_TOKENS)
    if layout.kv_dtype == "q8_0" and not supports_q8_0(layout.head_dim):
        raise ValueError(f"head_dim is {layout.head_dim}; a q8_0 cache needs a multiple of {KV_BLOCK_VALUES}")
    group, rest = divmod(num_heads, layout.num_kv_heads)
    if rest or not 1 <= group <= MAX_GROUP:
        raise ValueError(
            f"{num_heads} heads share {layout.num_kv_heads} KV heads; each KV head must have the same number of heads, "
            f"1 to {MAX_GROUP}"
        )


def check_logits(scale: float, window_tokens: int, softcap: float) -> None:
    """Raises ValueError for settings that do not give finite logits."""
    require("window_tokens", window_tokens, 0, MAX_CONTEXT_TOKENS)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be finite and above 0")
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap is {softcap}; it must be finite and at least 0")


def require(name: str, value: int, least: int, most: int) -> None:
    """Raises ValueError unless value is between least and most."""
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must be {least} to {most}")


def _require_one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value}; it must be one of {', '.join(map(str, choices))}")
