"""The `PassSpec` of a decoder, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.checkpoint.formats.stored_formats import PLAIN
from penstock.backend.checkpoint.quantization.modes import weight_bytes
from penstock.backend.checkpoint.quantized_weights import has_cpu_kernels
from penstock.backend.forward_pass import PassSpec
from penstock.backend.passes.decoder.ops import KV_BLOCK_BYTES, KV_BLOCK_VALUES, supports_q8_0

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.formats.stored_formats import StoredFormats
    from penstock.backend.checkpoint.quantization.modes import Quantization
    from penstock.backend.checkpoint.quantized_weights import WeightForm

_BLOCK_TOKENS = 64
"""Attention kernels read keys and values in blocks of up to this many tokens, which begin at a multiple of it: kBlock
of kernels/engine.h, kTokens of the CUDA kernels for prompts."""


def make_spec(
    config: DecoderConfig,
    dtype: torch.dtype,
    kv_dtypes: Iterable[str],
    quantization: Quantization | None = None,
    formats: StoredFormats = PLAIN,
    keeps: Callable[[WeightForm], bool] = has_cpu_kernels,
) -> PassSpec:
    """The spec of a model with weights of dtype, except those that are quantised, by us or (formats) in the checkpoint.

    KV dtypes wider than dtype come last, for an explicit choice.
    """
    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    widths = {name: KV_BLOCK_BYTES[name] for name in kv_dtypes if name != "q8_0" or supports_q8_0(config.head_dim)}
    order = sorted(widths, key=lambda name: (widths[name] > KV_BLOCK_VALUES * dtype.itemsize, -widths[name]))
    return PassSpec(
        config.vocab_size,
        config.max_context_tokens,
        {name: values_per_token * widths[name] // KV_BLOCK_VALUES for name in order},
        weight_bytes(config, dtype, quantization, formats, keeps),
        quantization="none" if quantization is None else quantization.name,
        scores_prompts=True,
        embedding_size=config.hidden_size,
        window_tokens=_window_tokens(config),
    )


def _window_tokens(config: DecoderConfig) -> int | None:
    """See `PassSpec.window_tokens`. None also if no sequence is longer than the window."""
    windows = [window for window in config.layer_window_tokens if window is not None]
    if len(windows) < config.num_layers:
        return None
    window_tokens = max(windows) + _BLOCK_TOKENS - 1
    return window_tokens if window_tokens < config.max_context_tokens else None
