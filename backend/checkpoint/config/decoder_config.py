"""The dimensions and variations of a decoder, independent of any checkpoint format.

The defaults are those of Llama. An architecture is a set of values: the model and the operations know no names of
architectures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

NormKind: TypeAlias = Literal["rms", "layer"]
QkNormScope: TypeAlias = Literal["head", "each head", "projection"]
Activation: TypeAlias = Literal["silu", "gelu_tanh"]
MlpKind: TypeAlias = Literal["gated", "plain"]


@dataclass(frozen=True, slots=True)
class PositionScale:
    """The factor of queries at a position: 1 + beta × ln(1 + floor(position / period)) (Llama 4, Ministral 3)."""

    beta: float
    period: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (arXiv 2104.09864), rotate-half layout.

    inv_freq has rotary_dim / 2 entries in fp64, with all scaling applied. cos and sin are multiplied by
    attention_factor, which is 1.0 unless YaRN or LongRoPE changes it, and by the scale of their position.
    """

    rotary_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    scale: PositionScale | None = None
    """Not allowed with a rotary_dim below head_dim: the numbers that do not rotate would not be multiplied."""
    axes: tuple[int, ...] = ()
    """Which of a token's three positions (`StepBatch.rope_positions`) turns each pair; empty: its place turns all."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of a model, and soft caps: x becomes cap × tanh(x / cap). None is no cap."""

    scores: float | None = None
    """Attention scores, q·k; None is head_dim ** -0.5."""
    scores_softcap: float | None = None
    embedding: float = 1.0
    """Rows of the embedding table; rounded to the weights' dtype first."""
    given_embeddings: float = 1.0
    """Factor of embeddings that a prompt brings with it."""
    residual: float = 1.0
    """Factor of additions of attention and MLP to the residual stream. Not for models with output norms."""
    logits: float = 1.0
    logits_softcap: float | None = None
    """Applied after `logits`."""


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gate × sigmoid(alpha × gate) × (up + 1), with gate at most limit and up from -limit to limit (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: gated MLPs. Each token uses the few that its router rates highest."""

    count: int
    per_token: int
    """From 1 to count."""
    width: int
    """Width of an expert's MLP, like intermediate_size of a dense one."""
    normalises: bool
    """The probabilities of a token's experts, which weight their results, are divided by their sum."""
    shared_width: int | None = None
    """Width of an MLP beside the experts that all tokens use, weighted by the sigmoid of its own linear (Qwen2-MoE)."""
    biased: bool = False
    """The router and the experts' linears have biases."""
    clamped_gate: ClampedGate | None = None
    """Replaces the model's activation."""
    beside_mlp: bool = False
    """The layers have the dense MLP too. Both have norms of their own, are added, and their sum has the MLP's output
    norm. The router has its own norm, and each expert a factor (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Layers in which a matrix for each value head takes the place of keys and values: a gated delta rule changes it
    (arXiv 2412.06464), after a short convolution over the sequence. Sizes are those of heads."""

    layers: tuple[bool, ...]
    """Whether each layer is one; the others have attention."""
    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads."""
    key_dim: int
    value_dim: int
    conv_width: int
    """Tokens that the convolution sees; the last is the token itself."""
    tiles_key_heads: bool = False
    """Value head i uses key head i modulo their number (GGUF files of Qwen3.5); otherwise neighbours share one."""
    has_log_decay: bool = True
    """The checkpoint has logarithms of the decays; otherwise the decays with a minus sign (GGUF)."""

    @property
    def values_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Inputs of the convolution: queries and keys of all key heads, then values."""
        return 2 * self.num_key_heads * self.key_dim + self.value_size

    @property
    def state_bytes(self) -> int:
        """A sequence's state in all layers, in fp32."""
        of_layer = self.value_size * self.key_dim + (self.conv_width - 1) * self.num_channels
        return 4 * sum(self.layers) * of_layer


@dataclass(frozen=True, slots=True)
class Streams:
    """Several residual streams: each layer predicts all, computes the first, and corrects the others by the result
    (AltUp, arXiv 2301.13310). Beside attention it adds a product of low rank (LAuReL, arXiv 2411.07501)."""

    count: int
    laurel_rank: int
    gate_cutoffs: tuple[float | None, ...]
    """By layer, how many standard deviations above their mean the gates of the MLP must be: what exceeds this is
    activated, and the others are 0. None: they are as usual."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a layer's tensors in the checkpoint, without the prefix and without .weight or .bias.

    None means that the model lacks the norm. A tuple's tensors are stacked, in this order.
    """

    attention_norm: str | None = "input_layernorm"
    attention_output_norm: str | None = None
    """Applied to attention's addition to the residual stream."""
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_output_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """q, k and v, or one tensor of all three."""
    delta_in: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    """Inputs of the convolution, and gates of results; or one tensor, with both of each key head in turn."""
    delta_gates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    """Strengths of updates, and decays; or one tensor as in delta_in."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up; or one tensor, of both or of a plain MLP's only input product."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    """An expert, by its number. Its tensors' names follow after a dot."""
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    fused_experts: str | None = None
    """If not None, a layer's experts are together in the tensors gate_up_proj and down_proj of this name.

    Matrices are [experts, inputs, outputs]. Then the names of single experts do not exist.
    """
    fused_takes_turns: bool = True
    """Outputs of fused gate and up alternate (gpt-oss). Otherwise all of gate come first, and matrices may also be
    [experts, outputs, inputs] (Qwen3-VL: the hub's files have one order, those of transformers 5 the other)."""
    shared_expert: str = "mlp.shared_expert"
    """Its tensors have the names of an expert's."""
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder. Per-layer tuples have num_layers entries."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_context_tokens: int
    rope: RopeConfig
    tie_embeddings: bool
    has_lm_head: bool = True
    """False: the model ends with the final norm, or with a head that the checkpoint does not call lm_head. Then
    tie_embeddings is False too."""
    head_width: int = 1
    """Outputs of the head that the checkpoint does not call lm_head."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    norm: NormKind = "rms"
    norm_bias: bool = False
    """Layer norms have a bias (StarCoder2)."""
    norm_offset: float = 0.0
    """Added to the weights of all norms: 1 for Gemma."""
    qk_norm: QkNormScope | None = None
    """The norm of q and k before RoPE: over each head with one weight for all heads (Qwen3), over each head with its
    own weight (Command-R+), or over all heads together (OLMo 2)."""
    sinks: bool = False
    """Each head has a learned score that takes part in the softmax of every query and has no value (gpt-oss)."""
    gated_attention: bool = False
    """Attention's results are multiplied by sigmoids; in the checkpoint a head's gate follows its q."""
    delta_net: DeltaNet | None = None
    activation: Activation = "silu"
    mlp: MlpKind = "gated"
    experts: Experts | None = None
    layer_has_experts: tuple[bool, ...] = ()
    """Layers with the experts in place of the dense MLP. Not for models with output norms or biases of the MLP."""
    parallel_blocks: bool = False
    """Attention and MLP read the same norm of the residual stream, and both are added to it (Cohere)."""
    scales: Scales = field(default_factory=Scales)
    names: TensorNames = field(default_factory=TensorNames)

    interleaved_rope: bool = False
    """The checkpoint's heads rotate dimensions 2 i and 2 i + 1 together (GLM, Cohere), not i and i + rotary_dim / 2."""
    window_rope: RopeConfig | None = None
    """RoPE of the layers with a window, if it differs from `rope` (Gemma 3); its rotary_dim too if there are
    full_heads."""
    query_rope: RopeConfig | None = None
    """RoPE of queries where keys have `rope`, if it differs; its rotary_dim is the same."""
    layer_uses_rope: tuple[bool, ...] = ()
    """False for layers without RoPE (SmolLM3, Cohere 2)."""
    layer_window_tokens: tuple[int | None, ...] = ()
    """Sliding window: a token attends to itself and the window - 1 tokens before it. None is full attention."""
    full_heads: tuple[int, int] | None = None
    """num_kv_heads and head_dim of layers without a window, if others have other ones (Gemma 4)."""
    full_values_are_keys: bool = False
    """In layers without a window k's projection is v's too."""
    norms_values: bool = False
    """v has a norm without a weight, over each head."""
    num_shared_layers: int = 0
    """The last layers have only q, and the keys and values of the last layer before them that has a window if they
    do."""
    doubles_shared_mlp: bool = False
    """The MLP of these layers has 2 * intermediate_size."""
    layer_input_size: int = 0
    """Each layer adds an input of its own, of this size, that depends on the token (Gemma 3n); 0 for none."""
    num_layer_inputs: int | None = None
    """Tokens with such inputs, if not all: the others have those of token 0."""
    streams: Streams | None = None
    scales_layers: bool = False
    """The residual stream is multiplied by a number at the end of each layer."""
    has_mtp: bool = False
    """There is one layer more, with attention: part of a head that predicts the token after the next one."""
    picture_layers: int = 0
    """The first layers, fewer than all, behind which pictures add to the residual stream (arXiv 2406.04334)."""
    pictures_see_whole: Literal["nowhere", "in windows", "everywhere"] = "nowhere"
    """Layers, those with a window or all, in which a picture's tokens attend to each other both ways (Gemma 4, 3)."""

    @property
    def input_rows(self) -> int:
        """Rows of the table of layers' inputs."""
        return min(self.num_layer_inputs or self.vocab_size, self.vocab_size)

    @property
    def all_layers(self) -> range:
        """The indices of all layers, that of `has_mtp` too."""
        return range(self.num_layers + self.has_mtp)

    @property
    def has_own_lm_head(self) -> bool:
        """The output layer has a tensor of its own."""
        return self.has_lm_head and not self.tie_embeddings

    @property
    def logits_width(self) -> int:
        """Outputs of the last layer; a buffer for them is never empty."""
        return self.vocab_size if self.has_lm_head else self.head_width

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scales.scores is None else self.scales.scores

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return tuple(rope for rope in (self.rope, self.window_rope, self.query_rope) if rope is not None)

    def rope_of_layer(self, index: int) -> int | None:
        """Index into `ropes`; None for a layer without RoPE."""
        if index < len(self.layer_uses_rope) and not self.layer_uses_rope[index]:
            return None
        return 1 if self.window_rope is not None and self.window_of_layer(index) is not None else 0

    def query_rope_of_layer(self, index: int) -> int | None:
        """Index into `ropes` of the queries' RoPE; None if it is the keys'."""
        return None if self.query_rope is None or self.rope_of_layer(index) != 0 else len(self.ropes) - 1

    @property
    def has_experts_beside(self) -> bool:
        return self.experts is not None and self.experts.beside_mlp

    def experts_of_layer(self, index: int) -> Experts | None:
        last = self.num_layers - 1  # the layer of a head is like it
        return self.experts if self.experts is not None and self.layer_has_experts[min(index, last)] else None

    def delta_net_of_layer(self, index: int) -> DeltaNet | None:
        """None for a layer with attention."""
        is_delta = self.delta_net is not None and index < self.num_layers and self.delta_net.layers[index]
        return self.delta_net if is_delta else None

    def window_of_layer(self, index: int) -> int | None:
        return self.layer_window_tokens[index] if index < len(self.layer_window_tokens) else None

    def sees_whole_pictures(self, index: int) -> bool:
        where = self.pictures_see_whole
        return where == "everywhere" or (where == "in windows" and self.window_of_layer(index) is not None)

    def has_full_heads(self, index: int) -> bool:
        return self.full_heads is not None and self.window_of_layer(index) is None

    def heads_of_layer(self, index: int) -> tuple[int, int]:
        """num_kv_heads and head_dim."""
        own = self.num_kv_heads, self.head_dim
        return self.full_heads if self.full_heads is not None and self.has_full_heads(index) else own

    def mixer_widths(self, index: int) -> tuple[int, int]:
        """The widths of what a layer's attention or delta rule is given, and of what it gives."""
        if (net := self.delta_net_of_layer(index)) is not None:
            return net.num_channels + net.value_size, net.value_size
        num_kv_heads, head_dim = self.heads_of_layer(index)
        num_queries = self.num_heads << self.gated_attention
        num_stored = 2 * num_kv_heads if self.source_of_layer(index) == index else 0
        return (num_queries + num_stored) * head_dim, self.num_heads * head_dim

    def mlp_width_of_layer(self, index: int) -> int:
        is_doubled = self.doubles_shared_mlp and self.source_of_layer(index) != index
        return self.intermediate_size << is_doubled

    def source_of_layer(self, index: int) -> int:
        """The layer whose keys and values the layer uses."""
        num_own = self.num_layers - self.num_shared_layers
        if index < num_own or index == self.num_layers:
            return index
        window = self.window_of_layer(index)
        return max(other for other in range(num_own) if self.window_of_layer(other) == window)
