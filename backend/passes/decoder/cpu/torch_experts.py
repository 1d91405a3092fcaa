"""Mixtures of experts in torch: a layer's experts, and where its tokens go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from penstock.backend.passes.decoder.cpu.torch_linear import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from penstock.backend.checkpoint.decoder_config import Experts
    from penstock.backend.passes.decoder.ops import ExpertWeights

_ALIGNMENT_BYTES = 16
"""Of the rows of both operands of torch._grouped_mm."""


@dataclass(frozen=True, slots=True)
class TorchExperts:
    router: PackedLinear
    """In fp32."""
    gate_up: Tensor
    """[experts, gate | up, hidden], with zeros after the last input where torch needs an even number of bytes."""
    down: Tensor
    """[experts, hidden, width], as above."""
    scale: float

    @staticmethod
    def pack(weights: ExpertWeights, scale: float, dtype: torch.dtype) -> TorchExperts:
        count = len(weights.router)

        def by_expert(weight: Tensor) -> Tensor:
            aligned = _align(weight.to(dtype))
            return aligned.view(count, -1, aligned.shape[1])

        router = PackedLinear.pack(weights.router.float(), None)
        return TorchExperts(router, by_expert(weights.gate_up), by_expert(weights.down), scale)


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Pairs of a token and an expert, grouped by expert."""

    tokens: Tensor
    """[pairs] the token of each, in ascending order within a group."""
    places: Tensor
    """[T, experts per token] where a token's pairs are."""
    weights: Tensor
    """[T, experts per token] fp32."""
    ends: Tensor
    """int32 [experts]: where each group ends."""

    @staticmethod
    def route(logits: Tensor, experts: Experts) -> ExpertGroups:
        """logits [T, experts] fp32."""
        # topk does not say which of equal numbers it takes.
        ordered, chosen = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        weights, chosen = ordered[:, : experts.per_token], chosen[:, : experts.per_token]
        if experts.normalises:
            weights = weights / _row_sums(weights)
        order = chosen.flatten().sort(stable=True).indices
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        ends = torch.bincount(chosen.flatten(), minlength=experts.count).cumsum(0).int()
        return ExpertGroups(order // experts.per_token, places.view(chosen.shape), weights, ends)

    def sums(self, results: Tensor) -> Tensor:
        """The weighted sums over each token's pairs, likeliest expert first, of results [pairs, n]: [T, n] fp32."""
        columns = zip(self.places.unbind(1), _columns(self.weights), strict=True)
        return _sum([results[places].float() * weights for places, weights in columns])


@dataclass(frozen=True, slots=True)
class TorchExpertOps:
    """See `ExpertOps`. The functions are those of the operations, which may be deterministic."""

    settings: Experts
    dtype: torch.dtype
    product: Callable[[Tensor, PackedLinear], Tensor]
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor]
    """As `grouped_product`."""
    activate: Callable[[Tensor], Tensor]
    sigmoid: Callable[[Tensor], Tensor]

    def pack(self, weights: ExpertWeights, scale: float) -> TorchExperts:
        return TorchExperts.pack(weights, scale, self.dtype)

    def add(self, x: Tensor, experts: TorchExperts, residual: Tensor) -> None:
        groups = ExpertGroups.route(self.product(x.float(), experts.router), self.settings)
        gate, up = self.grouped(x[groups.tokens], experts.gate_up, groups.ends).float().chunk(2, dim=-1)
        mixed = self.activate(gate).mul_(up).to(self.dtype)
        results = self.grouped(mixed, experts.down, groups.ends)
        residual.add_(groups.sums(results).mul_(experts.scale))

    def weight_by_sigmoid(self, x: Tensor, gate: PackedLinear, mixed: Tensor) -> None:
        mixed.mul_(self.sigmoid(self.product(x, gate).float()))


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[pairs, outputs]: x [pairs, inputs] times the weight of each pair's expert.

    weights: [experts, outputs, aligned inputs]. ends: int32 [experts], where each expert's pairs end.
    """
    return torch._grouped_mm(_align(x), weights.transpose(1, 2), offs=ends)


def _row_sums(x: Tensor) -> Tensor:
    """[rows, 1], one number after the other: a row's bits do not depend on the others."""
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
