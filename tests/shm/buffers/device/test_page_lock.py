"""Host memory that the device reads in place."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from array import array
from pathlib import Path

import pytest

from penstock.shm.buffers.cuda_driver import DriverDevice, open_device
from penstock.shm.buffers.device_api import DeviceError, DeviceRow
from penstock.shm.buffers.host_memory import PageLock
from penstock.shm.buffers.shared_buffers import BufferSlice
from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import BufferContent
from tests.shm.buffers.buffer_backend import BLOCK, HIDDEN, TurnedBackend
from tests.shm.buffers.device.harness import ON_HOST, STREAM
from tests.shm.buffers.fake_device import UUID, FakeDevice


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
    # Nothing waits for the enqueued copy. Once it is done, the memory is unlocked and freed.
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


def test_backend_that_ends_before_its_clients_unlocks_all_pages(socket_path: Path, device: FakeDevice) -> None:
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


def test_missing_driver_is_reported() -> None:
    with pytest.raises(DeviceError, match="no usable CUDA driver"):
        DriverDevice(0, library="libno-such-driver.so.1")
    with pytest.raises(DeviceError, match="no usable CUDA driver"):
        open_device(UUID, library="libno-such-driver.so.1")
