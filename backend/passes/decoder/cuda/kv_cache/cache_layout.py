"""Where the keys and values lie in the device's KV cache: one range of bytes, [layer][page][K | V][kv head][block].

A block is one page of one head. fp32, bf16 and fp8 (e4m3) blocks are [token][head_dim]. A q8_0 block has all int8
values first, [token][head_dim], then all fp16 scales, [token][head_dim / 32]: GGML's numbers, but not its interleaving
of the two, under which no row of values would begin at a multiple of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backend.passes.decoder.ops import KV_BLOCK_BYTES, KV_BLOCK_VALUES

KV_MACRO = {"fp32": 0, "bf16": 1, "q8_0": 2, "fp8": 3}
"""Values of the macro KV_DTYPE."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All sizes in bytes unless the name says otherwise."""

    num_layers: int
    num_pages: int
    page_size_tokens: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str

    @property
    def row_bytes(self) -> int:
        """One token of one head, keys or values alone, scales included."""
        return self.head_dim * KV_BLOCK_BYTES[self.kv_dtype] // KV_BLOCK_VALUES

    @property
    def block_bytes(self) -> int:
        return self.page_size_tokens * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """One page of one layer."""
        return 2 * self.num_kv_heads * self.block_bytes

    @property
    def layer_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.layer_bytes
