"""Where our code meets others': page-locked shared memory, IPC between processes, CuPy's launches in torch's graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.passes.decoder.cuda.ops.elementwise import Elementwise
from penstock.backend.passes.decoder.ops import HeadShape
from penstock.shm.buffers.cuda_driver import DriverDevice
from penstock.shm.buffers.cuda_ipc import BLOCK_BYTES, ExportedDeviceMemory
from penstock.shm.buffers.device_api import DeviceRow
from penstock.shm.buffers.host_memory import PageLock
from penstock.shm.memory import region
from penstock.tools.gpu_check.cases.comparing import require, require_close
from penstock.tools.gpu_check.devices.device_context import open_lab
from penstock.tools.gpu_check.speed.host_pages import check_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.shm.buffers.device_api import DeviceApi
    from penstock.tools.gpu_check.devices.device_context import Lab
    from penstock.tools.gpu_check.reporting.results import Results

_PEER = (sys.executable, "-m", "penstock.tools.gpu_check.checks.sharing_peer")
_PEER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Handles:
    """What a peer needs to open the buffers; in hexadecimal, for it travels as JSON."""

    memory: list[str]
    events: list[str]
    num_bytes: int
    device_uuid: str


def run(results: Results) -> None:
    lab = open_lab()
    results.attempt("sharing.graph", partial(check_graph, results, lab))
    results.attempt("sharing.host_pages", partial(check_pool, results, lab))
    # The driver's own interface: what the backend uses for its shared buffers.
    device = DriverDevice(0)
    results.attempt("sharing.host", partial(check_host_registration, results, lab, device))
    results.attempt("sharing.ipc", partial(check_ipc, results, lab, device, _PEER))


def check_graph(results: Results, lab: Lab) -> None:
    """Kernels of ours and products of torch, captured in one graph, compute again on what the buffers hold then."""
    hidden, rows = 256, 5
    elementwise = _elementwise(lab, hidden)
    weight, norm = torch.randn(hidden, hidden, device=lab.at), torch.ones(hidden, device=lab.at)
    residual = torch.zeros(rows, hidden, device=lab.at)
    normed, product = torch.empty_like(residual), torch.empty_like(residual)

    def work() -> None:
        elementwise.add_rms_norm(residual, None, norm, normed)
        torch.mm(normed, weight, out=product)

    work()
    lab.device.synchronize()
    graph = lab.device.capture(work)
    for _ in range(3):
        residual.normal_()
        graph.replay()
        lab.device.synchronize()
        x = residual.double()
        expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() @ weight.double()
        require_close("the graph's product", product.cpu(), expected.cpu(), 1e-3, 1e-2)
    results.check("sharing.graph", True, "our kernels and torch's products, replayed on new values")


def check_host_registration(results: Results, lab: Lab, device: DeviceApi, num_bytes: int = 32 << 20) -> None:
    """A memfd, sealed and mapped as shared buffers are, read in place: by copies in the stream and by a kernel."""
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
        copied = torch.zeros(host.shape, dtype=torch.int32, device=lab.at)
        copy = partial(lock.copy, 0, num_bytes, DeviceRow(copied.data_ptr(), lab.device.stream))
        copy()
        lab.device.synchronize()
        require("what was copied is not what the host wrote", torch.equal(copied.cpu(), host.cpu()))
        us = lab.clock.once_us(copy)
        results.fact("sharing.host.copy", num_bytes / us / 1e3, "GB/s", "copied in the stream, in place")
        rows = torch.arange(len(host) - 1, -1, -1, dtype=torch.int32, device=lab.at)
        out = torch.zeros(host.shape, dtype=torch.int32, device=lab.at)
        elementwise = _elementwise(lab, 256)
        elementwise.gather_rows(host, rows, out)
        lab.device.synchronize()
        require("what the kernel read is not what the host wrote", torch.equal(out.cpu(), host.flip(0)))
        us = lab.clock.once_us(partial(elementwise.gather_rows, host, rows, out))
        results.fact("sharing.host.read", num_bytes / us / 1e3, "GB/s", "by a kernel, in place")
    finally:
        lab.device.synchronize()
        lock.close()
    results.check("sharing.host", True, "a registered memfd is read in place")


def check_ipc(results: Results, lab: Lab, device: DeviceApi, command: Sequence[str]) -> None:
    """Another process reads what we put into a buffer, behind its event, and we what it says it read."""
    memory = ExportedDeviceMemory(device, 2, BLOCK_BYTES)
    try:
        values = torch.arange(BLOCK_BYTES // 8, dtype=torch.float32, device=lab.at)
        row = DeviceRow(values.data_ptr(), lab.device.stream)
        for index in range(2):
            memory.write(index, 0, values.numel() * 4, row)
            values += 1
        handles = Handles(
            [handle.hex() for handle in memory.memory_handles],
            [handle.hex() for handle in memory.event_handles],
            BLOCK_BYTES,
            device.uuid.hex(),
        )
        done = subprocess.run(
            command, input=json.dumps(asdict(handles)), capture_output=True, text=True, check=False,
            timeout=_PEER_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"the peer: {done.stderr.strip().splitlines()[-1][:300] if done.stderr else 'no word'}")
        sums, count = json.loads(done.stdout), BLOCK_BYTES // 8
        expected = [float(np.arange(count, dtype=np.float64).sum() + index * count) for index in range(2)]
        require(f"the peer's sums are {sums}, expected {expected}", sums == expected)
    finally:
        lab.device.synchronize()
        memory.free()
    results.check("sharing.ipc", True, "two buffers and their events, opened in another process")


def _elementwise(lab: Lab, hidden: int) -> Elementwise:
    made = Elementwise(lab.device.launcher, HeadShape(2, 1, 64), hidden, 64, 1e-5, torch.float32, "bf16", 16, lab.at)
    lab.device.launcher.prepare(made.kernels)
    return made
