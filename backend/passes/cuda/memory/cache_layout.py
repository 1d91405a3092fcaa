"""The layout of the device's KV cache: one range of bytes, [layer][page][K | V][kv head][block].

A block is one page of one head. fp32, bf16 and fp8 (e4m3) blocks are [token][head_dim]. A q8_0 block contains all int8
values, [token][head_dim], then all fp16 scales, [token][head_dim / 32]. The numbers are GGML's; its interleaving of
values and scales is not used, because rows of values would not begin at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backend.passes.ops.interface import KV_BLOCK_BYTES, KV_BLOCK_VALUES

KV_MACRO = {"fp32": 0, "bf16": 1, "q8_0": 2, "fp8": 3}
"""Values of the macro KV_DTYPE, by KV dtype."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    num_layers: int
    num_pages: int
    page_size_tokens: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head, keys or values only, including scales."""
        return self.head_dim * KV_BLOCK_BYTES[self.kv_dtype] // KV_BLOCK_VALUES

    @property
    def block_bytes(self) -> int:
        return self.page_size_tokens * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return 2 * self.num_kv_heads * self.block_bytes

    @property
    def layer_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.layer_bytes
