"""The tensors of an encoder: their names and shapes in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backend.checkpoint.tensors import TensorSpec

if TYPE_CHECKING:
    from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig, HeadLayer


def table_specs(config: EncoderConfig, prefix: str) -> dict[str, TensorSpec]:
    """By the name of `EncoderWeights.table`."""
    names, hidden = config.names, config.hidden_size
    tables = {
        "words": (names.words, config.vocab_size, hidden),
        "positions": (names.positions, config.num_positions, hidden),
        "token_types": (names.token_types, config.num_token_types, hidden),
        "relative_bias": (names.relative_bias, config.num_relative_buckets, config.num_heads),
    }
    return {
        table: TensorSpec(f"{prefix}{name}.weight", (rows, width))
        for table, (name, rows, width) in tables.items()
        if rows
    }


def layer_specs(config: EncoderConfig, prefix: str, index: int) -> dict[str, tuple[TensorSpec, ...]]:
    """Field of EncoderLayerWeights → the checkpoint's tensors that are stacked into it, in order; () for none."""
    names = config.names
    start, hidden, width = prefix + names.layer.format(index), config.hidden_size, config.intermediate_size
    linears = {
        "qkv": (names.qkv, 3 * hidden, hidden, config.qkv_bias),
        "output": ((names.output,), hidden, hidden, config.output_bias),
        "mlp_in": (names.mlp_in, (1 + config.is_gated) * width, hidden, config.mlp_in_bias),
        "mlp_out": ((names.mlp_out,), hidden, width, config.mlp_out_bias),
    }
    specs: dict[str, tuple[TensorSpec, ...]] = {}
    for field, (tensors, outputs, inputs, biased) in linears.items():
        rows = outputs // len(tensors)
        specs[field] = tuple(TensorSpec(f"{start}{name}.weight", (rows, inputs)) for name in tensors)
        specs[f"{field}_bias"] = tuple(TensorSpec(f"{start}{name}.bias", (rows,)) for name in tensors if biased)
    has_attention_norm = index > 0 or config.first_attention_norm
    norm = norm_specs(start + names.attention_norm, hidden, biased=config.norm_bias)
    specs["attention_norm"] = norm if has_attention_norm else ()
    specs["mlp_norm"] = norm_specs(start + names.mlp_norm, hidden, biased=config.norm_bias)
    return specs


def norm_specs(name: str, width: int, *, biased: bool) -> tuple[TensorSpec, ...]:
    weight = TensorSpec(f"{name}.weight", (width,))
    return (weight, TensorSpec(f"{name}.bias", (width,))) if biased else (weight,)


def linear_specs(layer: HeadLayer) -> tuple[TensorSpec, ...]:
    """The weight, if it is a tensor of its own, and the bias, if there is one."""
    weight = () if layer.weight is None else (TensorSpec(layer.weight, (layer.outputs, layer.inputs)),)
    return weight if layer.bias is None else (*weight, TensorSpec(layer.bias, (layer.outputs,)))
