"""Linears of a transformers model with quantised weights and int8 activations, by their definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class QuantizedLinear(nn.Module):
    """The product of a linear layer by its definition, in float64.

    Activations are int8 with a scale for each 32 inputs; of the largest groups, what rounding leaves is int8 once more.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.double(), bias

    def forward(self, x: Tensor) -> Tensor:
        inputs = x.shape[-1]
        groups = nn.functional.pad(x.double(), (0, -inputs % 32)).unflatten(-1, (-1, 32))
        top = groups.abs().amax(dim=-1, keepdim=True)
        scales = top.clamp(min=1e-30) / 127
        steps = torch.round(groups / scales)
        rests = torch.round((groups / scales - steps) * 254) / 254
        is_wide = top > 1.5 * top.square().mean(dim=-2, keepdim=True).sqrt()
        rounded = ((steps + torch.where(is_wide, rests, 0.0)) * scales).flatten(-2)[..., :inputs]
        product = (rounded @ self.weight.T).float()
        return product if self.bias is None else product + self.bias


class QuantizedExperts(nn.Module):
    """A layer's experts, products as above; the arguments of forward are those of transformers."""

    def __init__(self, gate_up: Tensor, down: Tensor, theirs: Any) -> None:
        """Rows of all experts in order: [experts × 2 × width, hidden] and [experts × hidden, width].

        theirs: the layer's experts in transformers. Only those of gpt-oss have biases, and a function of gate and up,
        which take turns.
        """
        super().__init__()
        self.apply_gate = getattr(theirs, "_apply_gate", None) if hasattr(theirs, "limit") else None
        self.activate = getattr(theirs, "act_fn", None)
        biases: tuple[Any, Any] = ([None] * theirs.num_experts,) * 2
        if self.apply_gate is not None:
            taking_turns = theirs.gate_up_proj_bias
            biases = torch.cat([taking_turns[:, 0::2], taking_turns[:, 1::2]], dim=1), theirs.down_proj_bias
        self.gate_up, self.down = (
            [QuantizedLinear(part, bias) for part, bias in zip(weight.chunk(theirs.num_experts), of_all, strict=True)]
            for weight, of_all in zip((gate_up, down), biases, strict=True)
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row, (experts, of_row) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, weight in zip(experts, of_row, strict=True):
                gate, up = self.gate_up[expert](x[row]).chunk(2)
                if self.apply_gate is None:
                    mixed = self.activate(gate) * up
                else:
                    mixed = self.apply_gate(torch.stack([gate, up], dim=-1).flatten())
                out[row] += weight * self.down[expert](mixed)
        return out


def replace_linear(model: Any, name: str, weight: Tensor) -> None:
    if name == "model.embed_tokens":
        model.model.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)
        name = "lm_head"
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(own := getattr(owner, child), nn.Embedding):
        own.weight = nn.Parameter(weight, requires_grad=False)
        return
    setattr(owner, child, QuantizedLinear(weight, getattr(owner, child).bias))


def relative_error(found: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))
