"""--shared-buffers: the kinds of shared memory that a pass and its device support, and the exporter for them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass.extensions import IDeviceHiddenStates, IDeviceLogits, IHiddenStates
from penstock.shm.buffers.buffer_export import BufferExporter
from penstock.shm.buffers.cuda_driver import DriverDevice
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.messages import BufferContent, BufferKind, ContentSpec

if TYPE_CHECKING:
    from penstock.backend.forward_pass import IBatchedForwardPass
    from penstock.shm.buffers.device_api import DeviceApi

logger = logging.getLogger("penstock.backend")


def check_shared_buffers(choice: str, device: str) -> None:
    """Raises StartupError if the pass's device does not support --shared-buffers. Called before anything is loaded."""
    if choice == "cuda" and device == "cpu":
        raise StartupError('--shared-buffers is "cuda"; the model runs on the CPU: use "host" or "auto"')


def open_sharing_device(device: str) -> DeviceApi | None:
    """The pass's GPU, for shared buffers. None on the CPU, and after a warning when the driver refuses."""
    if device == "cpu":
        return None
    try:
        return DriverDevice(int(device.removeprefix("cuda:")))
    except DeviceError as error:
        logger.warning("shared buffers are not available on %s, only on the host: %s", device, error)
        return None


def make_exporter(
    choice: str, budget_bytes: int, forward_pass: IBatchedForwardPass, device: DeviceApi | None
) -> BufferExporter:
    """Return the exporter. choice is --shared-buffers; device is the pass's, None on the CPU. Raises StartupError."""
    has_device_outputs = device is not None and isinstance(forward_pass, IDeviceLogits)
    if choice == "cuda" and not has_device_outputs:
        raise StartupError(
            '--shared-buffers is "cuda"; this forward pass shares nothing on a GPU: use "host" or "auto"'
        )
    kinds = {"cuda": (BufferKind.CUDA,), "host": (BufferKind.HOST,)}.get(
        choice, (BufferKind.CUDA, BufferKind.HOST) if has_device_outputs else (BufferKind.HOST,)
    )
    contents: tuple[ContentSpec, ...] = (ContentSpec(BufferContent.TOKENS, 1, "<i4"),)
    if forward_pass.spec.generates:
        contents += (ContentSpec(BufferContent.LOGITS, forward_pass.spec.vocab_size, "<f4"),)
    # Each content is offered in every kind of memory, or not at all.
    if isinstance(forward_pass, IDeviceHiddenStates if BufferKind.CUDA in kinds else IHiddenStates):
        contents += (ContentSpec(BufferContent.HIDDEN_STATES, forward_pass.hidden_size, "<f4"),)
    if embedding_size := forward_pass.spec.embedding_size:
        contents += (ContentSpec(BufferContent.PROMPT_EMBEDDINGS, embedding_size, "<f4"),)
    # A pass without outputs on the device reads prompts on the host.
    return BufferExporter(kinds, contents, budget_bytes, device if has_device_outputs else None)
