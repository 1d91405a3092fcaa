"""The models that the native kernels run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.backend.passes.ops.layer_groups import LayerGroups, layer_groups, one_group

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.forward_pass import PassOptions


def unsupported_by_kernels(config: DecoderConfig) -> str | None:
    """Return why the kernels cannot run this model, or None. They need heads of whole vectors and even input sizes."""
    for head_dim in (config.head_dim, *(config.full_heads or ())[1:]):
        if head_dim % 16 or head_dim > 1024:
            return f"heads of {head_dim}; they have heads of a multiple of 16, up to 1024"
    for name in ("hidden_size", "intermediate_size", "layer_input_size"):
        if getattr(config, name) % 2:
            return f"an odd {name}, {getattr(config, name)}"
    if config.experts is not None:
        for name, width in (("width", config.experts.width), ("shared_width", config.experts.shared_width or 0)):
            if width % 2:
                return f"experts of an odd {name}, {width}"
    if config.streams is not None and config.streams.laurel_rank % 2:
        return f"an odd laurel_rank, {config.streams.laurel_rank}"
    net = config.delta_net
    if net is not None and (net.key_dim % 16 or net.value_dim % 16):
        return f"a delta rule's heads of {net.key_dim} and {net.value_dim}; they have multiples of 16"
    if config.mlp == "plain" and config.activation != "gelu_tanh":
        return f"{config.activation} in an MLP without a gate"
    return None


def supports_native_ops(config: DecoderConfig) -> bool:
    return unsupported_by_kernels(config) is None


def with_usable_head(config: DecoderConfig) -> DecoderConfig:
    """Without a head that predicts further tokens if the model runs on torch, which cannot use it."""
    return config if supports_native_ops(config) else replace(config, has_mtp=False)


def cpu_groups(config: DecoderConfig, options: PassOptions) -> LayerGroups:
    """In torch layers of different sizes share no pages."""
    shares = config.full_heads is None or supports_native_ops(config)
    return layer_groups(config, options) if shares else one_group(config)
