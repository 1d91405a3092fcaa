"""The tensors of a decoder: their names and shapes in a checkpoint, and the form that the model uses.

Reads no file, so models with random weights use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.backend.checkpoint.config.decoder_config import (
        DecoderConfig,
        DeltaNet,
        Experts,
        QkNormScope,
        Streams,
        TensorNames,
    )

MTP_LAYER, MTP_FC = "mtp.layers.0.", "mtp.fc.weight"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
NORM_FIELDS = ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm")
"""The norms of a layer, as fields of `TensorNames` and of `LayerWeights`."""
_MTP_NORMS = {f"mtp_{kind}_norm": f"mtp.pre_fc_norm_{kind}" for kind in ("embedding", "hidden")}
INPUT_TABLE = "model.embed_tokens_per_layer.weight"
_BESIDE_NORMS = {
    "dense_output_norm": "post_feedforward_layernorm_1.weight",
    "expert_norm": "pre_feedforward_layernorm_2.weight",
    "expert_output_norm": "post_feedforward_layernorm_2.weight",
    "router_scale": "router.scale",
}
LINEARS = (
    *("qkv", "o", "gate_up", "down", "expert_gate_up", "expert_down"),
    *("input_gate", "input_projection", "inputs_table", "inputs_projection", "mtp_fc"),
)
"""The fields of LayerWeights that are matrices of linears."""
DEQUANTIZED = ("delta_gates", "laurel_left", "laurel_right", "streams_in", "streams_out")
"""Fields that checkpoints may quantise and that are never quantised in memory: they decide a state for long, or are
small."""
FLOAT_FIELDS = ("delta_bias", "delta_decay", "stream_router", "stream_norm", "stream_predictions", "stream_corrections")
"""Fields that are read in fp32, whatever the model's dtype."""
STACKED_IN_PARTS = ("qkv",)
"""Linears whose tensors' outputs follow each other in whole panels of the kernels, so each may have its own form."""


