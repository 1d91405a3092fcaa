"""Several residual streams (AltUp) in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import TorchLinear
    from penstock.backend.passes.cpu.in_torch.torch_side import TorchSideOps, TorchStep
    from penstock.backend.passes.ops.interface import Laurel, LayerInput, StreamWeights


class TorchStreamOps:
    """Implements `StreamOps`. The functions are those of `TorchOps`."""

    def __init__(
        self,
        dtype: torch.dtype,
        side: TorchSideOps,
        pack_linear: Callable[..., TorchLinear],
        product: Callable[[Tensor, TorchLinear], Tensor],
        adapted: Callable[[Tensor, TorchLinear], Tensor],
        activate: Callable[[Tensor], Tensor],
        row_norm: Callable[[Tensor, Tensor], Tensor],
        add_norm: Callable[[Tensor, Tensor, Tensor], None],
        normalise: Callable[[Tensor], Tensor],
    ) -> None:
        self._dtype, self._side, self._pack_linear, self._product = dtype, side, pack_linear, product
        self._adapted, self._activate = adapted, activate
        self._row_norm, self._add_norm, self._normalise = row_norm, add_norm, normalise
        self._streams = torch.empty(0)
        """[T, streams, hidden] fp32 of the current step."""

    def pack_ends(self, first: Tensor, last: Tensor) -> None:
        count = len(first) // first.shape[1]
        self._first, self._last = (
            [self._pack_linear(part, None) for part in own.chunk(count)] for own in (first, last)
        )

    def pack(self, weights: StreamWeights) -> StreamWeights:
        return weights

    def _modes(self, x: Tensor, layer: StreamWeights) -> Tensor:
        return torch.tanh((self._normalise(x)[:, None] * layer.router.float()).sum(-1))

    def begin(self, residual: Tensor, step: TorchStep) -> None:  # noqa: ARG002 - as all
        x = residual.to(self._dtype)
        projected = [self._product(x, linear).float() for linear in self._first]
        self._streams = torch.stack([residual, *(_in_size_of(residual, own) for own in projected)], dim=1)

    def predict(self, layer: StreamWeights, residual: Tensor, step: TorchStep) -> None:
        self._narrow(step)
        streams = self._streams
        factors = (self._modes(streams[:, 0], layer)[:, None] * layer.predictions.float()).sum(-1)
        count = streams.shape[1]
        changes = factors.view(-1, count, count, 1) * streams[:, None]
        self._streams = streams + changes.sum(2)
        residual.copy_(self._streams[:, 0])

    def _narrow(self, step: TorchStep) -> None:
        if step.is_narrowed and len(self._streams) != len(step.last_tokens):
            self._streams = self._streams[step.last_tokens]

    def add_laurel(self, laurel: Laurel, residual: Tensor) -> None:
        x = self._row_norm(residual, laurel.input_norm)
        low = self._product(x.to(self._dtype), laurel.left).to(self._dtype)
        residual.add_(x)
        self._add_norm(self._product(low, laurel.right).float(), laurel.norm, residual)

    def cut_linear(self, x: Tensor, weights: TorchLinear, cutoff: float) -> Tensor:
        gate, up = self._adapted(x, weights).float().chunk(2, dim=-1)
        std, mean = torch.std_mean(gate, dim=-1, keepdim=True, correction=0)
        return (self._activate(functional.relu(gate - (mean + std * cutoff))) * up).to(self._dtype)

    def correct(self, layer: StreamWeights, index: int, own: LayerInput, residual: Tensor, step: TorchStep) -> None:
        self._narrow(step)
        factors = 1 + (self._modes(residual, layer)[:, None] * layer.corrections.float()).sum(-1)
        change = residual - self._streams[:, 0]
        self._streams = self._streams + factors[..., None] * change[:, None]
        first = self._streams[:, 0] * layer.scale.float()
        added = self._row_norm(self._side.input_of(index, own, first, step), own.norm)
        self._streams[:, 1:] += added[:, None]

    def end(self, residual: Tensor, step: TorchStep) -> None:  # noqa: ARG002 - as all
        first, *others = self._streams.unbind(1)
        ends = zip(others, self._last, strict=True)
        projected = [self._product(own.to(self._dtype), linear).float() for own, linear in ends]
        residual.copy_(torch.stack([first, *(_in_size_of(first, own) for own in projected)]).mean(0))


def _in_size_of(row: Tensor, x: Tensor) -> Tensor:
    size, own = (part.square().mean(dim=-1, keepdim=True) for part in (row, x))
    return x * size.sqrt() / own.clamp(min=1e-5).sqrt()
