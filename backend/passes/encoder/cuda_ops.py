"""The encoder's operations on a GPU: torch's, and our kernels for attention and for products with int8 weights.

All work runs in order in the device's stream, and nothing waits. Torch keeps freed memory for later operations of the
same stream, so buffers are simply allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.encoders.encoder_config import Activation, EncoderConfig, PoolingMode
from penstock.backend.passes.cuda.attention.encoder_attention import EncoderAttention
from penstock.backend.passes.cuda.device.device import Device, Event, annotate_faults
from penstock.backend.passes.cuda.ops.device_weights import DeviceWeights
from penstock.backend.passes.cuda.ops.matmul import BlockedMatmul, CudaLinear
from penstock.backend.passes.cuda.ops.packed_weights import CudaQuantizedLinear
from penstock.backend.passes.cuda.ops.quantized_linear import QuantizedProducts
from penstock.backend.passes.encoder.ops import EmbeddingTables, Encode, EncoderRows, LayerAttention
from penstock.backend.passes.ops.rope_table import RopeTable

Linear = CudaLinear | CudaQuantizedLinear


class DeviceVectors:
    """These methods of `EncoderOps`, and copies to and from the device. A row is summed by itself, in one order."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def send(self, values: NDArray[np.int32]) -> Tensor:
        """Start to copy values to the device."""
        host = self._device.pinned(values.size, torch.int32)
        host.numpy()[:] = values.ravel()
        # Page-locked memory that torch has allocated is not given away before the copies from it are done.
        return host.to(self._device.torch_device, non_blocking=True).view(values.shape)

    def pool(self, hidden: Tensor, rows: Sequence[tuple[int, int]], modes: tuple[PoolingMode, ...]) -> Tensor:
        ends = np.array(rows, np.int32)
        places = self.send(ends)
        lengths = self.send(ends[:, 1] - ends[:, 0])
        return torch.cat([self._pool(hidden, rows, places, lengths, mode) for mode in modes], dim=1)

    def _pool(
        self, hidden: Tensor, rows: Sequence[tuple[int, int]], places: Tensor, lengths: Tensor, mode: PoolingMode
    ) -> Tensor:
        match mode:
            case "cls":
                return hidden.index_select(0, places[:, 0])
            case "lasttoken":
                return hidden.index_select(0, places[:, 1] - 1)
        chosen = hidden
        if sum(end - start for start, end in rows) < len(hidden):
            chosen = torch.cat([hidden[start:end] for start, end in rows])
        counts = lengths[:, None]
        match mode:
            case "max":
                return _reduced(chosen, lengths, "max")
            case "mean":
                return _reduced(chosen, lengths, "sum") / counts
            case "mean_sqrt_len":
                return _reduced(chosen, lengths, "sum") / counts.sqrt()
        order = np.concatenate([np.arange(1, end - start + 1, dtype=np.int32) for start, end in rows])
        weighted = chosen * self.send(order)[:, None]
        return _reduced(weighted, lengths, "sum") / (counts * (counts + 1) / 2)

    def splade(self, blocks: Iterable[Tensor]) -> Tensor:
        top = torch.stack([block.amax(dim=0) for block in blocks]).amax(dim=0, keepdim=True)
        return top.relu_().log1p_()

    def fetch(self, vectors: Sequence[Tensor]) -> FetchedVectors:
        flat = torch.cat([each.reshape(-1) for each in vectors])
        host = self._device.pinned(len(flat), torch.float32)
        host.copy_(flat, non_blocking=True)
        shapes = [tuple(each.shape) for each in vectors]
        return FetchedVectors(self._device, host, self._device.record(), shapes)

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        with annotate_faults(self._device, doing):
            yield


@dataclass(frozen=True, slots=True)
class FetchedVectors:
    """Implements `Fetched`."""

    device: Device
    host: Tensor
    done: Event
    shapes: list[tuple[int, ...]]

    def wait(self) -> list[NDArray[np.float32]]:
        with annotate_faults(self.device, f"waiting for {len(self.shapes)} blocks of vectors"):
            self.done.synchronize()
        numbers: NDArray[np.float32] = self.host.numpy()
        parts = np.split(numbers[: sum(map(math.prod, self.shapes))], np.cumsum([*map(math.prod, self.shapes)])[:-1])
        return [part.reshape(shape).copy() for part, shape in zip(parts, self.shapes, strict=True)]


def _reduced(x: Tensor, lengths: Tensor, how: str) -> Tensor:
    """[rows, width]: the tokens of each row, added up in their order, or the largest. A NaN stays one."""
    reduced: Tensor = torch.segment_reduce(x, how, lengths=lengths, axis=0, unsafe=True)
    return reduced


BLOCK_ROWS = 512
"""Tokens of a product: enough that a step of a small model is not all launches, and few enough that a short step, which
is filled up to them, takes little longer than its launches."""


@dataclass(frozen=True, slots=True)
class _Step:
    ids: Tensor
    types: Tensor
    positions: Tensor
    starts: Tensor
    tiles: Tensor
    turns: Tensor
    """[T, ropes, 2, head_dim / 2]: cos and sin of each token."""


