"""The operations of a decoder: one protocol, implemented per device. The model uses nothing else.

The T tokens of a step lie back to back, [T, …]. The residual stream is fp32; all else has the dtype of the weights. An
operation may return a buffer of its own that its next call overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from penstock.backend.passes.ops.state_ops import DeltaNetOps, MtpOps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from penstock.backend.checkpoint.config.tensors import LayerWeights
    from penstock.backend.checkpoint.tensor_files.lora_weights import LoraWeights
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
    from penstock.backend.dtypes import Dtype


class Weights(Protocol):
    """A source of unpacked weights, such as `checkpoint.weights.DecoderWeights`. Each call returns a copy.

    The embedding table and the matrices of linears may be quantised.
    """

    def embedding(self, dtype: Dtype) -> Tensor | QuantizedWeight: ...

    def layer(self, index: int, dtype: Dtype) -> LayerWeights[Tensor | QuantizedWeight]: ...

    def final_norm(self, dtype: Dtype) -> Tensor: ...

    def lm_head(self, dtype: Dtype) -> Tensor | QuantizedWeight | None:
        """None if the embedding table serves as the output layer too."""


KV_BLOCK_VALUES = 32
KV_BLOCK_BYTES = {"fp32": 128, "bf16": 64, "q8_0": 34, "fp8": 32}
"""Bytes of 32 values, by KV dtype. q8_0 is GGML's format: int8 with one binary16 scale per 32 values of a head. fp8 is
e4m3 without a scale."""
CPU_KV_DTYPES = ("fp32", "bf16", "q8_0")


def supports_q8_0(head_dim: int) -> bool:
    """Whether a head's values fill whole blocks of 32."""
    return head_dim % KV_BLOCK_VALUES == 0


Array: TypeAlias = Any
"""A tensor on the device, in the implementation's own library."""
Linear: TypeAlias = Any
"""A packed weight, returned by `pack_linear`."""
Experts: TypeAlias = Any
"""A layer's packed experts and their router, returned by `ExpertOps.pack`."""
Step: TypeAlias = Any
"""A step's rows in the implementation's own form."""


class Forward(Protocol):
    """The signature of `DecoderModel.forward` and `guess`."""

    @property
    def __name__(self) -> str: ...

    def __call__(self, step: Step, *, needs_logits: bool) -> Array | None: ...


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of an attention layer. The qkv projection's output is [q heads | k heads | v heads], head_dim each.

    With `DecoderConfig.gated_attention` the gates of all q heads follow q.
    """

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
class ExpertWeights:
    """A layer's experts, as in `LayerWeights`."""

    router: Tensor
    gate_up: Tensor | QuantizedWeight
    down: Tensor | QuantizedWeight
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    factors: Tensor | None = None
    """[experts] factors of their results."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention settings that differ from layer to layer. Norm weights and sinks are results of `vector`."""

    index: int
    rope: int | None
    """Index into the model's ropes; None for a layer without rotary embeddings."""
    window_tokens: int | None
    q_norm: Array | None
    k_norm: Array | None
    query_rope: int | None = None
    """Index of the queries' rope, if it differs."""
    sinks: Array | None = None
    """[num_heads] a score for each head that takes part in the softmax and has no value."""
    group: int = 0
    """The group whose pages have its keys and values: an entry of `PassSpec.kv_windows`."""
    group_index: int | None = None
    """Its index among the group's layers, or units; None if all layers are one group."""
    v_norm: Array | None = None
    has_full_heads: bool = False
    """Its heads are `DecoderConfig.full_heads`."""
    source: int | None = None
    """The layer whose keys and values it uses, if it has none: then its qkv has only q."""
    sees_ahead: bool = False
    """Tokens see up to `StepBatch.visible_ends`."""
    first_key: int = 0
    """The first position that tokens see, in a layer without a window."""

    @property
    def cache_index(self) -> int:
        """Index of the layer's part in its group's pages."""
        return self.index if self.group_index is None else self.group_index

    @property
    def ropes(self) -> tuple[int | None, int | None]:
        """The rope indices of queries and of keys."""
        return self.rope if self.query_rope is None else self.query_rope, self.rope


