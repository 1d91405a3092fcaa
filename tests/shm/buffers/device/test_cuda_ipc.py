"""Device memory across processes, on a fake device: what each side reads, and in which order."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from penstock.shm.buffers.buffer_export import Loan, LoanError
from penstock.shm.buffers.cuda_ipc import BLOCK_BYTES, ExportedDeviceMemory, ImportedDeviceMemory
from penstock.shm.buffers.device_api import HANDLE_BYTES, DeviceError, DeviceRow
from penstock.shm.buffers.shared_buffers import BufferSlice
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
from tests.shm.buffers.buffer_backend import BLOCK, HIDDEN, TurnedBackend
from tests.shm.buffers.device.harness import ON_DEVICE
from tests.shm.buffers.fake_device import UUID, FakeDevice


def granted(memory: ExportedDeviceMemory, num_bytes: int = BLOCK, **changes: object) -> BufferGrant:
    handles = memory.memory_handles, memory.event_handles
    fields = {"kind": BufferKind.CUDA, "num_buffers": len(handles[0]), "num_bytes": num_bytes, "contents": ()}
    fields |= {"device_uuid": UUID, "memory_handles": handles[0], "event_handles": handles[1]}
    return BufferGrant(**(fields | changes))  # type: ignore[arg-type]


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
    """The driver serves smaller allocations from one block, and a handle opens the whole block."""
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
        # Returned before the device has done the copy: the event orders the client's stream behind it.
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
    """The user who released it did not wait for that."""
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
        loan.copy_rows(0, 1, DeviceRow(target, step_stream))  # too late: nothing is enqueued
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


def test_prompt_that_is_still_being_written_is_refused(device: FakeDevice, clients_device: FakeDevice) -> None:
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
