"""The units of docs/operations/systemd, and a server that is started as systemd starts it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from penstock.process.children import module_argv
from tests.system.processes import REPOSITORY, START_TIMEOUT_S, STOP_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

UNITS = REPOSITORY / "docs" / "operations" / "systemd"
MAX_EXPOSURE = 4.0
"""Of systemd-analyze security."""
WATCHDOG_US = "900000"
ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(str(tmp_path / "notify"))
        receiving.settimeout(START_TIMEOUT_S)
        yield receiving


def started(arguments: list[str], fd: int, runtime_dir: Path) -> subprocess.Popen[bytes]:
    """Like systemd: the socket is fd 3, and LISTEN_PID is the process itself."""
    script = f'exec 3<&{fd}; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
    environment = os.environ | {
        "XDG_RUNTIME_DIR": str(runtime_dir),
        "NOTIFY_SOCKET": str(runtime_dir / "notify"),
        "WATCHDOG_USEC": WATCHDOG_US,
        "PYTHONPATH": str(REPOSITORY),
    }
    return subprocess.Popen(["/bin/bash", "-c", script, "bash", *arguments], env=environment, pass_fds=(fd,))


def receive_for_ever(notified: socket.socket) -> None:
    while True:
        notified.recv(100)


def test_server_takes_the_managers_socket_and_reports_its_life(tmp_path: Path, notified: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/models"
        process = started(
            list(module_argv("penstock.main", ["serve", "--forward-pass", "fake"])), listening.fileno(), tmp_path
        )
        try:
            seen = {notified.recv(100)}
            while b"READY=1" not in seen:
                seen.add(notified.recv(100))
            assert httpx.get(url).status_code == 200
            assert {notified.recv(100) for _ in range(2)} == {b"WATCHDOG=1"}
            process.send_signal(signal.SIGTERM)
            while notified.recv(100) != b"STOPPING=1":
                pass
            assert process.wait(STOP_TIMEOUT_S) == 0
        finally:
            process.kill()
            process.wait()


def test_backend_alone_reports_its_life(tmp_path: Path, notified: socket.socket) -> None:
    arguments = ["--forward-pass", "fake", "--socket", str(tmp_path / "b.sock")]
    with socket.create_server(("127.0.0.1", 0)) as unused:
        process = started(list(module_argv("penstock.backend.main", arguments)), unused.fileno(), tmp_path)
        try:
            assert notified.recv(100) == b"READY=1"
            assert {notified.recv(100) for _ in range(2)} == {b"WATCHDOG=1"}
            process.send_signal(signal.SIGSTOP)  # a process that hangs is silent, so that systemd kills it
            notified.settimeout(2 * int(WATCHDOG_US) / 1e6)
            with pytest.raises(TimeoutError):
                receive_for_ever(notified)
        finally:
            process.kill()
            process.wait()


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("with_gpu", [False, True])
def test_units_are_valid_and_leave_little_exposed(tmp_path: Path, with_gpu: bool) -> None:
    ignored = () if with_gpu else ("penstock.service.d",)
    units = shutil.copytree(UNITS, tmp_path / "units", ignore=shutil.ignore_patterns(*ignored))
    service, socket_unit = units / "penstock.service", units / "penstock.socket"
    service.write_text(service.read_text().replace("/opt/penstock/bin/penstock", sys.executable))
    assert ANALYZE is not None
    done = subprocess.run([ANALYZE, "verify", service, socket_unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    # Its scale ends at 10, exposed to everything.
    security = [ANALYZE, "security", "--offline=true", f"--threshold={MAX_EXPOSURE * 10:.0f}", service]
    done = subprocess.run(security, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert ("✗ PrivateDevices=" in done.stdout) is with_gpu
