"""The decoder's operations by our own C++ kernels (kernels/cpu.cpp), called through ctypes.

An array is the address of a buffer that exists as long as the operations. The model's operations are recorded in its
first step; each later step runs the record in one call, during which ctypes releases the GIL. The kernels have threads
of their own; torch takes no part in a step.
"""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.dtypes import Dtype, widen_bf16
from penstock.backend.passes.cpu.library.native_structs import (
    CACHE_FORMS,
    AddNorm,
    Buffer,
    LinearOutput,
    Operation,
    OperationKind,
    OperationTime,
    ScoredBlocks,
    StepRows,
    declare_functions,
    make_shape,
)
from penstock.backend.passes.cpu.native_cache import NativeCache
from penstock.backend.passes.cpu.native_delta_net import NativeDeltaNetOps, NativeMtpOps
from penstock.backend.passes.cpu.native_experts import NativeExpertOps
from penstock.backend.passes.cpu.native_lora import NativeAdapters
from penstock.backend.passes.cpu.native_sampling import NativeSampler
from penstock.backend.passes.cpu.native_side import NativeSideOps
from penstock.backend.passes.cpu.native_streams import NativeStreamOps
from penstock.backend.passes.cpu.step_queue import ComputedStep, StepQueue, describe_rows
from penstock.backend.passes.cpu.weight_memory.native_weights import (
    EmbeddingTable,
    PackedLinear,
    WeightPacker,
)
from penstock.backend.passes.ops.prompt_embeddings import add_picture_rows, place_embeddings
from penstock.backend.passes.ops.rope_table import RopeTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
    from penstock.backend.forward_pass import EmbeddedTokens, ScoredTokens, StepBatch, TokenLogprobs
    from penstock.backend.passes.cpu.weight_memory.anonymous import WeightMemory
    from penstock.backend.passes.ops.interface import AttentionLayer, Forward

_SCORED_VALUES = 1 << 22
"""Logits of scored tokens that are in memory at a time: 16 MiB. Each block of rows reads the weights again."""


@dataclass(frozen=True, slots=True)
class _Step:
    num_logits: int
    num_last: int
    """Tokens that remain after `last_tokens`: tokens of logit rows, and scored ones."""
    embeddings: tuple[EmbeddedTokens, ...]


@dataclass(frozen=True, slots=True)
class _Program:
    """The operations of a step. They hold addresses of buffers and of the cache."""

    operations: ctypes.Array[Operation]
    address: int
    picture_ends: list[int]  # of the operations before embeddings are put, see `_put_embeddings`
    logits: NDArray[np.float32]
    """All of the buffer."""


@dataclass(frozen=True, slots=True)
class TimedOperations:
    operations: list[Operation]
    times: ctypes.Array[OperationTime]


