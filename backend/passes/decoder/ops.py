"""The operations a decoder is made of: one protocol, implemented per device. The model knows nothing else of a device.

T tokens of a step lie back to back, [T, …]; the residual stream is fp32, all else has the weights' dtype. An operation
may return a buffer of its own that the next call of the same operation overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.forward_pass import StepBatch

KV_BLOCK_VALUES = 32
KV_BLOCK_BYTES = {"fp32": 128, "bf16": 64, "q8_0": 34, "fp8": 32}
"""Of each KV dtype, the bytes of 32 values. q8_0 is GGML's: int8, and one binary16 scale for 32 values of a head; fp8
is e4m3 without a scale."""
CPU_KV_DTYPES = ("fp32", "bf16", "q8_0")


def supports_q8_0(head_dim: int) -> bool:
    """Whether a head's values fill whole blocks, as q8_0 asks."""
    return head_dim % KV_BLOCK_VALUES == 0


Array: TypeAlias = Any
"""A tensor on the device, of the library that the implementation uses."""
Linear: TypeAlias = Any
"""What `pack_linear` returned."""
Step: TypeAlias = Any
"""A step's rows in the form the implementation likes."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of one attention layer. A projection's output is [q heads | k heads | v heads], head_dim each."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def output_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What distinguishes one layer's attention from the next one's. Norm weights are as `vector` returned them."""

    index: int
    uses_rope: bool
    window_tokens: int | None
    q_norm: Array | None
    k_norm: Array | None


class Ops(Protocol):
    """What the model needs of a device. Weights are handed over once and kept in the form the device likes best."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """weight [out, in], bias [out]; the caller drops its own copy."""
        ...

    def pack_gated(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """weight [gate | up, in], bias [gate | up], for `gated_linear`."""
        ...

    def vector(self, weight: Tensor) -> Array:
        """A norm's weight, [n]."""
        ...

    def table(self, weight: Tensor) -> Array:
        """The embedding table, [vocab, hidden]."""
        ...

    def tied_table(self, weight: Tensor, lm_head: Linear) -> Array:
        """As `table`, where lm_head was packed from the same weight and may be read in its place."""
        ...

    def embed(self, table: Array, step: Step) -> Array:
        """The residual stream of the step, [T, hidden] fp32: of the table's rows, and of embeddings that are given."""
        ...

    def rms_norm(self, residual: Array, weight: Array) -> Array:
        """[T, hidden] in the weights' dtype."""
        ...

    def linear(self, x: Array, weights: Linear) -> Array: ...

    def linear_add(self, x: Array, weights: Linear, residual: Array) -> None:
        """Adds the product to residual [T, out] in place, in fp32."""
        ...

    def gated_linear(self, x: Array, weights: Linear) -> Array:
        """silu(x @ gate) * (x @ up), [T, intermediate]."""
        ...

    def rotate_and_store(self, qkv: Array, step: Step, layer: AttentionLayer) -> None:
        """Norms and rotates q and k of qkv [T, qkv_size] in place and writes k and v to the cache."""
        ...

    def attention(self, qkv: Array, step: Step, layer: AttentionLayer) -> Array:
        """Causal attention of the step's queries over their sequences' cached positions, [T, output_size]."""
        ...

    def last_tokens(self, qkv: Array, residual: Array, step: Step) -> tuple[Array, Array, Step]:
        """The same three with only the last token of each logit row: L tokens, at least one."""
        ...

    def logits(self, x: Array, weights: Linear) -> Array:
        """The product, [L, vocab]: in fp32 on the host, in the weights' dtype on a GPU."""
        ...

    def close(self) -> None: ...


class CpuOps(Ops, Protocol):
    """The operations on the CPU, with the step and the cache in their own hands."""

    def create_cache(self, num_layers: int, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None: ...

    def begin_step(self, batch: StepBatch, input_ids: NDArray[np.int32]) -> Step:
        """Copies batch.page_copies. input_ids [T] are batch.input_ids with every FROM_SLOT resolved, and any token
        instead of FROM_EMBEDDINGS."""
        ...

    def normed_rows(self, normed: Array, num_rows: int) -> NDArray[np.float32]:
        """A copy of the first rows of what `rms_norm` gave last, [num_rows, hidden]."""
        ...
