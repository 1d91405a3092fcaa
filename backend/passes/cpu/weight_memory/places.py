"""The places where a pass on the CPU finds packed weights, and leaves them for later processes."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import torch

from penstock.backend.checkpoint.config_json import read_declared_dtype
from penstock.backend.checkpoint.fingerprint import packing_fingerprint
from penstock.backend.checkpoint.formats.declared import read_stored_formats
from penstock.backend.checkpoint.quantization.modes import find_cpu_quantization, packed_linears, weight_bytes
from penstock.backend.checkpoint.weights import choose_dtype
from penstock.backend.passes.cpu.weight_memory.held import CpuMemories, create_memfd
from penstock.backend.passes.held_weights.packed_file import PackedFile
from penstock.process.private_directory import UnsafeDirectory
from penstock.shm.memory.fd_mailbox import FdMailbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
    from penstock.backend.forward_pass import PassOptions
    from penstock.backend.passes.cpu.library.cpu_paths import CpuPath
    from penstock.backend.passes.held_weights.blocks import WeightStore

logger = logging.getLogger("penstock.backend")


@contextlib.contextmanager
def weight_places(
    model_dir: Path, config: DecoderConfig, options: PassOptions, path: CpuPath
) -> Iterator[list[tuple[WeightStore, CpuMemories]]]:
    """A file, if the weights are worth one, and the server's mailbox, if it has one."""
    places: list[tuple[WeightStore, CpuMemories]] = []
    file = packed_file(model_dir, config, options, path)
    if file is not None:
        places.append((file, CpuMemories(file.create)))
    with contextlib.ExitStack() as closer:
        if options.weights_fds is not None:
            mailbox = closer.enter_context(contextlib.closing(FdMailbox.attach(options.weights_fds)))
            places.append((mailbox, CpuMemories(create_memfd)))
        yield places


def fingerprint(model_dir: Path, options: PassOptions, path: CpuPath) -> str:
    return packing_fingerprint(model_dir, _settings(options, path))


def _settings(options: PassOptions, path: CpuPath) -> tuple[object, ...]:
    """The options that determine what is packed, and how."""
    return options.task, options.dtype, options.quantize, path.name, path.uses_tiles


def packed_file(model_dir: Path, config: DecoderConfig, options: PassOptions, path: CpuPath) -> PackedFile | None:
    """The file for weights with quantised linears; None for others, which are packed about as fast as a file is read
    and would take their size on the disk again."""
    quantization, formats = find_cpu_quantization(options.quantize), read_stored_formats(model_dir)
    if not packed_linears(config, quantization, formats):
        return None
    dtype = choose_dtype(options.dtype, read_declared_dtype(model_dir) or torch.bfloat16)
    num_bytes = weight_bytes(config, dtype, quantization, formats)
    try:
        return PackedFile.of(model_dir, _settings(options, path), num_bytes)
    except (OSError, UnsafeDirectory) as error:
        logger.warning("the packed weights cannot be kept: %s; the next start packs them again", error)
        return None
