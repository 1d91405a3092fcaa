"""The item sharing, on the emulated device and fake shared memory."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.shm.buffers.device_api import DeviceError
from penstock.tools.gpu.cases.check import Mismatch
from penstock.tools.gpu.checks import peers, sharing
from penstock.tools.gpu.devices import caches
from tests.shm.buffers.fake_device import FakeDevice
from tests.tools.gpu.device_context import Record, make_device_context

PAGES = CacheLayout(3, 40, 16, 2, 64, "bf16")


class HostMemoryDevice(FakeDevice):
    """A device whose memory is the host's, as the emulated GPU's is."""

    def copy_from_host(self, destination: int, address: int, num_bytes: int, stream: int) -> None:
        self._check_registered(address, num_bytes)
        ctypes.memmove(destination, address, num_bytes)


def test_registered_memfd_is_read_in_place(record: Record, tmp_path: Path) -> None:
    device = HostMemoryDevice(tmp_path)
    assert "in place" in sharing.check_host_registration(make_device_context(), device, 1 << 16)[0]
    assert not device.registered


def test_pages_survive_a_copy_to_the_host_and_back(record: Record) -> None:
    context = make_device_context()
    assert "saved 20 pages" in sharing.check_host_page_copies(context, PAGES)[0]
    assert [memory.is_free for memory in context.device.host_memories] == [True]  # type: ignore[attr-defined]


def test_changed_pages_are_detected(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches.page_moves, "copy_pages", lambda *_arguments, **_keywords: None)
    with pytest.raises(Mismatch, match="the pages in host memory: "):
        sharing.check_host_page_copies(make_device_context(), PAGES)


class CopyingFakeDevice(FakeDevice):
    """Copies from host tensors, which stand for GPU tensors."""

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        self.poke(destination, ctypes.string_at(source, num_bytes))


def test_another_process_reads_the_buffers(record: Record, tmp_path: Path) -> None:
    device = CopyingFakeDevice(tmp_path)
    script = f"""
import sys
from pathlib import Path
from tests.shm.buffers.fake_device import FakeDevice
from penstock.tools.gpu.checks.peers import main
sys.exit(main((), open_peer=lambda uuid: FakeDevice(Path({str(tmp_path)!r}))))
"""
    sharing.check_ipc(make_device_context(), device, [sys.executable, "-c", script])
    assert device.num_allocated == 0


def test_failed_peer_is_reported_with_its_last_error_line(tmp_path: Path) -> None:
    device = CopyingFakeDevice(tmp_path)
    with pytest.raises(DeviceError, match=r"in the other process: .*no usable CUDA driver"):
        sharing.check_ipc(make_device_context(), device)
    with pytest.raises(RuntimeError, match="the peer failed: no GPU"):
        sharing.check_ipc(make_device_context(), device, [sys.executable, "-c", "raise SystemExit('no GPU')"])
    assert device.num_allocated == 0


PEER_ON_THE_STUB = """
import sys
from tests.shm.buffers.stub_driver import stub_library
from penstock.tools.gpu.checks.peers import main
sys.exit(main(sys.argv[1:], stub_library()))
"""


def test_memory_of_a_killed_process_is_read_and_a_device_without_it_refuses(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-c", PEER_ON_THE_STUB)
    sharing.check_shared_blocks(make_device_context(), command, 2 << 20)
    monkeypatch.setattr(peers, "VALUES", (0x11, 0x2F))
    with pytest.raises(Mismatch, match="block 1 has other bytes than 47"):
        sharing.check_shared_blocks(make_device_context(), command, 2 << 20)
    monkeypatch.setenv("STUB_CUDA_NO_BLOCKS", "1")
    with pytest.raises(DeviceError, match="in the other process: the device gives no file descriptors"):
        sharing.check_shared_blocks(make_device_context(), command, 2 << 20)


def test_refusal_by_the_driver_is_a_finding_and_fails_nothing(record: Record) -> None:
    def refuse() -> tuple[str, None]:
        raise DeviceError("cuIpcGetMemHandle: operation not supported")

    sharing.unless_refused(record.results, "sharing.ipc", refuse, "copies")
    found = record.findings()["sharing.ipc"]
    assert (found.value, found.passed) == ("refused", None)
    assert "operation not supported" in found.detail


def test_wrong_data_is_not_a_refusal(record: Record) -> None:
    def differ() -> tuple[str, None]:
        raise Mismatch("3 of 4 bytes differ")

    sharing.unless_refused(record.results, "sharing.host", differ, "copies")
    assert [finding.passed for finding in record.all()] == [False]
