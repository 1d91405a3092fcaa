"""CudaDecoderPass: a decoder on one GPU, running one step ahead of the host.

A step is one copy to the device, the model's kernels (a CUDA graph, unless the step is large), the sampler's kernels,
and one copy of the tokens to the host. The host does not wait for any of them: `sample` returns a handle, and the next
step reads the tokens on the device.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from penstock.backend.checkpoint.formats.stored_formats import PLAIN
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import DeviceRows, SamplingParams, SlotInit, StepBatch
from penstock.backend.passes.cuda.attention.prefill_attention import WGMMA_CAPABILITY
from penstock.backend.passes.cuda.device.device import annotate_faults, explain_fault, first_line
from penstock.backend.passes.cuda.device.launcher import KernelFailed
from penstock.backend.passes.cuda.device.link_probe import LinkSpeed, measure_link
from penstock.backend.passes.cuda.memory import lora, page_moves
from penstock.backend.passes.cuda.memory.page_moves import HostPool, PageMoves, StateCopies, TokenCosts, open_pool
from penstock.backend.passes.cuda.memory.private_weights import PrivateMemory
from penstock.backend.passes.cuda.ops.cuda_ops import upload_rows
from penstock.backend.passes.cuda.ops.fused_ops import make_ops
from penstock.backend.passes.cuda.step import step_buffers
from penstock.backend.passes.cuda.step.step_buffers import StepBuffers, count_decode_rows
from penstock.backend.passes.cuda.step.step_packing import NO_INTS
from penstock.backend.passes.cuda.step.step_sampling import StepSampling
from penstock.backend.passes.decoder.adapters import LoadsAdapters
from penstock.backend.passes.decoder.cuda_pass.cuda_graphs import MixedGraphs, StepGraphs
from penstock.backend.passes.decoder.cuda_pass.model_parts import make_full_layout, make_layout
from penstock.backend.passes.decoder.cuda_pass.step_library import open_step_library
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import (
    StepSizes,
    attention_by_window,
    captured_sizes_of,
    choose_matmul,
    groups_of,
    plan_spec,
    rounds_rows,
    sampling_sizes,
    step_limits,
)
from penstock.backend.passes.decoder.model import DecoderModel
from penstock.backend.passes.ops.rope_table import RopeTable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.formats.stored_formats import StoredFormats
    from penstock.backend.checkpoint.quantization.modes import Quantization
    from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter
    from penstock.backend.forward_pass import EmbeddedTokens, PassOptions, PassSpec, PendingOutput, TokenMasks
    from penstock.backend.forward_pass.extensions import PictureTower
    from penstock.backend.passes.cuda.device.device import Device
    from penstock.backend.passes.cuda.memory.private_weights import DeviceMemory
    from penstock.backend.passes.decoder.cuda_pass.workspace_plan import PassSettings
    from penstock.backend.passes.ops.interface import Weights
    from penstock.backend.passes.shared_weights.watch import WatchedWeights

PassT = TypeVar("PassT", bound="CudaDecoderPass")

logger = logging.getLogger("penstock.backend")


class CudaDecoderPass(LoadsAdapters):
    """Implements `IBatchedForwardPass`, `ICheckpointsStates` and `ILoadsAdapters`. Logits are on the device in the
    weights' dtype; the next step overwrites them.

    `PassOptions.deterministic` changes matmul.py and step_attention.py, and leaves out fused_ops.py; everything else
    computes each row independently anyway.
    """

    link: LinkSpeed
    """Speed of copies between host and device; measured by `create_cache`."""
    token_costs: TokenCosts
    """Cost to copy a token's KV and to recompute it; measured by `create_cache`, which then chooses the cheaper one."""

    shared_weights: WatchedWeights | None = None
    """Weights that outlive the process (`ISharedWeights`); None if they end with it."""
    picture_tower: PictureTower | None = None
    """See `IEncodesPictures`."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        device: Device,
        dtype: torch.dtype,
        sizes: StepSizes,
        host_kv_bytes: int = 0,
        quantization: Quantization | None = None,
        formats: StoredFormats = PLAIN,
        adapters: Sequence[PeftAdapter] = (),
        turns_heads: bool = False,
        memory: DeviceMemory | None = None,
    ) -> None:
        """host_kv_bytes limits the host memory for offloaded pages. quantization and formats are as in `make_spec`.
        adapters must stay open until this returns.

        memory holds the weights; by default it is this process's own.
        """
        self._memory = memory or PrivateMemory()
        self._inference = torch.inference_mode()
        self._step_library = open_step_library()  # before the weights are read
        self._config = config
        self._device = device
        self._sizes = sizes
        self._dtype = dtype
        self._spec = plan_spec(config, dtype, sizes, quantization, formats, adapters)
        self._turns_heads = turns_heads
        rounds = rounds_rows(formats, quantization, sizes, dtype)
        self._groups = groups_of(config, sizes)
        # Pages of several groups or sizes do not move to the host, and bring back no states.
        moves_pages = len(self._groups.windows) == 1 and config.delta_net is None and config.full_heads is None
        self._host_kv_bytes = host_kv_bytes if moves_pages else 0
        self._decode_sizes = sizes.decode_sizes(rounds_rows=rounds)
        self._mixed_sizes = captured_sizes_of(config, dtype, sizes, self._spec.weight_bytes, rounds_rows=rounds)
        with torch.inference_mode():
            self._ops = make_ops(
                device, config, dtype, sizes.max_tokens, sizes.max_logits, choose_matmul(sizes),
                rounded_rows=sizes.choices.rounded_rows if rounds else None, memory=self._memory,
                product_rows=sizes.choices.product_rows_of(config.hidden_size), adapter_bytes=sizes.adapter_bytes,
                claims_products=bool(sizes.choices.claimed_products),
            )  # fmt: skip
            self._model = DecoderModel(config, self._ops, weights, Dtype.of(dtype), self._groups)
            self._of_linears = self._ops.adapters
            if self._ops.adapters is not None:
                self._ops.adapters.open(self._model.adapted_linears)
            self._put_first(adapters)

    @classmethod
    def describe(cls, model_dir: Path, options: PassOptions) -> PassSpec:
        # Imported here, as in `load`: given weights by its caller, the pass needs no package that reads checkpoints.
        from penstock.backend.checkpoint.config_json import read_decoder_config
        from penstock.backend.passes.decoder.cuda_pass.loading import describe_checkpoint

        return describe_checkpoint(model_dir, read_decoder_config(model_dir, options.max_context_tokens), options)

    @classmethod
    def load(cls: type[PassT], model_dir: Path, options: PassOptions, device: Device) -> PassT:
        from penstock.backend.checkpoint.config_json import read_decoder_config
        from penstock.backend.passes.decoder.cuda_pass.loading import load_pass

        config = read_decoder_config(model_dir, options.max_context_tokens)

        def build(weights: Weights, settings: PassSettings, memory: DeviceMemory) -> PassT:
            return cls(config, weights, device, *settings, memory=memory)

        return load_pass(model_dir, config, options, device, build)

    @classmethod
    def shared_bytes(cls, model_dir: Path, options: PassOptions, device_uuid: bytes) -> int:
        """Size of the weights that `load` would map (`IFindsSharedWeights`). Frees other shared weights: `load` would
        not map them."""
        from penstock.backend.passes.decoder.cuda_pass.loading import find_shared_bytes

        return find_shared_bytes(model_dir, options, device_uuid)

    @property
    def spec(self) -> PassSpec:
        return self._spec

    @torch.inference_mode()
    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        """Also compiles the kernels, measures the link, captures the decode graphs, times a prefill step, and allocates
        host memory for pages if copying them is faster than recomputing them."""
        config, device = self._config, self._device
        longest = min(self._sizes.max_context_tokens, num_pages * page_size_tokens)
        sizes = replace(self._sizes, max_context_tokens=longest)
        layout = make_layout(config, num_pages, page_size_tokens, kv_dtype, self._groups)
        full_layout = make_full_layout(config, layout)
        try:
            attention = attention_by_window(
                config,
                layout,
                sizes,
                self._dtype,
                num_sms=device.num_sms,
                shared_bytes_per_sm=device.shared_bytes_per_sm,
                has_wgmma=device.compute_capability == WGMMA_CAPABILITY,
            )
        except ValueError as error:
            raise StartupError(f"the GPU kernels do not support this cache: {error}") from error
        limits = step_limits(config, sizes, page_size_tokens, num_pages, max(self._mixed_sizes, default=0))
        self._buffers = StepBuffers(device, limits, self._step_library)
        self._sampling = StepSampling(device, self._dtype, limits, sampling_sizes(config, sizes), self._buffers)
        ropes = tuple(
            torch.tensor(RopeTable(rope).cover(longest)[:longest], device=device.torch_device) for rope in config.ropes
        )
        self._ops.open_cache(layout, self._buffers, self._sampling.last_tokens, ropes, attention, full_layout)
        no_host_pages = HostPool(device, layout, 0)
        full_pages = None
        if full_layout is not None:
            full_pages = self._ops.full_cache.view(full_layout.num_layers, num_pages, full_layout.page_bytes)
        self._moves = PageMoves(device.launcher, self._ops.pages, self._buffers.uplink, no_host_pages, full_pages)
        self.create_checkpoints(0)
        try:
            device.launcher.prepare(
                [*self._ops.kernels(), *self._sampling.kernels, *step_buffers.kernels(), *page_moves.kernels()]
            )
            self.link = measure_link(device)
            self._graphs = StepGraphs(device, self._decode_sizes, self._run_padding)
            adapted_sizes = self._decode_sizes if sizes.adapter_bytes else []
            self._adapted_graphs = StepGraphs(device, adapted_sizes, partial(self._run_padding, has_adapters=True))
            self._mixed_graphs = MixedGraphs(device, self._ops, self._model, self._buffers, self._mixed_sizes)
            token_s = self._warm_up(min(sizes.max_tokens, longest))
        except torch.OutOfMemoryError as error:
            reason = f"a step does not fit into GPU memory beside the KV cache: {first_line(error)}"
            raise StartupError(f"{reason} (last launch: {device.last_launch}); lower --kv-budget") from error
        except (KernelFailed, RuntimeError) as error:
            reason = f"the GPU kernels do not run: {first_line(error)} (last launch: {device.last_launch})"
            raise StartupError(reason) from error
        self.token_costs = TokenCosts(self.link.copy_s(self._spec.kv_bytes_per_token[kv_dtype]), token_s)
        self._moves.pool = open_pool(device, layout, self.link, self.token_costs, self._host_kv_bytes)

    def create_checkpoints(self, num_checkpoints: int) -> None:
        states = [] if self._ops.delta_net is None else self._ops.delta_net.states
        self._states = StateCopies(self._device.launcher, states, num_checkpoints)

    @property
    def num_host_pages(self) -> int:
        return self._moves.pool.num_pages

    @torch.inference_mode()
    def save_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        """Call after a step's `sample` and before the next step's `forward`."""
        with annotate_faults(self._device, f"saving {len(pairs)} pages"):
            self._moves.save(pairs)

    # The next two are a step's work on the host: a decorator and a context manager each would make a dozen calls.
    def forward(self, batch: StepBatch) -> Tensor:
        try:
            with self._inference:
                return self._forward(batch)
        except Exception as error:
            explain_fault(self._device, error, step_name(batch))
            raise

    def sample(self, logits: Tensor, batch: StepBatch, masks: TokenMasks | None = None) -> PendingOutput:
        try:
            with self._inference:
                return self._sample(logits, batch, masks)
        except Exception as error:
            explain_fault(self._device, error, f"sampling {step_name(batch)}")
            raise

    def host_logits(self, logits: Tensor) -> NDArray[np.float32]:
        with annotate_faults(self._device, f"copying {len(logits)} rows to the host"):
            host: NDArray[np.float32] = logits.float().cpu().numpy().copy()
        return host

    def device_logits(self, logits: Tensor) -> DeviceRows:
        """With 16-bit weights this is an fp32 copy. It is valid until the next call and not part of the memory plan."""
        with annotate_faults(self._device, f"copying {len(logits)} rows of logits"):
            self._shared_logits = logits.float()
        return DeviceRows(self._shared_logits.data_ptr(), self._device.stream)

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    def host_hidden_states(self, logits: Tensor) -> NDArray[np.float32]:
        return self.host_logits(self._last_normed(len(logits)))

    def device_hidden_states(self, logits: Tensor) -> DeviceRows:
        """Lifetime and memory as in `device_logits`."""
        with annotate_faults(self._device, f"copying {len(logits)} hidden states"):
            self._shared_hidden_states = self._last_normed(len(logits)).float()
        return DeviceRows(self._shared_hidden_states.data_ptr(), self._device.stream)

    def _last_normed(self, num_rows: int) -> Tensor:
        return self._ops.last_normed(num_rows, is_scored=self._sampling.is_scored)

    def _num_bytes(self, adapter: PeftAdapter) -> int:
        return lora.adapter_bytes(adapter, self._config, self._dtype)

    @torch.inference_mode()
    def put_adapter(self, index: int, adapter: Any) -> None:
        super().put_adapter(index, adapter)

    def close(self) -> None:
        self._device.synchronize()
        self._ops.close()
        self._moves.close()
        del self._graphs, self._adapted_graphs, self._mixed_graphs
        del self._buffers, self._sampling, self._model, self._states
        if self.shared_weights is not None:
            self.shared_weights.close()
        self._memory.unmap()
        self._device.trim()

    def _forward(self, batch: StepBatch) -> Tensor:
        num_logits: int = batch.logit_rows.shape[0] if batch.drafts is None else batch.num_sampled
        ends = NO_INTS if batch.visible_ends is None else batch.visible_ends
        may_replay = not ends.size and not (batch.embeddings and self._config.picture_layers)
        is_decode_only = may_replay and batch.input_ids.shape[0] == num_logits == batch.context_lens.shape[0]
        num_decode = num_logits if is_decode_only else count_decode_rows(batch)
        graphs = self._graphs if batch.adapters is None else self._adapted_graphs
        num_padded = graphs.size_for(num_logits) if is_decode_only else None
        updates, num_updates = self._sampling.pack_slots(batch.slot_inits)
        restores, copies = self._moves.pack(batch)
        tiles, mixed = NO_INTS, None
        if not is_decode_only:
            tiles = self._ops.tiling.tiles(batch.query_starts, batch.context_lens, num_decode, batch.visible_ends)
            mixed = self._mixed_graphs.fit(batch, num_decode, tiles) if may_replay else None
        own_tiles = tiles if mixed is None else NO_INTS
        parts = [updates, restores, copies, *self._states.pack(batch), own_tiles, ends, *self._sampling.parts(batch)]
        is_drawn = num_padded is not None and self._sampling.is_redrawable
        sent = self._buffers.load(batch, num_padded or 0, parts, mixed, is_drawn=is_drawn)
        device_updates, device_restores, device_copies, of_states, state_saves, *rest = sent
        device_tiles, device_ends, *sampling_parts = rest
        self._sampling.begin(device_updates, num_updates, sampling_parts, is_drawn=is_drawn)
        self._moves.run(device_restores, device_copies)
        self._states.restore(of_states)
        for given in batch.embeddings:
            self._put_embeddings(given)
        if num_padded is not None:
            graphs.replay(num_padded)
        else:
            if mixed is not None:
                stored = self._mixed_graphs.replay(mixed, num_logits, is_scored=batch.scored is not None)
            else:
                step = self._buffers.step(batch, num_decode, device_tiles if len(tiles) else None)
                if not may_replay:
                    visible_ends = device_ends if ends.size else None
                    step = replace(step, is_decode_only=False, embeddings=batch.embeddings, visible_ends=visible_ends)
                self._ops.begin(step)
                stored = *self._model.store_tokens(step), step
            if num_logits or batch.scored is not None:
                self._model.finish(*stored)
        self._states.save(state_saves)
        return self._ops.last_logits(num_logits)

    def _sample(self, logits: Tensor, batch: StepBatch, masks: TokenMasks | None) -> PendingOutput:
        return self._sampling.sample(logits, batch, masks, self._scored_logits, partial(step_name, batch))

    def _scored_logits(self, tokens: Tensor) -> Tensor:
        """Logits of scored tokens, in the memory of the step's logits."""
        logits: Tensor = self._model.logits(self._ops.gather_normed(tokens))
        return logits

    def _run_padding(self, num_rows: int, *, has_adapters: bool = False) -> None:
        """Launch a decode step of num_rows padding rows, for a graph to capture."""
        step = self._buffers.decode_step(num_rows, has_adapters=has_adapters)
        self._ops.begin(step)
        logits = self._model.forward(step, needs_logits=True)
        if logits is not None and self._spec.generates:
            self._sampling.capture(logits)

    def _warm_up(self, num_tokens: int) -> float:
        """Run two prefill steps of the largest size, in pages that have no owner yet. Return seconds per token."""
        ids = np.zeros(num_tokens, np.int32)
        num_pages = -(-num_tokens // self._ops.layout.page_size_tokens)
        pages = np.tile(np.arange(num_pages, dtype=np.int32)[:, None], len(self._groups.windows))
        batch = StepBatch(
            input_ids=ids,
            query_starts=np.array([0, num_tokens], np.int32),
            context_lens=np.zeros(1, np.int32),
            page_table=pages.T if pages.shape[1] == 1 else pages[None],
            slots=np.zeros(1, np.int32),
            logit_rows=np.zeros(1, np.int32),
            slot_inits=(SlotInit(0, SamplingParams(temperature=0.0), ids, num_tokens),),
        )
        for _ in range(2):  # libraries load parts of themselves in the first run
            started_s = time.perf_counter()
            self._sample(self._forward(batch), batch, None).wait()
        return (time.perf_counter() - started_s) / num_tokens

    def _put_embeddings(self, given: EmbeddedTokens) -> None:
        """Write a prompt's embeddings to the residual stream, where captured steps read it too."""
        rows = self._ops.residual_rows(given.first, given.values.num_rows)
        if given.values.device_reads:
            given.values.copy_to(DeviceRows(rows.data_ptr(), self._device.stream))
        else:
            upload_rows(self._device, given.values.read()[:, : rows.shape[1]], rows)
        if self._config.scales.given_embeddings != 1.0:
            rows.mul_(self._config.scales.given_embeddings)


def step_name(batch: StepBatch) -> str:
    return f"a step of {batch.num_tokens} tokens in {batch.num_rows} rows"
