"""Checks the interfaces with CUDA: page-locked shared memory, IPC between processes, memory that outlives a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.memory.page_moves import HostPool
from penstock.backend.passes.cuda.ops.elementwise import Elementwise
from penstock.backend.passes.ops.interface import HeadShape
from penstock.shm.buffers.cuda_driver import DriverDevice
from penstock.shm.buffers.cuda_ipc import BLOCK_BYTES, ExportedDeviceMemory
from penstock.shm.buffers.device_api import DeviceApi, DeviceError, DeviceRow
from penstock.shm.buffers.host_memory import PageLock
from penstock.shm.memory import region
from penstock.shm.memory.fd_mailbox import FdMailbox, close_all
from penstock.tools.gpu.cases.check import require, require_same_bits
from penstock.tools.gpu.checks import peers
from penstock.tools.gpu.devices import device_context
from penstock.tools.gpu.devices.caches import cache_shape, make_page_copier
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.items import Item
from penstock.tools.gpu.results import Results

_LLAMA_PAGES = CacheLayout(32, 256, 32, 8, 128, "bf16")
"""The pages of a Llama 8B, 1 GB."""


def run(results: Results, _item: Item) -> None:
    context = device_context.open_device_context()
    device = DriverDevice(0)  # the CUDA driver API, which the backend uses for its shared buffers
    copies, loads = "the backend copies on the host", "--hold-weights loads the files each time"
    results.agree("sharing.host_pages", partial(check_host_page_copies, context))
    unless_refused(results, "sharing.host", partial(check_host_registration, context, device), copies)
    unless_refused(results, "sharing.ipc", partial(check_ipc, context, device), copies)
    unless_refused(results, "sharing.blocks", partial(check_shared_blocks, context), loads)


def unless_refused(results: Results, name: str, check: Callable[[], tuple[str, None]], otherwise: str) -> None:
    """Run a check. A driver that refuses, as virtual machines do, is a finding; otherwise is what happens then."""

    def attempt() -> None:
        try:
            results.check(name, True, *check())
        except DeviceError as refusal:
            results.fact(name, "refused", "", f"{otherwise}: {refusal}")

    results.attempt(name, attempt)


def check_host_page_copies(context: DeviceContext, layout: CacheLayout = _LLAMA_PAGES) -> tuple[str, None]:
    """Check that pages survive a copy to the host and back to other pages, and that the host sees the saved bytes."""
    count = layout.num_pages // 2
    cache = torch.randint(0, 256, cache_shape(layout), dtype=torch.uint8, device=context.torch_device)
    expected = cache.clone()
    pool = HostPool(context.device, layout, count)
    try:
        pages = torch.arange(count, dtype=torch.int32, device=context.torch_device)
        places = pages.flip(0)
        copy = make_page_copier(context)
        saved = partial(copy, cache, pool.pages, torch.stack([pages, places], dim=1))
        restored = partial(copy, pool.pages, cache, torch.stack([places, pages + count], dim=1))
        rates = [layout.num_bytes / 2 / context.clock.work_us([saved])[0] / 1e3]
        cache[:, :count] = 0xFF
        rates += [layout.num_bytes / 2 / context.clock.work_us([restored])[0] / 1e3]
        context.device.synchronize()
        require_same_bits("the pages in host memory", pool.pages.flip(1), expected[:, :count].cpu())
        require_same_bits("the restored pages", cache[:, count : 2 * count].cpu(), expected[:, :count].cpu())
    finally:
        context.device.synchronize()
        pool.close()
    return f"a kernel saved {count} pages with {rates[0]:.1f} GB/s, and restored them with {rates[1]:.1f}", None


def check_host_registration(context: DeviceContext, device: DeviceApi, num_bytes: int = 32 << 20) -> tuple[str, None]:
    """Check that a memfd, sealed and mapped like a shared buffer, is read in place by stream copies and by a kernel."""
    fd = region.create("gpu-check", num_bytes)
    try:
        region.seal(fd)
        mapping = region.attach(fd, num_bytes, writable=True)
    finally:
        os.close(fd)
    host = torch.frombuffer(mapping, dtype=torch.int32).view(-1, 1024)
    host.copy_(torch.arange(host.numel(), dtype=torch.int32).view_as(host))
    lock = PageLock(device, mapping)
    try:
        copied, out = (torch.zeros(host.shape, dtype=torch.int32, device=context.torch_device) for _ in range(2))
        rows = torch.arange(len(host) - 1, -1, -1, dtype=torch.int32, device=context.torch_device)
        kernels = Elementwise(
            context.device.launcher, HeadShape(2, 1, 64), 256, 64, 1e-5, torch.float32, "bf16", 16, copied.device
        )
        context.device.launcher.prepare(kernels.kernels)
        row = DeviceRow(copied.data_ptr(), context.device.stream)
        lock.copy(0, num_bytes, row)
        kernels.gather_rows(host, rows, out)
        context.device.synchronize()
        require("the copy differs from what the host wrote", torch.equal(copied.cpu(), host.cpu()))
        require("the kernel read something else than the host wrote", torch.equal(out.cpu(), host.flip(0)))
    finally:
        context.device.synchronize()
        lock.close()
    return "copies and a kernel read a registered memfd in place", None


def check_ipc(context: DeviceContext, device: DeviceApi, command: Sequence[str] = peers.COMMAND) -> tuple[str, None]:
    """Check that another process reads what we wrote into two buffers, once their events have passed."""
    memory = ExportedDeviceMemory(device, 2, BLOCK_BYTES)
    try:
        values = torch.arange(BLOCK_BYTES // 8, dtype=torch.float32, device=context.torch_device)
        row = DeviceRow(values.data_ptr(), context.device.stream)
        for index in range(2):
            memory.write(index, 0, values.numel() * 4, row)
            values += 1
        handles = [
            [each.hex() for each in pair] for pair in zip(memory.memory_handles, memory.event_handles, strict=True)
        ]
        given = json.dumps([device.uuid.hex(), BLOCK_BYTES, handles])
        sums, count = json.loads(peers.run_peer(command, 0, given)), BLOCK_BYTES // 8
        expected = [float(np.arange(count, dtype=np.float64).sum() + index * count) for index in range(2)]
        require(f"the peer's sums are {sums}, expected {expected}", sums == expected)
    finally:
        context.device.synchronize()
        memory.free()
    return "another process opened two buffers and their events", None


def check_shared_blocks(
    context: DeviceContext, command: Sequence[str] = peers.COMMAND, block_bytes: int = 256 << 20
) -> tuple[str, None]:
    """Check that memory which a killed process has filled is read here, by a kernel too, and freed with its last
    descriptor. Raises DeviceError if the driver refuses."""
    with contextlib.closing(FdMailbox.create()) as mailbox:
        argv = [*command, context.device.uuid.hex(), *map(str, mailbox.fds), str(block_bytes)]
        context.memory.reset_peak()  # what torch keeps would count as not freed
        free_before = context.memory.free_bytes()
        peers.run_peer(argv, -signal.SIGKILL, pass_fds=mailbox.fds)
        fds = mailbox.find()
    try:
        started_s = time.perf_counter()
        memory = context.device.block_range(len(peers.VALUES) * block_bytes)
        try:
            for fd in fds:
                memory.map(fd, block_bytes)
            mapped_ms = (time.perf_counter() - started_s) * 1e3
            for index, value in enumerate(peers.VALUES):
                found = memory.tensor(index * block_bytes, block_bytes)
                require(f"block {index} has other bytes than {value}", bool((found == value).all()))
            across = memory.read(block_bytes - 4, 8)
            expected = bytes(value for value in peers.VALUES for _ in range(4))
            require(f"the bytes between the blocks are {across.hex()}", across == expected)
        finally:
            context.device.synchronize()
            memory.close()
    finally:
        close_all(fds)
    context.memory.reset_peak()
    kept = free_before - context.memory.free_bytes()
    require(f"{kept} bytes are not freed with the last descriptor", kept < block_bytes)
    return f"memory of a killed process was mapped in {mapped_ms:.1f} ms, read and freed", None
