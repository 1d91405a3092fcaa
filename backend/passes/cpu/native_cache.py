"""The memory of the paged KV cache of the C++ kernels, and the layers' structs that point to it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.passes.cpu.library.native_structs import Attention
from penstock.backend.passes.cpu.weight_memory.anonymous import map_memory
from penstock.backend.passes.ops.interface import KV_BLOCK_BYTES, KV_BLOCK_VALUES
from penstock.backend.passes.ops.layer_groups import unit_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.passes.ops.interface import AttentionLayer


class NativeCache:
    def __init__(self, config: DecoderConfig, rope_begins: tuple[int, ...]) -> None:
        """rope_begins: where the numbers of each rope begin in a row of the table."""
        self._unit_values = unit_values(config)
        self._is_mixed = config.full_heads is not None
        self._rope_begins = rope_begins
        self._layers: dict[int, Attention] = {}
        self._page_bytes = 0
        """From one page of an array to the next."""
        self._unit_bytes = 0
        """The bytes of a layer's page, or of a unit of `LayerGroups`."""
        self.arrays: list[NDArray[np.uint8]] = []
        """One per layer, uint8 [num_pages, bytes of a page]; its layout: kernels/attention/paged_cache.h. If layers
        have different sizes, one for all together."""

    def create(self, num_layers: int, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        self._unit_bytes = self._unit_values * page_size_tokens * KV_BLOCK_BYTES[kv_dtype] // KV_BLOCK_VALUES
        num_arrays, units = (1, num_layers) if self._is_mixed else (num_layers, 1)
        self._page_bytes = units * self._unit_bytes
        memory = map_memory(num_arrays * num_pages * self._page_bytes)
        self.arrays = list(np.frombuffer(memory, np.uint8).reshape(num_arrays, num_pages, self._page_bytes))
        self._layers.clear()

    def save(self, page: int, content: NDArray[np.uint8]) -> None:
        np.concatenate([layer[page] for layer in self.arrays], out=content)

    def restore(self, page: int, content: NDArray[np.uint8]) -> None:
        for layer, part in zip(self.arrays, content.reshape(len(self.arrays), -1), strict=True):
            layer[page] = part

    def release(self) -> None:
        self._layers.clear()
        self.arrays = []

    def attention_of(self, layer: AttentionLayer) -> int:
        """Return the address of the layer's struct."""
        struct = self._layers.get(layer.index)
        if struct is None:
            query_rope, key_rope = (-1 if rope is None else self._rope_begins[rope] for rope in layer.ropes)
            index, offset = divmod(layer.cache_index * self._unit_bytes, self._page_bytes)
            struct = self._layers[layer.index] = Attention(
                cache=self.arrays[index].ctypes.data + offset,
                page_bytes=self._page_bytes,
                group=layer.group,
                q_norm=_address(layer.q_norm),
                k_norm=_address(layer.k_norm),
                v_norm=_address(layer.v_norm),
                sinks=_address(layer.sinks),
                window=layer.window_tokens or 0,
                first_key=layer.first_key,
                query_rope=query_rope,
                key_rope=key_rope,
                has_other_heads=layer.has_full_heads,
                stores=layer.source is None,
                sees_ahead=layer.sees_ahead,
            )
        return ctypes.addressof(struct)


def _address(vector: NDArray[np.float32] | None) -> int | None:
    return None if vector is None else vector.ctypes.data
