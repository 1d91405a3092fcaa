"""Shared buffers in the engine: clients on this machine receive outputs and give prompts without copies through
messages.

Rows of a step's logits and hidden states are written to the clients' buffers, and embeddings in them are prompts of a
pass. --shared-buffers chooses at start which kinds of memory and which contents are offered. The buffers themselves are
in `penstock.shm.buffers`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import DeviceRows, IBatchedForwardPass
from penstock.backend.forward_pass.extensions import IDeviceHiddenStates, IDeviceLogits, IHiddenStates, read_host_logits
from penstock.backend.scheduling.step_plan import Plan
from penstock.shm.buffers.buffer_export import BufferExporter, Loan
from penstock.shm.buffers.cuda_driver import DriverDevice
from penstock.shm.buffers.device_api import DeviceApi, DeviceError, DeviceRow
from penstock.shm.messages import BufferContent, BufferKind, ContentSpec

_OUTPUT = attrgetter("output")


def share_outputs(forward_pass: IBatchedForwardPass, logits: Any, plan: Plan) -> None:
    """Write the rows that clients requested. Call it between `forward` and `sample`, on their thread.

    logits is the handle that `forward` returned. Raises DeviceError when a copy on the device cannot be launched.
    """
    if not any(map(_OUTPUT, plan.sequences)):  # the usual case, so it must be fast
        return
    on_host: dict[bool, NDArray[np.float32]] = {}
    on_device: dict[bool, DeviceRows] = {}
    for row, index in enumerate(plan.logit_rows):
        sequence = plan.sequences[index]
        loan, generated_index = sequence.output, plan.ends[index] - sequence.num_prompt_tokens
        if loan is None or not loan.needs_row(generated_index):
            continue
        hidden = loan.holds_hidden_states
        if loan.is_on_device:
            if hidden not in on_device:
                on_device[hidden] = _device_rows(forward_pass, logits, hidden=hidden)
            rows = on_device[hidden]
            loan.write(generated_index, DeviceRow(rows.pointer + row * loan.row_bytes, rows.stream))
        else:
            if hidden not in on_host:
                on_host[hidden] = _host_rows(forward_pass, logits, hidden=hidden)
            loan.write(generated_index, np.ascontiguousarray(on_host[hidden][row], np.float32).data)


# Clients can request only what `make_exporter` found the pass to have, so the casts below hold.


def _host_rows(forward_pass: IBatchedForwardPass, logits: Any, *, hidden: bool) -> NDArray[np.float32]:
    if hidden:
        return cast("IHiddenStates", forward_pass).host_hidden_states(logits)
    return read_host_logits(forward_pass, logits)


def _device_rows(forward_pass: IBatchedForwardPass, logits: Any, *, hidden: bool) -> DeviceRows:
    if hidden:
        return cast("IDeviceHiddenStates", forward_pass).device_hidden_states(logits)
    return cast("IDeviceLogits", forward_pass).device_logits(logits)


@dataclass(frozen=True, slots=True)
class SharedPromptRows:
    """`EmbeddingRows` in a client's buffer."""

    loan: Loan
    first: int
    num_rows: int

    @property
    def device_reads(self) -> bool:
        return self.loan.device_reads

    def read(self) -> NDArray[np.float32]:
        return np.frombuffer(self.loan.read_rows(self.first, self.num_rows), np.float32).reshape(self.num_rows, -1)

    def copy_to(self, there: DeviceRows) -> None:
        self.loan.copy_rows(self.first, self.num_rows, DeviceRow(there.pointer, there.stream))


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
