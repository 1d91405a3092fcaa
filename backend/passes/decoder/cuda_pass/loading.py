"""Reads a checkpoint for a pass on a GPU."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, TypeVar

import torch

from penstock.backend.checkpoint.config_json import choose_dtype, read_declared_dtype
from penstock.backend.checkpoint.fingerprint import packing_fingerprint
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.quantization.modes import find_quantization
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_served_weights
from penstock.backend.checkpoint.tensor_files.lora_adapter import open_adapters, turns_heads
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.passes.cuda.device.device import first_line
from penstock.backend.passes.cuda.device.kernel_choices import adopted_choices
from penstock.backend.passes.cuda.memory.private_weights import PrivateMemory
from penstock.backend.passes.cuda.memory.shared_weights import DeviceMemories, fingerprint_of, mapped_bytes
from penstock.backend.passes.cuda.ops.packed_weights import has_kernels
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import PassSettings, plan_spec, step_sizes
from penstock.backend.passes.shared_weights.blocks import SharedWeightsError
from penstock.backend.passes.shared_weights.memory_trimming import return_freed_memory
from penstock.backend.passes.shared_weights.sharing import load_or_map
from penstock.shm.memory.fd_mailbox import FdMailbox, close_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Protocol

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.forward_pass import PassOptions, PassSpec
    from penstock.backend.passes.cuda.device.device import Device
    from penstock.backend.passes.cuda.memory.private_weights import DeviceMemory
    from penstock.backend.passes.ops.interface import Weights
    from penstock.backend.passes.shared_weights.watch import WatchedWeights

    class _Loaded(Protocol):
        shared_weights: WatchedWeights | None


logger = logging.getLogger("penstock.backend")

P = TypeVar("P", bound="_Loaded")


def describe_checkpoint(model_dir: Path, config: DecoderConfig, options: PassOptions) -> PassSpec:
    """Describe the pass. config is the checkpoint's, or was made from it. Raises StartupError."""
    dtype = choose_dtype(options.dtype, read_declared_dtype(model_dir) or Dtype.BF16, Dtype.FP16)
    quantization, formats = find_quantization(options.quantize), read_stored_formats(model_dir)
    with open_adapters(model_dir, options.adapters, config) as adapters:
        sizes = step_sizes(config, options, dtype.in_torch, adapters)
        return plan_spec(config, dtype.in_torch, sizes, quantization, formats, adapters)


def load_pass(
    model_dir: Path,
    config: DecoderConfig,
    options: PassOptions,
    device: Device,
    build: Callable[[Weights, PassSettings, DeviceMemory], P],
) -> P:
    """Return build's pass.

    If the options ask for it, its weights outlive this process, or come from an earlier one. Raises StartupError, also
    if the weights do not fit the GPU.
    """
    quantization, formats = find_quantization(options.quantize), read_stored_formats(model_dir)
    choices, source = adopted_choices(options.device)
    logger.info("kernels on %s: %s (%s)", options.device, choices.of_kernels(), source)

    def pack(weights: Weights, dtype: Dtype, memory: DeviceMemory) -> P:
        try:
            with open_adapters(model_dir, options.adapters, config) as adapters:
                settings = PassSettings(
                    dtype.in_torch, step_sizes(config, options, dtype.in_torch, adapters), options.host_kv_bytes,
                    quantization, formats, adapters, turns_heads(model_dir),
                )  # fmt: skip
                return build(weights, settings, memory)
        except torch.OutOfMemoryError as error:
            raise StartupError(f"the weights and workspace do not fit the GPU: {first_line(error)}") from error

    def load(memory: DeviceMemory) -> tuple[P, Dtype]:
        with return_freed_memory(), open_served_weights(model_dir, config, quantization, has_kernels) as weights:
            dtype = weights.choose_dtype(options.dtype, Dtype.FP16)
            return pack(weights, dtype, memory), dtype

    if options.weights_fds is None:
        return load(PrivateMemory())[0]
    planned_bytes = describe_checkpoint(model_dir, config, options).weight_bytes
    with contextlib.closing(FdMailbox.attach(options.weights_fds)) as mailbox:
        fingerprint = _fingerprint(model_dir, options, device.uuid)
        memories = DeviceMemories(device, planned_bytes)
        loaded, shared = load_or_map([(mailbox, memories)], fingerprint, config, pack, load, PrivateMemory)
    loaded.shared_weights = shared
    return loaded


def find_shared_bytes(model_dir: Path, options: PassOptions, device_uuid: bytes) -> int:
    """Return how much device memory the weights take that `load_pass` would map. Free other shared weights."""
    if options.weights_fds is None:
        return 0
    fingerprint = _fingerprint(model_dir, options, device_uuid)
    # Locked, because the weights of a backend that packs them now count when it has finished.
    with contextlib.closing(FdMailbox.attach(options.weights_fds)) as mailbox, mailbox.locked():
        fds = mailbox.find()
        try:
            if fds and fingerprint_of(fds) == fingerprint:
                return mapped_bytes(fds)
        except SharedWeightsError as error:
            logger.error("the shared weights cannot be used: %s", error)
        finally:
            close_all(fds)
        mailbox.clear()
        return 0


def _fingerprint(model_dir: Path, options: PassOptions, device_uuid: bytes) -> str:
    return packing_fingerprint(model_dir, ("cuda", device_uuid.hex(), options.task, options.dtype, options.quantize))
