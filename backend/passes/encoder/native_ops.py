"""The encoder's operations by our own C++ kernels, which the decoder has too (`passes/cpu/kernels`).

An array is the address of a buffer. The model's operations are recorded when they first run; later steps run the record
in one call, during which ctypes releases the GIL.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager
from ctypes import byref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.checkpoint.encoders.encoder_config import Activation, EncoderConfig
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.cpu.library.encoder_structs import (
    ACTIVATIONS,
    OUTPUTS,
    EncoderAttention,
    EncoderOperation,
    EncoderStepRows,
    EncoderTables,
    FirstAttention,
    declare_encoder_functions,
)
from penstock.backend.passes.cpu.library.native_structs import NORM_KINDS, Buffer, LinearOutput, Operation, Shape
from penstock.backend.passes.cpu.weight_memory.native_weights import EmbeddingTable, PackedLinear, WeightPacker
from penstock.backend.passes.encoder.host_vectors import HostVectors
from penstock.backend.passes.encoder.ops import EmbeddingTables, Encode, EncoderRows, LayerAttention
from penstock.backend.passes.ops.rope_table import RopeTable


def make_encoder_shape(config: EncoderConfig, dtype: Dtype, *, uses_tiles: bool) -> Shape:
    return Shape(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.head_dim,
        rotary_dim=config.head_dim,
        page_size=16,
        act_bf16=dtype is Dtype.BF16,
        uses_tiles=uses_tiles,
        rope_width=config.head_dim * len(config.ropes),
        norm_kind=NORM_KINDS["layer"],
        eps=config.norm_eps,
        score_scale=config.head_dim**-0.5,
        embedding_scale=1.0,
    )


GROUP_TOKENS = 1024
"""Tokens of rows that are computed together: what an operation writes is in a cache when the next one reads it."""
BIAS_PADDING = 32
"""Numbers behind a table of relative biases: the kernels read whole vectors."""


def unsupported_by_kernels(config: EncoderConfig) -> str | None:
    """Return why the kernels cannot run this model, or None."""
    if config.head_dim % 16:
        return f"heads of {config.head_dim}; they have heads of a multiple of 16"
    if config.relative_span:
        return "scores by relative position"
    if config.intermediate_size % 2:
        return f"an odd intermediate_size, {config.intermediate_size}"
    odd = [layer.inputs for head in config.heads for layer in head.layers if layer.inputs % 2]
    if odd:
        return f"a head's linear of {odd[0]} inputs; they must be even"
    if (config.activation, config.is_gated) not in OUTPUTS:
        return f"{config.activation} in an MLP {'with' if config.is_gated else 'without'} a gate"
    return None


class NativeEncoderOps(HostVectors):
    """Implements `EncoderOps`. dtype is that of weights and activations: float32 or bfloat16."""

    group_tokens = GROUP_TOKENS

    def __init__(
        self,
        library: ctypes.CDLL,
        config: EncoderConfig,
        dtype: Dtype,
        num_threads: int,
        spin_s: float,
        *,
        uses_tiles: bool,
    ) -> None:
        declare_encoder_functions(library)
        self._library = library
        self._config = config
        self._dtype = dtype
        self._rope_table = RopeTable(*config.ropes)
        self._step_rows = EncoderStepRows()
        self._activated_output = OUTPUTS[config.activation, config.is_gated]
        shape = make_encoder_shape(config, dtype, uses_tiles=uses_tiles)
        self._engine: int | None = library.ps_create(num_threads, round(spin_s * 1e9), byref(shape))
        self._packer = WeightPacker(library, self._engine, dtype)
        self._recording: list[Operation] | None = None
        self._programs: dict[bool, ctypes.Array[Operation]] = {}
        """By whether only each row's first token is read."""
        self._structs: list[ctypes.Structure] = []
        """To which recorded operations point."""
        self._residual = Buffer(config.hidden_size, Dtype.FP32)
        self._hidden = Buffer(config.hidden_size, dtype)
        self._qkv = Buffer(3 * config.hidden_size, dtype)
        self._attended = Buffer(config.hidden_size, dtype)
        self._activated = Buffer(config.intermediate_size, dtype)
        self._buffers = (self._residual, self._hidden, self._qkv, self._attended, self._activated)

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, *, is_gated: bool = False
    ) -> PackedLinear:
        return self._packer.pack(weight, bias, 1.0, is_gated=is_gated)

    def vector(self, weight: Tensor) -> Tensor:
        """Followed by BIAS_PADDING numbers."""
        padded = torch.zeros(weight.numel() + BIAS_PADDING)
        padded[: weight.numel()] = weight.flatten()
        return padded[: weight.numel()].view(weight.shape)

    def table(self, weight: Tensor) -> EmbeddingTable:
        return self._packer.table(weight)

    def step(self, doing: str) -> AbstractContextManager[None]:
        """Wakes the kernels' threads."""
        self._library.ps_wake(self._engine)
        return super().step(doing)

    def run(self, rows: EncoderRows, encode: Encode) -> NDArray[np.float32]:
        num_tokens = len(rows.input_ids)
        for buffer in self._buffers:
            if buffer.reserve(num_tokens):
                self._programs, self._structs = {}, []
        program = self._programs.get(rows.only_first) or self._record(encode, only_first=rows.only_first)
        arrays = [np.ascontiguousarray(array, np.int32) for array in (rows.input_ids, rows.token_types, rows.starts)]
        step = self._step_rows
        step.input_ids, step.token_types, step.starts = (array.ctypes.data for array in arrays)
        step.rope = self._rope_table.cover(int(np.diff(rows.starts).max())).ctypes.data if self._config.ropes else None
        step.num_tokens, step.num_rows = num_tokens, len(rows.starts) - 1
        self._library.ps_run_encoder_step(self._engine, byref(step), program, len(program))
        return self._residual.rows[:num_tokens]

    def _record(self, encode: Encode, *, only_first: bool) -> ctypes.Array[Operation]:
        self._recording = operations = list[Operation]()
        try:
            encode(self if only_first else None)
        finally:
            self._recording = None
        program = self._programs[only_first] = (Operation * len(operations))(*operations)
        return program

    def _do(self, kind: EncoderOperation, weights: int | None, x: int | None, out: int, form: int = 0) -> int:
        """Run an operation, or record it. Return out."""
        operation = Operation(kind, weights, x, out, form)
        if self._recording is None:
            self._library.ps_run_encoder(self._engine, byref(operation), 1)
        else:
            self._recording.append(operation)
        return out

    def _keep(self, struct: ctypes.Structure) -> int:
        """Return the address of a struct for recorded operations."""
        self._structs.append(struct)
        return ctypes.addressof(struct)

    def embed(self, tables: EmbeddingTables) -> int:
        address = self._keep(
            EncoderTables(
                words=tables.words.address,
                positions=None if tables.positions is None else tables.positions.address,
                token_types=None if tables.token_types is None else tables.token_types.address,
                first_position=self._config.first_position,
            )
        )
        return self._do(EncoderOperation.EMBED, address, None, self._residual.address)

    def norm(self, residual: int, weight: Tensor | None) -> int:
        address = None if weight is None else weight.data_ptr()
        return self._do(EncoderOperation.NORM, address, residual, self._hidden.address)

    def norm_in_place(self, residual: int, weight: Tensor) -> int:
        return self._do(EncoderOperation.NORM_IN_PLACE, weight.data_ptr(), residual, self._hidden.address)

    def linear(self, x: int, weights: PackedLinear) -> int:
        return self._do(EncoderOperation.LINEAR, weights.address, x, self._qkv.address, LinearOutput.STORE)

    def linear_add(self, x: int, weights: PackedLinear, residual: int) -> None:
        self._do(EncoderOperation.LINEAR, weights.address, x, residual, LinearOutput.ADD)

    def activated_linear(self, x: int, weights: PackedLinear) -> int:
        return self._do(EncoderOperation.LINEAR, weights.address, x, self._activated.address, self._activated_output)

    def attention(self, qkv: int, layer: LayerAttention) -> int:
        address = self._prepare_attention(qkv, layer)
        return self._do(EncoderOperation.ATTENTION, address, qkv, self._attended.address)

    def first_attention(self, qkv: int, layer: LayerAttention, residual: int) -> int:
        attended = self._attended.address
        address = self._keep(FirstAttention(self._prepare_attention(qkv, layer), residual, attended))
        return self._do(EncoderOperation.FIRST_ATTENTION, address, qkv, attended)

    def spread_first(self, residual: int) -> None:
        self._do(EncoderOperation.SPREAD_FIRST, None, None, residual)

    def _prepare_attention(self, qkv: int, layer: LayerAttention) -> int:
        """Rotate q and k. Return the address of the layer's struct."""
        bias = layer.relative_bias
        address = self._keep(
            EncoderAttention(
                bias=None if bias is None else bias.data_ptr(),
                bias_reach=0 if bias is None else (bias.shape[1] + 1) // 2,
                window=-1 if layer.window is None else layer.window,
                rope_offset=0 if layer.rope is None else layer.rope * self._config.head_dim,
            )
        )
        if layer.rope is not None:
            self._do(EncoderOperation.ROTATE, address, None, qkv)
        return address

    def _begin_rows(self, count: int) -> None:
        """The next operations are on this many rows of numbers."""
        self._library.ps_plan_encoder(self._engine, byref(EncoderStepRows(num_tokens=count)))

    def dense(self, x: NDArray[np.float32], weights: PackedLinear, activation: Activation) -> NDArray[np.float32]:
        rows = torch.from_numpy(np.ascontiguousarray(x)).to(self._dtype.in_torch)
        product = np.empty((len(x), weights.struct.outputs), np.float32)
        out = product.ctypes.data
        self._begin_rows(len(x))
        self._do(EncoderOperation.LINEAR, weights.address, rows.data_ptr(), out, LinearOutput.STORE_FLOAT)
        if activation != "identity":
            self._do(EncoderOperation.ACTIVATE, weights.address, None, out, ACTIVATIONS[activation])
        return product

    def dense_norm(self, x: NDArray[np.float32], weight: Tensor) -> NDArray[np.float32]:
        normed = np.array(x, np.float32, order="C")
        scratch = torch.empty(normed.shape, dtype=self._dtype.in_torch)
        self._begin_rows(len(x))
        self._do(EncoderOperation.NORM_IN_PLACE, weight.data_ptr(), normed.ctypes.data, scratch.data_ptr())
        return normed

    def close(self) -> None:
        """Stop the kernels' threads. Idempotent."""
        if self._engine is not None:
            self._library.ps_destroy(self._engine)
            self._engine = None
        self._programs = {}
