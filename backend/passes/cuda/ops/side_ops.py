"""Inputs of layers, experts beside the MLP, and several residual streams (kernels/rows/streams.cu)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, Streams
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher, int32
from penstock.backend.passes.cuda.ops.activations import Activations, Residual, narrow
from penstock.backend.passes.cuda.ops.device_weights import DeviceWeights
from penstock.backend.passes.cuda.ops.elementwise import Elementwise
from penstock.backend.passes.cuda.ops.expert_ops import CudaExpertOps, CudaExperts
from penstock.backend.passes.cuda.step.step_rows import CudaStep
from penstock.backend.passes.ops.interface import BesideNorms, Laurel, LayerInput, Linear, StreamWeights

LAUNCHES_OF_INPUTS, LAUNCHES_BESIDE, LAUNCHES_OF_STREAMS = 5, 13, 6
"""Kernels of a layer's input beside its products, of a layer's sums and factors of experts, and of its streams."""
_THREADS = 256
_STREAM_KERNELS = (
    "predict_streams", "correct_streams", "add_to_streams", "begin_streams", "take_stream", "end_stream", "cut_gates",
)  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield stream_kernel(0, "resolve_ids")
    yield from (stream_kernel(act, entry) for act in ACT_MACRO.values() for entry in _STREAM_KERNELS)


def stream_kernel(act: int, entry: str) -> Kernel:
    return Kernel("rows/streams.cu", entry, (("ACT", act),), _THREADS)


def side_bytes(config: DecoderConfig, dtype: torch.dtype, max_tokens: int, padded_tokens: int) -> int:
    """Memory of the buffers, and of vectors beyond weights in dtype."""
    inputs, size = config.num_layers * config.layer_input_size, config.layer_input_size
    vectors = 4 * config.hidden_size * config.num_layers
    num_bytes = 4 * max_tokens * (inputs + 1) + padded_tokens * (inputs + size) * dtype.itemsize
    if config.streams is not None:
        count, hidden, rank = config.streams.count, config.hidden_size, config.streams.laurel_rank
        num_bytes += 4 * max_tokens * count * hidden
        num_bytes += padded_tokens * ((count - 1) * hidden + rank) * dtype.itemsize
        num_bytes += 4 * config.num_layers * (count * hidden + count**3 + count**2 + 2 * hidden)
    return num_bytes + (2 * 4 * max_tokens * config.hidden_size + 4 * vectors if config.has_experts_beside else 0)


class CudaSideOps:
    """Implements `SideOps`. No step allocates."""

    def __init__(
        self,
        launcher: Launcher,
        config: DecoderConfig,
        dtype: torch.dtype,
        torch_device: torch.device,
        max_tokens: int,
        padded_tokens: int,
        weights: DeviceWeights,
        experts: CudaExpertOps | None,
        elementwise: Callable[[], Elementwise],
        ids: Callable[[], tuple[Tensor, Tensor]],
        embed: Callable[[Any, Tensor, CudaStep, Tensor, float], None],
        norm: Callable[[Residual, Tensor | None], Tensor],
        linear_add: Callable[[Tensor, Linear, Residual, Tensor], None],
        multiply: Callable[[Tensor, Linear, Tensor], Tensor],
        now: Callable[[], Activations],
    ) -> None:
        """embed, norm, linear_add and multiply are those of `CudaOps`, now its buffers; elementwise and ids, of the
        step's tokens and of slots' last ones, its own from the cache on."""
        self._launcher, self._of_ids = launcher, ids
        self._config, self._weights, self._experts, self._elementwise = config, weights, experts, elementwise
        self._embed, self._norm, self._linear_add, self._multiply = embed, norm, linear_add, multiply
        size, hidden = config.layer_input_size, config.hidden_size
        self._scale = Dtype.of(dtype).round(size**0.5)

        def zeros(rows: int, width: int, of: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(rows, width, dtype=of, device=torch_device)

        self._inputs = zeros(max_tokens, config.num_layers * size)
        """[T, layers * layer_input_size] of the current step."""
        self._ids = zeros(max_tokens, 1, torch.int32).flatten()
        self._projected = zeros(padded_tokens, config.num_layers * size, dtype)
        self._gates = zeros(padded_tokens, size, dtype)
        num_sums = max_tokens if config.has_experts_beside else 0
        self._total, self._results = zeros(num_sums, hidden), zeros(num_sums, hidden)
        self.kernels: tuple[Kernel, ...] = (stream_kernel(0, "resolve_ids"),)
        """The kernels to pass to `Launcher.prepare`."""
        self.streams = None
        if (streams := config.streams) is not None:
            rows, begun = zeros(max_tokens, streams.count * hidden), (streams.count - 1) * hidden
            buffers = rows, zeros(padded_tokens, begun, dtype), zeros(padded_tokens, streams.laurel_rank, dtype)
            self.streams = CudaStreamOps(
                launcher, config, streams, ACT_MACRO[dtype], weights, elementwise, norm, multiply, now, *buffers,
                self._input_of,
            )  # fmt: skip
            self.kernels += self.streams.kernels

    def pack_inputs(self, table: Tensor | QuantizedWeight, projection: Tensor | QuantizedWeight, norm: Tensor) -> None:
        pack = self._weights.pack_linear
        if isinstance(table, Tensor):
            self._table: Any = self._weights.table(table)
        else:
            self._table = self._weights.packed_table(table, pack(table, None))
        self._projection = pack(projection, None, self._config.hidden_size**-0.5)
        self._norm_and_factor = self._weights.vector(torch.cat([norm.float(), norm.new_full((1,), 0.5**0.5).float()]))

    def begin_inputs(self, residual: Residual, step: CudaStep) -> None:
        num_tokens, size = step.num_tokens, self._config.layer_input_size
        ids, rows = self._ids[:num_tokens], step.rows
        self._launcher.launch(  # pictures, and tokens without a row, have the inputs of token 0
            self.kernels[0], (-(-num_tokens // _THREADS), 1, 1), *self._of_ids(), rows.query_starts, rows.slots, ids,
            int32(num_tokens), int32(len(rows.slots)), int32(self._config.input_rows),
        )  # fmt: skip
        inputs = self._inputs[:num_tokens]
        self._embed(self._table, ids, step, inputs, self._scale)
        projected = self._multiply(self._norm(residual, None), self._projection, self._projected[:num_tokens])
        self._elementwise().rms_norm_added(inputs.view(-1, size), projected.view(-1, size), self._norm_and_factor)

    def add_input(self, index: int, layer: LayerInput, residual: Residual, step: CudaStep) -> None:
        self._linear_add(self._input_of(index, layer, residual, step), layer.projection, residual, layer.norm)

    def _input_of(self, index: int, layer: LayerInput, residual: Residual, step: CudaStep) -> Tensor:
        """Return what the projection multiplies."""
        size, x = self._config.layer_input_size, self._norm(residual, None)
        gates = self._multiply(x, layer.gate, self._gates[: len(x)])
        tokens = step.logit_tokens if step.is_decode_only else None  # after `last_tokens` too
        self._elementwise().gelu_mul_input(gates, self._inputs[:, index * size : (index + 1) * size], tokens)
        return gates

    def add_experts(
        self, mixed: Tensor, down: Linear, experts: CudaExperts, norms: BesideNorms, residual: Residual
    ) -> None:
        if self._experts is None:
            raise ValueError("these operations have none for experts")
        kernels, num_rows, hidden = self._elementwise(), len(mixed), self._config.hidden_size
        total, results = self._total[:num_rows].zero_(), self._results[:num_rows].zero_()
        self._linear_add(mixed, down, Residual(total), norms.dense)
        self._experts.choose(self._norm(residual, norms.router), experts)
        x = self._norm(residual, norms.expert_inputs)
        self._experts.add_chosen(x, experts, results)
        kernels.add_rms_norm(results, None, norms.experts, x)
        kernels.add_rms_norm(total.add_(x), None, norms.sum, x)
        residual.values.add_(x)
        if len(norms.sum) > hidden:
            residual.values.mul_(norms.sum[hidden:])


class CudaStreamOps:
    """Implements `StreamOps`. No step allocates."""

    def __init__(
        self,
        launcher: Launcher,
        config: DecoderConfig,
        streams: Streams,
        act: int,
        weights: DeviceWeights,
        elementwise: Callable[[], Elementwise],
        norm: Callable[[Residual, Tensor | None], Tensor],
        multiply: Callable[[Tensor, Linear, Tensor], Tensor],
        now: Callable[[], Activations],
        rows: Tensor,
        begun: Tensor,
        low: Tensor,
        input_of: Callable[[int, LayerInput, Residual, CudaStep], Tensor],
    ) -> None:
        """rows [T, streams * hidden] fp32: of the current step. begun and low: results of products. input_of is that of
        `CudaSideOps`."""
        self._launcher, self._weights, self._elementwise = launcher, weights, elementwise
        self._norm, self._multiply, self._now, self._input_of = norm, multiply, now, input_of
        self._rows, self._begun, self._low = rows, begun, low
        self._num_streams = streams.count
        self._shape, self._eps = (int32(streams.count), int32(config.hidden_size)), np.float32(config.norm_eps)
        self._kernels = {entry: stream_kernel(act, entry) for entry in _STREAM_KERNELS}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._kernels.values())

    def pack_ends(self, first: Tensor, last: Tensor) -> None:
        pack = self._weights.pack_linear
        self._first, self._last = pack(first, None), [pack(part, None) for part in last.chunk(self._num_streams - 1)]

    def pack(self, weights: StreamWeights) -> StreamWeights:
        plain = (weights.router, weights.predictions, weights.corrections, weights.scale)
        return StreamWeights(*map(self._weights.vector, plain))

    def begin(self, residual: Residual, step: CudaStep) -> None:
        projected = self._multiply(self._norm(residual, None), self._first, self._begun[: step.num_tokens])
        self._launch("begin_streams", self._rows, residual.values, projected, *self._shape)

    def predict(self, layer: StreamWeights, residual: Residual, step: CudaStep) -> None:
        residual.add_pending()
        arrays = residual.values, layer.router, layer.predictions
        self._launch("predict_streams", self._rows, *arrays, *_tokens(step), *self._shape, self._eps)

    def add_laurel(self, laurel: Laurel, residual: Residual) -> None:
        x = self._norm(residual, laurel.input_norm)
        low = self._multiply(x, laurel.left, self._low[: len(x)])
        added = self._multiply(low, laurel.right, self._now().added)
        residual.values.add_(x)
        self._elementwise().rms_norm_added(residual.values, added, laurel.norm)

    def cut_linear(self, x: Tensor, weights: Any, cutoff: float) -> Tensor:
        size = weights.num_outputs // 2
        product = self._multiply(x, weights, narrow(self._now().gate_up, 2 * size))
        out = narrow(self._now().gated, size)
        self._launch("cut_gates", product, out, int32(size), np.float32(cutoff))
        return out

    def correct(self, layer: StreamWeights, index: int, own: LayerInput, residual: Residual, step: CudaStep) -> None:
        residual.add_pending()
        arrays = residual.values, layer.router, layer.corrections, layer.scale
        self._launch("correct_streams", self._rows, *arrays, *_tokens(step), *self._shape, self._eps)
        added = self._multiply(self._input_of(index, own, residual, step), own.projection, self._now().added)
        self._elementwise().rms_norm_added(residual.values.zero_(), added, own.norm)
        self._launch("add_to_streams", self._rows, residual.values, *_tokens(step), *self._shape)

    def end(self, residual: Residual, step: CudaStep) -> None:
        x, tokens = self._now().hidden, _tokens(step)
        for stream, linear in enumerate(self._last, 1):
            self._launch("take_stream", self._rows, x, *tokens, int32(stream), *self._shape)
            projected = self._multiply(x, linear, self._now().added)
            self._launch("end_stream", self._rows, residual.values, projected, *tokens, int32(stream), *self._shape)

    def _launch(self, entry: str, *arguments: Any) -> None:
        self._launcher.launch(self._kernels[entry], (len(self._now().residual), 1, 1), *arguments)


def _tokens(step: CudaStep) -> tuple[Tensor, np.int32]:
    """The rows' tokens, and whether they are used: after `last_tokens` too."""
    return step.logit_tokens, int32(step.is_decode_only)
