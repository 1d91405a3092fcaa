"""Kernels that treat each row alone: norms, rotary embedding with the cache write, gated activations, and gathers.

None of them allocates or waits; the caller owns `out` and in-place arguments. The T tokens of a step are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher, int32
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.backend.passes.ops.interface import HeadShape, supports_q8_0

_VALUES = 8
"""Values that a thread processes at a time."""
_UNIT_BYTES = 16
_MAX_NORM_SIZE = 1024 * 2 * _VALUES
"""The widest row that a block of 1024 threads holds in registers."""
_THREADS_OF_ONE_CHUNK = 512
_MAX_HEAD_DIM = 32 * _VALUES

_ROW_NORMS = ("add_rms_norm", "add_layer_norm", "rms_norm_added")
_ACTIVATIONS = ("silu_mul", "gelu_mul", "gelu", "sigmoid_mul", "gelu_mul_input")
_GATHER_ROWS = Kernel("step/copies.cu", "gather_rows", (), num_threads=256)
_TURN_TOKENS = Kernel("step/step.cu", "turn_tokens", (), num_threads=128)


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield from (_GATHER_ROWS, _TURN_TOKENS)
    for act in ACT_MACRO.values():
        yield from (_embed(act), *(_norm(act, entry, 256) for entry in _ROW_NORMS), _norm_q_and_k(act))
        yield from (_activation(act, entry) for entry in _ACTIVATIONS)
        yield from (_rope_and_store(act, kv_dtype) for kv_dtype in KV_MACRO)
        yield from (_rope_and_store_wide(act, kv_dtype) for kv_dtype in KV_MACRO)


def unsupported_reason(
    hidden_size: int, intermediate_size: int, head_dim: int, rotary_dim: int, kv_dtype: str
) -> str | None:
    """Return why these kernels do not support a model, or None."""
    for name, value, unit, limit in (
        ("hidden_size", hidden_size, _VALUES, _MAX_NORM_SIZE),
        ("intermediate_size", intermediate_size, _VALUES, None),
        ("head_dim", head_dim, _VALUES, _MAX_HEAD_DIM),
        ("rotary_dim", rotary_dim, 2 * _VALUES, head_dim),
    ):
        if value % unit or (limit is not None and value > limit):
            return f"{name} is {value}; it must be a multiple of {unit}" + (f", at most {limit}" if limit else "")
    if kv_dtype == "q8_0" and not supports_q8_0(head_dim):
        return f"head_dim is {head_dim}; a q8_0 cache needs a multiple of 32"
    return None


class Elementwise:
    """The kernels for one model on one device. `unsupported_reason` has accepted the model's sizes."""

    def __init__(
        self,
        launcher: Launcher,
        heads: HeadShape,
        hidden_size: int,
        rotary_dim: int,
        rms_norm_eps: float,
        dtype: torch.dtype,
        kv_dtype: str,
        page_size_tokens: int,
        device: torch.device,
        input_size: int = 0,
        *,
        ropes_by_token: bool = False,
    ) -> None:
        """input_size: of `DecoderConfig.layer_input_size`. ropes_by_token: `rope_and_store` is given the result of
        `turn_tokens`."""
        act = ACT_MACRO[dtype]
        self._launcher = launcher
        self._hidden = np.int32(hidden_size)
        self._unused = torch.zeros(4, device=device)
        self._no_tokens = torch.zeros(1, dtype=torch.int32, device=device)
        self._eps = np.float32(rms_norm_eps)
        self._embed = _embed(act)
        norm_threads = _norm_threads(hidden_size)
        self._add_rms_norm, self._add_layer_norm, added = (_norm(act, entry, norm_threads) for entry in _ROW_NORMS)
        self._rms_norm_added = {hidden_size: added}
        """By the width of rows."""
        if input_size:
            self._rms_norm_added[input_size] = replace(added, num_threads=_norm_threads(input_size))
        self._norm_q_and_k = _norm_q_and_k(act)
        self._activations = [_activation(act, entry) for entry in _ACTIVATIONS]
        self._silu_mul, self._gelu_mul, self._gelu, self._sigmoid_mul, self._gelu_mul_input = self._activations
        self._rope_and_store, self._rope_and_store_wide = (
            make(act, kv_dtype) for make in (_rope_and_store, _rope_and_store_wide)
        )
        self._rotary_dim = np.int32(rotary_dim)
        self._ropes_by_token = np.int32(ropes_by_token)
        self._page_size = np.int32(page_size_tokens)
        self._head_shape = tuple(map(np.int32, (heads.num_heads, heads.num_kv_heads, heads.head_dim)))
        # The kernel cuts a block of threads into groups of lanes, one group per head.
        lanes = 8 if heads.head_dim <= 64 else 16 if heads.head_dim <= 128 else 32
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        self._head_blocks = -(-num_heads * lanes // self._rope_and_store.num_threads)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels to pass to `Launcher.prepare`."""
        norms = (self._add_rms_norm, self._add_layer_norm, *self._rms_norm_added.values(), self._norm_q_and_k)
        stores = self._rope_and_store, self._rope_and_store_wide
        return (self._embed, *norms, *self._activations, *stores, _GATHER_ROWS, _TURN_TOKENS)

    def embed(
        self,
        table: Tensor,
        input_ids: Tensor,
        rows: RowArrays,
        last_tokens: Tensor,
        residual: Tensor,
        scale: float = 1.0,
    ) -> None:
        """Write the embeddings of input_ids [T], times scale, to residual [T, width] fp32; an id outside table [V,
        width] gives 0.

        FROM_SLOT stands for the last token of the row's slot, last_tokens [max_slots]. Tokens with FROM_EMBEDDINGS are
        left unchanged.
        """
        num_tokens, width = residual.shape
        self._launcher.launch(
            self._embed, (num_tokens, _blocks(width // _VALUES, self._embed), 1), table, input_ids, last_tokens,
            rows.query_starts, rows.slots, residual, int32(rows.slots.shape[0]), int32(table.shape[0]), int32(width),
            np.float32(scale),
        )  # fmt: skip

    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor) -> None:
        """residual [T, hidden] fp32 += delta [T, hidden]; out [T, hidden] = RMS norm of residual * weight [hidden]."""
        self._add_norm(self._add_rms_norm, residual, delta, weight, out)

    def add_layer_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor) -> None:
        """As `add_rms_norm`, with the layer norm; weight [2 * hidden] is [weight | bias]."""
        self._add_norm(self._add_layer_norm, residual, delta, weight, out)

    def _add_norm(self, kernel: Kernel, residual: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor) -> None:
        added = out if delta is None else delta
        self._launcher.launch(
            kernel, (residual.shape[0], 1, 1), residual, added, weight, out, self._hidden, int32(delta is not None),
            self._eps,
        )  # fmt: skip

    def rms_norm_added(self, residual: Tensor, added: Tensor, weight: Tensor) -> None:
        """residual [n, width] fp32 += RMS norm of added [n, width] * weight [width].

        weight may have one more number, by which the sum is multiplied. width: hidden, or input_size.
        """
        num_rows, width = residual.shape
        sizes = int32(width), int32(len(weight) > width)
        kernel = self._rms_norm_added[width]
        self._launcher.launch(kernel, (num_rows, 1, 1), residual, added, weight, *sizes, self._eps)

    def norm_q_and_k(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
        """RMS norms over all heads of q and over all heads of k in qkv [T, qkv_size], in place. Padding rows too."""
        self._launcher.launch(
            self._norm_q_and_k, (qkv.shape[0], 2, 1), qkv, q_weight, k_weight, int32(q_weight.shape[0]),
            int32(k_weight.shape[0]), self._eps,
        )  # fmt: skip

    def turn_tokens(self, rope: Tensor, positions: Tensor, axes: Tensor, out: Tensor) -> None:
        """out [T, rotary_dim] = each token's [cos | sin] of rope [positions, rotary_dim]: of a pair at the position, of
        the token's three in positions int32 [3 T], that axes int32 [rotary_dim / 2] names."""
        self._launcher.launch(_TURN_TOKENS, (len(out), 1, 1), rope, positions, axes, out, self._rotary_dim)

    def rope_and_store(
        self,
        qkv: Tensor,
        layer_cache: Tensor,
        page_table: Tensor,
        rows: RowArrays,
        rope: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        query_rope: Tensor | None = None,
        *,
        has_layer_norms: bool = False,
    ) -> None:
        """Norm and rotate q of qkv [T, q | … | k | v] in place; write k, normed and rotated, and v to the cache.

        k and v in qkv do not change. layer_cache: the layer's bytes of the cache. rope [positions, rotary_dim] fp32 is
        [cos | sin]; None for a layer without rope. query_rope: the same for q, if it has another one. norms: weights of
        q and k, [head_dim] fp32; with has_layer_norms [heads * head_dim]. Rows whose slot is -1 are skipped.
        """
        table = self._unused if rope is None else rope
        query_table = table if query_rope is None else query_rope
        q_norm, k_norm = norms or (self._unused, self._unused)
        head_norm = int32(0 if norms is None else 1 + has_layer_norms)
        num_rows, max_pages = int32(rows.slots.shape[0]), int32(page_table.shape[1])
        self._launcher.launch(
            self._rope_and_store, (qkv.shape[0], self._head_blocks, 1), qkv, q_norm, k_norm, query_table, table,
            layer_cache, page_table, rows.query_starts, rows.context_lens, rows.slots, num_rows, max_pages,
            self._page_size, int32(qkv.shape[1] // int(self._head_shape[-1])), *self._head_shape,
            self._rotary_dim if rope is not None else int32(0), head_norm, self._ropes_by_token, self._eps,
        )  # fmt: skip

    def rope_and_store_wide(
        self,
        qkv: Tensor,
        layer_cache: Tensor,
        page_table: Tensor,
        rows: RowArrays,
        rope: Tensor,
        norms: tuple[Tensor | None, Tensor | None, Tensor | None],
        heads: HeadShape,
    ) -> None:
        """As `rope_and_store`, with the same rope for q and k and RMS norms [head_dim] of q, k and v.

        Without KV heads qkv has only q, and nothing is stored.
        """
        weights = (self._unused if norm is None else norm for norm in norms)
        num_tokens, num_rows, all_heads = len(qkv), int32(len(rows.slots)), heads.qkv_size // heads.head_dim
        shape = qkv.shape[1] // heads.head_dim, heads.num_heads, heads.num_kv_heads, heads.head_dim, rope.shape[1]
        self._launcher.launch(
            self._rope_and_store_wide, (num_tokens, all_heads, 1), qkv, *weights, rope, layer_cache, page_table,
            rows.query_starts, rows.context_lens, rows.slots, num_rows, int32(page_table.shape[1]), self._page_size,
            *map(int32, shape), self._eps,
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [T, n] = silu(gate) * up, where gate_up [T, 2 n] is [gate | up]."""
        self._activate(self._silu_mul, gate_up, out)

    def gelu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [T, n] = gelu(gate) * up, with the tanh form of GELU."""
        self._activate(self._gelu_mul, gate_up, out)

    def gelu(self, x: Tensor, out: Tensor) -> None:
        """out [T, n] = gelu(x [T, n]), in the tanh form."""
        self._activate(self._gelu, x, out)

    def sigmoid_mul(self, gates: Tensor, out: Tensor) -> None:
        """out [T, n] *= sigmoid(gates [T, n]), which may be columns of a wider matrix."""
        num_tokens, size = out.shape
        grid = (num_tokens, _blocks(size // _VALUES, self._sigmoid_mul), 1)
        self._launcher.launch(self._sigmoid_mul, grid, gates, out, int32(size), int32(gates.stride(0)))

    def gelu_mul_input(self, gates: Tensor, inputs: Tensor, tokens: Tensor | None) -> None:
        """gates [n, size] = gelu(gates) * inputs fp32 [T, size], which may be columns of a wider matrix.

        tokens: int32 [n], the rows of inputs; None for all.
        """
        num_rows, size = gates.shape
        grid = (num_rows, _blocks(size // _VALUES, self._gelu_mul_input), 1)
        self._launcher.launch(
            self._gelu_mul_input, grid, gates, inputs, self._no_tokens if tokens is None else tokens, int32(size),
            int32(inputs.stride(0)), int32(tokens is not None),
        )  # fmt: skip

    def gather_rows(self, source: Tensor, rows: Tensor, out: Tensor) -> None:
        """out [n, m] = source[rows, :m], in any dtype. rows: int32 [n]; a negative one leaves its row of out unchanged.

        Raises ValueError unless rows and strides are multiples of 16 bytes.
        """
        size, width = source.element_size(), out.shape[1] * out.element_size()
        strides = source.stride(0) * size, out.stride(0) * size
        if width % _UNIT_BYTES or strides[0] % _UNIT_BYTES or strides[1] % _UNIT_BYTES:
            raise ValueError(f"rows of {width} bytes, {strides} bytes apart, are not multiples of {_UNIT_BYTES} bytes")
        units = width // _UNIT_BYTES
        self._launcher.launch(
            _GATHER_ROWS, (len(rows), _blocks(units, _GATHER_ROWS), 1), source, rows, out, np.int32(units),
            *(np.int64(stride // _UNIT_BYTES) for stride in strides),
        )  # fmt: skip

    def _activate(self, kernel: Kernel, x: Tensor, out: Tensor) -> None:
        num_tokens, size = out.shape
        grid = (num_tokens, _blocks(size // _VALUES, kernel), 1)
        self._launcher.launch(kernel, grid, x, out, int32(size))


def _blocks(num_threads: int, kernel: Kernel) -> int:
    return -(-num_threads // kernel.num_threads)


def _embed(act: int) -> Kernel:
    return Kernel("rows/embed.cu", "embed", (("ACT", act),), num_threads=128)


def _norm_threads(hidden_size: int) -> int:
    """Return the threads of a row's block: 8 values each in up to 512 threads, or 16 values in more."""
    num_chunks = -(-hidden_size // _VALUES)
    chunks_each = 1 if num_chunks <= _THREADS_OF_ONE_CHUNK else 2
    return -(-num_chunks // (32 * chunks_each)) * 32


def _norm(act: int, entry: str, num_threads: int) -> Kernel:
    return Kernel("rows/norms.cu", entry, (("ACT", act),), num_threads)


def _norm_q_and_k(act: int) -> Kernel:
    return Kernel("rows/norms.cu", "norm_q_and_k", (("ACT", act),), num_threads=256)


def _activation(act: int, entry: str) -> Kernel:
    return Kernel("rows/activations.cu", entry, (("ACT", act),), num_threads=128)


def _rope_and_store(act: int, kv_dtype: str) -> Kernel:
    macros = (("ACT", act), ("KV_DTYPE", KV_MACRO[kv_dtype]))
    return Kernel("rows/rope_and_store.cu", "rope_and_store", macros, num_threads=256)


def _rope_and_store_wide(act: int, kv_dtype: str) -> Kernel:
    return replace(_rope_and_store(act, kv_dtype), entry="rope_and_store_wide", num_threads=64)
