"""The order of a decoder's operations, the same for all architectures and on every device.

Decoder layers (attention, MLP) as in arXiv 2302.13971, with the variations that DecoderConfig declares: the norms and
their places, and the additions. A checkpoint's conventions end here: norms that add 1 to their weights and heads that
rotate neighbouring dimensions become plain ones when the weights are packed. Packed weights that are mapped are tensors
on the meta device here, of which some operations (`w[rows]`, `w + 1`, `torch.cat`) import sympy, in 0.15 s.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.config.tensors import NORM_FIELDS
from penstock.backend.checkpoint.weight_forms.stacked_weights import take_rows
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
    DeltaNetOps,
    DeltaNetWeights,
    ExpertOps,
    Experts,
    ExpertWeights,
    LayerInput,
    Linear,
    LinearAdapters,
    Ops,
    SideOps,
    Step,
)

if TYPE_CHECKING:
    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig, DeltaNet
    from penstock.backend.checkpoint.config.tensors import LayerWeights
    from penstock.backend.checkpoint.tensor_files.lora_adapter import LoraWeights, PeftAdapter
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
    from penstock.backend.passes.ops.interface import Weights
    from penstock.backend.passes.ops.layer_groups import LayerGroups


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: AttentionLayer | None
    delta_net: Any
    """The operations' own form of it, if the layer has one in place of attention."""
    attention_norm: Array | None
    qkv: Linear
    output: Linear
    output_norm: Array | None
    mlp_norm: Array | None
    mlp: _Mlp | None
    """With experts it is the shared expert, if there is one."""
    experts: Experts | None
    beside: BesideNorms | None
    """If the experts are beside the MLP."""
    input: LayerInput | None


@dataclass(frozen=True, slots=True)
class _Mlp:
    gate_up: Linear
    down: Linear
    output_norm: Array | None
    gate: Linear | None
    """Weights a shared expert."""