Matrix = TypeVar("Matrix", covariant=True)
"""A tensor or a quantised weight."""


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[Matrix]):
    """One decoder layer. Linear weights are [outputs, inputs], row-major; biases [outputs]."""

    qkv: Matrix
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]: rows of q, with its gates, then k, then v. In a layer
    with a delta rule its inputs, as `TensorNames.delta_in`."""
    o: Matrix
    """[hidden_size, num_heads * head_dim]; [hidden_size, value_size] after a delta rule."""
    delta_gates: Tensor | None = None
    """[2 * num_value_heads, hidden_size] in layers with a delta rule, as the next four: `TensorNames.delta_gates`."""
    delta_conv: Tensor | None = None
    """[num_channels, 1, conv_width]"""
    delta_bias: Tensor | None = None
    """[num_value_heads], as the next: of the decays, and their factors."""
    delta_decay: Tensor | None = None
    delta_norm: Tensor | None = None
    """[value_dim]: the norm of each head's results."""
    gate_up: Matrix | None = None
    """[2 * intermediate_size, hidden_size]: rows of gate, then up. [intermediate_size, hidden_size] of a plain MLP.
    In a layer with experts it is the shared expert's, if there is one, as `down`."""
    down: Matrix | None = None
    """[hidden_size, intermediate_size]"""
    router: Tensor | None = None
    """[experts, hidden_size] in layers with experts, as the next two."""
    expert_gate_up: Matrix | None = None
    """[experts * 2 * width, hidden_size]: rows of the first expert's gate, then up, then of the second's."""
    expert_down: Matrix | None = None
    """[experts * hidden_size, width]"""
    router_bias: Tensor | None = None
    """[experts]"""
    expert_gate_up_bias: Tensor | None = None
    """[experts * 2 * width], in the order of expert_gate_up's rows."""
    expert_down_bias: Tensor | None = None
    """[experts * hidden_size]"""
    shared_gate: Tensor | None = None
    """[1, hidden_size]: the linear that weights the shared expert."""
    attention_norm: Tensor | None = None
    """[hidden_size] or None, as all four; a bias follows if the model's norms have one: [2 * hidden_size]."""
    attention_output_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None
    q_norm: Tensor | None = None
    """[head_dim], [num_heads, head_dim] or [num_heads * head_dim], as the scope of the model's q and k norms is."""
    k_norm: Tensor | None = None
    """[head_dim], [num_kv_heads, head_dim] or [num_kv_heads * head_dim]"""
    sinks: Tensor | None = None
    """[num_heads] scores that take part in the softmax of attention and have no value."""
    input_gate: Matrix | None = None
    """[layer_input_size, hidden_size]"""
    input_projection: Matrix | None = None
    """[hidden_size, layer_input_size]"""
    input_norm: Tensor | None = None
    """[hidden_size], as the next four, which layers with experts beside the MLP have."""
    dense_output_norm: Tensor | None = None
    expert_norm: Tensor | None = None
    expert_output_norm: Tensor | None = None
    router_scale: Tensor | None = None
    expert_scale: Tensor | None = None
    """[experts]: factors of their results."""
    layer_scale: Tensor | None = None
    """[1]"""
    inputs_table: Matrix | None = None
    """[input_rows, num_layers * layer_input_size]. The first layer alone has this and the next two: the inputs of all
    layers are computed from them."""
    inputs_projection: Matrix | None = None
    """[num_layers * layer_input_size, hidden_size]"""
    inputs_norm: Tensor | None = None
    """[layer_input_size]"""
    stream_router: Tensor | None = None
    """[streams, hidden_size] in models with several residual streams, as the next seven."""
    stream_norm: Tensor | None = None
    """[hidden_size]: of the router's inputs."""
    stream_predictions: Tensor | None = None
    """[streams * streams, streams]"""
    stream_corrections: Tensor | None = None
    """[streams, streams]"""
    stream_scale: Tensor | None = None
    """[hidden_size]"""
    laurel_left: Tensor | None = None
    """[laurel_rank, hidden_size]"""
    laurel_right: Tensor | None = None
    """[hidden_size, laurel_rank]"""
    laurel_norm: Tensor | None = None
    """[hidden_size]"""
    streams_in: Tensor | None = None
    """[(streams - 1) * hidden_size, hidden_size], in the first layer alone, as the next: what begins the streams after
    the first, and ends them."""
    streams_out: Tensor | None = None
    mtp_fc: Matrix | None = None
    """[hidden_size, 2 * hidden_size], in the layer of `DecoderConfig.has_mtp` alone, as the next three."""
    mtp_embedding_norm: Tensor | None = None
    mtp_hidden_norm: Tensor | None = None
    mtp_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The place of one expert's matrix or bias in a tensor that has all experts of the layer."""

    tensor: str
    index: int
    count: int
    takes_turns: bool
    """Outputs of gate and up alternate; otherwise all of gate come first."""
    may_have_outputs_first: bool = False
    """The shape of a matrix says whether it is [inputs, outputs]; a square one is refused."""

    def part_name(self, part: str) -> str:
        """Name of the tensor with this part for all experts, if a quantised format stores matrices in parts."""
        return f"{self.tensor}_{part}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name of a tensor in the checkpoint, and its required shape."""

    name: str
    """The expert's own name, even if it is part of a larger tensor (`place`)."""
    shape: tuple[int, ...]
    place: ExpertSlice | None = None

    @property
    def stored_name(self) -> str:
        """The name in an unquantised checkpoint."""
        return self.name if self.place is None else self.place.tensor


def expected_tensors(config: DecoderConfig) -> Iterator[TensorSpec]:
    """Every tensor that the model needs from the checkpoint."""
    yield embedding_spec(config)
    for index in config.all_layers:
        for specs in layer_specs(config, index).values():
            yield from specs
    yield from final_norm_specs(config)
    if config.has_own_lm_head:
        yield lm_head_spec(config)


