"""The weights of a LoRA adapter, and of which linears. Reads no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ADAPTED_FIELDS = ("qkv", "o", "delta_gates", "gate_up", "down")
"""The fields of `LayerWeights` whose linears may have adapters."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An addition to consecutive outputs of a linear: up @ (down @ x)."""

    first_output: int
    """An output of the linear in its packed form, such as the first of k's outputs in qkv."""
    down: Tensor
    """[rank, inputs] fp32"""
    up: Tensor
    """[outputs, rank] fp32, the adapter's scale included"""
