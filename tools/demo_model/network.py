"""The demo model's network for training: a Llama whose parameters carry Hugging Face's names.

It has what training needs: no cache, no sampling. `state_dict` is the checkpoint; `hf_config` describes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROPE_THETA = 10000.0
RMS_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Dimensions:
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    max_positions: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Attention(nn.Module):
    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        self.q_proj = nn.Linear(dims.hidden, dims.heads * dims.head_dim, bias=False)
        self.k_proj = nn.Linear(dims.hidden, dims.kv_heads * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(dims.hidden, dims.kv_heads * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(dims.heads * dims.head_dim, dims.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            projection(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = query.shape[1] // key.shape[1]
        key, value = _rotate(key, cos, sin).repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        mixed = functional.scaled_dot_product_attention(_rotate(query, cos, sin), key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.up_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.down_proj = nn.Linear(dims.intermediate, dims.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dims.hidden, eps=RMS_NORM_EPS)
        self.self_attn = Attention(dims)
        self.post_attention_layernorm = nn.RMSNorm(dims.hidden, eps=RMS_NORM_EPS)
        self.mlp = FeedForward(dims)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaLayers(nn.Module):
    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(dims.vocab_size, dims.hidden)
        self.layers = nn.ModuleList(Layer(dims) for _ in range(dims.layers))
        self.norm = nn.RMSNorm(dims.hidden, eps=RMS_NORM_EPS)


class Network(nn.Module):
    """Token ids int64 [B, T] → logits [B, T, vocab_size]. The embedding matrix is also the output layer."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.dims = dims
        self.model = LlamaLayers(dims)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Matrices that add to the residual stream start smaller, by the number of additions, as in GPT-2.
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * dims.layers) ** 0.5 if adds else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = _rope_tables(ids.shape[1], self.dims.head_dim)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)


def _rope_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding, float32 [length, head_dim]; both halves are equal, as in Hugging Face."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def hf_config(dims: Dimensions, bos_token_id: int, eos_token_ids: list[int]) -> dict[str, Any]:
    """The checkpoint's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "max_position_embeddings": dims.max_positions,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": RMS_NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_ids,
        "pad_token_id": bos_token_id,
        "torch_dtype": "bfloat16",
    }
