"""The `PassSpec` of a decoder from its configuration, and what decoders change that return vectors or scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.backend.checkpoint.formats.stored_formats import PLAIN
from penstock.backend.checkpoint.quantization.modes import has_cpu_kernels, weight_bytes
from penstock.backend.forward_pass import PassSpec
from penstock.backend.passes.ops.interface import KV_BLOCK_BYTES, KV_BLOCK_VALUES, supports_q8_0
from penstock.backend.passes.ops.layer_groups import one_group, unit_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.config.tensors import LayerWeights
    from penstock.backend.checkpoint.encoders.pooled_decoder import PooledDecoder
    from penstock.backend.checkpoint.formats.stored_formats import StoredFormats
    from penstock.backend.checkpoint.quantization.modes import Quantization
    from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter
    from penstock.backend.checkpoint.weight_forms.quantized_forms import WeightForm
    from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
    from penstock.backend.dtypes import Dtype
    from penstock.backend.passes.ops.interface import Weights
    from penstock.backend.passes.ops.layer_groups import LayerGroups


def make_spec(
    config: DecoderConfig,
    dtype: Dtype,
    kv_dtypes: Iterable[str],
    quantization: Quantization | None = None,
    formats: StoredFormats = PLAIN,
    keeps: Callable[[WeightForm], bool] = has_cpu_kernels,
    groups: LayerGroups | None = None,
    adapters: Sequence[PeftAdapter] = (),
) -> PassSpec:
    """The spec of a model with weights of dtype, except those that are quantised, by us or in the checkpoint (formats).

    groups are layers with pages of their own; by default all share them. KV dtypes wider than dtype come last, for an
    explicit choice.
    """
    groups = groups or one_group(config)
    values_per_token = len(groups.windows) * groups.num_layers * unit_values(config)
    head_dims = {config.heads_of_layer(index)[1] for index in range(config.num_layers)}
    has_blocks = all(map(supports_q8_0, head_dims))
    widths = {name: KV_BLOCK_BYTES[name] for name in kv_dtypes if name != "q8_0" or has_blocks}
    order = sorted(widths, key=lambda name: (widths[name] > KV_BLOCK_VALUES * dtype.itemsize, -widths[name]))
    return PassSpec(
        config.vocab_size,
        config.max_context_tokens,
        {name: values_per_token * widths[name] // KV_BLOCK_VALUES for name in order},
        weight_bytes(config, dtype, quantization, formats, keeps)
        + sum(adapter.num_values for adapter in adapters) * dtype.itemsize,
        quantization="none" if quantization is None else quantization.name,
        scores_prompts=True,
        has_llama_cpp_sampling=True,
        # The inputs of layers need the token's id.
        embedding_size=0 if config.layer_input_size else config.hidden_size,
        kv_windows=groups.windows,
        state_bytes_per_sequence=0
        if config.delta_net is None
        else config.delta_net.state_bytes + config.has_mtp * 4 * config.hidden_size,
        guesses_tokens=config.has_mtp,
        adapter_ranks=tuple(adapter.rank for adapter in adapters),
        picture_layers=config.picture_layers,
        has_picture_axes=bool(config.rope.axes),
    )


def with_states(spec: PassSpec, num_state_drafts: int) -> PassSpec:
    """The spec of a pass that copies states. Drafts need some more."""
    num_bytes = spec.state_bytes_per_sequence
    return replace(
        spec, copies_states=num_bytes > 0, workspace_bytes=spec.workspace_bytes + num_state_drafts * num_bytes
    )


@dataclass(frozen=True, slots=True)
class WeightsWithHead:
    """A decoder's weights with another output layer, or none."""

    weights: Weights
    head: Tensor | None

    def embedding(self, dtype: Dtype) -> Tensor | QuantizedWeight:
        return self.weights.embedding(dtype)

    def layer(self, index: int, dtype: Dtype) -> LayerWeights[Tensor | QuantizedWeight]:
        return self.weights.layer(index, dtype)

    def final_norm(self, dtype: Dtype) -> Tensor:
        return self.weights.final_norm(dtype)

    def lm_head(self, dtype: Dtype) -> Tensor | None:
        return None if self.head is None else self.head.to(dtype.in_torch)


def pooled_spec(spec: PassSpec, pooled: PooledDecoder) -> PassSpec:
    """Change a decoder's spec to that of a pooling one."""
    pools = {pooled.kind: pooled.width}
    return replace(spec, pooled=pools, generates=False, scores_prompts=False, verifies_drafts=False, adapter_ranks=())
