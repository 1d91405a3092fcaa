"""Mixtures of experts checked against float64: routes, groups, products, sums, and the gate of a shared expert."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher
from penstock.backend.passes.cuda.ops.activations import Residual
from penstock.backend.passes.cuda.ops.expert_ops import CudaExpertOps, expert_kernels
from penstock.backend.passes.cuda.ops.matmul import BlockedMatmul, CudaLinear, WholeMatmul
from penstock.backend.passes.cuda.ops.quantized_linear import QuantizedProducts
from penstock.backend.passes.ops.interface import ExpertWeights
from penstock.tools.gpu.cases.check import require, require_close, require_same_bits, require_within
from penstock.tools.gpu.cases.elementwise import check_close, make, poisoned
from penstock.tools.gpu.cases.products.stored_forms import STORED_FORMS

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest error of the experts' sum in a row, relative to its largest number; they round twice in the dtype."""


@dataclass(frozen=True)
class ExpertsCase:
    """Experts with random weights, and rows for them."""

    experts: Experts
    hidden: int
    num_tokens: int
    dtype: torch.dtype
    scale: float = 0.5
    stored: str | None = None
    """One of STORED_FORMS; None for weights in dtype."""
    grouped_rows: int = 0
    device: torch.device = CPU
    """Of all tensors."""

    def weights(self) -> ExpertWeights:
        return _random_weights(self.experts, self.hidden, self.dtype, self.stored)

    def rows(self) -> Tensor:
        return torch.randn(self.num_tokens, self.hidden, generator=torch.Generator().manual_seed(1)).to(self.dtype)

    def ops(self, launcher: Launcher) -> CudaExpertOps:
        elementwise, device = make(launcher, self.dtype, hidden=self.hidden), self.device
        # In blocks because the router's product comes from a library.
        matmul = WholeMatmul(grouped_rows=self.grouped_rows) if self.grouped_rows else BlockedMatmul()
        quantized = QuantizedProducts(launcher, device, self.dtype, self.num_tokens, matmul)
        ops = CudaExpertOps(
            launcher, device, self.hidden, self.experts, self.dtype, self.num_tokens, matmul, quantized,
            elementwise.silu_mul,
        )  # fmt: skip
        launcher.prepare([*ops.kernels, *(kernel for kernel in elementwise.kernels if kernel.entry == "silu_mul")])
        return ops

    def run(self, launcher: Launcher, x: Tensor) -> Tensor:
        """Return the sum that the experts add to rows of zeros, [T, hidden] fp32."""
        ops = self.ops(launcher)
        residual = torch.zeros(len(x), self.hidden, device=self.device)
        ops.add(x.to(self.device), ops.pack(self.weights(), self.scale), Residual(residual))
        return residual.cpu()

    def expected(self, x: Tensor) -> Tensor:
        """Like `run`, in float64."""
        weights, count = self.weights(), self.experts.count
        rows = x.double()
        router_bias, gate_up_bias, down_bias = (
            torch.zeros(count, 1, dtype=torch.float64) if bias is None else bias.double().view(count, -1)
            for bias in (weights.router_bias, weights.gate_up_bias, weights.down_bias)
        )
        probabilities = (rows @ weights.router.double().T + router_bias.flatten()).softmax(dim=-1)
        chosen = probabilities.sort(dim=-1, descending=True, stable=True)
        shares = chosen.values[:, : self.experts.per_token]
        if self.experts.normalises:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        matrices = (w if isinstance(w, Tensor) else w.dequantize() for w in (weights.gate_up, weights.down))
        gate_up, down = (w.view(count, -1, w.shape[1]) for w in matrices)
        result = torch.zeros(len(x), self.hidden, dtype=torch.float64)
        which = chosen.indices[:, : self.experts.per_token]
        for expert in sorted(set(which.flatten().tolist())):
            row, place = (which == expert).nonzero(as_tuple=True)
            gate, up = (rows[row] @ gate_up[expert].double().T + gate_up_bias[expert]).chunk(2, dim=1)
            added = self._mixed(gate, up) @ down[expert].double().T + down_bias[expert]
            result.index_add_(0, row, shares[row, place, None] * added)
        return result * self.scale

    def _mixed(self, gate: Tensor, up: Tensor) -> Tensor:
        clamped = self.experts.clamped_gate
        if clamped is None:
            return functional.silu(gate) * up
        gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
        return gate * torch.sigmoid(clamped.alpha * gate) * (up + 1)


