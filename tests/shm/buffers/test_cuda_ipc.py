"""Device memory across processes, on a fake device: who has what open, when it is freed, what is refused."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shm.buffers.buffer_export import Loan, LoanError
from penstock.shm.buffers.cuda_driver import DriverDevice, open_device
from penstock.shm.buffers.cuda_ipc import BLOCK_BYTES, ExportedDeviceMemory, ImportedDeviceMemory
from penstock.shm.buffers.device_api import HANDLE_BYTES, DeviceError, DeviceRow
from penstock.shm.buffers.host_memory import PageLock
from penstock.shm.buffers.shared_buffers import BufferGone, BufferSlice
from penstock.shm.client.session import Session
from penstock.shm.link.events import FrontendDeath
from penstock.shm.memory.ledger import Ledger
from penstock.shm.messages import (
    NO_TOKEN,
    BufferContent,
    BufferGrant,
    BufferKind,
    BufferRef,
    BufferRequest,
    ContentSpec,
    Finish,
)
from tests.shm.buffers import fake_device
from tests.shm.buffers.buffer_backend import BLOCK, HIDDEN, ClientProcess, TurnedBackend, WelcomeRefused
from tests.shm.buffers.fake_device import UUID, FakeDevice

ON_DEVICE = BufferRequest(2, BLOCK, (BufferKind.CUDA,))
ON_HOST = BufferRequest(2, BLOCK, (BufferKind.HOST,))
STREAM = 7


@pytest.fixture
def device(tmp_path: Path) -> Iterator[FakeDevice]:
    """The backend's."""
    device = FakeDevice(tmp_path, free_bytes=16 * BLOCK)
    yield device
    assert (device.num_allocated, device.num_events, device.registered) == (0, 0, {})


@pytest.fixture
def clients_device(tmp_path: Path, device: FakeDevice) -> Iterator[FakeDevice]:
    """The same device as another process sees it."""
    seen = FakeDevice(tmp_path)
    yield seen
    assert (seen.num_opened, seen.num_events) == (0, 0)


@pytest.fixture
def backend(socket_path: Path, device: FakeDevice) -> Iterator[TurnedBackend]:
    backend = TurnedBackend(socket_path, device)
    yield backend
    backend.close()


def granted(memory: ExportedDeviceMemory, num_bytes: int = BLOCK, **changes: object) -> BufferGrant:
    handles = memory.memory_handles, memory.event_handles
    fields = {"kind": BufferKind.CUDA, "num_buffers": len(handles[0]), "num_bytes": num_bytes, "contents": ()}
    fields |= {"device_uuid": UUID, "memory_handles": handles[0], "event_handles": handles[1]}
    return BufferGrant(**(fields | changes))  # type: ignore[arg-type]


# Memory


def test_each_side_reads_what_the_other_writes_and_memory_starts_as_zeroes(
    device: FakeDevice, clients_device: FakeDevice
) -> None:
    exported = ExportedDeviceMemory(device, 2, BLOCK)
    imported = ImportedDeviceMemory(granted(exported), lambda _uuid: clients_device)
    assert clients_device.read(imported.pointers[1], BLOCK) == bytes(BLOCK)
    clients_device.poke(imported.pointers[1], b"prompt")
    assert (exported.read(1, 0, 6), exported.read(0, 0, 6)) == (b"prompt", bytes(6))
    source = device.allocate(8)
    device.poke(source, b"logits!!")
    exported.write(0, 16, 8, DeviceRow(source, 0))
    assert clients_device.read(imported.pointers[0], 32) == bytes(16) + b"logits!!" + bytes(8)
    device.free(source)
    for index in range(2):
        imported.close(index)
        imported.close(index)
    exported.free()


