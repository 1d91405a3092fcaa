"""Linears of a transformers model with quantised weights and int8 activations, by their definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """The product of a linear layer by its definition, in float64."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.double(), bias

    def forward(self, x: Tensor) -> Tensor:
        scales = x.abs().amax(dim=-1, keepdim=True).double() / 127
        steps = torch.round(x.double() / scales)
        product = (steps @ self.weight.T * scales).float()
        return product if self.bias is None else product + self.bias


def replace_linear(model: Any, name: str, weight: Tensor) -> None:
    if name == "model.embed_tokens":
        model.model.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)
        name = "lm_head"
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, child, QuantizedLinear(weight, getattr(owner, child).bias))


def relative_error(found: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))
