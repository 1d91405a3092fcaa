"""The decoder's operations by our own C++ kernels (kernels/cpu.cpp), called through ctypes.

An array is the address of a buffer that exists as long as the operations. ctypes releases the GIL during each call. The
kernels have their own threads; torch takes no part in a step.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import Structure, byref, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.backend.passes.decoder.ops import KV_BLOCK_BYTES, KV_BLOCK_VALUES
from penstock.backend.passes.decoder.prompt_embeddings import place_embeddings
from penstock.backend.passes.decoder.rope_table import RopeTable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.backend.forward_pass import EmbeddedTokens, StepBatch
    from penstock.backend.passes.decoder.ops import AttentionLayer

_STORE, _STORE_FLOAT, _ADD, _GATED = range(4)
_CACHE_FORMS = {"fp32": 0, "bf16": 1, "q8_0": 2}

_CHUNK_BYTES = 64 << 20


class _Shape(Structure):
    _fields_ = (
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
        ("page_size", c_int64),
        ("act_bf16", c_int64),
        ("cache_form", c_int64),
        ("uses_tiles", c_int64),
        ("eps", c_float),
    )


class _Linear(Structure):
    _fields_ = (("packed", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("outputs", c_int64))


class _Attention(Structure):
    _fields_ = (
        ("cache", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("window", c_int64),
        ("uses_rope", c_int64),
    )


_P, _N = c_void_p, c_int64
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ps_create": (c_void_p, (c_int, _N, _P)),
    "ps_destroy": (None, (_P,)),
    "ps_set_cache": (None, (_P, _N, _N)),
    "ps_packed_elements": (c_int64, (_N, _N, _N)),
    "ps_pack": (None, (_P, _P, _N, _N, _N, _P)),
    "ps_plan": (None, (_P, _P, _P, _N, _P, _N, _P, _N)),
    "ps_embed": (None, (_P, _P, _N, _P, _P)),
    "ps_rms_norm": (None, (_P, _P, _P, _N, _P)),
    "ps_linear": (None, (_P, _P, _N, _P, _N, _P)),
    "ps_rotate_and_store": (None, (_P, _P, _P, _P)),
    "ps_attention": (None, (_P, _P, _P, _N, _P)),
    "ps_take_last": (None, (_P, _P, _P)),
}


class _HugePageArena:
    """Memory for weights in mappings of huge pages. With 4 KB pages, address translation limits how fast a step reads
    the weights. Single tensors are never freed; each keeps its mapping alive."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used_bytes = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        num_bytes = num_elements * dtype.itemsize
        if self._chunk is None or self._used_bytes + num_bytes > len(self._chunk):
            self._chunk = map_memory(max(num_bytes, _CHUNK_BYTES))
            self._used_bytes = 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=num_elements, offset=self._used_bytes)
        self._used_bytes += -(-num_bytes // 64) * 64
        return tensor


def map_memory(num_bytes: int) -> mmap.mmap:
    """Map zeroed anonymous memory, in huge pages where the system has them; it becomes resident when written."""
    # Private, because shared anonymous memory, the default of mmap, gets no huge pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@dataclass(frozen=True, slots=True)
class _PackedLinear:
    """A struct for the kernels, its address, and the tensors that it points to."""

    address: int
    struct: _Linear
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Table:
    address: int
    is_packed: bool
    owner: Tensor


@dataclass(frozen=True, slots=True)
class _Step:
    """The arrays that the kernels read during the step, at the addresses given to `ps_plan`."""

    num_logits: int
    narrowed: bool
    input_ids: NDArray[np.int32]
    arrays: tuple[NDArray[np.int32], ...]
    embeddings: tuple[EmbeddedTokens, ...]


class _Buffer:
    """A row-major array that grows to the largest number of rows reserved so far."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width = width
        self._dtype = dtype
        self.rows = torch.empty(0, width, dtype=dtype)
        self.address = 0

    def reserve(self, num_rows: int) -> None:
        if num_rows > len(self.rows):
            self.rows = torch.empty(num_rows, self._width, dtype=self._dtype)
            self.address = self.rows.data_ptr()


def supports_native_ops(config: DecoderConfig) -> bool:
    """Whether the kernels can run this model: they need heads of whole vectors and even input sizes."""
    return (
        config.head_dim % 16 == 0
        and config.head_dim <= 1024
        and config.hidden_size % 2 == 0
        and config.intermediate_size % 2 == 0
        and config.rope.rotary_dim % 2 == 0
    )


class NativeOps:
    """See `CpuOps`. dtype is that of weights and activations: float32 or bfloat16. Needs `supports_native_ops`, and
    `request_tiles` for uses_tiles. With tiles bf16 products are faster, and their results differ in bits."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: DecoderConfig,
        dtype: torch.dtype,
        max_batch_tokens: int,
        num_threads: int,
        spin_s: float,
        *,
        uses_tiles: bool,
    ) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self._dtype = dtype
        self._rope_table = RopeTable(config.rope)
        self._num_kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        shape = _Shape(
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rope.rotary_dim,
            page_size=16,
            act_bf16=dtype is torch.bfloat16,
            cache_form=_CACHE_FORMS["fp32"],
            uses_tiles=uses_tiles,
            eps=config.rms_norm_eps,
        )
        self._engine: int | None = library.ps_create(num_threads, round(spin_s * 1e9), byref(shape))
        self._arena = _HugePageArena()
        self._layers: dict[int, _Attention] = {}
        self._num_rows = 0  # tokens of the current step; after `last_tokens`, its logit rows
        self._rope_address = 0
        self.cache: list[Tensor] = []
        """One tensor per layer, uint8 [num_pages, bytes of a page], in the layout of kernels/paged_cache.h."""

        attention_width = config.num_heads * config.head_dim
        self._residual = _Buffer(config.hidden_size, torch.float32)
        self._last_residual = _Buffer(config.hidden_size, torch.float32)
        self._hidden = _Buffer(config.hidden_size, dtype)
        self._qkv = _Buffer(attention_width + 2 * config.num_kv_heads * config.head_dim, dtype)
        self._attended = _Buffer(attention_width, dtype)
        self._gated = _Buffer(config.intermediate_size, dtype)
        self._logits = _Buffer(config.vocab_size, torch.float32)
        self._activations = (self._residual, self._hidden, self._qkv, self._attended, self._gated)
        for buffer in self._activations:
            buffer.reserve(max_batch_tokens)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> _PackedLinear:
        return self._pack(weight, bias, gated=False)

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> _PackedLinear:
        return self._pack(weight, bias, gated=True)

    def _pack(self, weight: Tensor, bias: Tensor | None, *, gated: bool) -> _PackedLinear:
        outputs, inputs = weight.shape
        if gated:
            outputs //= 2
        weight = weight.to(self._dtype).contiguous()
        packed = self._arena.empty(self._library.ps_packed_elements(inputs, outputs, gated), self._dtype)
        self._library.ps_pack(self._engine, weight.data_ptr(), inputs, outputs, gated, packed.data_ptr())
        bias = None if bias is None else self.vector(bias)
        struct = _Linear(packed.data_ptr(), None if bias is None else bias.data_ptr(), inputs, outputs)
        return _PackedLinear(ctypes.addressof(struct), struct, packed, bias)

    def vector(self, weight: Tensor) -> Tensor:
        return weight.float().contiguous()

    def table(self, weight: Tensor) -> _Table:
        plain = self._arena.empty(weight.numel(), self._dtype).view(weight.shape).copy_(weight)
        return _Table(plain.data_ptr(), False, plain)

    def tied_table(self, weight: Tensor, lm_head: _PackedLinear) -> _Table:  # noqa: ARG002 - rows are read from lm_head
        return _Table(lm_head.weight.data_ptr(), True, lm_head.weight)

    def create_cache(self, num_layers: int, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        values_per_page = 2 * self._num_kv_heads * page_size_tokens * self._head_dim
        page_bytes = values_per_page * KV_BLOCK_BYTES[kv_dtype] // KV_BLOCK_VALUES
        memory = map_memory(num_layers * num_pages * page_bytes)
        self.cache = list(torch.frombuffer(memory, dtype=torch.uint8).view(num_layers, num_pages, page_bytes))
        self._layers.clear()
        self._library.ps_set_cache(self._engine, page_size_tokens, _CACHE_FORMS[kv_dtype])

    def begin_step(self, batch: StepBatch, input_ids: NDArray[np.int32]) -> _Step:
        if batch.page_copies:
            sources, destinations = np.array(batch.page_copies).T
            for pages in self.cache:
                pages[destinations] = pages[sources]
        ends = batch.context_lens + batch.query_starts[1:] - batch.query_starts[:-1]
        self._rope_address = self._rope_table.cover(int(ends.max())).data_ptr()
        for buffer in self._activations:
            buffer.reserve(batch.num_tokens)
        arrays = tuple(
            np.ascontiguousarray(array, np.int32)
            for array in (batch.query_starts, batch.context_lens, batch.page_table, batch.logit_rows, input_ids)
        )
        starts, contexts, page_table, logit_rows, ids = arrays
        self._library.ps_plan(
            self._engine,
            starts.ctypes.data,
            contexts.ctypes.data,
            batch.num_rows,
            page_table.ctypes.data,
            page_table.shape[1],
            logit_rows.ctypes.data,
            len(logit_rows),
        )
        self._num_rows = batch.num_tokens
        return _Step(len(logit_rows), False, ids, arrays, batch.embeddings)

    def embed(self, table: _Table, step: _Step) -> int:
        out = self._residual.address
        self._library.ps_embed(self._engine, table.address, table.is_packed, step.input_ids.ctypes.data, out)
        place_embeddings(self._residual.rows.numpy(), step.embeddings)
        return out

    def rms_norm(self, residual: int, weight: Tensor) -> int:
        out = self._hidden.address
        self._library.ps_rms_norm(self._engine, residual, weight.data_ptr(), self._num_rows, out)
        return out

    def linear(self, x: int, weights: _PackedLinear) -> int:
        out = self._qkv.address
        self._library.ps_linear(self._engine, weights.address, _STORE, x, self._num_rows, out)
        return out

    def linear_add(self, x: int, weights: _PackedLinear, residual: int) -> None:
        self._library.ps_linear(self._engine, weights.address, _ADD, x, self._num_rows, residual)

    def gated_linear(self, x: int, weights: _PackedLinear) -> int:
        out = self._gated.address
        self._library.ps_linear(self._engine, weights.address, _GATED, x, self._num_rows, out)
        return out

    def rotate_and_store(self, qkv: int, step: _Step, layer: AttentionLayer) -> None:  # noqa: ARG002 - ps_plan received the step
        address = ctypes.addressof(self._attention_of(layer))
        self._library.ps_rotate_and_store(self._engine, qkv, address, self._rope_address)

    def attention(self, qkv: int, step: _Step, layer: AttentionLayer) -> int:
        out = self._attended.address
        address = ctypes.addressof(self._attention_of(layer))
        self._library.ps_attention(self._engine, qkv, address, step.narrowed, out)
        return out

    def last_tokens(self, qkv: int, residual: int, step: _Step) -> tuple[int, int, _Step]:
        self._last_residual.reserve(step.num_logits)
        self._library.ps_take_last(self._engine, residual, self._last_residual.address)
        self._num_rows = step.num_logits
        # ps_attention picks the queries of the last tokens out of qkv.
        return qkv, self._last_residual.address, replace(step, narrowed=True)

    def logits(self, x: int, weights: _PackedLinear) -> NDArray[np.float32]:
        """Return a view of a buffer that the next call overwrites."""
        self._logits.reserve(self._num_rows)
        out = self._logits.address
        self._library.ps_linear(self._engine, weights.address, _STORE_FLOAT, x, self._num_rows, out)
        logits: NDArray[np.float32] = self._logits.rows[: self._num_rows].numpy()
        return logits

    def normed_rows(self, normed: int, num_rows: int) -> NDArray[np.float32]:  # noqa: ARG002 - `rms_norm` has only one buffer
        rows: NDArray[np.float32] = self._hidden.rows[:num_rows].to(torch.float32, copy=True).numpy()
        return rows

    def close(self) -> None:
        """Stop the kernels' threads and release the cache. Idempotent."""
        if self._engine is not None:
            self._library.ps_destroy(self._engine)
            self._engine = None
        self._layers.clear()
        self.cache = []

    def _attention_of(self, layer: AttentionLayer) -> _Attention:
        struct = self._layers.get(layer.index)
        if struct is None:
            struct = self._layers[layer.index] = _Attention(
                cache=self.cache[layer.index].data_ptr(),
                q_norm=None if layer.q_norm is None else layer.q_norm.data_ptr(),
                k_norm=None if layer.k_norm is None else layer.k_norm.data_ptr(),
                window=layer.window_tokens or 0,
                uses_rope=layer.uses_rope,
            )
        return struct
