"""Packs a decoder's weights, layer by layer, in the form of a device's operations.

A checkpoint's conventions end here: norms that add 1 to their weights and heads that rotate neighbouring dimensions
become plain ones. Of weights that are packed already only shapes are there (`PackedShape`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.config.tensors import NORM_FIELDS
from penstock.backend.checkpoint.config.weight_shapes import PackedShape
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.checkpoint.weight_forms.stacked_weights import take_rows
from penstock.backend.lazy_torch import Tensor, torch
from penstock.backend.passes.decoder.row_orders import (
    delta_gates_order,
    delta_in_order,
    qkv_order,
    rotate_half_order,
)
from penstock.backend.passes.ops.interface import (
    Array,
    AttentionLayer,
    BesideNorms,
    ExpertOps,
    Experts,
    ExpertWeights,
    Laurel,
    LayerInput,
    Linear,
    Ops,
    SideOps,
    StreamOps,
    StreamWeights,
)
from penstock.backend.passes.ops.state_ops import DeltaNetOps, DeltaNetWeights, MtpOps, MtpWeights

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, DeltaNet
    from penstock.backend.checkpoint.config.tensors import LayerWeights


@dataclass(frozen=True, slots=True)
class Layer:
    attention: AttentionLayer | None
    delta_net: Any
    """The operations' own form of it, if the layer has one in place of attention."""
    attention_norm: Array | None
    qkv: Linear
    output: Linear
    output_norm: Array | None
    mlp_norm: Array | None
    mlp: Mlp | None
    """With experts it is the shared expert, if there is one."""
    experts: Experts | None
    beside: BesideNorms | None
    """If the experts are beside the MLP."""
    input: LayerInput | None
    streams: Any
    """The operations' own form of its part in several residual streams; None if there is one."""
    laurel: Laurel | None
    mtp: MtpWeights | None
    """If it predicts the token after the next one."""


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear
    down: Linear
    output_norm: Array | None
    gate: Linear | None
    """Weights a shared expert."""
    cutoff: float | None
    """As in `Streams.gate_cutoffs`."""


def pack_head(config: DecoderConfig, ops: Ops, weight: Tensor | QuantizedWeight | None) -> Linear | None:
    if weight is not None:
        return ops.pack_linear(weight, None, config.scales.logits)
    if config.has_lm_head:
        raise ValueError("a model without tied embeddings needs weights for lm_head")
    return None


def expert_ops(ops: Ops) -> ExpertOps:
    if ops.experts is None:
        raise ValueError("these operations have none for experts")
    return ops.experts


def delta_ops(ops: Ops) -> DeltaNetOps:
    if ops.delta_net is None:
        raise ValueError("these operations have none for layers with a delta rule")
    return ops.delta_net


def mtp_ops(ops: Ops) -> MtpOps:
    if ops.mtp is None:
        raise ValueError("these operations have none for a head that predicts further tokens")
    return ops.mtp


def side_ops(ops: Ops) -> SideOps:
    if ops.side is None:
        raise ValueError("these operations have none for inputs of layers and experts beside the MLP")
    return ops.side


def stream_ops(ops: Ops) -> StreamOps:
    streams = side_ops(ops).streams
    if streams is None:
        raise ValueError("these operations have none for several residual streams")
    return streams


class _Unpacked:
    """A layer's weights, each for a single use: a matrix is freed when it is packed, not with its layer."""

    def __init__(self, plain: LayerWeights[Tensor | QuantizedWeight]) -> None:
        self._fields: dict[str, Any] = {field.name: getattr(plain, field.name) for field in fields(plain)}

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def take(self, name: str) -> Any:
        """Return the field of LayerWeights and forget it."""
        return self._fields.pop(name)


