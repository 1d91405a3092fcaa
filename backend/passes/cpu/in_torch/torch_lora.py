"""Adapters of rows in torch: two products for each adapter and linear, over the tokens whose rows have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.forward_pass import NO_ADAPTER
from penstock.backend.passes.cpu.in_torch.torch_linear import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.lora.peft_adapter import LoraWeights
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import TorchLinear

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

    def give(self, linear: TorchLinear, adapters: Sequence[Sequence[LoraWeights]]) -> None:
        self._parts[id(linear)] = [[_part(lora, linear.scale) for lora in parts] for parts in adapters]

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
