"""What clients get besides tokens: rows of a step's output, written to the buffers that they lent for them."""

from __future__ import annotations

import logging
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from backend.errors import StartupError
from backend.forward_pass import IDeviceLogits
from shm.buffer_export import BufferExporter
from shm.cuda_driver import DriverDevice
from shm.device_api import DeviceError, DeviceRow
from shm.wire import BufferContent, BufferKind, ContentSpec

if TYPE_CHECKING:
    from backend.forward_pass import IBatchedForwardPass
    from backend.plan import Plan
    from shm.device_api import DeviceApi

_OUTPUT = attrgetter("output")

_log = logging.getLogger("penstock.backend")


def share_outputs(forward_pass: IBatchedForwardPass, logits: Any, plan: Plan) -> None:
    """To be called between `forward` and `sample`, on their thread; logits are those of plan.logit_rows.

    Raises DeviceError where a copy on the device cannot be launched.
    """
    if not any(map(_OUTPUT, plan.sequences)):  # nearly always, so at next to no cost
        return
    on_device = on_host = None
    for row, index in enumerate(plan.logit_rows):
        sequence = plan.sequences[index]
        loan, generated_index = sequence.output, plan.ends[index] - sequence.num_prompt_tokens
        if loan is None or not loan.wants(generated_index):
            continue
        if not loan.is_on_device:
            on_host = forward_pass.host_logits(logits) if on_host is None else on_host
            loan.write(generated_index, np.ascontiguousarray(on_host[row], np.float32).data)
        elif isinstance(forward_pass, IDeviceLogits):
            on_device = forward_pass.device_logits(logits) if on_device is None else on_device
            loan.write(generated_index, DeviceRow(on_device.pointer + row * loan.row_bytes, on_device.stream))


def check_choice(choice: str, device: str) -> None:
    """Raises StartupError where --shared-buffers cannot be had on the pass's device, before anything is loaded."""
    if choice == "cuda" and device == "cpu":
        raise StartupError('--shared-buffers is "cuda"; the model runs on the CPU: use "host" or "auto"')


def open_device_of(device: str) -> DeviceApi | None:
    """For shared buffers and page-locked arenas: the pass's GPU. None on the CPU, and where the driver will not."""
    if device == "cpu":
        return None
    try:
        return DriverDevice(int(device.removeprefix("cuda:")))
    except DeviceError as error:
        _log.warning("no memory is shared on %s: %s", device, error)
        return None


def make_exporter(
    choice: str, budget_bytes: int, forward_pass: IBatchedForwardPass, device: DeviceApi | None
) -> BufferExporter:
    """choice is --shared-buffers; device is the pass's, None on the CPU. Raises StartupError."""
    has_device_outputs = device is not None and isinstance(forward_pass, IDeviceLogits)
    if choice == "cuda" and not has_device_outputs:
        raise StartupError('--shared-buffers is "cuda"; this forward pass shares nothing there: use "host" or "auto"')
    kinds = {"cuda": (BufferKind.CUDA,), "host": (BufferKind.HOST,)}.get(
        choice, (BufferKind.CUDA, BufferKind.HOST) if has_device_outputs else (BufferKind.HOST,)
    )
    contents = (
        ContentSpec(BufferContent.TOKENS, 1, "<i4"),
        ContentSpec(BufferContent.LOGITS, forward_pass.spec.vocab_size, "<f4"),
    )
    return BufferExporter(kinds, contents, budget_bytes, device)
