"""The process that leaves memory behind: arguments are the device's UUID, the mailbox's fds and the size of a block."""

from __future__ import annotations

import sys

from penstock.shm.buffers.cuda_driver import open_device
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.memory.fd_mailbox import FdMailbox
from penstock.tools.gpu_check.checks.held_blocks import REFUSED_STATUS, fill_and_die


def main(library: str = "libcuda.so.1") -> int:
    uuid, inlet, outlet, block_bytes = sys.argv[1:5]
    mailbox = FdMailbox.attach((int(inlet), int(outlet)))
    try:
        fill_and_die(open_device(bytes.fromhex(uuid), library), mailbox, int(block_bytes))
    except DeviceError as refusal:
        print(refusal)
    return REFUSED_STATUS


if __name__ == "__main__":
    sys.exit(main())
