"""The `PassSpec` of a decoder, from its configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.tensors import expected_tensors
from penstock.backend.forward_pass import PassSpec
from penstock.backend.passes.decoder.ops import KV_BLOCK_BYTES, KV_BLOCK_VALUES, supports_q8_0

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from penstock.backend.checkpoint.decoder_config import DecoderConfig


def make_spec(config: DecoderConfig, dtype: torch.dtype, kv_dtypes: Iterable[str]) -> PassSpec:
    """The spec of a model with weights of dtype. KV dtypes wider than the weights come last, for an explicit choice."""
    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    widths = {name: KV_BLOCK_BYTES[name] for name in kv_dtypes if name != "q8_0" or supports_q8_0(config.head_dim)}
    order = sorted(widths, key=lambda name: (widths[name] > KV_BLOCK_VALUES * dtype.itemsize, -widths[name]))
    num_weights = sum(math.prod(tensor.shape) for tensor in expected_tensors(config))
    return PassSpec(
        config.vocab_size,
        config.max_context_tokens,
        {name: values_per_token * widths[name] // KV_BLOCK_VALUES for name in order},
        num_weights * dtype.itemsize,
    )
