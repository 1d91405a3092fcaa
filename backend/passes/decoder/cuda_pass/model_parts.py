"""Which variations of models the kernels have, and the layouts of the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.passes.ops.layer_groups import LayerGroups


def unsupported_variation(config: DecoderConfig) -> str | None:
    """Return the first variation of the model that the kernels do not have, or None."""
    has_output_norms = bool(config.names.attention_output_norm or config.names.mlp_output_norm)
    variations = {
        "layer norms of what attention and MLP add": config.norm == "layer" and has_output_norms,
        "layer norms of q and k without a weight for each head": config.norm == "layer"
        and config.qk_norm in ("head", "projection"),
        "RMS norms of q and k with a weight for each head": config.norm == "rms" and config.qk_norm == "each head",
        "heads of several sizes or shared keys without norms of values": not config.norms_values
        and (config.full_heads is not None or config.num_shared_layers > 0),
        "inputs of layers without GELU": config.layer_input_size > 0 and config.activation != "gelu_tanh",
        "SiLU in an MLP without a gate": config.mlp == "plain" and config.activation != "gelu_tanh",
    }
    return next((name for name, is_present in variations.items() if is_present), None)


def make_layout(
    config: DecoderConfig, num_pages: int, page_size_tokens: int, kv_dtype: str, groups: LayerGroups | None = None
) -> CacheLayout:
    """num_pages: of all groups of layers; by default there is one."""
    num_layers = config.num_layers if groups is None else groups.num_layers
    if config.full_heads is not None:
        num_layers = config.num_layers - config.num_shared_layers
        num_layers -= sum(map(config.has_full_heads, range(num_layers)))
    return CacheLayout(num_layers, num_pages, page_size_tokens, config.num_kv_heads, config.head_dim, kv_dtype)


def make_full_layout(config: DecoderConfig, layout: CacheLayout) -> CacheLayout | None:
    """Return the layout of layers with `DecoderConfig.full_heads`, beside that of the others."""
    if config.full_heads is None:
        return None
    num_layers = sum(map(config.has_full_heads, range(config.num_layers - config.num_shared_layers)))
    num_kv_heads, head_dim = config.full_heads
    return replace(layout, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