def pack_layer(
    config: DecoderConfig,
    ops: Ops,
    weights: LayerWeights[Tensor | QuantizedWeight],
    index: int,
    place: tuple[int, int],
) -> Layer:
    """place: the layer's group of the cache, and its index there."""
    plain = _Unpacked(weights)
    scale, net = config.scales.residual, config.delta_net_of_layer(index)
    if plain.has("inputs_table"):
        side_ops(ops).pack_inputs(*map(plain.take, ("inputs_table", "inputs_projection", "inputs_norm")))
    if plain.has("streams_in"):
        stream_ops(ops).pack_ends(plain.take("streams_in"), plain.take("streams_out"))
    of_input, factor = plain.has("input_norm"), plain.take("layer_scale")
    last_norm = "input_norm" if of_input else "mlp_output_norm"
    packed = {
        field: pack_norm(config, ops, plain.take(field), factor if field == last_norm else None)
        for field in (*NORM_FIELDS, "input_norm")
        if field != "attention_output_norm"
    }
    has_streams, norm = config.streams is not None, plain.take("attention_output_norm")
    if has_streams:  # the sum of attention, LAuReL's product and the residual is divided by √2
        norm = _join(norm, PackedShape((1,)) if isinstance(norm, PackedShape) else torch.full((1,), 0.5**0.5))
    packed["attention_output_norm"] = pack_norm(config, ops, norm)
    return Layer(
        attention=_pack_attention(config, ops, plain, index, place) if net is None else None,
        delta_net=None if net is None else _pack_delta_net(config, net, ops, plain),
        attention_norm=packed["attention_norm"],
        qkv=_pack_qkv(ops, plain, qkv_order(config) if net is None else delta_in_order(config, net)),
        output=ops.pack_linear(plain.take("o"), plain.take("o_bias"), scale),
        output_norm=packed["attention_output_norm"],
        mlp_norm=packed["mlp_norm"],
        mlp=_pack_mlp(config, ops, plain, packed["mlp_output_norm"], index),
        experts=_pack_experts(ops, plain, scale),
        beside=_pack_beside(config, ops, plain, packed["mlp_output_norm"]) if plain.has("expert_norm") else None,
        input=_pack_input(ops, plain, packed["input_norm"]) if of_input else None,
        streams=_pack_streams(config, ops, plain) if has_streams else None,
        laurel=_pack_laurel(ops, plain, packed["attention_norm"]) if has_streams else None,
        mtp=_pack_mtp(config, ops, plain) if plain.has("mtp_fc") else None,
    )


def _pack_attention(
    config: DecoderConfig, ops: Ops, plain: _Unpacked, index: int, place: tuple[int, int]
) -> AttentionLayer:
    q_norm, k_norm, sinks = plain.take("q_norm"), plain.take("k_norm"), plain.take("sinks")
    if config.interleaved_rope:
        order = rotate_half_order(config)
        q_norm, k_norm = (_reorder_norm(config, norm, order) for norm in (q_norm, k_norm))
    source = config.source_of_layer(index)
    return AttentionLayer(
        index=index,
        rope=config.rope_of_layer(index),
        query_rope=config.query_rope_of_layer(index),
        window_tokens=config.window_of_layer(index),
        q_norm=None if q_norm is None else ops.vector(_offset(config, q_norm).flatten()),
        k_norm=None if k_norm is None else ops.vector(_offset(config, k_norm).flatten()),
        sinks=None if sinks is None else ops.vector(sinks),
        group=place[0],
        group_index=place[1],
        v_norm=ops.vector(q_norm.new_ones(config.heads_of_layer(index)[1])) if config.norms_values else None,
        has_full_heads=config.has_full_heads(index),
        source=None if source == index else source,
        sees_ahead=config.sees_whole_pictures(index),
        first_key=int(index == config.num_layers),  # before the first token nothing was given
    )


def _pack_delta_net(config: DecoderConfig, net: DeltaNet, ops: Ops, plain: _Unpacked) -> Any:
    gates, decays = plain.take("delta_gates"), plain.take("delta_decay")
    if net.has_log_decay and not isinstance(decays, PackedShape):
        decays = -decays.exp()
    weights = DeltaNetWeights(
        gates=_take_rows(gates, delta_gates_order(config, net)),
        conv=plain.take("delta_conv").flatten(1),
        bias=plain.take("delta_bias"),
        decays=decays,
        norm=plain.take("delta_norm"),
    )
    return delta_ops(ops).pack(weights)


def _pack_beside(config: DecoderConfig, ops: Ops, plain: _Unpacked, norm_of_sum: Array) -> BesideNorms:
    router = plain.take("router_scale") * config.hidden_size**-0.5
    dense, inputs, results = map(plain.take, ("dense_output_norm", "expert_norm", "expert_output_norm"))
    return BesideNorms(ops.vector(dense), ops.vector(router), ops.vector(inputs), ops.vector(results), norm_of_sum)


