"""What a pass on a GPU reads from a checkpoint."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from penstock.backend.checkpoint.config_json import read_declared_dtype
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.quantization.modes import find_quantization
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_served_weights
from penstock.backend.checkpoint.weights import choose_dtype
from penstock.backend.errors import StartupError
from penstock.backend.passes.decoder.cuda.device.device import first_line
from penstock.backend.passes.decoder.cuda.device.kernel_choices import adopted_choices
from penstock.backend.passes.decoder.cuda.ops.packed_weights import has_kernels
from penstock.backend.passes.decoder.cuda.workspace_plan import PassSettings, plan_spec, step_sizes
from penstock.backend.passes.decoder.memory_trimming import return_freed_memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.backend.checkpoint.decoder_config import DecoderConfig
    from penstock.backend.forward_pass import PassOptions, PassSpec
    from penstock.backend.passes.decoder.model import Weights

logger = logging.getLogger("penstock.backend")


def describe_checkpoint(model_dir: Path, config: DecoderConfig, options: PassOptions) -> PassSpec:
    """config: that of the checkpoint, or one that was made from it. Raises StartupError."""
    dtype = choose_dtype(options.dtype, read_declared_dtype(model_dir) or torch.bfloat16, torch.float16)
    quantization = find_quantization(options.quantize)
    return plan_spec(config, dtype, step_sizes(config, options), quantization, read_stored_formats(model_dir))


@contextmanager
def open_checkpoint(
    model_dir: Path, config: DecoderConfig, options: PassOptions
) -> Iterator[tuple[Weights, PassSettings]]:
    """The weights, for as long as a pass is made from them. Raises StartupError, also if they do not fit the GPU."""
    quantization = find_quantization(options.quantize)
    with return_freed_memory(), open_served_weights(model_dir, config, quantization, has_kernels) as weights:
        dtype, formats = weights.choose_dtype(options.dtype, torch.float16), read_stored_formats(model_dir)
        settings = PassSettings(dtype, step_sizes(config, options), options.host_kv_bytes, quantization, formats)
        choices, source = adopted_choices(options.device)
        logger.info("kernels on %s: %s (%s)", options.device, choices.of_kernels(), source)
        try:
            yield weights, settings
        except torch.OutOfMemoryError as error:
            raise StartupError(f"the weights and workspace do not fit the GPU: {first_line(error)}") from error
