"""The decoder's operations in plain torch: the reference for the other implementations, and the CPU's fallback.

Products use packed weights. Attention gathers the keys and values of a group of query tiles and computes in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from penstock.backend.checkpoint.weight_forms.quantized_weights import Int8Weight
from penstock.backend.checkpoint.weight_forms.stacked_weights import decoded
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import NO_ADAPTER
from penstock.backend.passes.cpu.in_torch.paged_cache import KvShape, PagedCache, ScoreRule
from penstock.backend.passes.cpu.in_torch.query_tiles import TileLimits
from penstock.backend.passes.cpu.in_torch.torch_delta_net import TorchDeltaNetOps, delta_rows
from penstock.backend.passes.cpu.in_torch.torch_experts import TorchExpertOps, grouped_product, product_by_product
from penstock.backend.passes.cpu.in_torch.torch_linear import PackedLinear
from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import QuantizedLinear, TorchLinear
from penstock.backend.passes.cpu.in_torch.torch_side import TorchSideOps, TorchStep, rows_of
from penstock.backend.passes.cpu.in_torch.torch_streams import TorchStreamOps
from penstock.backend.passes.ops.interface import HeadShape
from penstock.backend.passes.ops.prompt_embeddings import add_picture_rows, place_embeddings
from penstock.backend.passes.ops.rope_table import RopeTable
from penstock.backend.sampling.logprobs import score_in_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.tensor_files.lora_weights import LoraWeights
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
    from penstock.backend.forward_pass import ScoredTokens, StepBatch, TokenLogprobs
    from penstock.backend.passes.cpu.in_torch.torch_experts import GroupedWeights
    from penstock.backend.passes.ops.interface import AttentionLayer, Forward

_Part = tuple[slice, PackedLinear, PackedLinear]
"""Slice of the outputs, and the two matrices in fp32."""


class TorchAdapters:
    """The adapters of all linears, and which of a step's tokens use which adapter."""

    def __init__(self) -> None:
        self._parts: dict[int, list[list[_Part]]] = {}
        """By the id of a packed linear, which the model keeps: the parts of each adapter."""
        self._of_tokens: NDArray[np.int32] | None = None
        self._tokens: list[tuple[int, Tensor]] = []
        """The adapters of the current step, each with its tokens."""

    def prepare(self, linear: TorchLinear, parts: Sequence[LoraWeights]) -> list[_Part]:
        return [_part(lora, linear.scale) for lora in parts]

    def put(self, linear: TorchLinear, index: int, prepared: list[_Part] | None) -> None:
        parts = self._parts.setdefault(id(linear), [])
        parts += [[] for _ in range(index + 1 - len(parts))]
        parts[index] = prepared or []

    def begin_step(self, batch: StepBatch) -> None:
        rows = batch.adapters
        self._choose(None if rows is None else rows.repeat(batch.query_starts[1:] - batch.query_starts[:-1]))

    def narrow(self, tokens: NDArray[np.int64]) -> None:
        """Limit the step to these tokens from now on."""
        if self._of_tokens is not None:
            self._choose(self._of_tokens[tokens])

    def _choose(self, of_tokens: NDArray[np.int32] | None) -> None:
        self._of_tokens, self._tokens = of_tokens, []
        if of_tokens is not None:
            chosen = [adapter for adapter in np.unique(of_tokens).tolist() if adapter != NO_ADAPTER]
            self._tokens = [(adapter, torch.from_numpy(np.flatnonzero(of_tokens == adapter))) for adapter in chosen]

    def add(
        self, x: Tensor, linear: TorchLinear, product: Tensor, multiply: Callable[[Tensor, TorchLinear], Tensor]
    ) -> Tensor:
        """Return product, linear's result for x, plus the adapters' additions; fp32 if there are any.

        multiply is the matrix product of the operations.
        """
        adapters = self._parts.get(id(linear)) if self._tokens else None
        if adapters is None:
            return product
        product = product.float()
        for adapter, tokens in self._tokens:
            inputs = x[tokens].float()
            for outputs, down, up in adapters[adapter]:
                product[tokens, outputs] += multiply(multiply(inputs, down), up)
        return product


