"""The tensors of a decoder: their names and shapes in a checkpoint, and the form that the model uses.

Reads no file, so models with random weights use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.backend.checkpoint.decoder_config import DecoderConfig, QkNormScope

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
NORM_FIELDS = ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")
"""The norms of a layer, as fields of `TensorNames` and of `LayerWeights`."""
LINEARS = ("qkv", "o", "gate_up", "down")
"""The fields of LayerWeights that are matrices of linears."""


Matrix = TypeVar("Matrix", covariant=True)
"""A tensor or a quantised weight."""


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[Matrix]):
    """One decoder layer. Linear weights are [outputs, inputs], row-major; biases [outputs]."""

    qkv: Matrix
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: rows of q, then k, then v."""
    o: Matrix
    """[hidden_size, num_heads * head_dim]"""
    gate_up: Matrix
    """[2 * intermediate_size, hidden_size]: rows of gate, then up. [intermediate_size, hidden_size] of a plain MLP."""
    down: Matrix
    """[hidden_size, intermediate_size]"""
    attention_norm: Tensor | None = None
    """[hidden_size] or None, as all four; a bias follows if the model's norms have one: [2 * hidden_size]."""
    attention_output_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    q_norm: Tensor | None = None
    """[head_dim], [num_heads, head_dim] or [num_heads * head_dim], as the scope of the model's q and k norms is."""
    k_norm: Tensor | None = None
    """[head_dim], [num_kv_heads, head_dim] or [num_kv_heads * head_dim]"""
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name of a tensor in the checkpoint, and its required shape."""

    name: str
    shape: tuple[int, ...]


def expected_tensors(config: DecoderConfig) -> Iterator[TensorSpec]:
    """Every tensor that the model needs from the checkpoint."""
    yield embedding_spec(config)
    for index in range(config.num_layers):
        for specs in layer_specs(config, index).values():
            yield from specs
    yield from final_norm_specs(config)
    if not config.tie_embeddings:
        yield lm_head_spec(config)


def linear_names(config: DecoderConfig) -> Iterator[str]:
    """The names of all linears' weights, lm_head's included if it has one of its own."""
    for index in range(config.num_layers):
        layout = layer_specs(config, index)
        yield from (spec.name for field in LINEARS for spec in layout[field])
    if not config.tie_embeddings:
        yield LM_HEAD


def embedding_spec(config: DecoderConfig) -> TensorSpec:
    return TensorSpec(EMBEDDING, (config.vocab_size, config.hidden_size))


def final_norm_specs(config: DecoderConfig) -> tuple[TensorSpec, ...]:
    return _norm_specs(config, FINAL_NORM.removesuffix(".weight"))


def lm_head_spec(config: DecoderConfig) -> TensorSpec:
    return TensorSpec(LM_HEAD, (config.vocab_size, config.hidden_size))


def layer_specs(config: DecoderConfig, index: int) -> dict[str, tuple[TensorSpec, ...]]:
    """Field of LayerWeights that this model has → the checkpoint's tensors that are stacked into it, in order."""
    prefix, names = f"model.layers.{index}.", config.names
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = _divide(names.qkv, (q_rows, kv_rows, kv_rows))
    gate_up = _divide(names.gate_up, (intermediate,) if config.mlp == "plain" else (intermediate, intermediate))
    o, down = {"self_attn.o_proj": hidden}, {names.down: hidden}

    def weights(rows_by_name: dict[str, int], inputs: int) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{prefix}{name}.weight", (rows, inputs)) for name, rows in rows_by_name.items())

    def biases(rows_by_name: dict[str, int]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{prefix}{name}.bias", (rows,)) for name, rows in rows_by_name.items())

    layout = {
        "qkv": weights(qkv, hidden),
        "o": weights(o, q_rows),
        "gate_up": weights(gate_up, hidden),
        "down": weights(down, intermediate),
    }
    for field in NORM_FIELDS:
        name: str | None = getattr(names, field)
        if name is not None:
            layout[field] = _norm_specs(config, prefix + name)
    if config.qk_norm is not None:
        for field, heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
            shape = _qk_norm_shape(config.qk_norm, heads, config.head_dim)
            layout[field] = (TensorSpec(f"{prefix}self_attn.{field}.weight", shape),)
    if config.qkv_bias:
        layout["qkv_bias"] = biases(qkv)
    if config.output_bias:
        layout["o_bias"] = biases(o)
    if config.mlp_bias:
        layout |= {"gate_up_bias": biases(gate_up), "down_bias": biases(down)}
    return layout


def _norm_specs(config: DecoderConfig, name: str) -> tuple[TensorSpec, ...]:
    weight = TensorSpec(f"{name}.weight", (config.hidden_size,))
    return (weight, TensorSpec(f"{name}.bias", weight.shape)) if config.norm_bias else (weight,)


def _qk_norm_shape(scope: QkNormScope, num_heads: int, head_dim: int) -> tuple[int, ...]:
    match scope:
        case "head":
            return (head_dim,)
        case "each head":
            return (num_heads, head_dim)
        case "projection":
            return (num_heads * head_dim,)


def _divide(names: tuple[str, ...], rows: tuple[int, ...]) -> dict[str, int]:
    """Name of each tensor → its rows; a single tensor has all."""
    return dict(zip(names, rows, strict=True)) if len(names) > 1 else {names[0]: sum(rows)}
