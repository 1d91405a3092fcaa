"""The Llama family: the order of operations, the same on every device.

Pre-norm decoder layers (attention, gated MLP) as in arXiv 2302.13971, with grouped-query attention, optional biases,
QK norm (Qwen3), sliding windows (Mistral, Qwen2) and layers without RoPE (SmolLM3), as DecoderConfig says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock.backend.passes.decoder.ops import Array, AttentionLayer, Linear, Ops, Step

if TYPE_CHECKING:
    import torch

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.quantized_weights import QuantizedWeight
    from penstock.backend.checkpoint.tensors import LayerWeights


class Weights(Protocol):
    """A source of unpacked weights, such as `checkpoint.weights.DecoderWeights`. Each call returns a copy.

    Matrices of linears may be quantised; then so is an embedding table that serves as the output layer too.
    """

    def embedding(self, dtype: torch.dtype) -> Tensor | QuantizedWeight: ...

    def layer(self, index: int, dtype: torch.dtype) -> LayerWeights[Tensor | QuantizedWeight]: ...

    def final_norm(self, dtype: torch.dtype) -> Tensor: ...

    def lm_head(self, dtype: torch.dtype) -> Tensor | QuantizedWeight | None:
        """None if the embedding table serves as the output layer too."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: AttentionLayer
    input_norm: Array
    qkv: Linear
    output: Linear
    mlp_norm: Array
    gate_up: Linear
    down: Linear


class DecoderModel:
    """The packed weights, and the computation of a step. `normed` is the only state that a step leaves."""

    normed: Array | None = None
    """[L, hidden] after the final norm, of the last step with logits. The buffer belongs to the operations; the next
    step overwrites it."""

    def __init__(self, config: DecoderConfig, ops: Ops, weights: Weights, dtype: torch.dtype) -> None:
        """Packs the weights layer by layer; at most one layer is in memory unpacked."""
        self._ops = ops
        embedding = weights.embedding(dtype)
        if config.tie_embeddings:
            self._lm_head = ops.pack_linear(embedding, None)
            self._embedding = ops.tied_table(embedding, self._lm_head)
        else:
            self._embedding = ops.table(_plain(embedding))
        del embedding
        if not config.tie_embeddings:
            self._lm_head = ops.pack_linear(_required(weights.lm_head(dtype)), None)
        self._layers = [_pack_layer(config, ops, weights.layer(i, dtype), i) for i in range(config.num_layers)]
        self._final_norm = ops.vector(weights.final_norm(dtype))

    def forward(self, step: Step, *, needs_logits: bool) -> Array | None:
        """Return the logits of the step's logit rows, [L, vocab] fp32, or None if needs_logits is False."""
        ops = self._ops
        residual = ops.embed(self._embedding, step)
        for layer in self._layers[:-1]:
            qkv = self._project(layer, residual, step)
            self._attend_and_mix(layer, qkv, residual, step)
        # After the last layer's cache write, only the tokens that need logits matter.
        last = self._layers[-1]
        qkv = self._project(last, residual, step)
        if not needs_logits:
            return None
        qkv, residual, step = ops.last_tokens(qkv, residual, step)
        self._attend_and_mix(last, qkv, residual, step)
        self.normed = ops.rms_norm(residual, self._final_norm)
        return ops.logits(self.normed, self._lm_head)

    def _project(self, layer: _Layer, residual: Array, step: Step) -> Array:
        ops = self._ops
        qkv = ops.linear(ops.rms_norm(residual, layer.input_norm), layer.qkv)
        ops.rotate_and_store(qkv, step, layer.attention)
        return qkv

    def _attend_and_mix(self, layer: _Layer, qkv: Array, residual: Array, step: Step) -> None:
        ops = self._ops
        ops.linear_add(ops.attention(qkv, step, layer.attention), layer.output, residual)
        ops.linear_add(ops.gated_linear(ops.rms_norm(residual, layer.mlp_norm), layer.gate_up), layer.down, residual)


def _plain(embedding: Tensor | QuantizedWeight) -> Tensor:
    if not isinstance(embedding, Tensor):
        raise TypeError("only an embedding that is the output layer too may be quantised")
    return embedding


def _required(lm_head: Tensor | QuantizedWeight | None) -> Tensor | QuantizedWeight:
    if lm_head is None:
        raise ValueError("a model without tied embeddings needs weights for lm_head")
    return lm_head


def _pack_layer(config: DecoderConfig, ops: Ops, plain: LayerWeights[Tensor | QuantizedWeight], index: int) -> _Layer:
    return _Layer(
        attention=AttentionLayer(
            index=index,
            uses_rope=config.layer_uses_rope[index] if config.layer_uses_rope else True,
            window_tokens=config.layer_window_tokens[index] if config.layer_window_tokens else None,
            q_norm=None if plain.q_norm is None else ops.vector(plain.q_norm),
            k_norm=None if plain.k_norm is None else ops.vector(plain.k_norm),
        ),
        input_norm=ops.vector(plain.input_norm),
        qkv=ops.pack_linear(plain.qkv, plain.qkv_bias),
        output=ops.pack_linear(plain.o, plain.o_bias),
        mlp_norm=ops.vector(plain.post_attention_norm),
        gate_up=ops.pack_gated(plain.gate_up, plain.gate_up_bias),
        down=ops.pack_linear(plain.down, plain.down_bias),
    )
