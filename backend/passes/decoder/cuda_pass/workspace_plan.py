"""Decides which models the kernels support, and how much memory a pass takes, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.backend.checkpoint.formats.stored_formats import PLAIN
from penstock.backend.checkpoint.quantization.modes import check_sizes, packed_linears
from penstock.backend.checkpoint.tensor_files.lora_weights import ADAPTED_FIELDS
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import MAX_VERIFIED
from penstock.backend.passes.cuda.attention import delta_net
from penstock.backend.passes.cuda.attention.decode_attention import DecodeAttention
from penstock.backend.passes.cuda.attention.kernel_limits import PAGE_SIZES_TOKENS
from penstock.backend.passes.cuda.attention.prefill_attention import PrefillAttention, most_captured_tiles
from penstock.backend.passes.cuda.attention.prefill_segments import max_parts
from penstock.backend.passes.cuda.attention.step_attention import (
    OneKernelAttention,
    StepAttention,
    TwoKernelAttention,
    layer_windows,
)
from penstock.backend.passes.cuda.attention.wide_attention import WideAttention
from penstock.backend.passes.cuda.device.kernel_choices import CONSTANTS, KernelChoices, adopted_choices
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO
from penstock.backend.passes.cuda.memory import lora
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.cuda.memory.page_moves import MAX_PAGE_MOVES
from penstock.backend.passes.cuda.ops import elementwise, expert_ops, quantized_linear, row_products, side_ops
from penstock.backend.passes.cuda.ops.activations import activation_bytes, head_shape, max_linear_inputs
from penstock.backend.passes.cuda.ops.fused_ops import fuses
from penstock.backend.passes.cuda.ops.matmul import (
    INVARIANT_MATMUL,
    BlockedMatmul,
    Matmul,
    WholeMatmul,
    forbid_split_sums,
)
from penstock.backend.passes.cuda.ops.packed_weights import has_kernels, packed_bytes, takes_packed
from penstock.backend.passes.cuda.ops.rounded_rows import ROUNDED_FORMS, row_bytes
from penstock.backend.passes.cuda.step.device_sampler import MAX_BIASES, MAX_VOCAB, SlotArrays
from penstock.backend.passes.cuda.step.step_buffers import StepBuffers
from penstock.backend.passes.cuda.step.step_packing import StepLimits
from penstock.backend.passes.cuda.step.step_results import MAX_NAMED_LOGPROBS, ResultBuffers
from penstock.backend.passes.cuda.step.step_sampling import SamplingSizes
from penstock.backend.passes.decoder.cuda_pass.cuda_graphs import (
    USUAL_GRAPH_ROWS,
    graph_sizes,
    launch_bound_tokens,
    mixed_sizes,
    num_nodes_of,
)
from penstock.backend.passes.decoder.cuda_pass.model_parts import make_full_layout, make_layout, unsupported_variation
from penstock.backend.passes.decoder.spec import make_spec
from penstock.backend.passes.ops.layer_groups import LayerGroups, one_group, split_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.formats.stored_formats import StoredFormats
    from penstock.backend.checkpoint.quantization.modes import PackedLinear, Quantization
    from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter
    from penstock.backend.forward_pass import PassOptions, PassSpec

LIBRARY_BYTES = 224 << 20
"""Workspaces of cuBLAS and cuBLASLt, and the loaded kernels of torch and CuPy.

