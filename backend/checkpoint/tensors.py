"""The tensors of a decoder: their names and shapes in a checkpoint, and the form that the model uses.

Reads no file, so models with random weights use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.backend.checkpoint.decoder_config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


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
    """[2 * intermediate_size, hidden_size]: rows of gate, then up."""
    down: Matrix
    """[hidden_size, intermediate_size]"""
    input_norm: Tensor
    """[hidden_size]"""
    post_attention_norm: Tensor
    """[hidden_size]"""
    q_norm: Tensor | None = None
    """[head_dim]"""
    k_norm: Tensor | None = None
    """[head_dim]"""
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
    yield final_norm_spec(config)
    if not config.tie_embeddings:
        yield lm_head_spec(config)


def embedding_spec(config: DecoderConfig) -> TensorSpec:
    return TensorSpec(EMBEDDING, (config.vocab_size, config.hidden_size))


def final_norm_spec(config: DecoderConfig) -> TensorSpec:
    return TensorSpec(FINAL_NORM, (config.hidden_size,))


def lm_head_spec(config: DecoderConfig) -> TensorSpec:
    return TensorSpec(LM_HEAD, (config.vocab_size, config.hidden_size))


def layer_specs(config: DecoderConfig, index: int) -> dict[str, tuple[TensorSpec, ...]]:
    """Field of LayerWeights that this model has → the checkpoint's tensors that are stacked into it, in order."""
    prefix = f"model.layers.{index}."
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.architecture == "Phi3ForCausalLM":
        qkv = {"self_attn.qkv_proj": q_rows + 2 * kv_rows}
        gate_up = {"mlp.gate_up_proj": 2 * intermediate}
    else:
        qkv = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
        gate_up = {"mlp.gate_proj": intermediate, "mlp.up_proj": intermediate}

    def weights(rows_by_name: dict[str, int], inputs: int) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{prefix}{name}.weight", (rows, inputs)) for name, rows in rows_by_name.items())

    def vector(name: str, size: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec(f"{prefix}{name}.weight", (size,)),)

    def biases(rows_by_name: dict[str, int]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(f"{prefix}{name}.bias", (rows,)) for name, rows in rows_by_name.items())

    o, down = {"self_attn.o_proj": hidden}, {"mlp.down_proj": hidden}
    layout = {
        "qkv": weights(qkv, hidden),
        "o": weights(o, q_rows),
        "gate_up": weights(gate_up, hidden),
        "down": weights(down, intermediate),
        "input_norm": vector("input_layernorm", hidden),
        "post_attention_norm": vector("post_attention_layernorm", hidden),
    }
    if config.qk_norm:
        layout["q_norm"] = vector("self_attn.q_norm", config.head_dim)
        layout["k_norm"] = vector("self_attn.k_norm", config.head_dim)
    if config.qkv_bias:
        layout["qkv_bias"] = biases(qkv)
    if config.output_bias:
        layout["o_bias"] = biases(o)
    if config.mlp_bias:
        layout |= {"gate_up_bias": biases(gate_up), "down_bias": biases(down)}
    return layout
