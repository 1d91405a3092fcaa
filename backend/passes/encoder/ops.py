"""The operations that an encoder needs from a device. Rows lie back to back, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.encoders.encoder_config import Activation, PoolingMode
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight

Array: TypeAlias = Any
"""The arrays of an implementation: [T, width]."""
Linear: TypeAlias = Any
"""A packed linear."""
Vectors: TypeAlias = Any
"""The heads' arrays, [n, width] fp32 where the operations run: an NDArray on the CPU, a Tensor on a GPU."""


@dataclass(frozen=True, slots=True)
class EncoderRows:
    """Whole sequences that are computed together: R rows with T tokens in total."""

    input_ids: NDArray[np.int32]
    """[T]"""
    starts: NDArray[np.int32]
    """[R + 1] start of each row; the last entry is T."""
    token_types: NDArray[np.int32]
    """[T] rows of the table of token types."""
    only_first: bool = False
    """Only the result of a row's first token is read; the others need not be computed."""


@dataclass(frozen=True, slots=True)
class EmbeddingTables:
    """Tables whose rows are added: of the token, of its position and of its type."""

    words: Array
    positions: Array | None
    token_types: Array | None


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """Further factors of a layer's queries and keys, for relative positions (arXiv 2006.03654)."""

    keys: Array
    """[heads, 2 span, head_dim] fp32: multiplied with the query."""
    queries: Array
    """[heads, 2 span, head_dim] fp32: multiplied with the key."""
    places: Array
    """int64 [2 n - 1]: the row in both for keys from n - 1 before the query to n - 1 after it."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How a layer attends."""

    rope: int | None
    """Index into `EncoderConfig.ropes`."""
    window: int | None
    """Tokens to each side; None for all."""
    relative_bias: Array | None
    """[heads, 2 n - 1] fp32: added to the scores of keys from n - 1 before the query to n - 1 after it."""
    relative: RelativePositions | None = None


class Fetched(Protocol):
    """Vectors on their way to the host."""

    def wait(self) -> list[NDArray[np.float32]]:
        """Block until they are there. Call once, from any thread. Raises DeviceLost."""


class EncoderOps(Protocol):
    """The operations of an encoder. Weights are packed once.

    Settings that are the same in all layers come from the model's EncoderConfig. An Array is valid until the operation
    that made it runs again. A row's numbers have the same bits whatever the other rows are.
    """

    @property
    def group_tokens(self) -> int:
        """Rows are computed together up to this many tokens, or one by one."""

    @property
    def logits_tokens(self) -> int:
        """Tokens whose logits over the vocabulary are computed at a time."""

    def pack_linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, *, is_gated: bool = False) -> Linear:
        """weight [out, in], bias [out]; is_gated: out is [gate | up], for `activated_linear`."""

    def vector(self, weight: Tensor) -> Array:
        """A norm's [weight | bias], or a table of relative biases, in fp32."""

    def table(self, weight: Tensor) -> Array: ...

    def run(self, rows: EncoderRows, encode: Encode) -> Vectors:
        """Return a view of the numbers of encode's result, [T, hidden_size], which the next call may overwrite.

        encode may be called once for each value of `rows.only_first` and its operations recorded: it must be the same
        function each time.
        """

    def embed(self, tables: EmbeddingTables) -> Array:
        """The residual stream, [T, hidden_size] fp32."""

    def norm(self, residual: Array, weight: Array | None) -> Array:
        """[T, hidden_size] in the dtype of the weights. Without a weight the numbers are only converted."""

    def norm_in_place(self, residual: Array, weight: Array) -> Array:
        """Like `norm`; the residual stream becomes its norm too."""

    def linear(self, x: Array, weights: Linear) -> Array: ...

    def attention(self, qkv: Array, layer: LayerAttention) -> Array:
        """Each token over its row's tokens, [T, hidden_size]. Rotates q and k of qkv in place."""

    def linear_add(self, x: Array, weights: Linear, residual: Array) -> None:
        """Add the product to residual, in fp32."""

    def activated_linear(self, x: Array, weights: Linear) -> Array:
        """[T, intermediate_size]: activation(product), or activation(x @ gate) * (x @ up) of gated weights."""

    def pool(self, hidden: Vectors, rows: Sequence[tuple[int, int]], modes: tuple[PoolingMode, ...]) -> Vectors:
        """The pooled tokens [start, end) of each of `rows`, [len(rows), modes * hidden_size].

        Modes one after the other, as in sentence-transformers. hidden is the result of the last `run`.
        """

    def dense(self, x: Vectors, weights: Linear, activation: Activation) -> Vectors:
        """The activation of the product, [n, out], for heads."""

    def dense_norm(self, x: Vectors, weight: Array) -> Vectors:
        """The norm of rows, [n, width], for heads."""

    def splade(self, blocks: Iterable[Vectors]) -> Vectors:
        """log(1 + relu(x)) of the largest number of each column over all blocks, [1, width]. A NaN stays one."""

    def fetch(self, vectors: Sequence[Vectors]) -> Fetched:
        """Start to copy them to the host. The next `run` may overwrite them."""

    def step(self, doing: str) -> AbstractContextManager[None]:
        """Prepare and run a step in this context: what `run` needs gets ready, and a broken device raises DeviceLost.

        doing names the step in errors.
        """

    def close(self) -> None: ...


class FirstTokens(Protocol):
    """Operations that skip work which only the other tokens of a row need. The remaining results have the same bits."""

    def first_attention(self, qkv: Array, layer: LayerAttention, residual: Array) -> Array:
        """Like `EncoderOps.attention`, for each row's first token. All later operations are on these tokens alone."""

    def spread_first(self, residual: Array) -> None:
        """Move the first tokens of the residual stream back to their places, after the last operation."""


class Encode(Protocol):
    """Returns the residual stream of the last layer; with first_tokens, only that of each row's first token."""

    def __call__(self, first_tokens: FirstTokens | None) -> Array: ...