def test_every_buffer_is_an_allocation_of_whole_blocks(socket_path: Path, device: FakeDevice) -> None:
    """The driver serves smaller ones from a common block, all of which a handle would open."""
    backend = TurnedBackend(socket_path, device)
    with pytest.raises(ValueError, match="only multiples"):
        ExportedDeviceMemory(device, 1, BLOCK + 4096)
    with backend.visit(BufferRequest(3, BLOCK + 1, (BufferKind.CUDA,))):
        assert device.allocated_bytes() == [2 * BLOCK_BYTES] * 3
    backend.close()
    device.die()


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_handles": (b"memory-forged".ljust(HANDLE_BYTES, b"\0"),) * 2},
        {"memory_handles": (b"\0" * HANDLE_BYTES,) * 2},
        {"event_handles": (b"\xff" * HANDLE_BYTES,) * 2},
        {"event_handles": ()},
        {"num_buffers": 3},
        {"num_bytes": 2 * BLOCK},
        {"device_uuid": b"short"},
    ],
)
def test_invalid_grant_is_refused_and_nothing_stays_open(
    device: FakeDevice, clients_device: FakeDevice, changes: dict[str, object]
) -> None:
    exported = ExportedDeviceMemory(device, 2, BLOCK)
    with pytest.raises(DeviceError):
        ImportedDeviceMemory(granted(exported, **changes), lambda _uuid: clients_device)  # type: ignore[arg-type]
    assert (clients_device.num_opened, clients_device.num_events) == (0, 0)
    exported.free()


def test_stale_handle_opens_nothing(device: FakeDevice, clients_device: FakeDevice) -> None:
    exported = ExportedDeviceMemory(device, 1, BLOCK)
    grant = granted(exported)
    exported.free()
    with pytest.raises(DeviceError, match="invalid"):
        ImportedDeviceMemory(grant, lambda _uuid: clients_device)


def test_partial_allocation_is_freed_when_memory_runs_out(device: FakeDevice) -> None:
    with pytest.raises(DeviceError, match="out of memory"):
        ExportedDeviceMemory(device, 17, BLOCK)
    assert device.num_allocated == 0


def test_fake_device_refuses_what_the_driver_leaves_undefined(device: FakeDevice, tmp_path: Path) -> None:
    other, pointer = FakeDevice(tmp_path), device.allocate(BLOCK)
    opened, _ = other.open_memory(device.export_memory(pointer))
    with pytest.raises(DeviceError, match="undefined"):
        device.free(pointer)
    with pytest.raises(DeviceError, match="this process"):
        device.open_memory(device.export_memory(pointer))
    with pytest.raises(DeviceError, match="illegal access"):
        other.read(opened + BLOCK - 4, 8)
    other.close_memory(opened)
    with pytest.raises(DeviceError, match="not opened"):
        other.close_memory(opened)
    device.free(pointer)
    with pytest.raises(DeviceError, match="not an allocation"):
        device.free(pointer)


# Order


def test_client_reads_after_the_backends_write_without_waiting_for_it(
    backend: TurnedBackend, device: FakeDevice, clients_device: FakeDevice
) -> None:
    step_stream, clients_stream = 7, 9
    logits = device.allocate(4000)
    with backend.client(ON_DEVICE, clients_device) as client:
        buffers = client.session.buffers
        assert buffers is not None
        buffer = buffers.take()
        pointer = buffers.device_array(buffer, (1,), "|u1", 0).__cuda_array_interface__["data"][0]
        client.submit(1, output=BufferSlice(buffer, BufferContent.LOGITS, 1))
        loan = backend.submission().output
        assert loan is not None
        device.poke(logits, array("f", range(1000)).tobytes())
        loan.write(0, DeviceRow(logits, step_stream))
        backend.link.push(client.session.epoch, 1, NO_TOKEN, Finish.LENGTH)
        client.receive_until(lambda: buffers.num_returned == 1)
        # Returned, while the device has not come to it: the event orders what the client's stream does.
        found = buffer.device_rows(clients_stream).__cuda_array_interface__
        assert (found["shape"], found["typestr"], found["stream"]) == ((1, 1000), "<f4", clients_stream)
        scratch = clients_device.allocate(4000)
        clients_device.copy(scratch, pointer, 4000, clients_stream)
        assert clients_device.read(scratch, 4000) == bytes(4000)
        device.run(step_stream)
        clients_device.run(clients_stream)
        assert array("f", clients_device.read(scratch, 4000)).tolist() == list(range(1000))
        clients_device.free(scratch)
        buffer.release()
    device.free(logits)
    backend.until(lambda: not device.num_allocated)


