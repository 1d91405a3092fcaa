"""The section sharing, on the emulated device and fake shared memory."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from penstock.shm.buffers.device_api import DeviceError
from penstock.tools.gpu.cases.check import Mismatch
from penstock.tools.gpu.checks import shared_blocks, sharing
from penstock.tools.gpu.devices import caches
from tests.shm.buffers.fake_device import FakeDevice
from tests.tools.gpu.device_context import Record, make_device_context


def test_one_graph_captures_kernels_and_products(record: Record) -> None:
    sharing.check_graph(record.results, make_device_context())
    assert record.findings()["sharing.graph"].passed


class HostMemoryDevice(FakeDevice):
    """A device whose memory is the host's, as the emulated GPU's is."""

    def copy_from_host(self, destination: int, address: int, num_bytes: int, stream: int) -> None:
        self._check_registered(address, num_bytes)
        ctypes.memmove(destination, address, num_bytes)


def test_registered_memfd_is_read_in_place(record: Record, tmp_path: Path) -> None:
    device = HostMemoryDevice(tmp_path)
    sharing.check_host_registration(record.results, make_device_context(), device, 1 << 16)
    assert record.findings()["sharing.host"].passed
    assert not device.registered


def test_pages_survive_a_copy_to_the_host_and_back(record: Record) -> None:
    context = make_device_context()
    sharing.check_host_page_copies(record.results, context)
    assert record.findings()["sharing.host_pages"].passed
    assert [memory.is_free for memory in context.device.host_memories] == [True]  # type: ignore[attr-defined]


def test_changed_pages_are_detected(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches.page_moves, "copy_pages", lambda *_arguments, **_keywords: None)
    with pytest.raises(Mismatch, match="the pages in host memory: "):
        sharing.check_host_page_copies(record.results, make_device_context())


class CopyingFakeDevice(FakeDevice):
    """Copies from host tensors, which stand for GPU tensors."""

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        self.poke(destination, ctypes.string_at(source, num_bytes))


def test_another_process_reads_the_buffers(record: Record, tmp_path: Path) -> None:
    device = CopyingFakeDevice(tmp_path)
    script = f"""
import json, sys
from pathlib import Path
from tests.shm.buffers.fake_device import FakeDevice
from penstock.tools.gpu.checks.sharing import IpcHandles
from penstock.tools.gpu.checks.sharing import read_sums
print(json.dumps(read_sums(IpcHandles(**json.load(sys.stdin)), lambda uuid: FakeDevice(Path({str(tmp_path)!r})))))
"""
    sharing.check_ipc(record.results, make_device_context(), device, [sys.executable, "-c", script])
    assert record.findings()["sharing.ipc"].passed
    assert device.num_allocated == 0


def test_failed_peer_is_reported_with_its_last_error_line(record: Record, tmp_path: Path) -> None:
    device = CopyingFakeDevice(tmp_path)
    with pytest.raises(DeviceError, match=r"in the other process: .*no usable CUDA driver"):
        sharing.check_ipc(record.results, make_device_context(), device, sharing._PEER)
    with pytest.raises(RuntimeError, match="the peer failed: no GPU"):
        sharing.check_ipc(
            record.results, make_device_context(), device, [sys.executable, "-c", "raise SystemExit('no GPU')"]
        )
    assert device.num_allocated == 0


PEER_ON_THE_STUB = """
import sys
from tests.shm.buffers.stub_driver import stub_library
from penstock.tools.gpu.checks.shared_blocks import main
sys.exit(main(stub_library()))
"""


def test_memory_of_a_killed_process_is_read_and_a_device_without_it_refuses(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-c", PEER_ON_THE_STUB)
    shared_blocks.check_shared_blocks(record.results, make_device_context(), command, 2 << 20)
    assert record.findings()["sharing.blocks"].passed
    assert record.findings()["sharing.blocks.map"].unit == "ms"
    monkeypatch.setattr(shared_blocks, "_VALUES", (0x11, 0x2F))
    with pytest.raises(Mismatch, match="block 1 has other bytes than 47"):
        shared_blocks.check_shared_blocks(record.results, make_device_context(), command, 2 << 20)
    monkeypatch.setenv("STUB_CUDA_NO_BLOCKS", "1")
    with pytest.raises(DeviceError, match="in the other process: the device gives no file descriptors"):
        shared_blocks.check_shared_blocks(record.results, make_device_context(), command, 2 << 20)


def test_refusal_by_the_driver_is_a_finding_and_fails_nothing(record: Record) -> None:
    def refuse() -> None:
        raise DeviceError("cuIpcGetMemHandle: operation not supported")

    sharing.unless_refused(record.results, "sharing.ipc", refuse)
    found = record.findings()["sharing.ipc"]
    assert (found.value, found.passed) == ("refused", None)
    assert "operation not supported" in found.detail


def test_wrong_data_is_not_a_refusal(record: Record) -> None:
    def differ() -> None:
        raise Mismatch("3 of 4 bytes differ")

    with pytest.raises(Mismatch):
        sharing.unless_refused(record.results, "sharing.host", differ)