class ExpertOps(Protocol):
    """The operations of mixtures of experts."""

    def pack(self, weights: ExpertWeights, scale: float) -> Experts:
        """The experts' results are multiplied by scale. The caller drops its copy."""

    def add(self, x: Array, experts: Experts, residual: Array) -> None:
        """Add the weighted results of each token's experts to residual [T, hidden] in place, in fp32.

        The weights are the router's probabilities, from logits in fp32. Among equal ones the lower expert is chosen. A
        token's results are added in an order that does not depend on the batch.
        """

    def weight_by_sigmoid(self, x: Array, gate: Linear, mixed: Array) -> None:
        """Multiply each row of mixed, the result of `activated_linear`, by the sigmoid of gate's one output for x."""


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What turns a layer's input into an addition to the residual stream."""

    gate: Linear
    projection: Linear
    norm: Array
    """As in `linear_add`."""


@dataclass(frozen=True, slots=True)
class BesideNorms:
    """Norms of a layer with experts beside its MLP."""

    dense: Array
    """Of the MLP's results, as `experts` of those of the experts."""
    router: Array
    expert_inputs: Array
    experts: Array
    sum: Array
    """Of both together, as in `linear_add`."""


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """A layer's weights of several residual streams, as in `LayerWeights`; but router includes its norm's weight."""

    router: Tensor
    predictions: Tensor
    corrections: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Laurel:
    """A product of low rank beside attention."""

    input_norm: Array
    left: Linear
    right: Linear
    norm: Array


class StreamOps(Protocol):
    """The operations of models with several residual streams (`DecoderConfig.streams`)."""

    def pack_ends(self, first: Tensor, last: Tensor) -> None:
        """Keep what begins and ends the streams after the first, as in `LayerWeights`. The caller drops its copy."""

    def pack(self, weights: StreamWeights) -> Any:
        """Return the layer, for the next functions."""

    def begin(self, residual: Array, step: Step) -> None: ...

    def predict(self, layer: Any, residual: Array, step: Step) -> None:
        """Predict all streams; residual becomes the first."""

    def add_laurel(self, laurel: Laurel, residual: Array) -> None:
        """Add input_norm of the residual, and the norm of its product."""

    def cut_linear(self, x: Array, weights: Linear, cutoff: float) -> Array:
        """As `Ops.activated_linear`, with gates cut as `Streams.gate_cutoffs` says. weights: [gate | up], not gated."""

    def correct(self, layer: Any, index: int, own: LayerInput, residual: Array, step: Step) -> None:
        """Correct all streams by residual, the result of a layer, and add the layer's input to those after the first.

        residual is undefined then, as between layers.
        """

    def end(self, residual: Array, step: Step) -> None:
        """residual becomes the mean of the streams."""


class SideOps(Protocol):
    """Operations beside attention and the MLP, of models with inputs of layers or experts beside the MLP."""

    def pack_inputs(self, table: Tensor | QuantizedWeight, projection: Tensor | QuantizedWeight, norm: Tensor) -> None:
        """Keep what `begin_inputs` needs, as in `LayerWeights`. The caller drops its copy."""

    def begin_inputs(self, residual: Array, step: Step) -> None:
        """Compute the inputs of all layers, from the embeddings and the tokens' ids."""

    def add_input(self, index: int, layer: LayerInput, residual: Array, step: Step) -> None:
        """Add norm(projection(activation(gate(residual)) * the layer's input)) to residual."""

    @property
    def streams(self) -> StreamOps | None:
        """None if the model or these operations have none."""

    def add_experts(self, mixed: Array, down: Linear, experts: Experts, norms: BesideNorms, residual: Array) -> None:
        """Add the results of the MLP, whose down product is still to be computed from mixed, and of the experts."""