On an H100 the workspaces took 190 MiB for a model with biases, and about 70 for others.
"""
_NODE_BYTES = 8 << 10
"""Memory of one kernel in a graph. An estimate, not measured."""
_SM_SHARED_BYTES = 164 << 10
"""Shared memory per SM of the smallest supported GPU (A100); used only where the result does not depend on it."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The inputs of the memory plan: the largest step, the longest sequence, `PassOptions.deterministic`, and the GPU's
    measured settings."""

    max_rows: int
    max_tokens: int
    max_context_tokens: int
    deterministic: bool = False
    choices: KernelChoices = CONSTANTS
    splits_layers: bool = False
    """The option `PassOptions.splits_layers`."""
    max_verified: int = 0
    """Most rows and drafts of a step with drafts; 0 if it may have none."""
    adapter_bytes: int = 0
    """Memory of all adapters at a time (`adapter_bytes`); 0 if there are never any."""

    @property
    def max_logits(self) -> int:
        return max(self.max_rows, self.max_verified)

    def decode_sizes(self, *, rounds_rows: bool) -> list[int]:
        """Return the rows of captured decode steps; rounds_rows as in `captured_sizes`."""
        most, rounded_rows = min(self.max_rows, self.max_tokens), self.choices.rounded_rows
        may_round = not rounds_rows or rounded_rows <= USUAL_GRAPH_ROWS
        return graph_sizes(most if may_round else min(most, rounded_rows - 1))


class PassSettings(NamedTuple):
    """Arguments of `CudaDecoderPass`, in its order."""

    dtype: torch.dtype
    sizes: StepSizes
    host_kv_bytes: int = 0
    quantization: Quantization | None = None
    formats: StoredFormats = PLAIN
    adapters: Sequence[PeftAdapter] = ()
    turns_heads: bool = False


def step_sizes(
    config: DecoderConfig, options: PassOptions, dtype: torch.dtype, adapters: Sequence[PeftAdapter] = ()
) -> StepSizes:
    longest = min(options.max_context_tokens or config.max_context_tokens, config.max_context_tokens)
    choices, _ = adopted_choices(options.device)
    if options.deterministic:  # with levels a row's bits depend on the others
        choices = replace(choices, chunk_levels=0)
    max_verified = MAX_VERIFIED if config.delta_net is None else 0  # a state does not go back
    largest = options.max_running, options.max_batch_tokens, longest
    num_bytes = options.adapter_budget_bytes + sum(lora.adapter_bytes(adapter, config, dtype) for adapter in adapters)
    return StepSizes(*largest, options.deterministic, choices, options.splits_layers, max_verified, num_bytes)


def groups_of(config: DecoderConfig, sizes: StepSizes) -> LayerGroups:
    """Return the groups of layers that have pages of their own."""
    is_split = sizes.splits_layers and config.full_heads is None  # a group's pages have one size
    return split_groups(config) if is_split else one_group(config)


def plan_spec(
    config: DecoderConfig,
    dtype: torch.dtype,
    sizes: StepSizes,
    quantization: Quantization | None = None,
    formats: StoredFormats = PLAIN,
    adapters: Sequence[PeftAdapter] = (),
) -> PassSpec:
    """Return the pass's spec with its memory; quantization and formats are as in `make_spec`.

    Raises StartupError for an unsupported model or quantisation.
    """
    check_model_supported(config, sizes)
    if quantization is not None:
        check_quantization(quantization, config, dtype)
    smallest = PAGE_SIZES_TOKENS[0]
    layout = make_layout(config, 1, smallest, "bf16")
    attention = attention_by_window(config, layout, sizes, dtype, num_sms=1, shared_bytes_per_sm=_SM_SHARED_BYTES)
    matmul = choose_matmul(sizes)
    packed = packed_linears(config, quantization, formats, has_kernels)
    row_of_8_bits, rounds = 0, rounds_rows(formats, quantization, sizes, dtype)
    if rounds and any(each.form in ROUNDED_FORMS for each in packed):
        row_of_8_bits = row_bytes(max_linear_inputs(config))
    groups = groups_of(config, sizes)
    spec = make_spec(config, Dtype.of(dtype), KV_MACRO, quantization, formats, has_kernels, groups, adapters)
    more_bytes = sum(packed_bytes(each.form, each.shape, dtype) - each.form.num_bytes(each.shape) for each in packed)
    spec = replace(spec, weight_bytes=spec.weight_bytes + more_bytes)
    mixed = captured_sizes_of(config, dtype, sizes, spec.weight_bytes, rounds_rows=rounds)
    num_linears = config.num_layers * len(ADAPTED_FIELDS)
    parts = (
        activation_bytes(config, dtype, sizes.max_tokens, sizes.max_logits, matmul),
        expert_ops.expert_bytes(config, dtype, sizes.max_tokens, matmul),
        side_ops.side_bytes(config, dtype, sizes.max_tokens, matmul.padded_rows(sizes.max_tokens)),
        delta_net.delta_bytes(config, dtype, sizes.max_tokens, matmul.padded_rows(sizes.max_tokens)),
        quantized_linear.scratch_bytes(sizes.max_tokens, matmul, rounds) if packed and takes_packed(dtype) else 0,
        sizes.max_tokens * row_of_8_bits,
        row_products.scratch_bytes(config.hidden_size, head_shape(config)) if fuses(config, dtype, matmul) else 0,
        StepBuffers.num_bytes(step_limits(config, sizes, smallest, 1, max(mixed, default=0))),
        SlotArrays.num_bytes(sizes.max_rows + sizes.max_verified, config.logits_width),
        ResultBuffers.num_bytes(sizes.max_rows, sizes.max_tokens, sizes.max_verified),
        4 * mask_ints(config, sizes),
        lora.scratch_bytes(sizes.max_tokens, num_linears) if sizes.adapter_bytes else 0,
        sum(lora.adapter_bytes(each, config, dtype) - each.num_values * dtype.itemsize for each in adapters),
        4 * sizes.max_context_tokens * sum(rope.rotary_dim for rope in config.ropes),
        *(each.workspace_bytes for each in attention.values()),
        LIBRARY_BYTES,
        _graph_bytes(config, matmul, sizes, (sizes.decode_sizes(rounds_rows=rounds), mixed), packed, dtype),
    )
    return replace(
        spec,
        has_llama_cpp_sampling=False,  # the device samples
        workspace_bytes=sum(parts),
        graph_bytes=parts[-1],
        runs_ahead=True,
        page_sizes=PAGE_SIZES_TOKENS,
        copies_states=config.delta_net is not None,
        verifies_drafts=sizes.max_verified > 0,
        rounds_drafts=not sizes.deterministic,
    )


def captured_sizes_of(
    config: DecoderConfig, dtype: torch.dtype, sizes: StepSizes, weight_bytes: int, *, rounds_rows: bool
) -> list[int]:
    """Return `captured_sizes` of a model. Grouped products of experts allocate, so no captured step has them."""
    if config.experts is not None and (grouped_rows := choose_matmul(sizes).grouped_rows):
        sizes = replace(sizes, max_tokens=min(sizes.max_tokens, grouped_rows - 1))
    weights = make_spec(config, Dtype.of(dtype), KV_MACRO).weight_bytes // dtype.itemsize
    return captured_sizes(sizes, weight_bytes, weights, config.num_layers, rounds_rows=rounds_rows)


def captured_sizes(
    sizes: StepSizes, weight_bytes: int, weights: int, num_layers: int, *, rounds_rows: bool
) -> list[int]:
    """Return the tokens of captured mixed steps.

    weight_bytes is `PassSpec.weight_bytes`; weights is the number of weights. rounds_rows is the result of that
    function. Unless decode steps round rows too, none of such a step is rounded: a library that allocates for
    products of 8 bits would do so in a graph.
    """
    max_tokens, rounded_rows = sizes.max_tokens, sizes.choices.rounded_rows
    if rounds_rows and rounded_rows > USUAL_GRAPH_ROWS:
        max_tokens = min(max_tokens, rounded_rows - 1)
    max_tokens = min(max_tokens, launch_bound_tokens(weight_bytes, weights, num_layers))
    return mixed_sizes(max_tokens, min(sizes.max_rows, USUAL_GRAPH_ROWS), sizes.choices.mixed_tokens)


def choose_matmul(sizes: StepSizes) -> Matmul:
    if not sizes.deterministic:
        return WholeMatmul(sizes.choices.quantised_rows, grouped_rows=sizes.choices.grouped_rows)
    if not sizes.choices.whole_products:
        return BlockedMatmul()
    forbid_split_sums()
    return INVARIANT_MATMUL


def rounds_rows(
    formats: StoredFormats, quantization: Quantization | None, sizes: StepSizes, dtype: torch.dtype
) -> bool:
    """Whether a step may round rows of activations to 8 bits.

    Only with such a checkpoint or --quantize fp8, and never if a row must have the same bits in a step of any size.
    """
    is_declared = formats.rounds_rows if quantization is None else quantization.is_float
    has_rows = not sizes.deterministic and sizes.max_tokens >= sizes.choices.rounded_rows
    return is_declared and takes_packed(dtype) and has_rows


def check_quantization(quantization: Quantization, config: DecoderConfig, dtype: torch.dtype) -> None:
    """Raises StartupError if the mode of --quantize does not fit the model or the activations."""
    check_sizes(quantization, config)
    if not takes_packed(dtype):
        raise StartupError(
            f"--quantize is {quantization.name}; on a GPU it needs 16-bit activations: use --dtype bf16, or none"
        )


def check_model_supported(config: DecoderConfig, sizes: StepSizes) -> None:
    """Raises StartupError that names what the kernels do not support."""
    variation = unsupported_variation(config)
    if variation is not None:
        raise StartupError(
            f"{config.architecture} is not on the GPU yet: there are no kernels for {variation}; use --gpu none"
        )
    own_rope = config.rope if config.full_heads is None else config.window_rope or config.rope
    reason = elementwise.unsupported_reason(
        config.hidden_size, config.intermediate_size, config.head_dim, own_rope.rotary_dim, "bf16"
    )
    if reason is None and config.rope.rotary_dim % 16:
        reason = f"rotary_dim of full attention is {config.rope.rotary_dim}; it must be a multiple of 16"
    if config.logits_width > MAX_VOCAB:
        reason = f"the output layer has {config.logits_width} values; the sampler supports at most {MAX_VOCAB}"
    if reason is None and config.experts is not None:
        reason = expert_ops.unsupported_reason(config.experts)
    if reason is None and config.delta_net is not None:
        reason = delta_net.unsupported_reason(config.delta_net)
    if reason is None:
        layout = make_layout(config, 1, PAGE_SIZES_TOKENS[0], "bf16")
        try:
            attention_by_window(config, layout, sizes, torch.bfloat16, num_sms=1, shared_bytes_per_sm=_SM_SHARED_BYTES)
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        raise StartupError(f"the GPU kernels do not support this model: {reason}; use --gpu none")


def attention_by_window(
    config: DecoderConfig,
    layout: CacheLayout,
    sizes: StepSizes,
    dtype: torch.dtype,
    *,
    num_sms: int,
    shared_bytes_per_sm: int,
    has_wgmma: bool = False,
) -> dict[int | None, StepAttention]:
    """Return one attention per distinct window. dtype: of activations. has_wgmma changes no size.

    Raises ValueError for what no kernel supports.
    """
    scale, softcap, choices = config.score_scale, config.scales.scores_softcap or 0.0, sizes.choices
    # With two kernels a row's bits would depend on whether its step has a picture. All layers have the same tiles, so
    # they fit both kernels.
    has_pictures = config.pictures_see_whole != "nowhere"
    may_use_wgmma = has_wgmma and not (has_pictures and (sizes.deterministic or layout.head_dim > 128))

    def make_attention(window: int | None) -> StepAttention:
        window_tokens, sees_ahead = window or 0, config.sees_whole_pictures(layer_windows(config).index(window))
        prefill = PrefillAttention(
            layout, config.num_heads, scale, window_tokens, softcap, choices, may_use_wgmma,
            num_sms=num_sms, sees_ahead=sees_ahead,
        )  # fmt: skip
        prefill_sizes = prefill.workspace_sizes(sizes.max_tokens, sizes.max_context_tokens)
        if sizes.deterministic:
            return OneKernelAttention(prefill, prefill_sizes, sizes.max_logits)
        decode = DecodeAttention(
            layout, config.num_heads, scale, max_rows=sizes.max_logits, max_context_tokens=sizes.max_context_tokens,
            num_sms=num_sms, shared_bytes_per_sm=shared_bytes_per_sm, window_tokens=window_tokens, softcap=softcap,
            choices=choices,
        )  # fmt: skip
        return TwoKernelAttention(decode, prefill, prefill_sizes)

    windows = dict.fromkeys(layer_windows(config))
    full_layout = make_full_layout(config, layout)
    if full_layout is None:
        return {window: make_attention(window) for window in windows}
    others: dict[int | None, StepAttention] = {
        window: make_attention(window) for window in windows if window is not None
    }
    tiling = next(iter(others.values()))
    wide = WideAttention(full_layout, config.num_heads, scale, softcap, tiling, ACT_MACRO[dtype])
    return {None: wide, **others}


def max_update_ints(config: DecoderConfig, sizes: StepSizes) -> int:
    """Ints of `DeviceSampler.pack` for the largest single slot, which are also reserved for all slots of a step."""
    return 64 + 2 * MAX_BIASES + min(config.logits_width, sizes.max_context_tokens)


def mask_ints(config: DecoderConfig, sizes: StepSizes) -> int:
    """Ints of one mask per row, and of the table from row to mask."""
    return sizes.max_logits * (-(-config.logits_width // 32) + 1) + 8


def sampling_sizes(config: DecoderConfig, sizes: StepSizes) -> SamplingSizes:
    return SamplingSizes(config.logits_width, mask_ints(config, sizes), max_update_ints(config, sizes))


def step_limits(
    config: DecoderConfig, sizes: StepSizes, page_size_tokens: int, num_pages: int, mixed_tokens: int
) -> StepLimits:
    """mixed_tokens: of the largest captured mixed step."""
    group = config.num_heads // config.num_kv_heads
    tile_ints = 4 * (sizes.max_tokens * group // 32 + sizes.max_rows + max_parts(config.num_kv_heads))
    return StepLimits(
        max_rows=sizes.max_rows,
        max_tokens=sizes.max_tokens,
        max_pages=-(-sizes.max_context_tokens // page_size_tokens),
        page_size_tokens=page_size_tokens,
        num_pages=num_pages,
        vocab_size=config.vocab_size,
        tail_ints=max_update_ints(config, sizes)
        + tile_ints
        + 4 * MAX_PAGE_MOVES
        + sizes.max_rows * (1 + MAX_NAMED_LOGPROBS)
        + 2 * sizes.max_tokens  # scored tokens, and those that follow them
        + sizes.max_tokens * (config.pictures_see_whole != "nowhere")
        + 5 * sizes.max_verified  # slots of positions, and rows with drafts
        + 4 * sizes.max_rows  # restored and saved states
        + 44,
        num_groups=len(groups_of(config, sizes).windows),
        mixed_tokens=mixed_tokens,
        has_axes=bool(config.rope.axes),
        has_adapters=sizes.adapter_bytes > 0,
        mixed_tiles=most_captured_tiles(mixed_tokens, group, sizes.max_rows) if mixed_tokens else 0,
        max_verified=sizes.max_verified,
    )


def _graph_bytes(
    config: DecoderConfig, matmul: Matmul, sizes: StepSizes, captured: tuple[list[int], list[int]],
    packed: list[PackedLinear], dtype: torch.dtype,
) -> int:  # fmt: skip
    """Return the memory of all graphs; captured: the sizes of decode steps and of mixed ones."""
    decode, mixed = captured
    num_nodes = sum(num_nodes_of(config, matmul, size) for size in (*decode, *mixed))
    if sizes.adapter_bytes:
        beside = lora.NUM_LAUNCHES * len(ADAPTED_FIELDS) * config.num_layers
        num_nodes += sum(num_nodes_of(config, matmul, size) + beside for size in decode)
    num_nodes += len(mixed) * config.num_layers * len(set(layer_windows(config)))  # their prefill attention, and plans
    # Each product of widened weights has several launches.
    num_widened = sum(size > matmul.kernel_rows for size in (*decode, *mixed))
    of_experts = [any(".experts." in spec.name for spec in each.specs) for each in packed]
    more = [quantized_linear.num_launches(each.shape, dtype) - 1 for each in packed]
    num_nodes += num_widened * sum(count for count, is_expert in zip(more, of_experts, strict=True) if not is_expert)
    return num_nodes * _NODE_BYTES
