"""The other process of the IPC check: opens the buffers named on stdin and prints the sums of their contents."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from penstock.shm.buffers.cuda_driver import open_device
from penstock.shm.buffers.cuda_ipc import ImportedDeviceMemory
from penstock.shm.buffers.device_api import DeviceError
from penstock.tools.gpu_check.checks.sharing import REFUSED_STATUS, IpcHandles

if TYPE_CHECKING:
    from penstock.shm.buffers.device_api import OpenDevice
    from penstock.shm.messages import BufferGrant


@dataclass(frozen=True)
class _Grant:
    """The fields of a `BufferGrant` needed to open buffers, without msgspec."""

    memory_handles: tuple[bytes, ...]
    event_handles: tuple[bytes, ...]
    num_buffers: int
    num_bytes: int
    device_uuid: bytes


def read_sums(handles: IpcHandles, open_peer: OpenDevice) -> list[float]:
    """Sum the float32 values in each buffer's first half, after its event has passed."""
    grant = _Grant(
        tuple(map(bytes.fromhex, handles.memory)),
        tuple(map(bytes.fromhex, handles.events)),
        len(handles.memory),
        handles.num_bytes,
        bytes.fromhex(handles.device_uuid),
    )
    memory = ImportedDeviceMemory(cast("BufferGrant", grant), open_peer)
    sums = []
    for index, (pointer, event) in enumerate(zip(memory.pointers, memory.events, strict=True)):
        memory.device.synchronize(event)
        read = memory.device.read(pointer, handles.num_bytes // 2)
        sums.append(float(np.frombuffer(read, np.float32).astype(np.float64).sum()))
        memory.close(index)
    return sums


def main() -> int:
    try:
        print(json.dumps(read_sums(IpcHandles(**json.load(sys.stdin)), open_device)))
    except DeviceError as refusal:
        print(refusal)
        return REFUSED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