def _pack_input(ops: Ops, plain: _Unpacked, norm: Array) -> LayerInput:
    gate, projection = (ops.pack_linear(plain.take(field), None) for field in ("input_gate", "input_projection"))
    return LayerInput(gate, projection, norm)


def _pack_streams(config: DecoderConfig, ops: Ops, plain: _Unpacked) -> Any:
    router = plain.take("stream_router") * plain.take("stream_norm") * (1 / config.hidden_size)
    others = map(plain.take, ("stream_predictions", "stream_corrections", "stream_scale"))
    return stream_ops(ops).pack(StreamWeights(router, *others))


def _pack_laurel(ops: Ops, plain: _Unpacked, input_norm: Array) -> Laurel:
    left, right = (ops.pack_linear(plain.take(f"laurel_{side}"), None) for side in ("left", "right"))
    return Laurel(input_norm, left, right, ops.vector(plain.take("laurel_norm")))


def _pack_mtp(config: DecoderConfig, ops: Ops, plain: _Unpacked) -> MtpWeights:
    norms = (pack_norm(config, ops, plain.take(f"mtp_{name}")) for name in ("embedding_norm", "hidden_norm", "norm"))
    return MtpWeights(ops.pack_linear(plain.take("mtp_fc"), None), *norms)


def _pack_qkv(ops: Ops, plain: _Unpacked, order: NDArray[np.int64] | None) -> Linear:
    return ops.pack_linear(_take_rows(plain.take("qkv"), order), _take_rows(plain.take("qkv_bias"), order))


def _pack_mlp(config: DecoderConfig, ops: Ops, plain: _Unpacked, output_norm: Array | None, index: int) -> Mlp | None:
    if not (plain.has("gate_up") and plain.has("down")):
        return None
    gate, cutoff = plain.take("shared_gate"), None if config.streams is None else config.streams.gate_cutoffs[index]
    is_gated = config.mlp == "gated" and cutoff is None
    return Mlp(
        gate_up=ops.pack_linear(plain.take("gate_up"), plain.take("gate_up_bias"), is_gated=is_gated),
        down=ops.pack_linear(plain.take("down"), plain.take("down_bias"), config.scales.residual),
        output_norm=output_norm,
        gate=None if gate is None else ops.pack_linear(gate, None),
        cutoff=cutoff,
    )


def _pack_experts(ops: Ops, plain: _Unpacked, scale: float) -> Experts | None:
    if not (plain.has("router") and plain.has("expert_gate_up") and plain.has("expert_down")):
        return None
    weights = ExpertWeights(
        plain.take("router"),
        plain.take("expert_gate_up"),
        plain.take("expert_down"),
        plain.take("router_bias"),
        plain.take("expert_gate_up_bias"),
        plain.take("expert_down_bias"),
        plain.take("expert_scale"),
    )
    return expert_ops(ops).pack(weights, scale)


def pack_norm(config: DecoderConfig, ops: Ops, weight: Tensor | None, factor: Tensor | None = None) -> Array | None:
    """A layer norm without a bias gets one of zeros. factor: of the sum, see `Ops.linear_add`."""
    if weight is None:
        return None
    if factor is not None:
        weight = _join(weight, factor)
    if config.norm == "layer" and not config.norm_bias:
        weight = _join(weight, weight.new_zeros(len(weight)))
    return ops.vector(_offset(config, weight))


def _join(first: Any, second: Any) -> Any:
    if isinstance(first, PackedShape):
        return PackedShape((len(first) + len(second),))
    return torch.cat([first, second])


def _offset(config: DecoderConfig, weight: Any) -> Any:
    if not config.norm_offset or isinstance(weight, PackedShape):
        return weight
    # A copy: the source may give its own tensor.
    return weight.to(torch.float32, copy=True).add_(config.norm_offset)


def _take_rows(weight: Any, rows: NDArray[np.int64] | None) -> Any:
    if rows is None or weight is None or isinstance(weight, PackedShape):
        return weight
    order = torch.from_numpy(rows)
    return take_rows(weight, order) if isinstance(weight, QuantizedWeight) else weight.index_select(0, order)


def _reorder_norm(config: DecoderConfig, norm: Any, order: NDArray[np.int64]) -> Any:
    """Put the weight of a norm in the heads' new order. It covers whole heads."""
    if norm is None or isinstance(norm, PackedShape):
        return norm
    return norm.reshape(-1, config.head_dim)[:, order[: config.head_dim]].reshape(norm.shape)
