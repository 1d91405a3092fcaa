"""The keys of an encoder's config.json that change its computation, with bounds on every number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.backend.checkpoint.config.rope_scaling import RopeSettings
from penstock.shm.messages import MAX_CONTEXT_TOKENS

_Width = Annotated[int, Meta(ge=1, le=1 << 16)]
_Theta = Annotated[float, Meta(gt=1.0, le=1e15)]
_Epsilon = Annotated[float, Meta(gt=0.0, le=1.0)]
_Labels = Annotated[int, Meta(ge=1, le=1 << 20)]


class EncoderHfConfig(Struct, frozen=True):
    """Keys under the names that most architectures use; `families.EncoderFamily.keys` renames the others."""

    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    hidden_size: _Width
    intermediate_size: _Width
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)]
    num_attention_heads: Annotated[int, Meta(ge=1, le=4096)]
    max_position_embeddings: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    hidden_act: str = "gelu"
    layer_norm_eps: _Epsilon | None = None
    type_vocab_size: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    pad_token_id: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    position_embedding_type: str | None = None
    relative_attention_num_buckets: Annotated[int, Meta(ge=4, le=4096)] = 32

    position_buckets: Annotated[int, Meta(ge=4, le=4096)] = 256
    max_relative_positions: Annotated[int, Meta(ge=-1, le=MAX_CONTEXT_TOKENS)] = -1

    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    mlp_fc1_bias: bool | None = None
    decoder_bias: bool = True
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    classifier_pooling: Literal["cls", "mean"] = "cls"
    local_attention: Annotated[int, Meta(ge=2, le=MAX_CONTEXT_TOKENS)] = 128
    global_attn_every_n_layers: Annotated[int, Meta(ge=1, le=4096)] = 3
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    global_rope_theta: _Theta | None = None
    local_rope_theta: _Theta | None = None

    rope_theta: _Theta | None = None
    rope_scaling: RopeSettings | None = None
    rope_parameters: dict[str, Any] | None = None
    """RopeSettings, or those of each layer type."""
    max_trained_positions: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)] | None = None
    rotary_scaling_factor: Annotated[float, Meta(gt=0.0, le=1e6)] | None = None

    num_labels: _Labels | None = None
    id2label: dict[str, str] | None = None

    @property
    def label_count(self) -> int:
        """The number of labels, as in transformers: those with names, else num_labels, else 2."""
        return len(self.id2label) if self.id2label else self.num_labels or 2