class DecoderModel:
    """The packed weights, and the computation of a step. `normed` is the only state that a step leaves."""

    normed: Array | None = None
    """[L + S, hidden] after the final norm, from the last step with logits.

    The buffer belongs to the operations; the next step overwrites it.
    """

    def __init__(
        self, config: DecoderConfig, ops: Ops, weights: Weights, dtype: torch.dtype, groups: LayerGroups
    ) -> None:
        """Packs the weights layer by layer; at most one layer is in memory unpacked."""
        self._config = config
        self._ops = ops
        logits_scale = config.scales.logits
        embedding = weights.embedding(dtype)
        self._lm_head: Linear | None
        if config.tie_embeddings:
            self._lm_head = ops.pack_linear(embedding, None, logits_scale)
            self._embedding = ops.packed_table(embedding, self._lm_head)
        elif isinstance(embedding, Tensor):
            self._embedding = ops.table(embedding)
        else:
            self._embedding = ops.packed_table(embedding, ops.pack_linear(embedding, None))
        del embedding
        if not config.tie_embeddings:
            self._lm_head = _pack_head(config, ops, weights.lm_head(dtype))
        self._layers = [
            _pack_layer(config, ops, _Unpacked(weights.layer(i, dtype)), i, groups.places[i])
            for i in range(config.num_layers)
        ]
        self._num_stored = config.num_layers - config.num_shared_layers
        """The layers up to the last cache write."""
        self._final_norm = _pack_norm(config, ops, weights.final_norm(dtype))

    def read_adapter(self, of_linears: LinearAdapters, adapter: PeftAdapter) -> list[Any]:
        """Read the adapter layer by layer. The result has an entry for each linear, for `put_adapter`.

        of_linears belongs to the model's ops.
        """
        read: list[Any] = []
        for index, layer in enumerate(self._layers):
            of_layer = adapter.layer(index)
            for field, linear in _adapted_linears(layer).items():
                added = of_layer.get(field, [])
                if field == "qkv" and adapter.interleaves_rope:
                    added = [_reorder_outputs(self._config, lora) for lora in added]
                read.append(of_linears.prepare(linear, added) if added else None)
        return read

    def put_adapter(self, of_linears: LinearAdapters, index: int, read: list[Any] | None) -> None:
        """Give the linears what `read_adapter` returned as their adapter with this index, or none."""
        linears = [linear for layer in self._layers for linear in _adapted_linears(layer).values()]
        for linear, prepared in zip(linears, read or [None] * len(linears), strict=True):
            of_linears.put(linear, index, prepared)

    def forward(self, step: Step, *, needs_logits: bool) -> Array | None:
        """Return the logits of the step's logit rows, [L, vocab] fp32.

        None if needs_logits is False or the model has no head: then `normed` is the result. A step that scores tokens
        needs logits, even if it has no logit rows.
        """
        qkv, residual = self.store_tokens(step)
        return self.finish(qkv, residual, step) if needs_logits else None

    def store_tokens(self, step: Step) -> tuple[Array, Array]:
        """Run the step up to the last cache write; return the arguments of `finish`."""
        residual = self._ops.embed(self._embedding, step)
        if self._config.layer_input_size:
            _side_ops(self._ops).begin_inputs(residual, step)
        *layers, last = self._layers[: self._num_stored]
        for layer in layers:
            self._attend_and_mix(layer, self._project(layer, residual, step), residual, step)
        return self._project(last, residual, step), residual

    def finish(self, qkv: Array, residual: Array, step: Step) -> Array | None:
        """Run the rest of a step, like `forward` with needs_logits.

        After the last cache write, only the tokens that need logits matter, and those that are scored.
        """
        ops, (last, *shared) = self._ops, self._layers[self._num_stored - 1 :]
        qkv, residual, step = ops.last_tokens(qkv, residual, step)
        self._attend_and_mix(last, qkv, residual, step)
        for layer in shared:
            self._attend_and_mix(layer, self._project(layer, residual, step), residual, step)
        self.normed = ops.final_norm(residual, self._final_norm)
        if self._lm_head is None:
            return None
        return self.logits(ops.logit_rows(self.normed, step))

    def logits(self, normed: Array) -> Array:
        """Logits [n, vocab] of any rows [n, hidden] of `normed`."""
        return self._ops.logits(normed, self._lm_head)

    def _project(self, layer: _Layer, residual: Array, step: Step) -> Array:
        ops = self._ops
        x = ops.norm(residual, layer.attention_norm)
        qkv = ops.linear(x, layer.qkv)
        if layer.attention is None:
            # Every token changes the state, also those that `finish` leaves out.
            ops.linear_add(_delta_ops(ops).run(qkv, x, layer.delta_net, step), layer.output, residual)
        else:
            ops.rotate_and_store(qkv, step, layer.attention)
        return qkv

    def _attend_and_mix(self, layer: _Layer, qkv: Array, residual: Array, step: Step) -> None:
        ops = self._ops
        if layer.attention is None:
            self._add_mlp(layer, residual, step)
            return
        attended = ops.attention(qkv, step, layer.attention)
        if self._config.parallel_blocks:
            # The norm is computed again: a buffer of its own would cost more than this small part of a layer.
            mixed = self._mix(layer.mlp, ops.norm(residual, layer.attention_norm))
            ops.linear_add(attended, layer.output, residual, layer.output_norm)
            self._add_mixed(layer, mixed, residual, step)
        else:
            ops.linear_add(attended, layer.output, residual, layer.output_norm)
            self._add_mlp(layer, residual, step)

    def _add_mlp(self, layer: _Layer, residual: Array, step: Step) -> None:
        x = self._ops.norm(residual, layer.mlp_norm)
        mixed = self._mix(layer.mlp, x)
        if layer.experts is not None and layer.beside is None:
            _expert_ops(self._ops).add(x, layer.experts, residual)
        self._add_mixed(layer, mixed, residual, step)

    def _add_mixed(self, layer: _Layer, mixed: Array | None, residual: Array, step: Step) -> None:
        ops = self._ops
        if layer.mlp is not None and layer.beside is not None:
            _side_ops(ops).add_experts(mixed, layer.mlp.down, layer.experts, layer.beside, residual)
        elif layer.mlp is not None:
            ops.linear_add(mixed, layer.mlp.down, residual, layer.mlp.output_norm)
        if layer.input is not None and layer.attention is not None:
            _side_ops(ops).add_input(layer.attention.index, layer.input, residual, step)

    def _mix(self, mlp: _Mlp | None, x: Array) -> Array | None:
        """Return the input of the MLP's down product."""
        if mlp is None:
            return None
        mixed = self._ops.activated_linear(x, mlp.gate_up)
        if mlp.gate is not None:
            _expert_ops(self._ops).weight_by_sigmoid(x, mlp.gate, mixed)
        return mixed


