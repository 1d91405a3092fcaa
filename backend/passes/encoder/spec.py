"""The `PassSpec` of an encoder, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.forward_pass import PassSpec

if TYPE_CHECKING:
    import torch

    from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig


def make_spec(config: EncoderConfig, dtype: torch.dtype, quantize: str) -> PassSpec:
    return PassSpec(
        config.vocab_size,
        config.max_context_tokens,
        {},
        weight_bytes(config, dtype, quantize),
        quantization=quantize,
        pooled={head.kind: head.width(config.hidden_size) for head in config.heads},
        generates=False,
    )


def weight_bytes(config: EncoderConfig, dtype: torch.dtype, quantize: str) -> int:
    """Memory of the loaded weights, without norms and biases."""
    hidden, item = config.hidden_size, dtype.itemsize
    tables = (config.vocab_size + config.num_positions + config.num_token_types) * hidden
    by_position = 4 * 2 * 2 * config.relative_span * hidden * config.num_layers  # queries and keys in fp32
    linears = config.num_layers * (4 * hidden + (2 + config.is_gated) * config.intermediate_size) * hidden
    heads = sum(layer.inputs * layer.outputs for head in config.heads for layer in head.layers)
    return by_position + (tables + heads) * item + linears * (1 if quantize == "int8" else item)
