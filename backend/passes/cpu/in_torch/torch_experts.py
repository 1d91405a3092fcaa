"""Mixtures of experts in torch: a layer's experts, and the assignment of its tokens to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.checkpoint.weight_forms.stacked_weights import decoded, take_rows
from penstock.backend.passes.cpu.in_torch.torch_linear import PackedLinear
from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import QuantizedLinear, TorchLinear
from penstock.backend.passes.ops.interface import ExpertWeights

_ALIGNMENT_BYTES = 16
"""Alignment of the rows of both operands of torch._grouped_mm."""

GroupedWeights: TypeAlias = Tensor | tuple[QuantizedLinear, ...]
"""A matrix of each expert: plain or quantised.

Plain: [experts, outputs, inputs], with zeros after the last input where torch needs an even number of bytes.
"""


@dataclass(frozen=True, slots=True)
class TorchExperts:
    router: PackedLinear
    """In fp32."""
    gate_up: GroupedWeights
    """Rows are [gate | up], columns hidden."""
    down: GroupedWeights
    """Rows are hidden, columns width."""
    gate_up_bias: Tensor | None
    """[experts, gate | up] fp32"""
    down_bias: Tensor | None
    """[experts, hidden] fp32"""
    scale: float
    factors: Tensor | None = None
    """[experts] fp32 factors of their results."""

    @staticmethod
    def pack(weights: ExpertWeights, scale: float, dtype: torch.dtype) -> TorchExperts:
        count = len(weights.router)

        def by_expert(weight: Tensor | QuantizedWeight) -> GroupedWeights:
            if isinstance(weight, Tensor):
                aligned = _align(weight.to(dtype))
                return aligned.view(count, -1, aligned.shape[1])
            own, rows = decoded(weight), weight.shape[0] // count
            return tuple(
                QuantizedLinear(take_rows(own, slice(first, first + rows)), None)
                for first in range(0, count * rows, rows)
            )

        def bias_by_expert(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else bias.float().view(count, -1)

        router_bias = None if weights.router_bias is None else weights.router_bias.float()
        return TorchExperts(
            PackedLinear.pack(weights.router.float(), router_bias),
            by_expert(weights.gate_up),
            by_expert(weights.down),
            bias_by_expert(weights.gate_up_bias),
            bias_by_expert(weights.down_bias),
            scale,
            None if weights.factors is None else weights.factors.float(),
        )


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Pairs of a token and an expert, grouped by expert."""

    tokens: Tensor
    """[pairs] the token of each pair, ascending within a group."""
    experts: Tensor
    """[pairs] the expert of each pair."""
    places: Tensor
    """[T, experts per token] indices of a token's pairs."""
    weights: Tensor
    """[T, experts per token] fp32."""
    ends: Tensor
    """int32 [experts]: where each group ends."""

    @staticmethod
    def route(logits: Tensor, experts: Experts, factors: Tensor | None = None) -> ExpertGroups:
        """Choose each token's experts. logits is [T, experts] fp32; factors [experts] multiply the weights."""
        # topk does not specify which of equal numbers it returns.
        ordered, chosen = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        weights, chosen = ordered[:, : experts.per_token], chosen[:, : experts.per_token]
        if experts.normalises:
            weights = weights / _row_sums(weights)
        if factors is not None:
            weights = weights * factors[chosen]
        order = chosen.flatten().sort(stable=True).indices
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        ends = torch.bincount(chosen.flatten(), minlength=experts.count).cumsum(0).int()
        grouped = chosen.flatten()[order]
        return ExpertGroups(order // experts.per_token, grouped, places.view(chosen.shape), weights, ends)

    def sums(self, results: Tensor) -> Tensor:
        """The weighted sums over each token's pairs, likeliest expert first, of results [pairs, n] fp32: [T, n]."""
        columns = zip(self.places.unbind(1), _columns(self.weights), strict=True)
        return _sum([results[places] * weights for places, weights in columns])


@dataclass(frozen=True, slots=True)
class TorchExpertOps:
    """Implements `ExpertOps`. The functions are those of the operations, which may be deterministic."""

    settings: Experts
    dtype: torch.dtype
    product: Callable[[Tensor, PackedLinear], Tensor]
    grouped: Callable[[Tensor, GroupedWeights, Tensor], Tensor]
    """Compute [pairs, outputs]: x [pairs, inputs] times the weight of each pair's expert.

    int32 [experts] contains the end of each expert's pairs.
    """
    activate: Callable[[Tensor], Tensor]
    sigmoid: Callable[[Tensor], Tensor]

    def pack(self, weights: ExpertWeights, scale: float) -> TorchExperts:
        return TorchExperts.pack(weights, scale, self.dtype)

    def add(self, x: Tensor, experts: TorchExperts, residual: Tensor) -> None:
        residual.add_(self.results(x, x, experts))

    def results(self, rated: Tensor, x: Tensor, experts: TorchExperts) -> Tensor:
        """The weighted sums of each token's experts for x; the router reads rated."""
        logits = self.product(rated.float(), experts.router)
        groups = ExpertGroups.route(logits, self.settings, experts.factors)
        gate_up = self._products(x[groups.tokens], experts.gate_up, experts.gate_up_bias, groups)
        mixed = self._mix(*gate_up.chunk(2, dim=-1)).to(self.dtype)
        results = self._products(mixed, experts.down, experts.down_bias, groups)
        return groups.sums(results).mul_(experts.scale)

    def _products(self, x: Tensor, weights: GroupedWeights, biases: Tensor | None, groups: ExpertGroups) -> Tensor:
        """[pairs, outputs] fp32"""
        products = self.grouped(x, weights, groups.ends).float()
        return products if biases is None else products.add_(biases[groups.experts])

    def _mix(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the input of the down product from gate and up [pairs, width] fp32."""
        clamped = self.settings.clamped_gate
        if clamped is None:
            return self.activate(gate).mul_(up)
        gate = gate.clamp(max=clamped.limit)
        mixed = self.sigmoid(gate * clamped.alpha).mul_(gate)
        return mixed.mul_(up.clamp(-clamped.limit, clamped.limit).add_(1))

    def weight_by_sigmoid(self, x: Tensor, gate: PackedLinear, mixed: Tensor) -> None:
        mixed.mul_(self.sigmoid(self.product(x, gate).float()))


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute all experts at once (`TorchExpertOps.grouped`)."""
    return torch._grouped_mm(_align(x), weights.transpose(1, 2), offs=ends)


def product_by_product(
    x: Tensor,
    weights: Iterable[TorchLinear],
    ends: Tensor,
    product: Callable[[Tensor, TorchLinear], Tensor],
) -> Tensor:
    """Like `grouped_product`, one expert after the other."""
    products, begin = [], 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        if end > begin:
            products.append(product(x[begin:end], weight))
        begin = end
    return torch.cat(products)


def _row_sums(x: Tensor) -> Tensor:
    """Sum each row, [rows, 1], one number after the other: a row's bits do not depend on the other rows."""
    return _sum(_columns(x))


def _columns(x: Tensor) -> list[Tensor]:
    return [column[:, None] for column in x.unbind(1)]


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _align(rows: Tensor) -> Tensor:
    multiple = _ALIGNMENT_BYTES // rows.element_size()
    return functional.pad(rows, (0, -rows.shape[1] % multiple))
