"""Orders of the rows of matrices: maps each row that the operations expect to its row in the checkpoint."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, DeltaNet


def qkv_order(config: DecoderConfig) -> NDArray[np.int64] | None:
    """The order of q, k and v; None if it is the checkpoint's."""
    if config.gated_attention:
        return _gates_last(config)
    return rotate_half_order(config) if config.interleaved_rope else None


def rotate_half_order(config: DecoderConfig) -> NDArray[np.int64]:
    """Map each row of q, k and v to its row in a checkpoint with interleaved rotation.

    Scores do not change if q and k are reordered alike; v keeps its order.
    """
    rotary_dim, head_dim = config.rope.rotary_dim, config.head_dim
    in_head = np.concatenate(
        [np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2), np.arange(rotary_dim, head_dim)]
    )
    num_turned, num_kv_heads = config.num_heads + config.num_kv_heads, config.num_kv_heads
    turned = np.arange(num_turned)[:, None] * head_dim + in_head
    values = np.arange(num_turned * head_dim, (num_turned + num_kv_heads) * head_dim)
    return np.concatenate([turned.flatten(), values])


def _gates_last(config: DecoderConfig) -> NDArray[np.int64]:
    """[q and its gate of each head | k | v] to [q | gates | k | v]."""
    num_rows = 2 * config.num_heads * config.head_dim
    others = np.arange(num_rows, num_rows + 2 * config.num_kv_heads * config.head_dim)
    return np.concatenate([_by_part(config.num_heads, [config.head_dim] * 2), others])


def delta_in_order(config: DecoderConfig, net: DeltaNet) -> NDArray[np.int64] | None:
    """[q, k, v and gates of each key head] to [q | k | v | gates] of all; None if they are separate already."""
    if len(config.names.delta_in) > 1:
        return None
    values = net.values_per_key * net.value_dim
    return _by_part(net.num_key_heads, [net.key_dim, net.key_dim, values, values])


def delta_gates_order(config: DecoderConfig, net: DeltaNet) -> NDArray[np.int64] | None:
    """As `delta_in_order`, of [strengths | decays]."""
    return _by_part(net.num_key_heads, [net.values_per_key] * 2) if len(config.names.delta_gates) == 1 else None


def _by_part(num_groups: int, sizes: list[int]) -> NDArray[np.int64]:
    """Groups of parts of these sizes to parts of all groups."""
    rows = np.arange(num_groups * sum(sizes)).reshape(num_groups, -1)
    return np.concatenate([part.flatten() for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)])
