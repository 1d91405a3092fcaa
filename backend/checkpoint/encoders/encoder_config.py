"""The dimensions and variations of an encoder and its heads, independent of any checkpoint format.

The defaults are those of BERT (arXiv 1810.04805). An architecture is a set of values: the model and the operations know
no names of architectures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from penstock.backend.checkpoint.config.architectures.encoder_names import EncoderNames
from penstock.backend.checkpoint.config.decoder_config import RopeConfig

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid", "identity"]
"""gelu is the exact one, with the error function."""
PoolingMode: TypeAlias = Literal["cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len"]


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A linear of a head, followed by its activation and its norm. Names are those of whole tensors in the
    checkpoint."""

    weight: str | None
    """None: the table of words."""
    bias: str | None
    inputs: int
    outputs: int
    activation: Activation = "identity"
    norm: str | None = None
    """Without .weight and .bias."""
    norm_bias: bool = True


@dataclass(frozen=True, slots=True)
class Head:
    """Turns the hidden states of a sequence into a vector: pools them over its tokens, then applies the layers in turn.

    Without pooling the layers compute a vector for each token. The kind "sparse" pools those afterwards, to
    max(log(1 + relu(logit))) over the tokens.
    """

    kind: str
    """Kind of vector, as in `PooledRows`."""
    pooling: tuple[PoolingMode, ...] = ()
    """Several modes are concatenated, in this order."""
    layers: tuple[HeadLayer, ...] = ()

    def width(self, hidden_size: int) -> int:
        return self.layers[-1].outputs if self.layers else hidden_size * max(1, len(self.pooling))


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """One encoder. Per-layer tuples have num_layers entries."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    max_context_tokens: int
    activation: Activation
    names: EncoderNames
    heads: tuple[Head, ...] = ()
    normalizes: bool = False
    """The model's files ask for "embed" to be normalised. The pass leaves it unnormalised."""

    num_positions: int = 0
    """Rows of the table of learned positions; 0 without one."""
    first_position: int = 0
    """The row of a sequence's first token. RoBERTa's rows start after the padding token's id."""
    num_token_types: int = 0
    """Rows of the table of token types; 0 without one."""
    norm_first: bool = False
    """Attention and MLP read a norm of the residual stream (ModernBERT). Otherwise the stream itself is normalised
    after each of them."""
    first_attention_norm: bool = True
    """False: the first layer's attention reads the stream as it is; only with norm_first."""
    norm_bias: bool = True
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_in_bias: bool = True
    mlp_out_bias: bool = True
    is_gated: bool = False
    """The MLP's product is activation(gate) × up."""
    ropes: tuple[RopeConfig, ...] = ()
    layer_ropes: tuple[int | None, ...] = ()
    """Each layer's index into ropes."""
    layer_windows: tuple[int | None, ...] = field(default=())
    """Tokens to each side that a token attends to; None is all."""
    num_relative_buckets: int = 0
    """Rows of the table of relative position biases, the same for all layers (MPNet); 0 without one."""

    relative_span: int = 0
    """Rows to each side in the table of relative positions, whose queries and keys take part in the scores; 0 without a
    table.

    Source: DeBERTa (arXiv 2006.03654).
    """
    farthest: int = 0
    """The distance of the last of these rows. Beyond half of the rows several distances share one."""

    @property
    def score_scale(self) -> float:
        """The factor of a score, which is the sum of one or three products."""
        return float((self.head_dim * (3 if self.relative_span else 1)) ** -0.5)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def rope_of_layer(self, index: int) -> int | None:
        return self.layer_ropes[index] if self.layer_ropes else None

    def window_of_layer(self, index: int) -> int | None:
        return self.layer_windows[index] if self.layer_windows else None