def linear_names(config: DecoderConfig) -> Iterator[str]:
    """The names of all linears' weights, including lm_head if it has its own. Tables are no linears."""
    for index in config.all_layers:
        layout = layer_specs(config, index)
        fields = (*LINEARS, *DEQUANTIZED)
        yield from (spec.name for field in fields for spec in layout.get(field, ()) if spec.name != INPUT_TABLE)
    if config.has_own_lm_head:
        yield LM_HEAD


def embedding_spec(config: DecoderConfig) -> TensorSpec:
    return TensorSpec(EMBEDDING, (config.vocab_size, config.hidden_size))


def final_norm_specs(config: DecoderConfig) -> tuple[TensorSpec, ...]:
    return _norm_specs(config, FINAL_NORM.removesuffix(".weight"))


def lm_head_spec(config: DecoderConfig) -> TensorSpec:
    return TensorSpec(LM_HEAD, (config.vocab_size, config.hidden_size))


def layer_specs(config: DecoderConfig, index: int) -> dict[str, tuple[TensorSpec, ...]]:
    """Field of LayerWeights that this model has → the checkpoint's tensors that are stacked into it, in order."""
    is_mtp, names = index == config.num_layers, config.names
    prefix = MTP_LAYER if is_mtp else f"model.layers.{index}."
    net, experts = config.delta_net_of_layer(index), config.experts_of_layer(index)
    layout = _attention_specs(config, prefix, index) if net is None else _delta_specs(config, net, prefix)
    if experts is None or experts.beside_mlp:
        layout |= _dense_specs(config, prefix, config.mlp_width_of_layer(index))
    if experts is not None:
        layout |= _expert_specs(config, experts, prefix)
    layout |= _input_specs(config, prefix, index)
    if config.streams is not None:
        layout |= _stream_specs(config, config.streams, prefix, index)
    for field in NORM_FIELDS:
        name: str | None = getattr(names, field)
        if name is not None:
            layout[field] = _norm_specs(config, prefix + name)
    if is_mtp:
        layout["mtp_fc"] = (TensorSpec(MTP_FC, (config.hidden_size, 2 * config.hidden_size)),)
        layout |= {field: _norm_specs(config, name) for field, name in (_MTP_NORMS | {"mtp_norm": "mtp.norm"}).items()}
    return layout


def _delta_specs(config: DecoderConfig, net: DeltaNet, prefix: str) -> dict[str, tuple[TensorSpec, ...]]:
    names, heads, start = config.names, net.num_value_heads, f"{prefix}linear_attn."
    rows = _divide(names.delta_in, (net.num_channels, net.value_size))
    return {
        "qkv": _weights(prefix, rows, config.hidden_size),
        "o": _weights(start, {"out_proj": config.hidden_size}, net.value_size),
        "delta_gates": _weights(prefix, _divide(names.delta_gates, (heads, heads)), config.hidden_size),
        "delta_conv": (TensorSpec(f"{start}conv1d.weight", (net.num_channels, 1, net.conv_width)),),
        "delta_bias": (TensorSpec(f"{start}dt_bias", (heads,)),),
        "delta_decay": (TensorSpec(f"{start}A_log", (heads,)),),
        "delta_norm": (TensorSpec(f"{start}norm.weight", (net.value_dim,)),),
    }


