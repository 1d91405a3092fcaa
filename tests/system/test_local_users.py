"""The real commands next to another user of the machine, who may make any directory in /tmp."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.system.processes import Command, Frontend, running, start_backend
from tests.users import NOBODY, needs_root

BECOME_ANOTHER = f"""
import os, socket, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""
ATTACK = """
parent, genuine = sys.argv[1:]
os.makedirs(parent + "/penstock")
os.symlink(genuine, parent + "/penstock/backend.sock")
os.chmod(parent, 0o777)
listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
for listener, suffix in zip(listeners, (".zmq", ".messages")):
    listener.bind(f"{parent}/penstock/backend.sock{suffix}")
    os.chmod(listener.getsockname(), 0o777)
    listener.listen()
print("ready", flush=True)
sys.stdin.read()
for listener in listeners:
    listener.setblocking(False)
    try:
        listener.accept()
        print("someone came")
    except BlockingIOError:
        pass
"""


@needs_root
def test_no_command_meets_another_users_sockets() -> None:
    """He makes the directory before us, with a link to the genuine socket and message sockets of his own beside it."""
    with tempfile.TemporaryDirectory(prefix="ps-") as ours, tempfile.TemporaryDirectory(prefix="ps-") as theirs:
        genuine, path = Path(ours) / "backend.sock", Path(theirs) / "run" / "penstock" / "backend.sock"
        Path(theirs).chmod(0o1777)
        attacker = subprocess.Popen(
            [sys.executable, "-S", "-c", BECOME_ANOTHER + ATTACK, str(path.parent.parent), str(genuine)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "ready\n"
        refusal = (
            f"{path.parent} is not safe: the directory {path.parent.parent} has mode 777 and owner 65534 (nobody); its "
            "owner must be 0 (root); choose another path"
        )
        other_backend = Command("penstock.backend.main", "--socket", str(path), "--forward-pass", "fake")
        with running(other_backend):
            other_frontend = Command("penstock.frontend.main", "--port", "0", "--socket", str(path))
            with running(other_frontend):
                assert other_frontend.status() == other_backend.status() == 1
        assert other_frontend.output == f"frontend: --socket {path}: {refusal}"
        assert other_backend.output == f"backend: {refusal}"
        assert attacker.communicate()[0] == ""


@needs_root
def test_running_server_leaves_nothing_for_other_users(tmp_path: Path) -> None:
    """Every socket, file and directory that the commands make is closed to others, and messages have no name at all."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        path = Path(directory) / "made" / "backend.sock"
        Path(directory).chmod(0o755)
        previous = os.umask(0)
        try:
            backend = start_backend(path, "--forward-pass", "fake")
            frontend = Frontend(path)
        finally:
            os.umask(previous)
        with running(frontend, backend):
            frontend.wait_ready()
            names = {entry.name: entry.stat().st_mode for entry in os.scandir(path.parent)}
            assert set(names) == {"backend.sock", "backend.sock.lock"}
            for mode in (*names.values(), path.parent.stat().st_mode):
                assert not stat.S_IMODE(mode) & 0o077
            visit = "socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
            visitor = subprocess.run(
                [sys.executable, "-S", "-c", BECOME_ANOTHER + visit, str(path)],
                cwd="/",
                capture_output=True,
                text=True,
                check=False,
            )
            assert re.search(r"PermissionError", visitor.stderr)
