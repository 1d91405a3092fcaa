"""Which layers of a hybrid model have a gated delta rule in place of attention, and their sizes, from config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.checkpoint.config.decoder_config import DeltaNet
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.architectures.hf_config import HfConfig, LayerType


def attention_alone(config: HfConfig) -> DeltaNet | None:
    """The rule of all other architectures."""
    if config.layer_types is not None and "linear_attention" in config.layer_types:
        raise StartupError("layer_types has linear_attention; this architecture is supported without it only")
    return None


def delta_layers(config: HfConfig) -> DeltaNet | None:
    """The rule of Qwen3-Next and Qwen3.5: every full_attention_interval-th layer has attention."""
    count, interval = config.num_hidden_layers, config.full_attention_interval
    types: tuple[LayerType, ...] = config.layer_types or tuple(
        "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
    )
    if len(types) != count:
        raise StartupError(f"layer_types has {len(types)} entries for {count} layers")
    if "sliding_attention" in types or "full_attention" not in types:
        raise StartupError(
            "layer_types must be full_attention for at least one layer and linear_attention for the others"
        )
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise StartupError(
            f"linear_num_value_heads is {config.linear_num_value_heads}, not a multiple of linear_num_key_heads, "
            f"{config.linear_num_key_heads}"
        )
    return DeltaNet(
        layers=tuple(kind == "linear_attention" for kind in types),
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        tiles_key_heads=config.tiled_key_heads,
        has_log_decay=not config.plain_decay,
    )