def _pack_head(config: DecoderConfig, ops: Ops, weight: Tensor | QuantizedWeight | None) -> Linear | None:
    if weight is not None:
        return ops.pack_linear(weight, None, config.scales.logits)
    if config.has_lm_head:
        raise ValueError("a model without tied embeddings needs weights for lm_head")
    return None


def _expert_ops(ops: Ops) -> ExpertOps:
    if ops.experts is None:
        raise ValueError("these operations have none for experts")
    return ops.experts


def _delta_ops(ops: Ops) -> DeltaNetOps:
    if ops.delta_net is None:
        raise ValueError("these operations have none for layers with a delta rule")
    return ops.delta_net


def _side_ops(ops: Ops) -> SideOps:
    if ops.side is None:
        raise ValueError("these operations have none for inputs of layers and experts beside the MLP")
    return ops.side


class _Unpacked:
    """A layer's weights, each for a single use: a matrix is freed when it is packed, not with its layer."""

    def __init__(self, plain: LayerWeights[Tensor | QuantizedWeight]) -> None:
        self._fields: dict[str, Any] = {field.name: getattr(plain, field.name) for field in fields(plain)}

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def take(self, name: str) -> Any:
        """Return the field of LayerWeights and forget it."""
        return self._fields.pop(name)


def _pack_layer(config: DecoderConfig, ops: Ops, plain: _Unpacked, index: int, place: tuple[int, int]) -> _Layer:
    scale, net = config.scales.residual, config.delta_net_of_layer(index)
    if plain.has("inputs_table"):
        _side_ops(ops).pack_inputs(*map(plain.take, ("inputs_table", "inputs_projection", "inputs_norm")))
    of_input, factor = plain.has("input_norm"), plain.take("layer_scale")
    last_norm = "input_norm" if of_input else "mlp_output_norm"
    packed = {
        field: _pack_norm(config, ops, plain.take(field), factor if field == last_norm else None)
        for field in (*NORM_FIELDS, "input_norm")
    }
    return _Layer(
        attention=_pack_attention(config, ops, plain, index, place) if net is None else None,
        delta_net=None if net is None else _pack_delta_net(config, net, ops, plain),
        attention_norm=packed["attention_norm"],
        qkv=_pack_qkv(ops, plain, qkv_order(config) if net is None else delta_in_order(config, net)),
        output=ops.pack_linear(plain.take("o"), plain.take("o_bias"), scale),
        output_norm=packed["attention_output_norm"],
        mlp_norm=packed["mlp_norm"],
        mlp=_pack_mlp(config, ops, plain, packed["mlp_output_norm"]),
        experts=_pack_experts(ops, plain, scale),
        beside=_pack_beside(config, ops, plain, packed["mlp_output_norm"]) if plain.has("expert_norm") else None,
        input=_pack_input(ops, plain, packed["input_norm"]) if of_input else None,
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
        v_norm=ops.vector(torch.ones(config.heads_of_layer(index)[1])) if config.norms_values else None,
        has_full_heads=config.has_full_heads(index),
        source=None if source == index else source,
    )


