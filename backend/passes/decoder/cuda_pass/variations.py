"""Variations of models that the kernels do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig


def unsupported_variation(config: DecoderConfig) -> str | None:
    """Return the first variation of the model that the kernels do not have, or None."""
    has_output_norms = bool(config.names.attention_output_norm or config.names.mlp_output_norm)
    variations = {
        "layer norms of what attention and MLP add": config.norm == "layer" and has_output_norms,
        "layer norms of q and k without a weight for each head": config.norm == "layer"
        and config.qk_norm in ("head", "projection"),
        "RMS norms of q and k with a weight for each head": config.norm == "rms" and config.qk_norm == "each head",
        "several residual streams": config.streams is not None,
        "heads of several sizes or shared keys without norms of values": not config.norms_values
        and (config.full_heads is not None or config.num_shared_layers > 0),
        "inputs of layers without GELU": config.layer_input_size > 0 and config.activation != "gelu_tanh",
        "SiLU in an MLP without a gate": config.mlp == "plain" and config.activation != "gelu_tanh",
    }
    return next((name for name, is_present in variations.items() if is_present), None)
