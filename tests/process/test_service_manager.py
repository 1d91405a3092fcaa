"""Messages to a service manager, read from a socket like systemd's."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING

import pytest

from penstock.process.service_manager import ServiceManager, activated_fd, find_service_manager

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def received(systemd: socket.socket) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(systemd.recv(100))
        except BlockingIOError:
            return found


def test_without_a_service_manager_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert find_service_manager("serve") is None
    assert activated_fd("serve") is None


def test_states_arrive_and_children_do_not_inherit_the_variables(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    manager = find_service_manager("serve")
    assert manager is not None
    assert manager.beat_every_s == 1.0
    manager.ready()
    for _ in range(5):
        manager.beat()
    manager.stopping()
    manager.close()
    assert received(systemd) == [b"READY=1", b"WATCHDOG=1", b"STOPPING=1"]
    assert not set(VARIABLES) & set(os.environ)


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}])
def test_without_a_watchdog_of_this_process_no_beat_is_sent(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch, watchdog: dict[str, str]
) -> None:
    for name, value in watchdog.items():
        monkeypatch.setenv(name, value)
    manager = ServiceManager.from_environment()
    assert manager is not None
    manager.beat()
    manager.close()
    assert manager.beat_every_s is None
    assert received(systemd) == []


def test_a_manager_that_is_gone_is_logged_and_stops_nothing(
    systemd: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ServiceManager.from_environment()
    assert manager is not None
    systemd.close()
    manager.ready()
    manager.close()
    assert "does not take READY=1" in caplog.text


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NOTIFY_SOCKET": "notify"}, "NOTIFY_SOCKET is 'notify'; it must be a path"),
        ({"NOTIFY_SOCKET": "/nowhere/notify"}, "NOTIFY_SOCKET /nowhere/notify cannot be used: No such file"),
        ({"NOTIFY_SOCKET": "@a", "WATCHDOG_USEC": "1e6"}, "WATCHDOG_USEC is '1e6'; it must be a number"),
        ({"NOTIFY_SOCKET": "@a", "WATCHDOG_USEC": "0"}, "WATCHDOG_USEC is '0'; it must be a number"),
    ],
)
def test_unusable_variable_ends_the_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        find_service_manager("serve")
    assert re.match(f"serve: {re.escape(message)}", capsys.readouterr().err)


def test_a_socket_for_another_process_is_left_alone_and_several_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for pid, count, expected in ((1, "1", None), (os.getpid(), "0", None), (os.getpid(), "1", 3)):
        monkeypatch.setenv("LISTEN_PID", str(pid))
        monkeypatch.setenv("LISTEN_FDS", count)
        assert activated_fd("serve") == expected
        assert "LISTEN_FDS" not in os.environ
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with pytest.raises(SystemExit):
        activated_fd("serve")
    assert capsys.readouterr().err == "serve: LISTEN_FDS is '2'; the server listens on one socket\n"
