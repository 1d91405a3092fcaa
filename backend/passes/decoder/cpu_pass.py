"""CpuDecoderPass: a decoder on the CPU, by native kernels, or by torch if there are none."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.backend.checkpoint.formats.stored_formats import PLAIN
from penstock.backend.checkpoint.quantization.modes import check_sizes, find_cpu_quantization
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions, PassSpec, ScoredTokens, StepBatch, TokenLogprobs
from penstock.backend.passes.cpu.kernel_limits import (
    cpu_groups,
    supports_native_ops,
    unsupported_by_kernels,
    with_usable_head,
)
from penstock.backend.passes.cpu.library.thread_counts import SPIN_S, num_usable_cores
from penstock.backend.passes.cpu.native_ops import NativeOps
from penstock.backend.passes.cpu.native_sampling import NativeSampler
from penstock.backend.passes.cpu.path_choice import AUTO, check_cpu_path, load_kernels
from penstock.backend.passes.cpu.weight_memory.anonymous import AnonymousMemory
from penstock.backend.passes.decoder.adapters import LoadsAdapters
from penstock.backend.passes.decoder.guess_pass import MAX_GUESSED_ROWS, GuessPass
from penstock.backend.passes.decoder.model import DecoderModel
from penstock.backend.passes.decoder.spec import make_spec, with_states
from penstock.backend.passes.ops.copied_states import CopiedStates
from penstock.backend.passes.ops.cpu_interface import CpuOps
from penstock.backend.passes.ops.interface import CPU_KV_DTYPES
from penstock.backend.passes.ops.layer_groups import check_groups, one_group
from penstock.backend.passes.ops.prompt_embeddings import check_embeddings
from penstock.backend.passes.shared_weights.memory_trimming import return_freed_memory
from penstock.backend.sampling.sampler import HostSampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.checkpoint.formats.stored_formats import StoredFormats
    from penstock.backend.checkpoint.quantization.modes import Quantization
    from penstock.backend.checkpoint.tensor_files.lora_adapter import PeftAdapter
    from penstock.backend.forward_pass import PendingOutput, TokenMasks
    from penstock.backend.forward_pass.extensions import PagePlaces, PictureTower
    from penstock.backend.passes.cpu.step_queue import StepQueue
    from penstock.backend.passes.cpu.weight_memory.anonymous import WeightMemory
    from penstock.backend.passes.ops.interface import Weights
    from penstock.backend.passes.ops.layer_groups import LayerGroups
    from penstock.backend.passes.shared_weights.watch import WatchedWeights

logger = logging.getLogger("penstock.backend")

LoadedPass = TypeVar("LoadedPass", bound="CpuDecoderPass")


class CpuDecoderPass(LoadsAdapters, HostSampling):
    """Implements `IBatchedForwardPass`, `ICheckpointsStates`, `IPersistsPages`, `ILoadsAdapters` and `IGuessesTokens`.
    Logits are numpy float32 arrays; `HostSampling` samples."""

    shared_weights: WatchedWeights | None = None
    """Weights that outlive the process (`ISharedWeights`); None if they end with it."""
    picture_tower: PictureTower | None = None
    """See `IEncodesPictures`."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        ops: CpuOps,
        dtype: Dtype,
        max_running: int,
        quantization: Quantization | None = None,
        formats: StoredFormats = PLAIN,
        groups: LayerGroups | None = None,
        adapters: Sequence[PeftAdapter] = (),
        *,
        turns_heads: bool = False,
        num_state_drafts: int = 0,
    ) -> None:
        """quantization: how the weights are quantised if not as in the checkpoint. formats: how the checkpoint
        quantises them.

        groups: layers with pages of their own; None for one group. adapters: must stay open until this returns.
        """
        self._groups = groups or one_group(config)
        if config.full_heads is not None and not isinstance(ops, NativeOps) and len(self._groups.windows) > 1:
            raise StartupError(f"{config.architecture} needs the CPU kernels: its heads of two sizes share pages")
        sampler = None if ops.make_sampler is None else ops.make_sampler(max_running)
        HostSampling.__init__(self, config.vocab_size, max_running, sampler)
        self._config, self._ops, self._dtype = config, ops, dtype
        self._turns_heads, self._of_linears = turns_heads, ops.adapters
        self._places: PagePlaces | None = None
        self._model = DecoderModel(config, ops, weights, dtype, self._groups)
        self._put_first(adapters)
        spec = make_spec(config, dtype, CPU_KV_DTYPES, quantization, formats, groups=self._groups, adapters=adapters)
        is_native = isinstance(ops, NativeOps)
        self._num_spares = num_state_drafts if is_native else 0
        verifies = is_native and (config.delta_net is None or num_state_drafts > 0)
        self._spec = replace(with_states(spec, num_state_drafts), verifies_drafts=verifies)
        self._max_running = max_running
        self._num_pages = 0
        self._states = CopiedStates()
        self._queue: StepQueue | None = None

    def run_ahead(self) -> None:
        """From now on steps without preparations on the host are queued, if there are native kernels and no states."""
        if isinstance(self._ops, NativeOps) and isinstance(self._sampler, NativeSampler) and not self._config.delta_net:
            self._queue = self._ops.open_queue(self._last_tokens.buffer_info()[0], self._sampler)
            self._spec = replace(self._spec, runs_ahead=True)

    def _drain(self) -> None:
        """Wait for the queued steps. Then the operations may be used."""
        if self._queue is not None:
            self._queue.drain()

    @classmethod
    def describe(cls, model_dir: Path, options: PassOptions) -> PassSpec:
        # Imported here and in `load`: a pass with other weights needs no packages that read checkpoints.
        from penstock.backend.checkpoint.config_json import choose_dtype, read_declared_dtype, read_decoder_config
        from penstock.backend.checkpoint.formats.declared import read_stored_formats
        from penstock.backend.checkpoint.tensor_files.lora_adapter import open_adapters

        check_cpu_path(options.cpu_path)
        config = read_decoder_config(model_dir, options.max_context_tokens, with_mtp=options.guesses_tokens)
        config = with_usable_head(config)
        quantization = find_cpu_quantization(options.quantize)
        if quantization is not None:
            check_sizes(quantization, config)
        dtype = choose_dtype(options.dtype, read_declared_dtype(model_dir) or Dtype.BF16)
        formats, groups = read_stored_formats(model_dir), cpu_groups(config, options)
        with open_adapters(model_dir, options.adapters, config) as adapters:
            spec = make_spec(config, dtype, CPU_KV_DTYPES, quantization, formats, groups=groups, adapters=adapters)
        return with_states(spec, options.num_state_drafts)

    @classmethod
    def load(cls, model_dir: Path, options: PassOptions) -> CpuDecoderPass:
        from penstock.backend.checkpoint.config_json import read_decoder_config
        from penstock.backend.checkpoint.formats.declared import read_stored_formats
        from penstock.backend.checkpoint.tensor_files.lora_adapter import open_adapters, turns_heads

        has_kernels = options.guesses_tokens and load_kernels(options.cpu_path) is not None
        config = with_usable_head(read_decoder_config(model_dir, options.max_context_tokens, with_mtp=has_kernels))
        is_turned = turns_heads(model_dir)
        quantization, formats = find_cpu_quantization(options.quantize), read_stored_formats(model_dir)
        groups = cpu_groups(config, options)

        with open_adapters(model_dir, options.adapters, config) as adapters:

            def build(weights: Weights, dtype: Dtype, ops: CpuOps) -> CpuDecoderPass:
                return cls(
                    config, weights, ops, dtype, options.max_running, quantization, formats, groups, adapters,
                    turns_heads=is_turned, num_state_drafts=options.num_state_drafts,
                )  # fmt: skip

            return cls._load(model_dir, options, config, build)

    @classmethod
    def _load(
        cls,
        model_dir: Path,
        options: PassOptions,
        config: DecoderConfig,
        build: Callable[[Weights, Dtype, CpuOps], LoadedPass],
    ) -> LoadedPass:
        """Return build's pass, which packs the weights, or maps them where an earlier process has left them."""
        from penstock.backend.checkpoint.formats.declared import read_stored_formats
        from penstock.backend.passes.cpu.weight_memory.shared import fingerprint, weight_places
        from penstock.backend.passes.shared_weights.sharing import load_or_map

        rounds_rows = options.quantize == "none" and read_stored_formats(model_dir).rounds_rows

        def pack(weights: Weights, dtype: Dtype, memory: WeightMemory) -> LoadedPass:
            ops = make_cpu_ops(
                config,
                dtype,
                options.max_batch_tokens,
                options.cpu_path,
                deterministic=options.deterministic,
                memory=memory,
                rounds_rows=rounds_rows,
            )
            try:
                return build(weights, dtype, ops)
            except BaseException:
                ops.close()
                raise

        # It may compile for seconds; do that before the progress of the weights starts.
        kernels = load_kernels(options.cpu_path) if supports_native_ops(config) else None
        quantization, is_packed = find_cpu_quantization(options.quantize), kernels is not None

        def load(memory: WeightMemory) -> tuple[LoadedPass, Dtype]:
            from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_served_weights

            with (
                return_freed_memory(),
                open_served_weights(model_dir, config, quantization, keeps_file=not is_packed) as weights,
            ):
                dtype = weights.choose_dtype(options.dtype)
                return pack(weights, dtype, memory), dtype

        if kernels is None:
            return load(AnonymousMemory())[0]
        with weight_places(model_dir, config, options, kernels.path) as places:
            key = fingerprint(model_dir, config, options, kernels.path) if places else ""
            loaded, shared = load_or_map(places, key, config, pack, load, AnonymousMemory)
        loaded.shared_weights = shared
        return loaded

    @classmethod
    def shared_bytes(cls, model_dir: Path, options: PassOptions) -> int:
        """Size of the weights that `load` would map; see `IFindsSharedWeights`. Those in a file are free anyway."""
        from penstock.backend.checkpoint.config_json import read_decoder_config
        from penstock.backend.passes.cpu.weight_memory.shared import mapped_bytes

        if (kernels := load_kernels(options.cpu_path)) is None:
            return 0
        config = read_decoder_config(model_dir, options.max_context_tokens, with_mtp=options.guesses_tokens)
        return mapped_bytes(model_dir, config, options, kernels.path)

    def _num_bytes(self, adapter: PeftAdapter) -> int:
        return adapter.num_values * self._dtype.itemsize

    def put_adapter(self, index: int, adapter: Any) -> None:
        self._drain()
        super().put_adapter(index, adapter)

    @property
    def spec(self) -> PassSpec:
        return self._spec

    @property
    def ops(self) -> CpuOps:
        """The operations. They own the KV cache, and time themselves for benchmarks."""
        return self._ops

    def create_cache(self, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        self._drain()
        self._ops.create_cache(self._groups.num_layers, num_pages, page_size_tokens, kv_dtype)
        self._num_pages = num_pages
        self.create_checkpoints(0)

    def create_checkpoints(self, num_checkpoints: int) -> None:
        if self._ops.delta_net is not None:  # they are the states behind those of slots
            sizes = self._max_running + num_checkpoints, self._num_spares
            self._ops.delta_net.create_states(*sizes)
            arrays = self._ops.delta_net.states
            if self._ops.mtp is not None:
                self._ops.mtp.create_states(*sizes, MAX_GUESSED_ROWS)
                arrays.append(self._ops.mtp.kept)
            self._states = CopiedStates(self._max_running, num_checkpoints, arrays)

    def make_guesser(self) -> GuessPass | None:
        make_sampler, mtp = self._ops.make_sampler, self._ops.mtp
        if make_sampler is None or mtp is None:
            return None
        return GuessPass(self._spec, self._ops, self._model, make_sampler, mtp)

    def persist_pages(self, places: PagePlaces) -> None:
        self._places = places

    @property
    def num_host_pages(self) -> int:
        """Number of host pages. The cache is in host memory itself, so only pages that must outlive the process are
        copied."""
        return 0 if self._places is None else self._places.num_places

    def save_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        self._drain()
        if self._places is not None:
            for page, place in pairs:
                if page < self._num_pages:
                    self._ops.cache.save(page, self._places.place(place))
                else:
                    self._states.save(page - self._num_pages, self._places.place(place))
                self._places.note_written(place)

    def _restore(self, page: int, content: NDArray[np.uint8]) -> None:
        if page < self._num_pages:
            self._ops.cache.restore(page, content)
        else:
            self._states.restore(page - self._num_pages, content)

    def forward(self, batch: StepBatch) -> NDArray[np.float32]:
        if self._queue is not None:
            queued = self._queue.compute(batch)
            if queued is not None:
                return queued
            self._queue.drain()
        check_embeddings(batch)
        check_groups(batch, len(self._groups.windows))
        if self._places is not None:
            for place, page in batch.page_restores:
                self._restore(page, self._places.place(place))
        for checkpoint, slot in batch.state_restores:
            self._states.copy(self._max_running + checkpoint, slot)
        input_ids = self.begin_step(batch)
        if batch.embeddings:
            input_ids = np.maximum(input_ids, 0)  # FROM_EMBEDDINGS is not a row of the table
        step = self._ops.begin_step(batch, input_ids)
        needs_logits = len(batch.logit_rows) > 0 or batch.scored is not None
        logits = self._ops.run_step(step, self._model.forward, needs_logits=needs_logits)
        for slot, checkpoint in batch.state_saves:
            self._states.copy(slot, self._max_running + checkpoint)
        return np.empty((0, self._config.vocab_size), np.float32) if logits is None else logits

    def sample(  # type: ignore[override]  # `HostSampling` is never pending
        self, logits: NDArray[np.float32], batch: StepBatch, masks: TokenMasks | None = None
    ) -> PendingOutput:
        if self._queue is not None and self._queue.is_computing:
            queued = self._queue.sample(batch) if masks is None else None
            if queued is not None:
                return queued
            self._queue.drain()
        output = super().sample(logits, batch, masks)
        if self._states.arrays and batch.drafts is not None:
            self._states.go_back(batch, output.num_accepted)
        return output

    def score(self, logits: NDArray[np.float32], scored: ScoredTokens) -> TokenLogprobs:
        return self._ops.score(self._model.normed, len(logits), scored, self._model.logits)

    def host_logits(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        # The operations reuse their buffer in the next step.
        self._drain()
        return logits.copy()

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    def host_hidden_states(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if not len(logits):
            return np.empty((0, self.hidden_size), np.float32)
        self._drain()
        return self._ops.normed_rows(self._model.normed, len(logits))

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self._ops.close()
        if self.shared_weights is not None:
            self.shared_weights.close()


def make_cpu_ops(
    config: DecoderConfig,
    dtype: Dtype,
    max_batch_tokens: int,
    cpu_path: str = AUTO,
    *,
    deterministic: bool = False,
    memory: WeightMemory | None = None,
    rounds_rows: bool = False,
) -> CpuOps:
    """Return the fastest operations that this machine has for the model. Native ones are always deterministic.

    memory is where native operations pack weights, by default this process's own. rounds_rows: activations of int8
    products have one scale per row, as the checkpoint declares. Raises StartupError if the kernels of
    cpu_path, unless it is "auto", cannot be used.
    """
    unsupported = unsupported_by_kernels(config)
    if unsupported is not None:
        logger.info("The model runs on torch, slowly: the native kernels have no support for %s", unsupported)
    kernels = load_kernels(cpu_path) if unsupported is None else None
    if kernels is not None:
        return NativeOps(
            kernels.library,
            config,
            dtype,
            max_batch_tokens,
            num_usable_cores(),
            SPIN_S,
            uses_tiles=kernels.path.uses_tiles,
            memory=memory,
            rounds_rows=rounds_rows,
        )
    from penstock.backend.passes.cpu.in_torch.deterministic_torch_ops import DeterministicTorchOps
    from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps

    ops = DeterministicTorchOps if deterministic else TorchOps
    return ops(config, dtype.in_torch, rounds_rows=rounds_rows)