@lru_cache(maxsize=1)  # of one case; its checks run one after the other
def _random_weights(experts: Experts, hidden: int, dtype: torch.dtype, stored: str | None) -> ExpertWeights:
    generator = torch.Generator().manual_seed(hidden)
    count, width = experts.count, experts.width

    def random(rows: int, inputs: int) -> Tensor:
        numbers = torch.randn(rows, inputs, generator=generator)
        return (numbers / math.sqrt(inputs)).to(dtype)

    router = random(count, hidden) * 3
    gate_up, down = random(count * 2 * width, hidden), random(count * hidden, width)
    sizes = (count, count * 2 * width, count * hidden) if experts.biased else ()
    biases = [torch.randn(size, generator=generator).to(dtype) / 2 for size in sizes]
    if stored is None:
        return ExpertWeights(router, gate_up, down, *biases)
    make = STORED_FORMS[stored]
    return ExpertWeights(router, make(gate_up), make(down), *biases)


def check_experts(launcher: Launcher, case: ExpertsCase) -> float:
    """Returns the largest error of a row, relative to its largest number."""
    x = case.rows()
    found, expected = case.run(launcher, x), case.expected(x)
    error = ((found.double() - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)).max()
    return require_within("what experts add", float(error), TOLERANCE[case.dtype])


def check_rows_alone(launcher: Launcher, case: ExpertsCase) -> None:
    """A row's bits depend neither on the other rows nor on its place."""
    x = case.rows()
    together = case.run(launcher, x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    require_same_bits("in another order", case.run(launcher, x[order]), together[order])
    alone = replace(case, num_tokens=1)
    for row in (0, len(x) - 1):
        require_same_bits(f"row {row} alone", alone.run(launcher, x[row : row + 1])[0], together[row])


def check_routes(launcher: Launcher, num_experts: int, per_token: int) -> None:
    """Ties, infinities and NaN included: the chosen experts differ and exist."""
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(7, num_experts, generator=generator) * 4
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3, ::2] = -torch.inf
    logits[4, num_experts // 2] = torch.nan
    logits[5] = torch.nan
    route, group, *_ = expert_kernels(ACT_MACRO[torch.float32])
    for normalises in (False, True):
        chosen = torch.full((7, per_token), -1, dtype=torch.int32)
        weights = poisoned(7, per_token, dtype=torch.float32)
        sizes = map(np.int32, (7, num_experts, per_token, normalises))
        launcher.launch(route, (2, 1, 1), logits, chosen, weights, *sizes)
        expected = logits.double().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        usual = [0, 1, 2, 3]
        shares = expected.values[usual, :per_token]
        if normalises:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        require("other experts", torch.equal(chosen[usual].long(), expected.indices[usual, :per_token]))
        require_close("their weights", weights[usual], shares, 1e-5, 1e-7)
        require("a number is lost that is not finite", bool(weights[[4, 5]].isnan().all()))
        valid = (chosen >= 0) & (chosen < num_experts)
        require("an expert that does not exist", bool(valid.all()))
        require("an expert twice", all(len(set(row)) == per_token for row in chosen.tolist()))
    check_groups(launcher, group, chosen, num_experts)


def check_groups(launcher: Launcher, group: Kernel, chosen: Tensor, num_experts: int) -> None:
    """Groups of chosen int32 [T, per_token] equal a stable sort by expert."""
    pairs, per_token = chosen.numel(), chosen.shape[1]
    places, tokens, ends = (torch.full((n,), -1, dtype=torch.int32) for n in (pairs, pairs, num_experts))
    sizes = np.int32(pairs), np.int32(per_token)
    launcher.launch(group, (num_experts, 1, 1), chosen, places, tokens, ends, *sizes)
    order = chosen.flatten().sort(stable=True).indices
    require_same_bits("the tokens by place", tokens, (order // per_token).int())
    require_same_bits("the pairs by place", places[order], torch.arange(pairs, dtype=torch.int32))
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    require_same_bits("the groups' ends", ends, counts.cumsum(0).int())


def check_large_groups(launcher: Launcher, num_tokens: int) -> None:
    """Many pairs, an expert with most of them, and experts without any."""
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(0, 40, (num_tokens, 3), generator=generator, dtype=torch.int32)
    chosen[: num_tokens // 2] = torch.tensor([7, 39, 11], dtype=torch.int32)
    check_groups(launcher, expert_kernels(ACT_MACRO[torch.float32])[1], chosen, 44)


def check_shared_gate(launcher: Launcher, dtype: torch.dtype, hidden: int, width: int) -> float:
    generator = torch.Generator().manual_seed(width)
    x, mixed = (torch.randn(3, size, generator=generator).to(dtype) for size in (hidden, width))
    gate = (torch.randn(1, hidden, generator=generator) * hidden**-0.5).to(dtype)
    expected = mixed.double() * (x.double() @ gate.double().T).sigmoid()
    case = ExpertsCase(Experts(2, 1, 8, normalises=False), hidden, 3, dtype)
    case.ops(launcher).weight_by_sigmoid(x, CudaLinear(gate, gate.t(), None), mixed)
    return check_close("the weighted rows", mixed, expected, dtype)
