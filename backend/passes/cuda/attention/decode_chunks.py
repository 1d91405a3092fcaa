"""How decode attention cuts a context into chunks and tiles."""

from __future__ import annotations

NUM_WARPS = 4
"""Warps of a block. They take a chunk's tiles in turn."""
NUMBER_BYTES = {"fp32": 4, "bf16": 2, "q8_0": 1, "fp8": 1}
"""Bytes of a key's or value's number, without scales."""
_BLOCKS_TO_FILL_A_DEVICE = 256
_FEWEST_CHUNKS = 16


def tile_tokens(kv_dtype: str) -> int:
    """Return kTileTokens of kernels/decode_tiles.cuh."""
    return 32 // NUMBER_BYTES[kv_dtype]


def most_chunks(num_kv_heads: int) -> int:
    """Return the most chunks of a row: enough to fill a device with one long row."""
    return max(_FEWEST_CHUNKS, -(-_BLOCKS_TO_FILL_A_DEVICE // num_kv_heads))


def chunk_tokens(num_tokens: int, num_kv_heads: int, shortest: int) -> int:
    """Return the tokens of a row's chunks: shortest, doubled until there are at most `most_chunks`."""
    found = shortest
    while -(-num_tokens // found) > most_chunks(num_kv_heads):
        found *= 2
    return found
