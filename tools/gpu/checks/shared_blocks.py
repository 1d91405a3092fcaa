"""Checks device memory that outlives its process, which `--hold-weights` uses on a GPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from penstock.shm.buffers.cuda_blocks import DeviceBlocks
from penstock.shm.buffers.cuda_driver import DriverDevice, open_device
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.memory.fd_mailbox import FdMailbox, close_all
from penstock.tools.gpu.cases.check import require
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.results import Results

PEER = (sys.executable, "-m", "penstock.tools.gpu.checks.shared_blocks")
REFUSED_STATUS = 3
"""The peer's exit status if the driver refuses; its output is the reason."""
_VALUES = (0x11, 0x2E)
_PEER_TIMEOUT_S = 60.0


def fill_and_die(device: DriverDevice, mailbox: FdMailbox, block_bytes: int) -> None:
    """Fill a block with each of the values, leave both, and end without any cleaning up. Raises DeviceError."""
    blocks = DeviceBlocks(device, len(_VALUES) * block_bytes)
    fds = [blocks.add(block_bytes) for _ in _VALUES]
    for index, value in enumerate(_VALUES):
        device.fill(blocks.pointer + index * block_bytes, value, block_bytes)
    mailbox.leave(fds)
    os.kill(os.getpid(), signal.SIGKILL)


def run_peer(argv: Sequence[str], ends_with: int, given: str = "", pass_fds: Sequence[int] = ()) -> str:
    """Run the other process of a check; return its output. Raises DeviceError if the driver refuses there."""
    done = subprocess.run(
        argv, input=given, pass_fds=pass_fds, capture_output=True, text=True, check=False, timeout=_PEER_TIMEOUT_S
    )
    if done.returncode == REFUSED_STATUS:
        raise DeviceError(f"in the other process: {done.stdout.strip()[:300]}")
    if done.returncode != ends_with:
        last = done.stderr.strip().rpartition("\n")[2][:300] or "no error output"
        raise RuntimeError(f"the peer failed: {last}")
    return done.stdout


def check_shared_blocks(
    results: Results, context: DeviceContext, command: Sequence[str] = PEER, block_bytes: int = 256 << 20
) -> None:
    """Check that memory which a killed process has filled is read here, by a kernel too, and freed with its last
    descriptor. Raises DeviceError if the driver refuses."""
    with contextlib.closing(FdMailbox.create()) as mailbox:
        argv = [*command, context.device.uuid.hex(), *map(str, mailbox.fds), str(block_bytes)]
        context.memory.reset_peak()  # what torch keeps would count as not freed
        free_before = context.memory.free_bytes()
        run_peer(argv, ends_with=-signal.SIGKILL, pass_fds=mailbox.fds)
        fds = mailbox.find()
    try:
        started_s = time.perf_counter()
        memory = context.device.block_range(len(_VALUES) * block_bytes)
        try:
            for fd in fds:
                memory.map(fd, block_bytes)
            results.fact(
                "sharing.blocks.map", (time.perf_counter() - started_s) * 1e3, "ms",
                f"until {len(fds)} blocks of {block_bytes >> 20} MiB are mapped",
            )  # fmt: skip
            for index, value in enumerate(_VALUES):
                found = memory.tensor(index * block_bytes, block_bytes)
                require(f"block {index} has other bytes than {value}", bool((found == value).all()))
            across = memory.read(block_bytes - 4, 8)
            require(
                f"the bytes between the blocks are {across.hex()}", across == bytes([_VALUES[0]] * 4 + [_VALUES[1]] * 4)
            )
        finally:
            context.device.synchronize()
            memory.close()
    finally:
        close_all(fds)
    context.memory.reset_peak()
    kept = free_before - context.memory.free_bytes()
    require(f"{kept} bytes are not freed with the last descriptor", kept < block_bytes)
    results.check("sharing.blocks", True, "memory of a killed process was mapped, read and freed")


def main(library: str = "libcuda.so.1") -> int:
    """The process that leaves memory behind: arguments are the device's UUID, the mailbox's fds and a block's size."""
    uuid, inlet, outlet, block_bytes = sys.argv[1:5]
    mailbox = FdMailbox.attach((int(inlet), int(outlet)))
    try:
        fill_and_die(open_device(bytes.fromhex(uuid), library), mailbox, int(block_bytes))
    except DeviceError as refusal:
        print(refusal)
    return REFUSED_STATUS


if __name__ == "__main__":
    sys.exit(main())
