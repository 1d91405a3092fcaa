"""Mixtures of experts on the device: routing, groups, products and sums. No wait, and no loop over experts.

A pair is a token and one of its experts. The kernels group a step's pairs by expert; a group's rows are multiplied in
tiles, each with the weight of its expert. The host knows only how many tiles there may be. Many rows of bf16 may be
multiplied by torch instead (`Matmul.grouped_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, Experts
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher
from penstock.backend.passes.cuda.ops.activations import Residual
from penstock.backend.passes.cuda.ops.device_weights import DeviceWeights
from penstock.backend.passes.cuda.ops.matmul import CudaLinear, Matmul
from penstock.backend.passes.cuda.ops.packed_weights import CudaQuantizedLinear
from penstock.backend.passes.cuda.ops.quantized_linear import TILE_OUTPUTS, QuantizedProducts, most_tiles
from penstock.backend.passes.ops.interface import ExpertWeights

NUM_LAUNCHES = 9
"""The most kernels of one layer's experts, without the router's product: a copy, seven of ours, the shared expert's."""
_TOKENS_PER_BLOCK = 4
_VALUES = 8


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    for act in ACT_MACRO.values():
        yield from expert_kernels(act)


def expert_kernels(act: int) -> tuple[Kernel, Kernel, Kernel, Kernel, Kernel, Kernel]:
    """Return route, group_pairs, multiply_experts, clamped_gate, add_expert_results and weight_by_sigmoid."""
    macros = (("ACT", act),)
    return (
        Kernel("products/experts.cu", "route", macros, 128),
        Kernel("products/experts.cu", "group_pairs", macros, 256),
        Kernel("products/expert_products.cu", "multiply_experts", macros, 128),
        Kernel("products/experts.cu", "clamped_gate", macros, 128),
        Kernel("products/experts.cu", "add_expert_results", macros, 128),
        Kernel("products/experts.cu", "weight_by_sigmoid", macros, 128),
    )


def unsupported_reason(experts: Experts) -> str | None:
    """Return why the kernels do not support the experts of a model, or None."""
    if experts.biased != (experts.clamped_gate is not None):
        return "its experts have biases or clamped gates, and not both"
    for name, width in (("the experts", experts.width), ("the shared expert", experts.shared_width)):
        if width is not None and width % _VALUES:
            return f"the width of {name} is {width}; it must be a multiple of {_VALUES}"
    return None


@dataclass(frozen=True, slots=True)
class CudaExperts:
    router: CudaLinear
    """In fp32."""
    gate_up: Tensor | CudaQuantizedLinear
    """[experts, gate | up, hidden]; quantised, the first two are one dimension."""
    down: Tensor | CudaQuantizedLinear
    """[experts, hidden, width], or quantised like gate_up."""
    biases: tuple[Tensor, Tensor] | None
    """fp32 [experts, gate | up] and [experts, hidden]."""
    factors: Tensor | None
    """fp32 [experts], of their results."""
    scale: float


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Buffers for a step of T tokens with `per_token` pairs each."""

    x: Tensor
    """[T, hidden] fp32, the router's input."""
    logits: Tensor
    """[T, experts] fp32"""
    chosen: Tensor
    """int32 [T, per_token], by place."""
    weights: Tensor
    """fp32 [T, per_token]"""
    places: Tensor
    tokens: Tensor
    """int32 [pairs] by place."""
    ends: Tensor
    """int32 [experts]"""
    factors: Tensor
    """fp32 [pairs], if the experts have factors"""
    gate_up: Tensor
    gated: Tensor
    results: Tensor
    """[pairs, hidden] by place, like the two before."""


def _shapes(
    hidden_size: int, experts: Experts, dtype: torch.dtype, max_tokens: int, matmul: Matmul
) -> dict[str, tuple[int, int, torch.dtype]]:
    """Field of `_Buffers` → rows, width and dtype."""
    pairs, padded = max_tokens * experts.per_token, matmul.padded_rows(max_tokens)
    return {
        "x": (padded, hidden_size, torch.float32),
        "logits": (padded, experts.count, torch.float32),
        "chosen": (max_tokens, experts.per_token, torch.int32),
        "weights": (max_tokens, experts.per_token, torch.float32),
        "places": (max_tokens, experts.per_token, torch.int32),
        "tokens": (pairs, 1, torch.int32),
        "ends": (experts.count, 1, torch.int32),
        "factors": (pairs if experts.beside_mlp else 0, 1, torch.float32),
        "gate_up": (pairs, 2 * experts.width, dtype),
        "gated": (pairs, experts.width, dtype),
        "results": (pairs, hidden_size, dtype),
    }