class Ops(Protocol):
    """The operations that the model needs from a device. Weights are packed once, in the fastest layout there.

    Settings that are the same in all layers (the kind and epsilon of norms, the activation, the scales and soft caps
    that no argument names) come from the model's DecoderConfig.
    """

    @property
    def experts(self) -> ExpertOps | None:
        """The operations of experts; None if the model has none."""

    @property
    def delta_net(self) -> DeltaNetOps | None:
        """The operations of layers with a delta rule; None if the model or these operations have none."""

    @property
    def mtp(self) -> MtpOps | None:
        """As `delta_net`, of `DecoderConfig.has_mtp`."""

    @property
    def side(self) -> SideOps | None:
        """None if the model or these operations have none."""

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, scale: float = 1.0, *, is_gated: bool = False
    ) -> Linear:
        """Pack weight [out, in] and bias [out]; is_gated: out is [gate | up], for `activated_linear`.

        The result is multiplied by scale. The caller drops its copy.
        """

    def vector(self, weight: Tensor) -> Array:
        """Pack a norm's weight, [n], or a layer norm's, [weight | bias]; or other numbers that are used in fp32."""

    def table(self, weight: Tensor) -> Array:
        """Pack the embedding table, [vocab, hidden]."""

    def packed_table(self, weight: Tensor | QuantizedWeight, linear: Linear) -> Array:
        """Like `table`; linear was packed from the same weight, so its memory may serve as the table."""

    def embed(self, table: Array, step: Step) -> Array:
        """The step's residual stream, [T, hidden] fp32: rows of the table, and the step's own embeddings, scaled."""

    @property
    def add_pictures(self) -> Callable[[int, Array, Step], None] | None:
        """(layer, residual, step): add what pictures add behind the layer (`PassSpec.picture_layers`). None if the
        operations take no such pictures."""

    def norm(self, residual: Array, weight: Array | None) -> Array:
        """Return [T, hidden] in the dtype of the weights. Without a weight the numbers are only converted."""

    def final_norm(self, residual: Array, weight: Array | None) -> Array:
        """Like `norm`, for the model's last norm, whose result is also read outside of these operations."""

    def linear(self, x: Array, weights: Linear) -> Array: ...

    def linear_add(self, x: Array, weights: Linear, residual: Array, norm: Array | None = None) -> None:
        """Add the product, or its norm with that weight, to residual [T, out] in place, in fp32.

        norm may have one more number, by which the sum is multiplied.
        """

    def activated_linear(self, x: Array, weights: Linear) -> Array:
        """Return [T, intermediate]: activation(x @ gate) * (x @ up) of gated weights, activation(product) of others."""

    def rotate_and_store(self, qkv: Array, step: Step, layer: AttentionLayer) -> None:
        """Normalise and rotate q and k of qkv [T, qkv_size] in place, then write k and v to the cache."""

    def attention(self, qkv: Array, step: Step, layer: AttentionLayer) -> Array:
        """Causal attention of the step's queries over their sequences' cached positions, [T, output_size]."""

    def last_tokens(self, qkv: Array, residual: Array, step: Step) -> tuple[Array, Array, Step]:
        """Reduce all three to `StepBatch.logit_tokens`: L + S tokens, at least one."""

    def logit_rows(self, normed: Array, step: Step) -> Array:
        """The last tokens of the logit rows, [L, hidden], from the final norm's result."""

    def logits(self, x: Array, weights: Linear) -> Array:
        """The product, soft-capped, [L, vocab]: fp32 on the CPU, the dtype of the weights on a GPU."""

    def close(self) -> None: ...


class LinearAdapters(Protocol):
    """The adapters of the packed linears.

    `linear`, `linear_add` and `activated_linear` add the part of a row's adapter to a token's product, in fp32, before
    it is used otherwise. Tokens of rows without an adapter have the same bits as without adapters.
    """

    def prepare(self, linear: Linear, parts: Sequence[LoraWeights]) -> Any:
        """Return an adapter of the linear in the form that products read. Any thread may call it."""

    def put(self, linear: Linear, index: int, prepared: Any) -> None:
        """Make it the linear's adapter with this index, or None: it leaves the linear unchanged.

        Called between steps, for all linears that may have adapters.
        """