def _part(lora: LoraWeights, scale: float) -> _Part:
    outputs = slice(lora.first_output, lora.first_output + len(lora.up))
    down, up = (PackedLinear(matrix, None, packed=False) for matrix in (lora.down, lora.up * scale))
    return outputs, down, up


class TorchOps:
    """Implements `CpuOps`. dtype is that of weights and activations: float32 or bfloat16."""

    tile_limits = TileLimits()
    make_sampler = None

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, *, rounds_rows: bool = False) -> None:
        """rounds_rows: activations of int8 products have one scale per row."""
        self._config = config
        self._rounds_rows = rounds_rows
        own = config.num_kv_heads, config.head_dim
        self._heads = [HeadShape(config.num_heads, *heads) for heads in (own, config.full_heads or own)]
        """The heads of layers without full heads, then of layers with them."""
        self._rope_table = RopeTable(*config.ropes)
        self._embedding_scale = Dtype.of(dtype).round(config.scales.embedding)
        self._dtype = dtype
        self.adapters = TorchAdapters()
        net = config.delta_net
        self._delta_net = None if net is None else TorchDeltaNetOps(net, config.norm_eps, self._adapted)
        self.cache = PagedCache((), 0, 1, "fp32")
        self.side = TorchSideOps(
            config, dtype, self.experts, self.pack_linear, self._product, self._activate, self._row_norm, self._add_norm
        )
        norms = self._row_norm, self._add_norm, self._normalise
        functions = self.pack_linear, self._product, self._adapted, self._activate
        self.side.streams = TorchStreamOps(dtype, self.side, *functions, *norms)

    @property
    def experts(self) -> TorchExpertOps | None:
        if self._config.experts is None:
            return None
        return TorchExpertOps(
            self._config.experts, self._dtype, self._product, self._grouped_product, self._activate, self._sigmoid
        )

    mtp = None

    @property
    def delta_net(self) -> TorchDeltaNetOps | None:
        return self._delta_net

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> TorchLinear:
        if not isinstance(weight, torch.Tensor):
            rounds_rows = self._rounds_rows and isinstance(weight, Int8Weight)
            return QuantizedLinear(
                decoded(weight), None if bias is None else bias.float(), scale, is_gated, rounds_rows
            )
        packed = PackedLinear.pack(weight.to(self._dtype), None if bias is None else bias.to(self._dtype))
        return replace(packed, scale=scale, is_gated=is_gated)

    def vector(self, weight: Tensor) -> Tensor:
        return weight.float()

    def table(self, weight: Tensor) -> Tensor:
        return weight.to(self._dtype)

    def packed_table(self, weight: Tensor | QuantizedWeight, linear: TorchLinear) -> Tensor | QuantizedWeight:
        if isinstance(linear, QuantizedLinear):
            return linear.weight
        return self.table(weight if isinstance(weight, torch.Tensor) else weight.dequantize())

    def create_cache(self, num_layers: int, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        shapes = [KvShape(heads.num_kv_heads, heads.head_dim, heads.head_dim) for heads in self._heads]
        own = range(self._config.num_layers - self._config.num_shared_layers)
        by_layer = [shapes[self._config.has_full_heads(index)] for index in own]
        by_place = shapes[:1] * num_layers if self._config.full_heads is None else by_layer
        self.cache = PagedCache(by_place, num_pages, page_size_tokens, kv_dtype, self.tile_limits)

    def _cache_index(self, layer: AttentionLayer) -> int:
        """Layers of different sizes are one group here, in which each has pages of its own size."""
        own = layer.index if layer.source is None else layer.source
        return layer.cache_index if self._config.full_heads is None else own

    @torch.inference_mode()
    def begin_step(self, batch: StepBatch, input_ids: NDArray[np.int32]) -> TorchStep:
        paged = self.cache.begin_step(batch)
        self.adapters.begin_step(batch)
        positions = paged[0].positions
        if batch.rope_positions is None:
            rows = self._rope_table.cover(int(positions.max()) + 1)[positions.numpy()]
        else:
            rows = self._rope_table.of_tokens(batch.rope_positions)
        turns = torch.from_numpy(rows)
        of_ropes = torch.split(turns, [rope.rotary_dim for rope in self._config.ropes], dim=1)
        return TorchStep(
            input_ids=torch.from_numpy(input_ids.astype(np.int64)),
            turns=tuple(own.view(len(positions), 2, 1, -1) for own in of_ropes),
            paged=paged,
            last_tokens=torch.from_numpy(batch.logit_tokens.astype(np.int64)),
            num_logits=len(batch.logit_rows),
            embeddings=batch.embeddings,
            rows=delta_rows(batch),
        )

    def embed(self, table: Tensor | QuantizedWeight, step: TorchStep) -> Tensor:
        residual = rows_of(table, step.input_ids)
        if self._embedding_scale != 1.0:
            residual.mul_(self._embedding_scale)
        place_embeddings(residual.numpy(), step.embeddings, self._config.scales.given_embeddings)
        return residual

    def _add_pictures(self, index: int, residual: Tensor, step: TorchStep) -> None:
        add_picture_rows(residual.numpy(), step.embeddings, index)

    add_pictures = _add_pictures

    def norm(self, residual: Tensor, weight: Tensor | None) -> Tensor:
        return (residual if weight is None else self._row_norm(residual, weight)).to(self._dtype)

    final_norm = norm

    def _product(self, x: Tensor, weights: TorchLinear) -> Tensor:
        """x times the weight, plus the bias; fp32 for quantised weights. All linear layers use it."""
        return weights(x)

    def _adapted(self, x: Tensor, weights: TorchLinear) -> Tensor:
        """The product plus the additions of the rows' adapters."""
        return self.adapters.add(x, weights, self._product(x, weights), self._product)

    def _activate(self, x: Tensor) -> Tensor:
        """The activation of x [T, n] fp32; may write into x."""
        return functional.silu(x) if self._config.activation == "silu" else functional.gelu(x, approximate="tanh")

    def _sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def linear(self, x: Tensor, weights: TorchLinear) -> Tensor:
        return self._adapted(x, weights).to(self._dtype)

    def linear_add(self, x: Tensor, weights: TorchLinear, residual: Tensor, norm: Tensor | None = None) -> None:
        product = self._adapted(x, weights)
        if norm is None:
            residual.add_(product)
        else:
            self._add_norm(product.float(), norm, residual)

    def _add_norm(self, x: Tensor, norm: Tensor, residual: Tensor) -> None:
        hidden = self._config.hidden_size
        if len(norm) == hidden + 1:
            residual.add_(self._row_norm(x, norm[:hidden])).mul_(norm[hidden])
        else:
            residual.add_(self._row_norm(x, norm))

    def activated_linear(self, x: Tensor, weights: TorchLinear) -> Tensor:
        product = self._adapted(x, weights).float()
        if not weights.is_gated:
            return self._activate(product).to(self._dtype)
        gate, up = product.chunk(2, dim=-1)
        return self._activate(gate).mul_(up).to(self._dtype)

    def _grouped_product(self, x: Tensor, weights: GroupedWeights, ends: Tensor) -> Tensor:
        """Compute all experts' products (`TorchExpertOps.grouped`)."""
        if isinstance(weights, torch.Tensor):
            return grouped_product(x, weights, ends)
        return product_by_product(x, weights, ends, self._product)

    def rotate_and_store(self, qkv: Tensor, step: TorchStep, layer: AttentionLayer) -> None:
        shape = self._heads[layer.has_full_heads]
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        queries, values = heads[:, :num_heads], heads[:, -num_kv_heads:]
        keys = heads[:, -2 * num_kv_heads : -num_kv_heads]
        parts = [(queries, layer.q_norm, layer.ropes[0])]
        if layer.source is None:
            parts += [(keys, layer.k_norm, layer.ropes[1]), (values, layer.v_norm, None)]
        for part, norm, rope in parts:
            if norm is not None:
                part.copy_(self._norm_heads(part.float(), norm))
            if rope is not None:
                cos, sin = step.turns[rope].unbind(1)
                rotary_dim = 2 * cos.shape[-1]
                x, y = part[..., :rotary_dim].float().chunk(2, dim=-1)
                part[..., :rotary_dim] = torch.cat([x * cos - y * sin, y * cos + x * sin], dim=-1)
        if layer.source is None:
            step.paged[layer.group].store(self._cache_index(layer), keys, values)

    def attention(self, qkv: Tensor, step: TorchStep, layer: AttentionLayer) -> Tensor:
        heads = self._heads[layer.has_full_heads]
        queries = qkv[:, : heads.output_size].view(len(qkv), heads.num_heads, heads.head_dim)
        rule = ScoreRule(self._config.score_scale, self._config.scales.scores_softcap, layer.sinks)
        paged = step.paged[layer.group]
        index, window = self._cache_index(layer), layer.window_tokens
        attended = paged.attend(index, queries, window, rule, sees_ahead=layer.sees_ahead).view(len(qkv), -1)
        if not self._config.gated_attention:
            return attended
        gates = qkv[:, heads.output_size : 2 * heads.output_size].float()
        return (attended.float() * self._sigmoid(gates)).to(attended.dtype)

    def last_tokens(self, qkv: Tensor, residual: Tensor, step: TorchStep) -> tuple[Tensor, Tensor, TorchStep]:
        self.adapters.narrow(step.last_tokens.numpy())
        paged = [own.single(step.last_tokens.numpy()) for own in step.paged]
        turns = tuple(own[step.last_tokens] for own in step.turns)
        narrowed = replace(step, paged=paged, turns=turns, is_narrowed=True)
        return qkv[step.last_tokens], residual[step.last_tokens], narrowed

    def logit_rows(self, normed: Tensor, step: TorchStep) -> Tensor:
        return normed[: step.num_logits]

    def score(
        self, normed: Tensor, first: int, scored: ScoredTokens, logits_of: Callable[[Tensor], NDArray[np.float32]]
    ) -> TokenLogprobs:
        return score_in_blocks(scored, lambda part: logits_of(normed[first:][part]))

    def logits(self, x: Tensor, weights: TorchLinear) -> NDArray[np.float32]:
        product = self._product(x, weights).float()
        cap = self._config.scales.logits_softcap
        logits: NDArray[np.float32] = (product if cap is None else self._cap_rows(product, cap)).numpy()
        return logits

    def _cap_rows(self, x: Tensor, cap: float) -> Tensor:
        return _cap(x, cap)

    @torch.inference_mode()
    def run_step(self, step: TorchStep, forward: Forward, *, needs_logits: bool) -> NDArray[np.float32] | None:
        return forward(step, needs_logits=needs_logits)

    def normed_rows(self, normed: Tensor, num_rows: int) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = normed[:num_rows].to(torch.float32, copy=True).numpy()
        return rows

    def close(self) -> None:
        self.cache = PagedCache((), 0, 1, "fp32")

    def _row_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise rows: x [T, n] fp32, weight as given to `norm`."""
        if self._config.norm == "rms":
            return self._normalise(x) * weight
        scale, bias = weight.chunk(2)
        return self._normalise(x) * scale + bias

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Normalise heads [T, heads, head_dim] fp32."""
        if self._config.qk_norm == "projection":
            return (self._normalise(heads.flatten(1)) * weight).view(heads.shape)
        return self._normalise(heads) * weight.view(-1, heads.shape[-1])

    def _normalise(self, x: Tensor) -> Tensor:
        if self._config.norm == "layer":
            x = x - x.mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._config.norm_eps)


def _cap(x: Tensor, cap: float) -> Tensor:
    return x.div_(cap).tanh_().mul_(cap)
