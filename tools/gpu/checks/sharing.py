"""Checks the interfaces with CUDA and torch: captured launches, page-locked shared memory, IPC between processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.memory.page_moves import HostPool
from penstock.backend.passes.cuda.ops.elementwise import Elementwise
from penstock.backend.passes.ops.interface import HeadShape
from penstock.shm.buffers.cuda_driver import DriverDevice, open_device
from penstock.shm.buffers.cuda_ipc import BLOCK_BYTES, ExportedDeviceMemory, ImportedDeviceMemory
from penstock.shm.buffers.device_api import DeviceApi, DeviceError, DeviceRow, OpenDevice
from penstock.shm.buffers.host_memory import PageLock
from penstock.shm.memory import region
from penstock.tools.gpu.cases.check import require, require_close, require_same_bits
from penstock.tools.gpu.checks.shared_blocks import REFUSED_STATUS, check_shared_blocks, run_peer
from penstock.tools.gpu.devices.caches import cache_shape, make_page_copier
from penstock.tools.gpu.devices.device_context import DeviceContext, open_device_context
from penstock.tools.gpu.results import Results

_PEER = (sys.executable, "-m", "penstock.tools.gpu.checks.sharing")


@dataclass(frozen=True)
class IpcHandles:
    """Handles with which a peer opens the buffers. Bytes are in hexadecimal, because they travel as JSON."""

    memory: list[str]
    events: list[str]
    num_bytes: int
    device_uuid: str


def run(results: Results) -> None:
    context = open_device_context()
    results.attempt("sharing.graph", partial(check_graph, results, context))
    results.attempt("sharing.host_pages", partial(check_host_page_copies, results, context))
    # The CUDA driver API, which the backend uses for its shared buffers.
    device = DriverDevice(0)
    host = partial(check_host_registration, results, context, device)
    results.attempt("sharing.host", partial(unless_refused, results, "sharing.host", host))
    ipc = partial(check_ipc, results, context, device, _PEER)
    results.attempt("sharing.ipc", partial(unless_refused, results, "sharing.ipc", ipc))
    blocks = partial(check_shared_blocks, results, context)
    otherwise = "--hold-weights loads the files each time"
    results.attempt("sharing.blocks", partial(unless_refused, results, "sharing.blocks", blocks, otherwise))


def unless_refused(
    results: Results, name: str, check: Callable[[], None], otherwise: str = "the backend copies on the host"
) -> None:
    """Run a check. A driver that refuses, as virtual machines do, is a finding; otherwise is what happens then."""
    try:
        check()
    except DeviceError as refusal:
        results.fact(name, "refused", "", f"{otherwise}: {refusal}")


def check_graph(results: Results, context: DeviceContext) -> None:
    """Check that one graph of our kernels and torch's products computes on the buffers' new values at each replay."""
    hidden, rows = 256, 5
    elementwise = _elementwise(context, hidden)
    weight, norm = (
        torch.randn(hidden, hidden, device=context.torch_device),
        torch.ones(hidden, device=context.torch_device),
    )
    residual = torch.zeros(rows, hidden, device=context.torch_device)
    normed, product = torch.empty_like(residual), torch.empty_like(residual)

    def work() -> None:
        elementwise.add_rms_norm(residual, None, norm, normed)
        torch.mm(normed, weight, out=product)

    work()
    context.device.synchronize()
    graph = context.device.capture(work)
    for _ in range(3):
        residual.normal_()
        graph.replay()
        context.device.synchronize()
        x = residual.double()
        expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() @ weight.double()
        require_close("the graph's product", product.cpu(), expected.cpu(), 1e-3, 1e-2)
    results.check("sharing.graph", True, "our kernels and torch's products are replayed on new values")


def check_host_page_copies(results: Results, context: DeviceContext) -> None:
    """Check that pages survive a copy to the host and back to other pages, and that the host sees the saved bytes."""
    layout = CacheLayout(3, 40, 16, 2, 64, "bf16")
    count = layout.num_pages // 2
    cache = torch.randint(0, 256, cache_shape(layout), dtype=torch.uint8, device=context.torch_device)
    expected = cache.clone()
    pool = HostPool(context.device, layout, count)
    try:
        pages = torch.arange(count, dtype=torch.int32, device=context.torch_device)
        places = pages.flip(0)
        copy = make_page_copier(context)
        copy(cache, pool.pages, torch.stack([pages, places], dim=1))
        cache[:, :count] = 0xFF
        copy(pool.pages, cache, torch.stack([places, pages + count], dim=1))
        context.device.synchronize()
        require_same_bits("the pages in host memory", pool.pages.flip(1), expected[:, :count].cpu())
        require_same_bits("the restored pages", cache[:, count : 2 * count].cpu(), expected[:, :count].cpu())
    finally:
        context.device.synchronize()
        pool.close()
    results.check("sharing.host_pages", True, f"the copy kernel saved and restored {count} pages")


def check_host_registration(
    results: Results, context: DeviceContext, device: DeviceApi, num_bytes: int = 32 << 20
) -> None:
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
        copied = torch.zeros(host.shape, dtype=torch.int32, device=context.torch_device)
        copy = partial(lock.copy, 0, num_bytes, DeviceRow(copied.data_ptr(), context.device.stream))
        copy()
        context.device.synchronize()
        require("the copy differs from what the host wrote", torch.equal(copied.cpu(), host.cpu()))
        us = context.clock.once_us(copy)
        results.fact("sharing.host.copy", num_bytes / us / 1e3, "GB/s", "copied in the stream, in place")
        rows = torch.arange(len(host) - 1, -1, -1, dtype=torch.int32, device=context.torch_device)
        out = torch.zeros(host.shape, dtype=torch.int32, device=context.torch_device)
        elementwise = _elementwise(context, 256)
        elementwise.gather_rows(host, rows, out)
        context.device.synchronize()
        require("the kernel read something else than the host wrote", torch.equal(out.cpu(), host.flip(0)))
        us = context.clock.once_us(partial(elementwise.gather_rows, host, rows, out))
        results.fact("sharing.host.read", num_bytes / us / 1e3, "GB/s", "by a kernel, in place")
    finally:
        context.device.synchronize()
        lock.close()
    results.check("sharing.host", True, "copies and a kernel read a registered memfd in place")


def check_ipc(results: Results, context: DeviceContext, device: DeviceApi, command: Sequence[str]) -> None:
    """Check that another process reads what we wrote into two buffers, once their events have passed."""
    memory = ExportedDeviceMemory(device, 2, BLOCK_BYTES)
    try:
        values = torch.arange(BLOCK_BYTES // 8, dtype=torch.float32, device=context.torch_device)
        row = DeviceRow(values.data_ptr(), context.device.stream)
        for index in range(2):
            memory.write(index, 0, values.numel() * 4, row)
            values += 1
        handles = IpcHandles(
            [handle.hex() for handle in memory.memory_handles],
            [handle.hex() for handle in memory.event_handles],
            BLOCK_BYTES,
            device.uuid.hex(),
        )
        found = run_peer(command, ends_with=0, given=json.dumps(asdict(handles)))
        sums, count = json.loads(found), BLOCK_BYTES // 8
        expected = [float(np.arange(count, dtype=np.float64).sum() + index * count) for index in range(2)]
        require(f"the peer's sums are {sums}, expected {expected}", sums == expected)
    finally:
        context.device.synchronize()
        memory.free()
    results.check("sharing.ipc", True, "another process opened two buffers and their events")


def _elementwise(context: DeviceContext, hidden: int) -> Elementwise:
    made = Elementwise(
        context.device.launcher, HeadShape(2, 1, 64), hidden, 64, 1e-5, torch.float32, "bf16", 16, context.torch_device
    )
    context.device.launcher.prepare(made.kernels)
    return made


# ---- The other process of `check_ipc` ----


def read_sums(handles: IpcHandles, open_peer: OpenDevice) -> list[float]:
    """Sum the float32 values in each buffer's first half, after its event has passed."""
    grant: Any = SimpleNamespace(  # as a `BufferGrant`, without msgspec
        memory_handles=tuple(map(bytes.fromhex, handles.memory)),
        event_handles=tuple(map(bytes.fromhex, handles.events)),
        num_buffers=len(handles.memory),
        num_bytes=handles.num_bytes,
        device_uuid=bytes.fromhex(handles.device_uuid),
    )
    memory = ImportedDeviceMemory(grant, open_peer)
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
