"""The ctypes bindings of the driver's API, with a stub library that needs no GPU, in two processes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.shm.buffers.cuda_blocks import DeviceBlocks
from penstock.shm.buffers.cuda_driver import DriverDevice, open_device
from penstock.shm.buffers.cuda_ipc import BLOCK_BYTES, ExportedDeviceMemory, ImportedDeviceMemory
from penstock.shm.buffers.device_api import HANDLE_BYTES, UUID_BYTES, DeviceApi, DeviceError, DeviceRow
from penstock.shm.buffers.host_memory import PageLock
from penstock.shm.memory.fd_mailbox import FdMailbox, close_all
from penstock.shm.messages import BufferGrant, BufferKind
from tests.shm.buffers.stub_driver import COMPILER, stub_library

ROOT = Path(__file__).parents[3]
BUSY_STREAM = 0xB5

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the stub driver needs a C compiler")

OTHER_PROCESS = """
import sys
from penstock.shm.buffers.cuda_blocks import DeviceBlocks
from penstock.shm.buffers.cuda_driver import open_device
from penstock.shm.buffers.cuda_ipc import ImportedDeviceMemory
from penstock.shm.messages import BufferGrant, BufferKind
uuid, memory, event = map(bytes.fromhex, sys.argv[2:5])
grant = BufferGrant(BufferKind.CUDA, 1, 2 << 20, (), uuid, (memory,), (event,))
imported = ImportedDeviceMemory(grant, lambda uuid: open_device(uuid, sys.argv[1]))
device, pointer = imported.device, imported.pointers[0]
assert device.read(pointer + 8, 8) == b"from the"
device.copy(pointer + 64, pointer + 8, 8, 0)
device.record(imported.events[0], int(sys.argv[5]))
imported.close(0)
"""


@pytest.fixture
def library() -> str:
    return stub_library()


@pytest.fixture
def device(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DriverDevice:
    monkeypatch.setenv("STUB_CUDA_DIR", str(tmp_path))
    return DriverDevice(1, library)


def test_device_is_found_by_its_uuid_at_any_ordinal(device: DriverDevice, library: str) -> None:
    api: DeviceApi = device
    assert api.uuid == bytes([41]) * UUID_BYTES
    assert open_device(api.uuid, library).uuid == api.uuid
    with pytest.raises(DeviceError, match="does not see the backend's GPU; it sees 2 others"):
        open_device(bytes(UUID_BYTES), library)
    with pytest.raises(DeviceError, match="device 2; this process sees 2 devices"):
        DriverDevice(2, library)


def test_allocation_starts_as_zeroes_and_is_freed_once(device: DriverDevice) -> None:
    pointer = device.allocate(BLOCK_BYTES)
    assert device.read(pointer, BLOCK_BYTES) == bytes(BLOCK_BYTES)
    device.free(pointer)
    with pytest.raises(DeviceError, match=r"cuMemFree_v2: CUDA_ERROR_INVALID_VALUE \(1\)"):
        device.free(pointer)
    with pytest.raises(DeviceError, match="cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY"):
        device.allocate(1 << 30)


@pytest.mark.parametrize("stream", [0, BUSY_STREAM])
def test_another_process_reads_writes_and_records_an_event(
    device: DriverDevice, library: str, tmp_path: Path, stream: int
) -> None:
    exported = ExportedDeviceMemory(device, 1, BLOCK_BYTES)
    source = device.allocate(BLOCK_BYTES)
    ctypes.memmove(source, b"from the", 8)  # the stub's device memory is host memory
    exported.write(0, 8, 8, DeviceRow(source, 0))
    handles = device.uuid.hex(), exported.memory_handles[0].hex(), exported.event_handles[0].hex()
    argv = [sys.executable, "-c", OTHER_PROCESS, library, *handles, str(stream)]
    subprocess.run(argv, check=True, cwd=ROOT, timeout=60)
    if stream:
        assert not exported.is_written(0)
        device.synchronize(exported._events[0])
    assert exported.is_written(0)
    assert exported.read(0, 0, 72) == bytes(8) + b"from the" + bytes(48) + b"from the"
    device.wait(exported._events[0], BUSY_STREAM)
    device.free(source)
    exported.free()
    assert os.listdir(tmp_path) == []


def test_invalid_handles_open_nothing(device: DriverDevice) -> None:
    pointer, event = device.allocate(BLOCK_BYTES), device.create_event()
    for bad in (b"short", bytes(HANDLE_BYTES), device.export_event(event)):
        with pytest.raises(DeviceError):
            device.open_memory(bad)
    for bad in (b"short", bytes(HANDLE_BYTES), device.export_memory(pointer)):
        with pytest.raises(DeviceError):
            device.open_event(bad)
    handles = (bytes(HANDLE_BYTES),)
    grant = BufferGrant(BufferKind.CUDA, 1, BLOCK_BYTES, (), device.uuid, handles, handles)
    with pytest.raises(DeviceError, match="cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_HANDLE"):
        ImportedDeviceMemory(grant, lambda _uuid: device)
    device.destroy_event(event)
    device.free(pointer)


def test_mapping_is_page_locked_read_in_place_and_unlocked(device: DriverDevice) -> None:
    with contextlib.closing(mmap.mmap(-1, 4 * mmap.PAGESIZE)) as mapping:
        lock = PageLock(device, mapping)
        with pytest.raises(DeviceError, match="cuMemHostRegister_v2"):
            PageLock(device, mapping)
        pointer = device.allocate(4096)
        mapping[5000:5004] = b"read"
        lock.copy(5000, 4, DeviceRow(pointer + 8, 0))
        assert device.read(pointer + 8, 4) == b"read"
        for offset_bytes, num_bytes in ((-1, 4), (4 * mmap.PAGESIZE - 3, 4), (0, -1)):
            with pytest.raises(ValueError, match=f"{num_bytes} bytes at offset {offset_bytes};"):
                lock.copy(offset_bytes, num_bytes, DeviceRow(pointer, 0))
        device.free(pointer)
        lock.close()
        PageLock(device, mapping).close()


def test_host_memory_is_allocated_and_freed_once(device: DriverDevice) -> None:
    address = device.allocate_host(5000)
    ctypes.memmove(address, bytes(range(250)) * 20, 5000)
    assert ctypes.string_at(address + 4990, 10) == bytes(range(240, 250))
    device.free_host(address)
    with pytest.raises(DeviceError, match=r"cuMemFreeHost: CUDA_ERROR_INVALID_VALUE \(1\)"):
        device.free_host(address)
    with pytest.raises(DeviceError, match="cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        device.allocate_host(1 << 30)


FILLS_A_BLOCK = """
import ctypes, os, sys
from penstock.shm.buffers.cuda_blocks import DeviceBlocks
from penstock.shm.buffers.cuda_driver import DriverDevice
from penstock.shm.memory.fd_mailbox import FdMailbox
blocks = DeviceBlocks(DriverDevice(1, sys.argv[1]), 16 << 20)
fds = [blocks.add(5), blocks.add(3 << 20)]
ctypes.memmove(blocks.pointer + (2 << 20) - 4, b"across blocks", 13)
FdMailbox.attach((int(sys.argv[2]), int(sys.argv[3]))).leave(fds)
os.kill(os.getpid(), 9)
"""


def test_blocks_outlive_the_process_that_filled_them_until_their_last_fd_is_closed(
    device: DriverDevice, library: str
) -> None:
    mailbox = FdMailbox.create()
    argv = [sys.executable, "-c", FILLS_A_BLOCK, library, *map(str, mailbox.fds)]
    done = subprocess.run(argv, check=False, cwd=ROOT, timeout=60, pass_fds=mailbox.fds)
    assert done.returncode == -9
    fds = mailbox.find()
    mailbox.close()
    blocks, same = DeviceBlocks(device, 6 << 20), DeviceBlocks(device, 6 << 20)
    for memory in (blocks, same):
        for fd, num_bytes in zip(fds, (2 << 20, 4 << 20), strict=True):
            memory.map(fd, num_bytes)
        assert memory.read((2 << 20) - 4, 13) == b"across blocks"
    ctypes.memmove(blocks.pointer, b"shared", 6)
    assert same.read(0, 6) == b"shared"
    with pytest.raises(DeviceError, match="blocks of 8388608 bytes; 6291456 are reserved"):
        same.add(1)
    close_all(fds)
    assert blocks.read(0, 6) == b"shared"
    blocks.close()
    same.close()


def test_what_is_no_block_is_not_mapped_and_a_device_without_them_says_so(
    device: DriverDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = DeviceBlocks(device, 200 << 20)
    with open(os.devnull) as file, pytest.raises(DeviceError, match="cuMemImportFromShareableHandle: CUDA_ERROR_INV"):
        blocks.map(file.fileno(), 2 << 20)
    fd = blocks.add(1)
    with pytest.raises(DeviceError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        blocks.map(fd, 4 << 20)
    with pytest.raises(DeviceError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        blocks.add(100 << 20)
    assert blocks.block_bytes == [2 << 20]
    os.close(fd)
    blocks.close()
    monkeypatch.setenv("STUB_CUDA_NO_BLOCKS", "1")
    with pytest.raises(DeviceError, match="the device gives no file descriptors of its memory"):
        DeviceBlocks(device, 1)