class CudaEncoderOps(DeviceVectors, DeviceWeights):
    """Implements `EncoderOps`. dtype: of weights and activations, float32 or bfloat16. Call `open` after packing.

    Raises ValueError for a model that the kernels do not support.
    """

    logits_tokens = BLOCK_ROWS

    def __init__(self, device: Device, config: EncoderConfig, dtype: torch.dtype, max_tokens: int) -> None:
        """max_tokens: the most of a step."""
        self._matmul = BlockedMatmul(BLOCK_ROWS)
        products = QuantizedProducts(device.launcher, device.torch_device, dtype, max_tokens, self._matmul)
        DeviceVectors.__init__(self, device)
        DeviceWeights.__init__(self, device.torch_device, dtype, products)
        self.group_tokens = max_tokens
        self._config = config
        self._attention = EncoderAttention(config.num_heads, config.head_dim, dtype, config.head_dim**-0.5)
        self._rope = _turns_of_positions(config).to(device.torch_device, copy=True)

    def open(self) -> None:
        """Compile the kernels. Raises KernelFailed."""
        self._device.launcher.prepare([self._attention.kernel, *self._quantized.kernels()])

    def run(self, rows: EncoderRows, encode: Encode) -> Tensor:
        lengths = np.diff(rows.starts)
        positions = np.arange(rows.starts[-1], dtype=np.int32) - np.repeat(rows.starts[:-1], lengths)
        tiles = self._attention.tiles(rows.starts)
        parts = [rows.input_ids, rows.token_types, positions, rows.starts, tiles.ravel()]
        sent = torch.split(self.send(np.concatenate(parts)), [part.size for part in parts])
        ids, types, places, starts, tiles_there = sent
        turns = self._rope.index_select(0, places)
        self._now = _Step(ids, types, places, starts, tiles_there, turns)
        hidden: Tensor = encode(None)
        return hidden

    def embed(self, tables: EmbeddingTables) -> Tensor:
        step = self._now
        residual = functional.embedding(step.ids, tables.words).float()
        if tables.positions is not None:
            residual += functional.embedding(step.positions + self._config.first_position, tables.positions)
        if tables.token_types is not None:
            residual += functional.embedding(step.types, tables.token_types)
        return residual

    def norm(self, residual: Tensor, weight: Tensor | None) -> Tensor:
        return self._rounded(residual if weight is None else self._normed(residual, weight))

    def norm_in_place(self, residual: Tensor, weight: Tensor) -> Tensor:
        return self._rounded(residual.copy_(self._normed(residual, weight)))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        scale, bias = weight.chunk(2)
        normed: Tensor = functional.layer_norm(x, (x.shape[-1],), scale, bias, self._config.norm_eps)
        return normed

    def linear(self, x: Tensor, weights: Linear) -> Tensor:
        out = self._rows(len(x), weights.num_outputs)
        if isinstance(weights, CudaQuantizedLinear):
            return self._quantized.multiply(x, weights, out)
        return self._matmul.multiply(x, weights, out)

    def linear_add(self, x: Tensor, weights: Linear, residual: Tensor) -> None:
        residual.add_(self.linear(x, weights))

    def activated_linear(self, x: Tensor, weights: Linear) -> Tensor:
        product = self.linear(x, weights)
        if not weights.is_gated:
            return _activate(product, self._config.activation)
        gate, up = product.chunk(2, dim=-1)
        return torch.mul(_activate(gate, self._config.activation), up, out=self._rows(len(x), up.shape[1]))

    def attention(self, qkv: Tensor, layer: LayerAttention) -> Tensor:
        if layer.rope is not None:
            self._rotate(qkv, layer.rope)
        out = self._rows(len(qkv), self._config.hidden_size)
        self._attention.attend(
            self._device.launcher, qkv, self._now.starts, self._now.tiles, out, window=layer.window,
            biases=layer.relative_bias,
        )  # fmt: skip
        return out

    def _rotate(self, qkv: Tensor, rope: int) -> None:
        """Rotate q and k in place, rounded once."""
        heads, half = self._config.num_heads, self._config.head_dim // 2
        cos, sin = self._now.turns[:, rope, :, None, None].unbind(1)
        a, b = qkv.view(len(qkv), 3, heads, 2, half)[:, :2].unbind(3)
        turned = a * cos - b * sin, b * cos + a * sin
        a.copy_(turned[0])
        b.copy_(turned[1])

    def dense(self, x: Tensor, weights: Linear, activation: Activation) -> Tensor:
        return _activate(self.linear(self._rounded(x), weights).float(), activation)

    def dense_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._normed(x, weight)

    def _rounded(self, x: Tensor) -> Tensor:
        """x as an operand of a product."""
        return self._rows(len(x), x.shape[1]).copy_(x)

    def _rows(self, count: int, width: int) -> Tensor:
        """Uninitialised [count, width], the beginning of a buffer that products may use."""
        buffer = torch.empty(
            self._matmul.padded_rows(count), width, dtype=self._dtype, device=self._device.torch_device
        )
        return buffer[:count]

    def close(self) -> None:
        """Release the memory, once all steps are done."""
        self._device.synchronize()
        device = self._device
        self.__dict__.clear()
        device.trim()


def _turns_of_positions(config: EncoderConfig) -> Tensor:
    """[positions, ropes, 2, head_dim / 2]"""
    positions, count = config.max_context_tokens, len(config.ropes)
    rows = RopeTable(*config.ropes).cover(positions)[:positions] if count else np.empty((positions, 0), np.float32)
    return torch.from_numpy(rows).view(positions, count, 2, config.head_dim // 2)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply it in place."""
    match activation:
        case "gelu":
            torch.ops.aten.gelu_(x)
        case "gelu_tanh":
            torch.ops.aten.gelu_(x, approximate="tanh")
        case "relu":
            x.relu_()
        case "silu":
            functional.silu(x, inplace=True)
        case "tanh":
            x.tanh_()
        case "sigmoid":
            x.sigmoid_()
        case "identity":
            pass
    return x
