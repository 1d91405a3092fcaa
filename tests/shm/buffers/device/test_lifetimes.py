"""When device memory is freed: clients close, crash or disconnect, and backends end."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.buffers.shared_buffers import BufferGone
from penstock.shm.client.session import Session
from penstock.shm.link.events import FrontendDeath
from penstock.shm.memory.ledger import Ledger
from tests.shm.buffers.buffer_backend import BLOCK, ClientProcess, TurnedBackend, WelcomeRefused
from tests.shm.buffers.device.harness import ON_DEVICE
from tests.shm.buffers.fake_device import FakeDevice


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
        peer.do("disconnect")
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
    """Its work on the device may still use the buffer, so it does not report BuffersClosed."""
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


def test_buffer_is_gone_with_its_connection(socket_path: Path, device: FakeDevice, clients_device: FakeDevice) -> None:
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
    device.die()  # this process is the one that may have it open


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
        peer.do("disconnect")
        backend.until(lambda: backend.exporter.num_orphans)
        with pytest.raises(WelcomeRefused, match="asks for 2 shared buffers"):
            backend.invite(ON_DEVICE)
        peer.kill()
        backend.until(lambda: not backend.exporter.held_bytes)
    with backend.visit(ON_DEVICE):
        assert backend.exporter.held_bytes == 2 * BLOCK
    backend.close()
    device.die()
