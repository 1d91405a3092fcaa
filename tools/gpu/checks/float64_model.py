"""A decoder in float64, from a `DecoderConfig` and weights: whole sequences, no cache, no batch.

It shares no code with the passes. tests/tools/gpu/test_float64_model.py compares it with transformers in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, Experts, RopeConfig
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.ops.interface import Weights


class Float64Model:
    """Rounds nothing except the given weights; quantised ones have the numbers that they encode."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        self._config = config
        self._embedding = _numbers(weights.embedding(Dtype.FP32))
        head = self._embedding if config.tie_embeddings else _numbers(weights.lm_head(Dtype.FP32))
        self._lm_head = head
        self._final_norm = _numbers(weights.final_norm(Dtype.FP32))
        self._layers = [weights.layer(index, Dtype.FP32) for index in range(config.num_layers)]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.float64]:
        """Logits [tokens, vocab] after each token of one sequence."""
        config = self._config
        residual = self._embedding[torch.as_tensor(np.asarray(tokens), dtype=torch.int64)] * config.scales.embedding
        for index, layer in enumerate(self._layers):
            x = self._norm(residual, layer.attention_norm)
            attended = self._attend(x, layer, index)
            added = self._norm(_linear(attended, layer.o, layer.o_bias), layer.attention_output_norm)
            if config.parallel_blocks:
                residual = residual + config.scales.residual * (added + self._mlp(x, layer))
                continue
            residual = residual + config.scales.residual * added
            mixed = self._mix(self._norm(residual, layer.mlp_norm), layer, index)
            residual = residual + config.scales.residual * self._norm(mixed, layer.mlp_output_norm)
        logits = config.scales.logits * self._norm(residual, self._final_norm) @ self._lm_head.T
        return np.asarray(_capped(logits, config.scales.logits_softcap).numpy())

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        scale, bias = _numbers(weight), torch.zeros(1, dtype=torch.float64)
        if self._config.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
            scale, bias = scale.chunk(2) if self._config.norm_bias else (scale, bias)
        return self._unit(x) * (scale + self._config.norm_offset) + bias

    def _unit(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self._config.norm_eps).sqrt()

    def _attend(self, x: Tensor, layer: Any, index: int) -> Tensor:
        config, num_tokens = self._config, len(x)
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = _linear(x, layer.qkv, layer.qkv_bias).view(num_tokens, sum(counts), config.head_dim)
        q, k, v = torch.split(qkv, list(counts), dim=1)
        q, k = self._norm_heads(q, layer.q_norm), self._norm_heads(k, layer.k_norm)
        if (rope := config.rope_of_layer(index)) is not None:
            query_rope = config.query_rope_of_layer(index)
            q = self._rotate(q, config.ropes[rope if query_rope is None else query_rope])
            k = self._rotate(k, config.ropes[rope])
        group = config.num_heads // config.num_kv_heads
        k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.score_scale
        scores = _capped(scores, config.scales.scores_softcap)
        behind = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
        window = config.window_of_layer(index)
        is_hidden = (behind < 0) | (behind >= (num_tokens if window is None else window))
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if layer.sinks is not None:
            sinks = _numbers(layer.sinks)[:, None, None].expand(-1, num_tokens, 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)

    def _norm_heads(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return heads
        x = heads.flatten(1) if self._config.qk_norm == "projection" else heads
        if self._config.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        scale = _numbers(weight) + self._config.norm_offset
        return (self._unit(x) * scale).view(heads.shape)

    def _rotate(self, heads: Tensor, rope: RopeConfig) -> Tensor:
        """Pairs are dimensions 2 i and 2 i + 1, or i and i + half."""
        positions = torch.arange(len(heads), dtype=torch.float64)
        size = torch.full_like(positions, rope.attention_factor)
        if rope.scale is not None:
            size = size * (1 + rope.scale.beta * torch.log1p(torch.floor(positions / rope.scale.period)))
        turned = torch.polar(size[:, None], positions[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float64))
        part, rest = torch.split(heads, [rope.rotary_dim, heads.shape[-1] - rope.rotary_dim], dim=-1)
        by_pair = part.reshape(*part.shape[:-1], *((-1, 2) if self._config.interleaved_rope else (2, -1)))
        pair_dim = -1 if self._config.interleaved_rope else -2
        pairs = torch.complex(*(each.contiguous() for each in by_pair.unbind(pair_dim))) * turned[:, None]
        rotated = torch.stack([pairs.real, pairs.imag], dim=pair_dim).flatten(-2)
        return torch.cat([rotated, rest], dim=-1)

    def _mix(self, x: Tensor, layer: Any, index: int) -> Tensor:
        experts = self._config.experts_of_layer(index)
        if experts is None:
            return self._mlp(x, layer)
        mixed = self._experts(x, layer, experts)
        if layer.gate_up is None:
            return mixed
        shared = self._mlp(x, layer)
        if layer.shared_gate is not None:
            shared = shared * _linear(x, layer.shared_gate).sigmoid()
        return mixed + shared

    def _mlp(self, x: Tensor, layer: Any) -> Tensor:
        hidden = _linear(x, layer.gate_up, layer.gate_up_bias)
        if self._config.mlp == "gated":
            gate, up = hidden.chunk(2, dim=-1)
            return _linear(self._activation(gate) * up, layer.down, layer.down_bias)
        return _linear(self._activation(hidden), layer.down, layer.down_bias)

    def _experts(self, x: Tensor, layer: Any, experts: Experts) -> Tensor:
        shares, chosen = _linear(x, layer.router, layer.router_bias).softmax(-1).topk(experts.per_token)
        if experts.normalises:
            shares = shares / shares.sum(-1, keepdim=True)
        gate_up = _numbers(layer.expert_gate_up).view(experts.count, -1, x.shape[-1])
        down = _numbers(layer.expert_down).view(experts.count, x.shape[-1], -1)
        in_bias = _rows_of_bias(layer.expert_gate_up_bias, experts.count)
        out_bias = _rows_of_bias(layer.expert_down_bias, experts.count)
        mixed = torch.zeros_like(x)
        for row in range(len(x)):
            for share, expert in zip(shares[row], chosen[row].tolist(), strict=True):
                gate, up = (gate_up[expert] @ x[row] + in_bias[expert]).chunk(2)
                mixed[row] += share * (down[expert] @ self._gated(gate, up, experts) + out_bias[expert])
        return mixed

    def _gated(self, gate: Tensor, up: Tensor, experts: Experts) -> Tensor:
        if (clamped := experts.clamped_gate) is None:
            return self._activation(gate) * up
        gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
        return gate * torch.sigmoid(clamped.alpha * gate) * (up + 1)

    @property
    def _activation(self) -> Callable[[Tensor], Tensor]:
        if self._config.activation == "silu":
            return functional.silu
        return lambda x: functional.gelu(x, approximate="tanh")


def _numbers(weight: Any) -> Tensor:
    """A weight's numbers; for a quantised one, the numbers that it encodes."""
    plain: Tensor = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
    return plain.double()


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    product = x @ _numbers(weight).T
    return product if bias is None else product + bias.double()


def _rows_of_bias(bias: Tensor | None, count: int) -> Tensor:
    return torch.zeros(count, 1, dtype=torch.float64) if bias is None else bias.double().view(count, -1)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
