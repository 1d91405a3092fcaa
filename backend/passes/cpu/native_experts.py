"""Mixtures of experts by our own C++ kernels (kernels/rows/experts.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.passes.cpu.library.native_structs import LinearOutput, OperationKind
from penstock.backend.passes.cpu.weight_memory.native_weights import PackedExperts, PackedLinear, WeightPacker
from penstock.backend.passes.ops.interface import ExpertWeights


@dataclass(frozen=True, slots=True)
class NativeExpertOps:
    """Implements `ExpertOps`. do and linear run or record an operation of `NativeOps`."""

    settings: Experts
    packer: WeightPacker
    do: Callable[..., int]
    linear: Callable[[int, PackedLinear, int, LinearOutput], int]
    router_logits: int
    """Address of [rows, experts] fp32."""
    gated_output: LinearOutput

    def pack(self, weights: ExpertWeights, scale: float) -> PackedExperts:
        return self.packer.pack_experts(weights, self.settings, scale)

    def add(self, x: int, experts: PackedExperts, residual: int) -> None:
        self.rate(x, experts)
        self.add_rated(x, experts, residual)

    def rate(self, x: int, experts: PackedExperts) -> None:
        self.linear(x, experts.router, self.router_logits, LinearOutput.STORE_FLOAT)

    def add_rated(self, x: int, experts: PackedExperts, residual: int, *, replaces: bool = False) -> None:
        """replaces: residual is 0 before."""
        self.do(OperationKind.ROUTE, experts.address, x, self.router_logits)
        output = self.gated_output if self.settings.clamped_gate is None else LinearOutput.GATED_CLAMPED
        self.do(OperationKind.EXPERT_INPUTS, experts.address, None, 0, output)
        self.do(OperationKind.EXPERT_OUTPUTS, experts.address, None, residual, replaces)

    def weight_by_sigmoid(self, x: int, gate: PackedLinear, mixed: int) -> None:
        gates = self.linear(x, gate, self.router_logits, LinearOutput.STORE_FLOAT)
        self.do(OperationKind.WEIGHT_ROWS, None, gates, mixed, self.settings.shared_width or 0)