def expert_bytes(config: DecoderConfig, dtype: torch.dtype, max_tokens: int, matmul: Matmul) -> int:
    """Memory of the buffers, and of routers and biases beyond that of weights in dtype."""
    if config.experts is None:
        return 0
    shapes = _shapes(config.hidden_size, config.experts, dtype, max_tokens, matmul)
    numbers = config.experts.count * (config.hidden_size + config.experts.beside_mlp)
    if config.experts.biased:
        numbers += config.experts.count * (1 + 2 * config.experts.width + config.hidden_size)
    wide = sum(config.layer_has_experts) * numbers * (4 - dtype.itemsize)
    if 0 < matmul.grouped_rows <= max_tokens:  # a product's results, before they are copied
        wide += max_tokens * config.experts.per_token * max(2 * config.experts.width, config.hidden_size) * 2
    return wide + sum(rows * width * of.itemsize for rows, width, of in shapes.values())


class CudaExpertOps:
    """Implements `ExpertOps`. No step allocates, but for grouped products."""

    def __init__(
        self,
        launcher: Launcher,
        torch_device: torch.device,
        hidden_size: int,
        experts: Experts,
        dtype: torch.dtype,
        max_tokens: int,
        matmul: Matmul,
        quantized: QuantizedProducts,
        activate: Callable[[Tensor, Tensor], None],
        weights: DeviceWeights | None = None,
    ) -> None:
        """activate(gate_up [n, 2 width], out [n, width]) computes the gated activation. weights: packs them; by default
        into this process's own memory. Raises ValueError for experts
        with an `unsupported_reason`."""
        if (reason := unsupported_reason(experts)) is not None:
            raise ValueError(reason)
        self._launcher = launcher
        self._weights = weights or DeviceWeights(torch_device, dtype, quantized)
        self._experts = experts
        self._dtype = dtype
        self._matmul = matmul
        self._quantized = quantized
        self._activate = activate
        self.kernels = expert_kernels(ACT_MACRO[dtype])
        """The kernels to pass to `Launcher.prepare`."""
        self._route, self._group, self._multiply, self._gate, self._add, self._weight = self.kernels
        self._buffers = _Buffers(
            **{
                name: torch.zeros(rows, width, dtype=of, device=torch_device)
                for name, (rows, width, of) in _shapes(hidden_size, experts, dtype, max_tokens, matmul).items()
            }
        )

    def pack(self, weights: ExpertWeights, scale: float) -> CudaExperts:
        count, wide = self._experts.count, self._weights.vector

        def by_expert(weight: Tensor | QuantizedWeight) -> Tensor | CudaQuantizedLinear:
            packed = self._quantized.take(weight, None)
            if packed is not None:
                return packed
            plain = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
            return self._weights.table(plain).view(count, -1, plain.shape[1])

        gate_up, down = by_expert(weights.gate_up), by_expert(weights.down)
        router, router_bias = wide(weights.router), weights.router_bias
        biases = None
        if weights.gate_up_bias is not None and weights.down_bias is not None:
            biases = wide(weights.gate_up_bias), wide(weights.down_bias)
        linear = CudaLinear(router, router.t(), None if router_bias is None else wide(router_bias))
        factors = None if weights.factors is None else wide(weights.factors)
        return CudaExperts(linear, gate_up, down, biases, factors, scale)

    def add(self, x: Tensor, experts: CudaExperts, residual: Residual) -> None:
        residual.add_pending()
        self.choose(x, experts)
        self.add_chosen(x, experts, residual.values)

    def add_chosen(self, x: Tensor, experts: CudaExperts, sums: Tensor) -> None:
        """Add the results of the experts that `choose` has chosen to sums [T, hidden] fp32."""
        num_tokens, hidden = sums.shape
        per_token, buffers = self._experts.per_token, self._buffers
        pairs = num_tokens * per_token
        gate_up, gated, results = (buffer[:pairs] for buffer in (buffers.gate_up, buffers.gated, buffers.results))
        self._products(x, experts.gate_up, gate_up, gathers=True)
        self._mix(gate_up, gated, experts)
        self._products(gated, experts.down, results, gathers=False)
        has_bias = experts.biases is not None
        bias = buffers.weights if experts.biases is None else experts.biases[1]
        self._launcher.launch(
            self._add, (num_tokens, _chunks(hidden, self._add), 1), results, buffers.places, buffers.chosen,
            buffers.weights, bias, sums, np.int32(hidden), np.int32(per_token), np.int32(has_bias),
            np.float32(experts.scale),
        )  # fmt: skip

    def _mix(self, gate_up: Tensor, gated: Tensor, experts: CudaExperts) -> None:
        """Compute gated, the input of the down product, from gate_up [pairs, 2 width]."""
        clamped, buffers, width = self._experts.clamped_gate, self._buffers, gated.shape[1]
        if clamped is None or experts.biases is None:
            self._activate(gate_up, gated)
            return
        self._launcher.launch(
            self._gate, (len(gated), _chunks(width, self._gate), 1), gate_up, buffers.places, buffers.chosen,
            experts.biases[0], gated, np.int32(width), np.float32(clamped.alpha), np.float32(clamped.limit),
        )  # fmt: skip

    def weight_by_sigmoid(self, x: Tensor, gate: CudaLinear, mixed: Tensor) -> None:
        sizes = np.int32(x.shape[1]), np.int32(mixed.shape[1])
        self._launcher.launch(self._weight, (len(x), 1, 1), x, gate.weight, mixed, *sizes)

    def choose(self, x: Tensor, experts: CudaExperts) -> None:
        """Choose each token's experts from x, the router's input, and group the pairs."""
        settings, buffers, launch = self._experts, self._buffers, self._launcher.launch
        num_tokens, num_pairs = len(x), len(x) * settings.per_token
        inputs = buffers.x[:num_tokens].copy_(x)
        logits = self._matmul.multiply(inputs, experts.router, buffers.logits[:num_tokens])
        sizes = map(np.int32, (num_tokens, settings.count, settings.per_token, settings.normalises))
        grid = (-(-num_tokens // _TOKENS_PER_BLOCK), 1, 1)
        launch(self._route, grid, logits, buffers.chosen, buffers.weights, *sizes)
        if experts.factors is not None:
            chosen = buffers.chosen.view(-1)[:num_pairs]
            factors = torch.index_select(experts.factors, 0, chosen, out=buffers.factors.view(-1)[:num_pairs])
            buffers.weights.view(-1)[:num_pairs].mul_(factors)
        sizes = map(np.int32, (num_pairs, settings.per_token))
        grouped = buffers.places, buffers.tokens, buffers.ends
        launch(self._group, (settings.count, 1, 1), buffers.chosen, *grouped, *sizes)

    def _products(self, x: Tensor, weight: Tensor | CudaQuantizedLinear, out: Tensor, *, gathers: bool) -> None:
        """Write out [pairs, outputs]: each pair's row of x times its expert's matrix.

        x is [pairs, inputs], or [T, inputs] if gathers.
        """
        count, tokens, ends = self._experts.count, self._buffers.tokens, self._buffers.ends
        if not isinstance(weight, torch.Tensor):
            self._quantized.multiply_experts(x, weight, count, tokens, ends, out, gathers=gathers)
            return
        if 0 < self._matmul.grouped_rows <= len(out) // self._experts.per_token and weight.dtype == torch.bfloat16:
            if gathers:  # the memory of the next product's results is free
                gathered = self._buffers.results[: len(out)]
                x = torch.index_select(x, 0, tokens.view(-1)[: len(out)], out=gathered)
            out.copy_(torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends.view(-1)))
            return
        _, outputs, inputs = weight.shape
        self._launcher.launch(
            self._multiply, (-(-outputs // TILE_OUTPUTS), most_tiles(len(out), count), 1), x, tokens, weight, ends, out,
            *map(np.int32, (count, outputs, inputs, gathers)),
        )  # fmt: skip


def _chunks(width: int, kernel: Kernel) -> int:
    """Number of blocks for a row. Each thread has _VALUES numbers."""
    return -(-width // (_VALUES * kernel.num_threads))