def _pack_delta_net(config: DecoderConfig, net: DeltaNet, ops: Ops, plain: _Unpacked) -> Any:
    gates, order, decays = plain.take("delta_gates"), delta_gates_order(config, net), plain.take("delta_decay")
    weights = DeltaNetWeights(
        gates=gates if order is None else gates.index_select(0, order),
        conv=plain.take("delta_conv").flatten(1),
        bias=plain.take("delta_bias"),
        decays=-decays.exp() if net.has_log_decay else decays,
        norm=plain.take("delta_norm"),
    )
    return _delta_ops(ops).pack(weights)


def _pack_beside(config: DecoderConfig, ops: Ops, plain: _Unpacked, norm_of_sum: Array) -> BesideNorms:
    router = plain.take("router_scale") * config.hidden_size**-0.5
    dense, inputs, results = map(plain.take, ("dense_output_norm", "expert_norm", "expert_output_norm"))
    return BesideNorms(ops.vector(dense), ops.vector(router), ops.vector(inputs), ops.vector(results), norm_of_sum)


def _pack_input(ops: Ops, plain: _Unpacked, norm: Array) -> LayerInput:
    gate, projection = (ops.pack_linear(plain.take(field), None) for field in ("input_gate", "input_projection"))
    return LayerInput(gate, projection, norm)


def _pack_qkv(ops: Ops, plain: _Unpacked, order: Tensor | None) -> Linear:
    bias = plain.take("qkv_bias")
    if order is None:
        return ops.pack_linear(plain.take("qkv"), bias)
    return ops.pack_linear(_take_rows(plain.take("qkv"), order), None if bias is None else bias.index_select(0, order))


def _pack_mlp(config: DecoderConfig, ops: Ops, plain: _Unpacked, output_norm: Array | None) -> _Mlp | None:
    if not (plain.has("gate_up") and plain.has("down")):
        return None
    gate = plain.take("shared_gate")
    return _Mlp(
        gate_up=ops.pack_linear(plain.take("gate_up"), plain.take("gate_up_bias"), is_gated=config.mlp == "gated"),
        down=ops.pack_linear(plain.take("down"), plain.take("down_bias"), config.scales.residual),
        output_norm=output_norm,
        gate=None if gate is None else ops.pack_linear(gate, None),
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
    return _expert_ops(ops).pack(weights, scale)


def _pack_norm(config: DecoderConfig, ops: Ops, weight: Tensor | None, factor: Tensor | None = None) -> Array | None:
    """A layer norm without a bias gets one of zeros. factor: of the sum, see `Ops.linear_add`."""
    if weight is None:
        return None
    if factor is not None:
        weight = torch.cat([weight, factor])
    if config.norm == "layer" and not config.norm_bias:
        weight = functional.pad(weight, (0, len(weight)))
    return ops.vector(_offset(config, weight))


def _offset(config: DecoderConfig, weight: Tensor) -> Tensor:
    # A copy: the source may give its own tensor.
    return weight.to(torch.float32, copy=True).add_(config.norm_offset) if config.norm_offset else weight


def _adapted_linears(layer: _Layer) -> dict[str, Any]:
    """Field of `LayerWeights` → linear, of those that may have adapters."""
    linears = {"qkv": layer.qkv, "o": layer.output}
    return linears if layer.mlp is None else linears | {"gate_up": layer.mlp.gate_up, "down": layer.mlp.down}


def _reorder_outputs(config: DecoderConfig, lora: LoraWeights) -> LoraWeights:
    """Reorder an adapter's outputs. They are whole parts of q, k and v, and the new order mixes no parts."""
    first, count = lora.first_output, len(lora.up)
    return replace(lora, up=lora.up[rotate_half_order(config)[first : first + count] - first])


def _take_rows(weight: Tensor | QuantizedWeight, rows: Tensor) -> Tensor | QuantizedWeight:
    return weight.index_select(0, rows) if isinstance(weight, Tensor) else take_rows(weight, rows)


def _reorder_norm(config: DecoderConfig, norm: Tensor | None, order: Tensor) -> Tensor | None:
    """Put the weight of a norm in the heads' new order. It covers whole heads."""
    return None if norm is None else norm.reshape(-1, config.head_dim)[:, order[: config.head_dim]].reshape(norm.shape)
