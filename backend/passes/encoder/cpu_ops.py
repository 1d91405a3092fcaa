"""Chooses the operations and the dtype of an encoder on the CPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from penstock.backend.errors import StartupError
from penstock.backend.passes.cpu.library.cpu_paths import read_cpu_info, supported_paths
from penstock.backend.passes.cpu.library.thread_counts import num_usable_cores
from penstock.backend.passes.cpu.path_choice import AUTO, check_cpu_path, load_kernels
from penstock.backend.passes.decoder.cpu_pass import SPIN_S
from penstock.backend.passes.encoder.native_ops import NativeEncoderOps, unsupported_by_kernels
from penstock.backend.passes.encoder.torch_ops import TorchEncoderOps

if TYPE_CHECKING:
    from penstock.backend.checkpoint.encoders.encoder_config import EncoderConfig
    from penstock.backend.forward_pass import PassOptions
    from penstock.backend.passes.encoder.ops import EncoderOps

logger = logging.getLogger("penstock.backend")

_FAST_BF16_PATHS = ("amx", "avx512_bf16", "neon_bf16")
"""Paths whose products of bf16 are instructions of their own."""


def choose_dtype(config: EncoderConfig, options: PassOptions) -> torch.dtype:
    """The dtype to compute in; "auto" is bf16 where the kernels multiply it faster than fp32. Raises StartupError."""
    match options.dtype:
        case "bf16":
            return torch.bfloat16
        case "fp32":
            return torch.float32
        case "auto":
            check_cpu_path(options.cpu_path)
            paths = [path.name for path in supported_paths(read_cpu_info())]
            path = options.cpu_path if options.cpu_path != AUTO else next(iter(paths), "")
            is_fast = path in _FAST_BF16_PATHS and unsupported_by_kernels(config) is None
            return torch.bfloat16 if is_fast else torch.float32
    raise StartupError(f"dtype is {options.dtype!r}; it must be auto, bf16 or fp32")


def make_encoder_ops(config: EncoderConfig, dtype: torch.dtype, options: PassOptions) -> EncoderOps:
    """Return the fastest operations that this machine has for the model.

    Raises StartupError if the kernels of options.cpu_path, unless it is "auto", cannot be used.
    """
    unsupported = unsupported_by_kernels(config)
    if unsupported is not None:
        logger.info("The model runs on torch, slowly: the native kernels have no support for %s", unsupported)
        return TorchEncoderOps(config, dtype)
    kernels = load_kernels(options.cpu_path)
    if kernels is None:
        return TorchEncoderOps(config, dtype)
    return NativeEncoderOps(
        kernels.library, config, dtype, num_usable_cores(), SPIN_S, uses_tiles=kernels.path.uses_tiles
    )