class NativeOps:
    """Implements `CpuOps`. dtype is that of weights and activations: float32 or bfloat16.

    Needs `supports_native_ops`, and `request_tiles` for uses_tiles. With tiles bf16 products are faster, and their
    results differ in bits.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        config: DecoderConfig,
        dtype: Dtype,
        max_batch_tokens: int,
        num_threads: int,
        spin_s: float,
        *,
        uses_tiles: bool,
        memory: WeightMemory | None = None,
        rounds_rows: bool = False,
    ) -> None:
        declare_functions(library)
        self._library = library
        self._dtype = dtype
        self._rope_table = RopeTable(*config.ropes)
        self._scales = config.scales
        self._gated_output = LinearOutput.GATED_GELU if config.activation == "gelu_tanh" else LinearOutput.GATED_SILU
        self._settings = config.experts
        shape = make_shape(config, dtype, uses_tiles=uses_tiles)
        self._engine: int | None = library.ps_create(num_threads, round(spin_s * 1e9), byref(shape))
        self.weights = WeightPacker(library, self._engine, dtype, memory, rounds_rows=rounds_rows)
        self.adapters = NativeAdapters(dtype)
        self.make_sampler = partial(NativeSampler, library, self._engine, config.logits_width)
        self.open_queue = partial(StepQueue, library, self._engine, self._prepare_queued)
        self.cache = NativeCache(config, self._rope_table.begins)
        self._num_rows = 0  # tokens of the current step; after `last_tokens`, those that remain
        self._recording: list[Operation] | None = None
        self._programs: dict[tuple[str, bool], _Program] = {}
        """For a step with logits and for one without, by the function's name."""
        self._logits_program: list[Operation] = []
        """The operations that compute logits of scored tokens."""
        self._step_rows = StepRows()
        self._step_arrays = np.empty(0, np.int32)
        """The memory that `StepRows.arrays` points to, and free space."""
        self.timed: list[TimedOperations] | None = None
        """If not None, steps are timed, and their operations are appended."""
        shared_width = 0 if config.experts is None else config.experts.shared_width or 0
        mlp_width = max(map(config.mlp_width_of_layer, config.all_layers))
        projected_width, mixed_width = map(max, zip(*map(config.mixer_widths, config.all_layers), strict=True))
        self._residual = Buffer(config.hidden_size, Dtype.FP32)
        self._last_residual = Buffer(config.hidden_size, Dtype.FP32)
        self._hidden = Buffer(config.hidden_size, dtype)
        self._qkv = Buffer(projected_width, dtype)
        self._attended = Buffer(mixed_width, dtype)
        self._gated = Buffer(max(mlp_width, shared_width), dtype)
        self._router_logits = Buffer(0 if config.experts is None else config.experts.count, Dtype.FP32)
        self._added = Buffer(config.hidden_size, Dtype.FP32)
        """The result of attention or MLP before its norm, which is then added to the residual stream."""
        self._logits = Buffer(config.logits_width, Dtype.FP32)
        norms = config.names.attention_output_norm, config.names.mlp_output_norm
        added = () if norms == (None, None) else (self._added,)
        buffers = (self._residual, self._hidden, self._qkv, self._attended, self._gated, self._router_logits)
        others = self._create_parts(config, dtype)
        self._activations = (*buffers, *added, *others)
        for buffer in self._activations:
            buffer.reserve(max_batch_tokens)

    def _create_parts(self, config: DecoderConfig, dtype: Dtype) -> list[Buffer]:
        """Create the operations that only some models need. Returns their buffers."""
        buffers: list[Buffer] = []
        self.side: NativeSideOps | None = None
        parts = (self._do, self._linear, self.norm, self._add_norm)
        if config.layer_input_size or config.has_experts_beside:
            self.side = NativeSideOps(config, self.weights, dtype, *parts, lambda: self.experts)
            buffers += self.side.buffers
        if config.streams is not None and self.side is not None:
            streams = NativeStreamOps(config, config.streams, self.weights, dtype, self.side, self._gated, *parts)
            self.side.streams = streams
            buffers += streams.buffers
        self.delta_net: NativeDeltaNetOps | None = None
        if (net := config.delta_net) is not None:
            self.delta_net = NativeDeltaNetOps(net, self.weights, self._do, self._linear, self._attended)
            buffers += self.delta_net.buffers
        self.mtp = NativeMtpOps(config.hidden_size, dtype, self._do, self._linear) if config.has_mtp else None
        buffers += () if self.mtp is None else self.mtp.buffers
        return buffers

    @property
    def experts(self) -> NativeExpertOps | None:
        if self._settings is None:
            return None
        return NativeExpertOps(
            self._settings, self.weights, self._do, self._linear, self._router_logits.address, self._gated_output
        )

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> PackedLinear:
        return self.weights.pack(weight, bias, scale, is_gated=is_gated)

    def vector(self, weight: Tensor) -> NDArray[np.float32]:
        return self.weights.vector(weight)

    def table(self, weight: Tensor) -> EmbeddingTable:
        return self.weights.table(weight)

    def packed_table(self, weight: Tensor | QuantizedWeight, linear: PackedLinear) -> EmbeddingTable:  # noqa: ARG002 - rows are read from linear
        return EmbeddingTable.of_packed(linear)

    def create_cache(self, num_layers: int, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        self.cache.create(num_layers, num_pages, page_size_tokens, kv_dtype)
        self._forget_programs()
        self._library.ps_set_cache(self._engine, page_size_tokens, CACHE_FORMS[kv_dtype])

    def begin_step(self, batch: StepBatch, input_ids: NDArray[np.int32]) -> _Step:
        self._library.ps_wake(self._engine)
        if batch.page_copies:
            batch.check_page_moves()
            sources, destinations = np.array(batch.page_copies).T
            for pages in self.cache.arrays:
                pages[destinations] = pages[sources]
        self._reserve(self._activations, batch.num_tokens)
        rows = self._step_rows
        arrays, self._turns = describe_rows(rows, batch, input_ids, self._rope_table)
        self._place_arrays(arrays)
        self._library.ps_plan(self._engine, byref(rows))
        self._num_rows = batch.num_tokens
        num_logits = rows.num_logit_rows + rows.num_verified
        return _Step(num_logits, num_logits + rows.num_scored, batch.embeddings)

    def _place_arrays(self, arrays: tuple[NDArray[np.int32], ...]) -> None:
        """Copy the arrays to where the kernels read them, back to back."""
        size = sum(array.size for array in arrays)
        if size > len(self._step_arrays):
            self._step_arrays = np.empty(2 * size, np.int32)
            self._step_rows.arrays = self._step_arrays.ctypes.data
        np.concatenate(arrays, axis=None, out=self._step_arrays[:size])

    def run_step(self, step: _Step, forward: Forward, *, needs_logits: bool) -> NDArray[np.float32] | None:
        if needs_logits:
            self._reserve((self._last_residual,), step.num_last)
            self._reserve((self._logits,), step.num_logits)
        key = forward.__name__, needs_logits
        program = self._programs.get(key)
        if program is None:
            self._picture_ends: list[int] = []
            operations = self._record(partial(forward, step, needs_logits=needs_logits))
            array = (Operation * len(operations))(*operations)
            program = _Program(array, ctypes.addressof(array), self._picture_ends, self._logits.rows)
            self._programs[key] = program
        done = 0
        for index, end in enumerate(program.picture_ends if step.embeddings else ()):
            self._run(program, done, end)
            self._put_embeddings(index, step)
            done = end
        self._run(program, done, len(program.operations))
        return program.logits[: step.num_logits] if needs_logits else None

    def _prepare_queued(self, batch: StepBatch) -> ComputedStep | None:
        """None until a step like this one has run, which records the operations and makes room."""
        program, num_logits = self._programs.get(("forward", True)), len(batch.logit_rows)
        if program is None or self.timed is not None:
            return None
        if num_logits > len(program.logits) or batch.num_tokens > len(self._residual.rows):
            return None
        rows = StepRows()
        described, turns = describe_rows(rows, batch, batch.input_ids, self._rope_table)
        arrays = np.concatenate(described, axis=None, dtype=np.int32)
        rows.arrays = arrays.ctypes.data
        memory = arrays, program, turns
        return ComputedStep(rows, program.address, len(program.operations), program.logits[:num_logits], memory)

    def _reserve(self, buffers: tuple[Buffer, ...], num_rows: int) -> None:
        for buffer in buffers:
            if buffer.reserve(num_rows):
                self._forget_programs()

    def _forget_programs(self) -> None:
        self._programs.clear()
        self._logits_program = []

    def _record(self, run: Callable[[], object]) -> list[Operation]:
        self._recording = operations = list[Operation]()
        try:
            run()
        finally:
            self._recording = None
        return operations

    def _run(self, program: _Program, first: int, end: int) -> None:
        start = program.address + first * ctypes.sizeof(Operation)
        if self.timed is None:
            self._library.ps_run(self._engine, start, end - first, None)
            return
        times = (OperationTime * (end - first))()
        self._library.ps_run(self._engine, start, end - first, times)
        self.timed.append(TimedOperations(program.operations[first:end], times))

    def _do(self, kind: OperationKind, weights: int | None, x: int | None, out: int, form: int = 0) -> int:
        """Run an operation, or record it. Return out."""
        operation = Operation(kind, weights, x, out, form)
        if self._recording is None:
            self._library.ps_run(self._engine, byref(operation), 1, None)
        else:
            self._recording.append(operation)
        return out

    def embed(self, table: EmbeddingTable, step: _Step) -> int:
        out = self._do(OperationKind.EMBED, table.address, None, self._residual.address, table.is_packed)
        self._put_embeddings(0, step)
        return out

    def _add_pictures(self, index: int, residual: int, step: _Step) -> None:  # noqa: ARG002 - there is only one buffer
        self._put_embeddings(1 + index, step)

    add_pictures = _add_pictures

    def _put_embeddings(self, index: int, step: _Step) -> None:
        """Put them, or record where. index: 0 for the embeddings, 1 + n for what pictures add behind layer n."""
        if self._recording is not None:
            self._picture_ends.append(len(self._recording))
        elif index == 0:
            place_embeddings(self._residual.rows, step.embeddings, self._scales.given_embeddings)
        else:
            add_picture_rows(self._residual.rows, step.embeddings, index - 1)

    def norm(self, residual: int, weight: NDArray[np.float32] | None) -> int:
        address = None if weight is None else weight.ctypes.data
        return self._do(OperationKind.NORM, address, residual, self._hidden.address)

    final_norm = norm

    def _linear(self, x: int, weights: PackedLinear, out: int, output: LinearOutput) -> int:
        return self._do(OperationKind.LINEAR, weights.address, x, out, output)

    def linear(self, x: int, weights: PackedLinear) -> int:
        return self._linear(x, weights, self._qkv.address, LinearOutput.STORE)

    def linear_add(self, x: int, weights: PackedLinear, residual: int, norm: NDArray[np.float32] | None = None) -> None:
        if norm is None:
            self._linear(x, weights, residual, LinearOutput.ADD)
            return
        added = self._linear(x, weights, self._added.address, LinearOutput.STORE_FLOAT)
        self._add_norm(added, norm, residual)

    def _add_norm(self, x: int, norm: NDArray[np.float32], residual: int, form: AddNorm = AddNorm.ADD) -> None:
        if len(norm) == self._residual.width + 1:
            form = AddNorm.ADD_AND_SCALE
        self._do(OperationKind.ADD_NORM, norm.ctypes.data, x, residual, form)

    def activated_linear(self, x: int, weights: PackedLinear) -> int:
        output = self._gated_output if weights.struct.gated else LinearOutput.GELU
        return self._linear(x, weights, self._gated.address, output)

    def rotate_and_store(self, qkv: int, step: _Step, layer: AttentionLayer) -> None:  # noqa: ARG002 - ps_plan received the step
        self._do(OperationKind.ROTATE_AND_STORE, self.cache.attention_of(layer), None, qkv)

    def attention(self, qkv: int, step: _Step, layer: AttentionLayer) -> int:  # noqa: ARG002 - as above
        return self._do(OperationKind.ATTENTION, self.cache.attention_of(layer), qkv, self._attended.address)

    def last_tokens(self, qkv: int, residual: int, step: _Step) -> tuple[int, int, _Step]:
        self._last_residual.reserve(step.num_last)
        out = self._do(OperationKind.TAKE_LAST, None, residual, self._last_residual.address)
        self._num_rows = step.num_last
        # From here on, attention picks the queries of the last tokens out of qkv.
        return qkv, out, step

    def logit_rows(self, normed: int, step: _Step) -> int:
        self._num_rows = step.num_logits
        return self._do(OperationKind.KEEP_LOGITS, None, None, normed)

    def score(
        self, normed: int, first: int, scored: ScoredTokens, logits_of: Callable[[int], NDArray[np.float32]]
    ) -> TokenLogprobs:
        num_blocks = -(-len(scored.tokens) // max(1, _SCORED_VALUES // self._logits.width))
        num_rows = -(-len(scored.tokens) // num_blocks)
        self._reserve((self._logits,), num_rows)
        if not self._logits_program:
            self._num_rows = num_rows
            self._logits_program = self._record(partial(logits_of, normed))
        blocks = ScoredBlocks(scored, self._logits.width)
        for begin in range(0, len(scored.tokens), num_rows):
            rows = blocks.cut(begin, num_rows, self._logits.address)
            shift = (first + begin) * self._hidden.row_bytes
            operations = [
                Operation(op.kind, op.weights, op.x + shift if op.x == normed else op.x, op.out, op.form)
                for op in self._logits_program
            ]
            program = (Operation * len(operations))(*operations)
            self._library.ps_score(self._engine, ctypes.addressof(program), len(operations), byref(rows))
        return blocks.logprobs

    def logits(self, x: int, weights: PackedLinear) -> NDArray[np.float32]:
        """Return a view of a buffer that the next call overwrites."""
        self._logits.reserve(self._num_rows)
        self._linear(x, weights, self._logits.address, LinearOutput.STORE_FLOAT)
        if self._scales.logits_softcap is not None:
            self._do(OperationKind.CAP_LOGITS, None, None, self._logits.address, self._logits.rows.shape[1])
        return self._logits.rows[: self._num_rows]

    def normed_rows(self, normed: int, num_rows: int) -> NDArray[np.float32]:  # noqa: ARG002 - `norm` has only one buffer
        rows = self._hidden.rows[:num_rows]
        return widen_bf16(rows) if self._dtype is Dtype.BF16 else rows.copy()

    def close(self) -> None:
        """Stop the kernels' threads and release the cache. Idempotent."""
        if self._engine is not None:
            self._library.ps_destroy(self._engine)
            self._engine = None
        if self.delta_net is not None:
            self.delta_net.close()
        self._forget_programs()
        self.cache.release()
