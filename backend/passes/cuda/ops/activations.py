"""The buffers of a step's activations: their widths and their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.passes.cuda.ops.matmul import Matmul
from penstock.backend.passes.ops.interface import HeadShape


class Residual:
    """The residual stream: values [T, hidden] fp32, plus pending [T, hidden] in the weights' dtype unless None."""

    __slots__ = ("pending", "values")

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.pending: Tensor | None = None

    def add_pending(self) -> None:
        """Add the pending product, unless a norm has added it."""
        if self.pending is not None:
            self.values.add_(self.pending)
            self.pending = None


@dataclass(frozen=True, slots=True)
class Activations:
    """Buffers of a step, one row per token."""

    residual: Tensor
    hidden: Tensor
    """After a norm."""
    qkv: Tensor
    attended: Tensor
    added: Tensor
    """Output of a matrix product that the next norm adds to the residual stream."""
    gate_up: Tensor
    """Wide enough for the widest MLP; see `narrow`. As the next one."""
    gated: Tensor

    def cut(self, num_tokens: int) -> Activations:
        return Activations(*(getattr(self, name)[:num_tokens] for name in Activations.__slots__))


def narrow(buffer: Tensor, width: int) -> Tensor:
    """Return the same number of rows with a smaller width, stored one after the other."""
    rows, full_width = buffer.shape
    return buffer if full_width == width else buffer.view(-1)[: rows * width].view(rows, width)


def mlp_widths(config: DecoderConfig) -> dict[str, int]:
    """Name → width of each kind of MLP in the model's layers, except the experts that tokens choose."""
    widths = {}
    layers = range(config.num_layers)
    if config.has_experts_beside or any(config.experts_of_layer(index) is None for index in layers):
        widths["intermediate_size"] = max(map(config.mlp_width_of_layer, layers))
    if config.experts is not None and config.experts.shared_width is not None:
        widths["shared_expert_intermediate_size"] = config.experts.shared_width
    return widths


def activation_widths(config: DecoderConfig) -> dict[str, int]:
    """Return the number of values per token in each buffer of `Activations`."""
    intermediate = max(mlp_widths(config).values(), default=0)
    projected, mixed = zip(*map(config.mixer_widths, range(config.num_layers)), strict=True)
    return {
        "residual": config.hidden_size,
        "hidden": config.hidden_size,
        "qkv": max(projected),
        "attended": max(mixed),
        "added": config.hidden_size,
        "gate_up": (1 if config.mlp == "plain" else 2) * intermediate,
        "gated": intermediate,
    }


def max_linear_inputs(config: DecoderConfig) -> int:
    """Return the most inputs of a linear, except in the experts that tokens choose."""
    return max(activation_widths(config)[name] for name in ("hidden", "attended", "gated"))


def activation_bytes(config: DecoderConfig, dtype: torch.dtype, max_tokens: int, max_rows: int, matmul: Matmul) -> int:
    """Upper bound of `CudaOps`' memory, without the cache, the experts and the weights that keep their dtype."""
    widths, heads = activation_widths(config), head_shape(config)
    per_token = sum(widths.values()) * dtype.itemsize + widths["residual"] * (4 - dtype.itemsize)
    per_row = widths["residual"] * 4 + widths["qkv"] * dtype.itemsize
    logits = matmul.padded_rows(max_rows) * (config.logits_width + config.hidden_size) * dtype.itemsize
    per_layer = (4 * config.hidden_size + heads.qkv_size) * 2  # in fp32; the factor is a layer norm's bias
    norms = config.num_layers * per_layer + 2 * config.hidden_size
    if config.rope.axes:
        per_token += 4 * config.rope.rotary_dim
    if config.picture_layers:
        per_token += 4 * config.hidden_size
    return matmul.padded_rows(max_tokens) * per_token + max_rows * per_row + logits + 4 * norms + 16


def head_shape(config: DecoderConfig) -> HeadShape:
    return HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
