"""The order of a decoder's operations, the same for all architectures and on every device.

Decoder layers (attention, MLP) as in arXiv 2302.13971, with the variations that DecoderConfig declares: the norms and
their places, and the additions. `packing.py` has the layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.passes.decoder.packing import (
    Layer,
    Mlp,
    delta_ops,
    expert_ops,
    mtp_ops,
    pack_head,
    pack_layer,
    pack_norm,
    side_ops,
    stream_ops,
)
from penstock.backend.passes.decoder.row_orders import delta_gates_order, delta_in_order, qkv_order
from penstock.backend.passes.ops.interface import (
    Array,
    Linear,
    LinearAdapters,
    Ops,
    Step,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter
    from penstock.backend.checkpoint.tensor_files.lora_weights import LoraWeights
    from penstock.backend.dtypes import Dtype
    from penstock.backend.passes.ops.interface import Weights
    from penstock.backend.passes.ops.layer_groups import LayerGroups


class DecoderModel:
    """The packed weights, and the computation of a step. `normed` is the only state that a step leaves."""

    normed: Array | None = None
    """[L + S, hidden] after the final norm, from the last step with logits.

    The buffer belongs to the operations; the next step overwrites it.
    """

    def __init__(self, config: DecoderConfig, ops: Ops, weights: Weights, dtype: Dtype, groups: LayerGroups) -> None:
        """Packs the weights layer by layer; at most one layer is in memory unpacked."""
        self._config = config
        self._ops = ops
        logits_scale = config.scales.logits
        embedding = weights.embedding(dtype)
        self._lm_head: Linear | None
        if config.tie_embeddings:
            self._lm_head = ops.pack_linear(embedding, None, logits_scale)
            self._embedding = ops.packed_table(embedding, self._lm_head)
        elif isinstance(embedding, QuantizedWeight):
            self._embedding = ops.packed_table(embedding, ops.pack_linear(embedding, None))
        else:
            self._embedding = ops.table(embedding)
        del embedding
        if not config.tie_embeddings:
            self._lm_head = pack_head(config, ops, weights.lm_head(dtype))
        self._layers = [
            pack_layer(config, ops, weights.layer(i, dtype), i, groups.places[i]) for i in range(config.num_layers)
        ]
        self._head: Layer | None = None
        if config.has_mtp:
            index = config.num_layers
            self._head = pack_layer(config, ops, weights.layer(index, dtype), index, groups.places[index])
        self._num_stored = config.num_layers - config.num_shared_layers
        """The layers up to the last cache write."""
        self._final_norm = pack_norm(config, ops, weights.final_norm(dtype))

    def read_adapter(self, of_linears: LinearAdapters, adapter: PeftAdapter) -> list[Any]:
        """Read the adapter layer by layer. The result has an entry for each linear, for `put_adapter`.

        of_linears belongs to the model's ops.
        """
        read: list[Any] = []
        for index, layer in enumerate(self._layers):
            of_layer, orders = adapter.layer(index), _output_orders(self._config, index, adapter)
            for field, linear in _adapted_linears(layer).items():
                added, order = of_layer.get(field, []), orders.get(field)
                if order is not None:
                    added = [_reorder_outputs(lora, order) for lora in added]
                read.append(of_linears.prepare(linear, added) if added else None)
        return read

    @property
    def adapted_linears(self) -> list[Linear]:
        """Those that may have adapters, in the order of `read_adapter`."""
        return [linear for layer in self._layers for linear in _adapted_linears(layer).values()]

    def put_adapter(self, of_linears: LinearAdapters, index: int, read: list[Any] | None) -> None:
        """Give the linears what `read_adapter` returned as their adapter with this index, or none."""
        linears = self.adapted_linears
        for linear, prepared in zip(linears, read or [None] * len(linears), strict=True):
            of_linears.put(linear, index, prepared)

    def forward(self, step: Step, *, needs_logits: bool) -> Array | None:
        """Return the logits of the step's logit rows, [L, vocab] fp32.

        None if needs_logits is False or the model has no head: then `normed` is the result. A step that scores tokens
        needs logits, even if it has no logit rows.
        """
        qkv, residual = self.store_tokens(step)
        if self._head is not None and self._head.mtp is not None:  # it needs the results of all tokens
            self._attend_and_mix(self._layers[-1], qkv, residual, step)
            given = self._ops.final_norm(residual, self._final_norm)
            stream = mtp_ops(self._ops).begin(self._embedding, self._head.mtp, given)
            self._project(self._head, stream, step)
        return self.finish(qkv, residual, step) if needs_logits else None

    def guess(self, step: Step, *, needs_logits: bool) -> Array | None:  # noqa: ARG002 - always
        """As `forward`, by the head: logits of the token after the next one of rows of one token."""
        head, ops = self._head, self._ops
        if head is None or head.mtp is None:
            raise ValueError("the model has no head that predicts further tokens")
        stream = mtp_ops(ops).begin(self._embedding, head.mtp, None)
        self._attend_and_mix(head, self._project(head, stream, step), stream, step)
        given = ops.final_norm(stream, head.mtp.norm)
        mtp_ops(ops).keep(given, is_guess=True)
        return self.logits(given)

    def store_tokens(self, step: Step) -> tuple[Array, Array]:
        """Run the step up to the last cache write; return the arguments of `finish`."""
        residual = self._ops.embed(self._embedding, step)
        if self._config.layer_input_size:
            side_ops(self._ops).begin_inputs(residual, step)
        if self._config.streams is not None:
            stream_ops(self._ops).begin(residual, step)
        *layers, last = self._layers[: self._num_stored]
        for index, layer in enumerate(layers):
            self._attend_and_mix(layer, self._project(layer, residual, step), residual, step)
            if index < self._config.picture_layers and self._ops.add_pictures is not None:
                self._ops.add_pictures(index, residual, step)
        return self._project(last, residual, step), residual

    def finish(self, qkv: Array, residual: Array, step: Step) -> Array | None:
        """Run the rest of a step, like `forward` with needs_logits.

        After the last cache write, only the tokens that need logits matter, and those that are scored.
        """
        ops, (last, *shared) = self._ops, self._layers[self._num_stored - 1 :]
        qkv, residual, step = ops.last_tokens(qkv, residual, step)
        if self._head is None:
            self._attend_and_mix(last, qkv, residual, step)
        for layer in shared:
            self._attend_and_mix(layer, self._project(layer, residual, step), residual, step)
        if self._config.streams is not None:
            stream_ops(ops).end(residual, step)
        self.normed = ops.final_norm(residual, self._final_norm)
        if self._lm_head is None:
            return None
        return self.logits(ops.logit_rows(self.normed, step))

    def logits(self, normed: Array) -> Array:
        """Logits [n, vocab] of any rows [n, hidden] of `normed`."""
        return self._ops.logits(normed, self._lm_head)

    def _project(self, layer: Layer, residual: Array, step: Step) -> Array:
        ops = self._ops
        if layer.streams is not None:
            stream_ops(ops).predict(layer.streams, residual, step)
        x = ops.norm(residual, layer.attention_norm)
        qkv = ops.linear(x, layer.qkv)
        if layer.attention is None:
            # Every token changes the state, also those that `finish` leaves out.
            ops.linear_add(delta_ops(ops).run(qkv, x, layer.delta_net, step), layer.output, residual)
        else:
            ops.rotate_and_store(qkv, step, layer.attention)
        return qkv

    def _attend_and_mix(self, layer: Layer, qkv: Array, residual: Array, step: Step) -> None:
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
            if layer.laurel is not None:
                stream_ops(ops).add_laurel(layer.laurel, residual)
            ops.linear_add(attended, layer.output, residual, layer.output_norm)
            self._add_mlp(layer, residual, step)

    def _add_mlp(self, layer: Layer, residual: Array, step: Step) -> None:
        x = self._ops.norm(residual, layer.mlp_norm)
        mixed = self._mix(layer.mlp, x)
        if layer.experts is not None and layer.beside is None:
            expert_ops(self._ops).add(x, layer.experts, residual)
        self._add_mixed(layer, mixed, residual, step)

    def _add_mixed(self, layer: Layer, mixed: Array | None, residual: Array, step: Step) -> None:
        ops = self._ops
        if layer.mlp is not None and layer.beside is not None:
            side_ops(ops).add_experts(mixed, layer.mlp.down, layer.experts, layer.beside, residual)
        elif layer.mlp is not None:
            ops.linear_add(mixed, layer.mlp.down, residual, layer.mlp.output_norm)
        if layer.input is None or layer.attention is None:
            return
        if layer.streams is not None:
            stream_ops(ops).correct(layer.streams, layer.attention.index, layer.input, residual, step)
        else:
            side_ops(ops).add_input(layer.attention.index, layer.input, residual, step)

    def _mix(self, mlp: Mlp | None, x: Array) -> Array | None:
        """Return the input of the MLP's down product."""
        if mlp is None:
            return None
        if mlp.cutoff is not None:
            return stream_ops(self._ops).cut_linear(x, mlp.gate_up, mlp.cutoff)
        mixed = self._ops.activated_linear(x, mlp.gate_up)
        if mlp.gate is not None:
            expert_ops(self._ops).weight_by_sigmoid(x, mlp.gate, mixed)
        return mixed


def _adapted_linears(layer: Layer) -> dict[str, Any]:
    """Field of `LayerWeights` → linear, of those that may have adapters."""
    linears = {"qkv": layer.qkv, "o": layer.output}
    if layer.delta_net is not None:
        linears["delta_gates"] = layer.delta_net.gates
    return linears if layer.mlp is None else linears | {"gate_up": layer.mlp.gate_up, "down": layer.mlp.down}


def _output_orders(config: DecoderConfig, index: int, adapter: PeftAdapter) -> dict[str, NDArray[np.int64] | None]:
    """Field of `LayerWeights` → the order of its outputs, if it is not the adapter's."""
    net = config.delta_net_of_layer(index)
    if net is not None:
        return {"qkv": delta_in_order(config, net), "delta_gates": delta_gates_order(config, net)}
    return {"qkv": None if config.interleaved_rope and not adapter.interleaves_rope else qkv_order(config)}


def _reorder_outputs(lora: LoraWeights, order: NDArray[np.int64]) -> LoraWeights:
    """Reorder an adapter's outputs. They are whole parts, such as q, and the new order mixes no parts."""
    first, count = lora.first_output, len(lora.up)
    return replace(lora, up=lora.up[order[first : first + count] - first])