def _attention_specs(config: DecoderConfig, prefix: str, index: int) -> dict[str, tuple[TensorSpec, ...]]:
    names, hidden = config.names, config.hidden_size
    kv_heads, head_dim = config.heads_of_layer(index)
    q_rows, kv_rows = config.num_heads * head_dim, kv_heads * head_dim
    is_shared = config.source_of_layer(index) != index
    own = _divide(names.qkv, (q_rows * (1 + config.gated_attention), kv_rows, kv_rows))
    qkv = {names.qkv[0]: q_rows} if is_shared else own
    o = {"self_attn.o_proj": hidden}
    layout = {"qkv": _weights(prefix, qkv, hidden), "o": _weights(prefix, o, q_rows)}
    if config.full_values_are_keys and config.window_of_layer(index) is None and not is_shared:
        layout["qkv"] = (*layout["qkv"][:2], layout["qkv"][1])
    if config.qk_norm is not None:
        for field, heads in (("q_norm", config.num_heads), *(() if is_shared else (("k_norm", kv_heads),))):
            shape = _qk_norm_shape(config.qk_norm, heads, head_dim)
            layout[field] = (TensorSpec(f"{prefix}self_attn.{field}.weight", shape),)
    if config.sinks:
        layout["sinks"] = (TensorSpec(f"{prefix}self_attn.sinks", (config.num_heads,)),)
    if config.qkv_bias:
        layout["qkv_bias"] = _biases(prefix, qkv)
    if config.output_bias:
        layout["o_bias"] = _biases(prefix, o)
    return layout


def _input_specs(config: DecoderConfig, prefix: str, index: int) -> dict[str, tuple[TensorSpec, ...]]:
    """The specs of a layer's input, and of the layer's factor."""
    specs: dict[str, tuple[TensorSpec, ...]] = {}
    if size := config.layer_input_size:
        specs["input_gate"] = _weights(prefix, {"per_layer_input_gate": size}, config.hidden_size)
        specs["input_projection"] = _weights(prefix, {"per_layer_projection": config.hidden_size}, size)
        specs["input_norm"] = _norm_specs(config, f"{prefix}post_per_layer_input_norm")
        if index == 0:
            width = size * config.num_layers
            specs["inputs_table"] = (TensorSpec(INPUT_TABLE, (config.input_rows, width)),)
            specs["inputs_projection"] = _weights("model.", {"per_layer_model_projection": width}, config.hidden_size)
            specs["inputs_norm"] = (TensorSpec("model.per_layer_projection_norm.weight", (size,)),)
    if config.scales_layers:
        specs["layer_scale"] = (TensorSpec(f"{prefix}layer_scalar", (1,)),)
    return specs


def _stream_specs(
    config: DecoderConfig, streams: Streams, prefix: str, index: int
) -> dict[str, tuple[TensorSpec, ...]]:
    hidden, count, rank = config.hidden_size, streams.count, streams.laurel_rank
    own, laurel = f"{prefix}altup.", f"{prefix}laurel."
    specs = {
        "stream_router": _weights(own, {"modality_router": count}, hidden),
        "stream_norm": _norm_specs(config, f"{own}router_norm"),
        "stream_predictions": _weights(own, {"prediction_coefs": count * count}, count),
        "stream_corrections": _weights(own, {"correction_coefs": count}, count),
        "stream_scale": (TensorSpec(f"{own}correct_output_scale", (hidden,)),),
        "laurel_left": _weights(laurel, {"linear_left": rank}, hidden),
        "laurel_right": _weights(laurel, {"linear_right": hidden}, rank),
        "laurel_norm": _norm_specs(config, f"{laurel}post_laurel_norm"),
    }
    if index == 0:
        for field, name in (("streams_in", "altup_projections"), ("streams_out", "altup_unembed_projections")):
            specs[field] = _weights("model.", {f"{name}.{i}": hidden for i in range(count - 1)}, hidden)
    return specs


def _dense_specs(config: DecoderConfig, prefix: str, width: int) -> dict[str, tuple[TensorSpec, ...]]:
    names = config.names
    gate_up = _divide(names.gate_up, (width,) if config.mlp == "plain" else (width, width))
    down = {names.down: config.hidden_size}
    specs = {"gate_up": _weights(prefix, gate_up, config.hidden_size), "down": _weights(prefix, down, width)}
    if config.mlp_bias:
        specs |= {"gate_up_bias": _biases(prefix, gate_up), "down_bias": _biases(prefix, down)}
    return specs