def test_next_user_of_a_buffer_writes_after_the_backend_has_read_it(
    backend: TurnedBackend, device: FakeDevice, clients_device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though whoever released it had not waited for that."""
    step_stream, clients_stream = 7, 9
    rows = array("f", range(2 * HIDDEN)).tobytes()
    target = device.allocate(len(rows))
    with backend.client(ON_DEVICE, clients_device) as client:
        buffers = client.session.buffers
        assert buffers is not None
        buffer = buffers.take()
        clients_device.poke(buffer.device_view().__cuda_array_interface__["data"][0], rows)
        client.submit(1, BufferSlice(buffer, BufferContent.PROMPT_EMBEDDINGS, 2), num_prompt_tokens=2)
        loan = backend.submission().embeddings
        assert loan is not None
        loan.copy_rows(1, 1, DeviceRow(target, step_stream))
        with pytest.raises(ValueError, match="2 are lent"):
            loan.copy_rows(1, 2, DeviceRow(target, step_stream))
        backend.link.push(client.session.epoch, 1, NO_TOKEN, Finish.LENGTH)
        loan.copy_rows(0, 1, DeviceRow(target, step_stream))  # too late, and put nowhere
        client.receive_until(lambda: buffers.num_returned == 1)
        buffer.release(clients_stream)
        assert buffers.take() is buffer
        pointer = buffer.device_view(clients_stream).__cuda_array_interface__["data"][0]
        scratch = clients_device.allocate(len(rows))
        clients_device.copy(pointer, scratch, len(rows), clients_stream)
        with monkeypatch.context() as patch:
            patch.setattr(fake_device, "_WAIT_S", 0.0)
            with pytest.raises(DeviceError, match="never passes"):
                clients_device.run(clients_stream)
        device.run(step_stream)
        assert device.read(target, 4 * HIDDEN) == rows[4 * HIDDEN :]
        clients_device.run(clients_stream)
        assert clients_device.read(pointer, len(rows)) == bytes(len(rows))
        clients_device.free(scratch)
        buffer.release()
    device.free(target)
    backend.until(lambda: not device.num_allocated)


def test_prompt_that_is_still_being_written_is_refused(
    device: FakeDevice, clients_device: FakeDevice
) -> None:
    exported = ExportedDeviceMemory(device, 1, BLOCK)
    imported = ImportedDeviceMemory(granted(exported), lambda _uuid: clients_device)
    clients_device.record(imported.events[0], stream=3)
    ref = BufferRef(0, 1, BufferContent.TOKENS, 1)
    loan = Loan(exported, ref, ContentSpec(BufferContent.TOKENS, 1, "<i4"))
    with pytest.raises(LoanError, match="index is 0; the client lent this buffer before its write was complete"):
        loan.read()
    clients_device.run(3)
    assert loan.read() == bytes(4)
    imported.close(0)
    exported.free()


# Lives and deaths


def test_memory_is_freed_when_a_client_reports_its_buffers_closed(
    backend: TurnedBackend, device: FakeDevice, clients_device: FakeDevice
) -> None:
    with backend.client(ON_DEVICE, clients_device):
        assert device.num_allocated == clients_device.num_opened == 2
        assert backend.exporter.held_bytes == 2 * BLOCK
    backend.until(lambda: not backend.exporter.held_bytes)
    assert device.num_allocated == 0


def test_memory_of_a_killed_process_is_freed(
    backend: TurnedBackend, socket_path: Path, device: FakeDevice, tmp_path: Path
) -> None:
    with ClientProcess(backend, socket_path, tmp_path) as peer:
        assert device.num_allocated == 2
        peer.kill()
        backend.until(lambda: not device.num_allocated)
    assert (backend.exporter.held_bytes, backend.exporter.num_orphans) == (0, 0)


def test_memory_of_a_lost_connection_stays_while_its_process_runs(
    backend: TurnedBackend, socket_path: Path, device: FakeDevice, tmp_path: Path
) -> None:
    with ClientProcess(backend, socket_path, tmp_path) as peer:
        peer.do("desert")
        backend.until(lambda: any(isinstance(event, FrontendDeath) for event in backend.events))
        assert (device.num_allocated, backend.exporter.num_orphans) == (2, 1)
        assert backend.exporter.held_bytes == 2 * BLOCK
        peer.do("write x")  # still mapped
        backend.turn()
        assert device.num_allocated == 2
        peer.kill()
        backend.until(lambda: not device.num_allocated)
    assert (backend.exporter.held_bytes, backend.exporter.num_orphans) == (0, 0)


def test_buffer_held_at_close_stays_open_until_it_is_released(
    backend: TurnedBackend, socket_path: Path, device: FakeDevice, tmp_path: Path
) -> None:
    """Work of its own on the device may still use it; so there is no farewell, and the memory goes with the process."""
    with ClientProcess(backend, socket_path, tmp_path) as peer:
        peer.do("close")
        backend.until(lambda: any(isinstance(event, FrontendDeath) for event in backend.events))
        assert (device.num_allocated, backend.exporter.num_orphans) == (2, 1)
        peer.do("release")
        assert len(list(tmp_path.glob("open-*"))) == 0
        peer.kill()
        backend.until(lambda: not device.num_allocated)


def test_backend_that_ends_does_not_free_what_a_client_has_open(
    socket_path: Path, device: FakeDevice, tmp_path: Path
) -> None:
    backend = TurnedBackend(socket_path, device)
    with ClientProcess(backend, socket_path, tmp_path):
        backend.close()
        assert (device.num_allocated, backend.exporter.held_bytes) == (2, 0)
    device.die()


def test_buffer_is_gone_with_its_connection(
    socket_path: Path, device: FakeDevice, clients_device: FakeDevice
) -> None:
    backend = TurnedBackend(socket_path, device)
    with backend.client(ON_DEVICE, clients_device) as client:
        buffers = client.session.buffers
        assert buffers is not None
        held = buffers.take()
    assert clients_device.num_opened == 1
    with pytest.raises(BufferGone, match="connection"):
        held.device_view()
    with pytest.raises(BufferGone, match="connection"):
        buffers.take()
    held.release()
    held.release()
    assert clients_device.num_opened == 0
    backend.close()
    device.die()  # the process that may have it open is this one


def test_client_that_cannot_open_the_device_leaves_nothing(
    backend: TurnedBackend, device: FakeDevice, tmp_path: Path
) -> None:
    def no_device(_uuid: bytes) -> FakeDevice:
        raise DeviceError("none here")

    invitation = backend.invite(ON_DEVICE)
    with pytest.raises(DeviceError, match="none here"):
        Session(invitation, Ledger(), no_device)
    backend.until(lambda: not device.num_allocated)


def test_budget_counts_what_departed_clients_may_have_open(
    socket_path: Path, device: FakeDevice, tmp_path: Path
) -> None:
    backend = TurnedBackend(socket_path, device, budget_bytes=3 * BLOCK)
    with ClientProcess(backend, socket_path, tmp_path) as peer:
        with pytest.raises(WelcomeRefused, match=f"2 shared buffers of {BLOCK} bytes; {BLOCK} of {3 * BLOCK}"):
            backend.invite(ON_DEVICE)
        peer.do("desert")
        backend.until(lambda: backend.exporter.num_orphans)
        with pytest.raises(WelcomeRefused, match="asks for 2 shared buffers"):
            backend.invite(ON_DEVICE)
        peer.kill()
        backend.until(lambda: not backend.exporter.held_bytes)
    with backend.visit(ON_DEVICE):
        assert backend.exporter.held_bytes == 2 * BLOCK
    backend.close()
    device.die()


# Page-locked buffers on the host


def test_device_reads_host_buffers_in_place_while_their_client_is_connected(
    backend: TurnedBackend, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = device.allocate(BLOCK)
    with backend.client(ON_HOST) as client:
        ((_, num_bytes),) = device.registered.items()
        assert num_bytes % mmap.PAGESIZE == 0
        buffers = client.session.buffers
        assert buffers is not None
        prompt = buffers.take()
        prompt.view()[: 2 * 4 * HIDDEN] = array("f", range(2 * HIDDEN)).tobytes()
        client.submit(1, BufferSlice(prompt, BufferContent.PROMPT_EMBEDDINGS, 2), num_prompt_tokens=2)
        loan = backend.submission().embeddings
        assert loan is not None
        assert loan.device_reads
        loan.copy_rows(1, 1, DeviceRow(target, STREAM))
        device.run(STREAM)
        assert device.read(target, 4 * HIDDEN) == array("f", range(HIDDEN, 2 * HIDDEN)).tobytes()
        loan.copy_rows(0, 2, DeviceRow(target, STREAM))
        monkeypatch.setattr(device, "synchronize", lambda event: device.has_passed(event) or pytest.fail("it waits"))
    # Nobody waits for the copy that is under way; when it is done the memory is unlocked and freed.
    backend.until(lambda: any(isinstance(event, FrontendDeath) for event in backend.events))
    backend.turn()
    assert (len(device.registered), backend.exporter.num_orphans) == (1, 1)
    assert backend.exporter.held_bytes > 0
    device.run(STREAM)
    backend.turn()
    assert (device.registered, backend.exporter.num_orphans, backend.exporter.held_bytes) == ({}, 0, 0)
    assert device.read(target, 8 * HIDDEN) == array("f", range(2 * HIDDEN)).tobytes()
    loan.copy_rows(0, 2, DeviceRow(0, STREAM))
    device.free(target)


def test_backend_that_ends_before_its_clients_unlocks_all_pages(
    socket_path: Path, device: FakeDevice
) -> None:
    backend = TurnedBackend(socket_path, device)
    fds = len(os.listdir("/proc/self/fd"))
    buffers = backend.exporter.export(ON_HOST, os.getpid())
    assert device.registered
    backend.exporter.release_client(buffers, has_closed=False)
    assert backend.exporter.num_orphans == 1
    backend.exporter.close()
    assert (device.registered, backend.exporter.held_bytes, len(os.listdir("/proc/self/fd"))) == ({}, 0, fds)
    backend.close()


def test_mapping_cannot_be_closed_before_it_is_unlocked(device: FakeDevice) -> None:
    with contextlib.closing(mmap.mmap(-1, mmap.PAGESIZE)) as mapping:
        lock = PageLock(device, mapping)
        with pytest.raises(BufferError):
            mapping.close()
        lock.close()


def test_refused_page_lock_is_tried_once_and_the_host_reads_instead(
    socket_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device = FakeDevice(tmp_path, refuses_registration=True)
    backend = TurnedBackend(socket_path, device)
    for _ in range(2):
        with backend.client(ON_HOST) as client:
            buffers = client.session.buffers
            assert buffers is not None
            prompt = buffers.take()
            prompt.view()[: 4 * HIDDEN] = array("f", range(HIDDEN)).tobytes()
            client.submit(1, BufferSlice(prompt, BufferContent.PROMPT_EMBEDDINGS, 1), num_prompt_tokens=1)
            loan = backend.submission().embeddings
            assert loan is not None
            assert not loan.device_reads
            assert loan.read_rows(0, 1) == array("f", range(HIDDEN)).tobytes()
            with pytest.raises(TypeError, match="page-locked"):
                loan.copy_rows(0, 1, DeviceRow(0, 0))
    assert caplog.text.count("cannot page-lock") == 1
    assert device.num_events == 0
    backend.close()


# The driver


def test_missing_driver_is_reported() -> None:
    with pytest.raises(DeviceError, match="no usable CUDA driver"):
        DriverDevice(0, library="libno-such-driver.so.1")
    with pytest.raises(DeviceError, match="no usable CUDA driver"):
        open_device(UUID, library="libno-such-driver.so.1")
