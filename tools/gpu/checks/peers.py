"""The other processes of `sharing.py`: one reads our buffers, one dies and leaves memory behind. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from penstock.shm.buffers.cuda_blocks import DeviceBlocks
from penstock.shm.buffers.cuda_driver import DriverDevice, open_device
from penstock.shm.buffers.cuda_ipc import ImportedDeviceMemory
from penstock.shm.buffers.device_api import DeviceError, OpenDevice
from penstock.shm.memory.fd_mailbox import FdMailbox

COMMAND = (sys.executable, "-m", "penstock.tools.gpu.checks.peers")
VALUES = (0x11, 0x2E)
"""Bytes of the blocks that are left behind."""
_REFUSED_STATUS = 3
"""The exit status if the driver refuses; the output is the reason."""
_TIMEOUT_S = 60.0


def run_peer(argv: Sequence[str], ends_with: int, given: str = "", pass_fds: Sequence[int] = ()) -> str:
    """Run the other process of a check; return its output. Raises DeviceError if the driver refuses there."""
    done = subprocess.run(
        argv, input=given, pass_fds=pass_fds, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if done.returncode == _REFUSED_STATUS:
        raise DeviceError(f"in the other process: {done.stdout.strip()[:300]}")
    if done.returncode != ends_with:
        last = done.stderr.strip().rpartition("\n")[2][:300] or "no error output"
        raise RuntimeError(f"the peer failed: {last}")
    return done.stdout


def fill_and_die(device: DriverDevice, mailbox: FdMailbox, block_bytes: int) -> None:
    """Fill a block with each of the values, leave both, and end without any cleaning up. Raises DeviceError."""
    blocks = DeviceBlocks(device, len(VALUES) * block_bytes)
    fds = [blocks.add(block_bytes) for _ in VALUES]
    for index, value in enumerate(VALUES):
        device.fill(blocks.pointer + index * block_bytes, value, block_bytes)
    mailbox.leave(fds)
    os.kill(os.getpid(), signal.SIGKILL)


def read_sums(uuid: str, num_bytes: int, handles: list[tuple[str, str]], open_peer: OpenDevice) -> list[float]:
    """Sum the float32 values in each buffer's first half, after its event has passed. handles: memory and event."""
    memory_handles, event_handles = (tuple(map(bytes.fromhex, each)) for each in zip(*handles, strict=True))
    grant: Any = SimpleNamespace(  # as a `BufferGrant`, without msgspec
        memory_handles=memory_handles, event_handles=event_handles, num_buffers=len(handles), num_bytes=num_bytes,
        device_uuid=bytes.fromhex(uuid),
    )  # fmt: skip
    memory = ImportedDeviceMemory(grant, open_peer)
    sums = []
    for index, (pointer, event) in enumerate(zip(memory.pointers, memory.events, strict=True)):
        memory.device.synchronize(event)
        read = memory.device.read(pointer, num_bytes // 2)
        sums.append(float(np.frombuffer(read, np.float32).astype(np.float64).sum()))
        memory.close(index)
    return sums


def main(argv: Sequence[str], library: str = "libcuda.so.1", open_peer: OpenDevice = open_device) -> int:
    """Without arguments read the buffers whose handles come in JSON. Else leave blocks: the arguments are the device's
    UUID, the mailbox's fds and a block's size."""
    try:
        if argv:
            uuid, inlet, outlet, block_bytes = argv
            mailbox = FdMailbox.attach((int(inlet), int(outlet)))
            fill_and_die(open_device(bytes.fromhex(uuid), library), mailbox, int(block_bytes))
        uuid, num_bytes, handles = json.load(sys.stdin)
        print(json.dumps(read_sums(uuid, num_bytes, handles, open_peer)))
    except DeviceError as refusal:
        print(refusal)
        return _REFUSED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