def _expert_specs(config: DecoderConfig, experts: Experts, prefix: str) -> dict[str, tuple[TensorSpec, ...]]:
    names, hidden = config.names, config.hidden_size
    router = {names.router: experts.count}
    specs = {"router": _weights(prefix, router, hidden)}
    if experts.biased:
        specs["router_bias"] = _biases(prefix, router)
    if experts.beside_mlp:
        specs |= {field: (TensorSpec(prefix + name, (hidden,)),) for field, name in _BESIDE_NORMS.items()}
        specs["expert_scale"] = (TensorSpec(f"{prefix}router.per_expert_scale", (experts.count,)),)
    if names.fused_experts is not None:
        return specs | _fused_specs(experts, names, f"{prefix}{names.fused_experts}", hidden)

    def mlp(name: str, width: int) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        start = f"{prefix}{name}."
        gate_up = _weights(start, _divide(names.expert_gate_up, (width, width)), hidden)
        return gate_up, _weights(start, {names.expert_down: hidden}, width)

    all_experts = [mlp(names.expert.format(i), experts.width) for i in range(experts.count)]
    specs["expert_gate_up"] = tuple(spec for gate_up, _ in all_experts for spec in gate_up)
    specs["expert_down"] = tuple(spec for _, down in all_experts for spec in down)
    if experts.biased:
        starts = [f"{prefix}{names.expert.format(i)}." for i in range(experts.count)]
        gate_up, down = dict.fromkeys(names.expert_gate_up, experts.width), {names.expert_down: hidden}
        specs["expert_gate_up_bias"] = tuple(spec for start in starts for spec in _biases(start, gate_up))
        specs["expert_down_bias"] = tuple(spec for start in starts for spec in _biases(start, down))
    if experts.shared_width is not None:
        specs["gate_up"], specs["down"] = mlp(names.shared_expert, experts.shared_width)
        specs["shared_gate"] = _weights(prefix, {names.shared_gate: 1}, hidden)
    return specs


def _fused_specs(experts: Experts, names: TensorNames, name: str, hidden: int) -> dict[str, tuple[TensorSpec, ...]]:
    def specs(part: str, suffix: str, shape: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        takes_turns, either = names.fused_takes_turns and part == "gate_up_proj", not names.fused_takes_turns
        tensor = f"{name}.{part}" + ("_bias" if suffix == "bias" else "")
        return tuple(
            TensorSpec(f"{name}.{i}.{part}.{suffix}", shape, ExpertSlice(tensor, i, experts.count, takes_turns, either))
            for i in range(experts.count)
        )

    layout = {
        "expert_gate_up": specs("gate_up_proj", "weight", (2 * experts.width, hidden)),
        "expert_down": specs("down_proj", "weight", (hidden, experts.width)),
    }
    if experts.biased:
        layout["expert_gate_up_bias"] = specs("gate_up_proj", "bias", (2 * experts.width,))
        layout["expert_down_bias"] = specs("down_proj", "bias", (hidden,))
    return layout


def _weights(prefix: str, rows_by_name: dict[str, int], inputs: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"{prefix}{name}.weight", (rows, inputs)) for name, rows in rows_by_name.items())


def _biases(prefix: str, rows_by_name: dict[str, int]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"{prefix}{name}.bias", (rows,)) for name, rows in rows_by_name.items())


def _norm_specs(config: DecoderConfig, name: str) -> tuple[TensorSpec, ...]:
    weight = TensorSpec(f"{name}.weight", (config.hidden_size,))
    return (weight, TensorSpec(f"{name}.bias", weight.shape)) if config.norm_bias else (weight,)


def _qk_norm_shape(scope: QkNormScope, num_heads: int, head_dim: int) -> tuple[int, ...]:
    return {"head": (head_dim,), "each head": (num_heads, head_dim), "projection": (num_heads * head_dim,)}[scope]


def _divide(names: tuple[str, ...], rows: tuple[int, ...]) -> dict[str, int]:
    """Divide rows evenly among the tensors; a single tensor has all."""
    return dict(zip(names, rows, strict=True)) if len(names) > 1 else {names[0]: sum(rows)}
