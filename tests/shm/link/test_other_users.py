"""Another user of the machine can neither listen in the backend's place nor talk to it. Root plays all users."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import shutil
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.process.private_directory import UnsafeDirectory, default_socket_path
from penstock.shm.client.session import Session
from penstock.shm.link.join import Refused, join
from penstock.shm.link.listening_address import CannotListen
from penstock.shm.link.rendezvous import Rendezvous
from penstock.shm.memory.ledger import Ledger
from penstock.shm.memory.region import RegionError
from penstock.shm.messages import PROTOCOL_VERSION, Hello, Refusal, Welcome, WireError, decode_welcome, encode
from tests.shm.scripted_backend import ScriptedBackend, model_card
from tests.users import NOBODY, needs_root


@contextmanager
def another_user(action: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """Run the action in a child with another user's rights; the action's socket is connected to the yielded one."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action(theirs)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child of pytest must not go on as pytest
            traceback.print_exc()
            os._exit(1)
    theirs.close()
    try:
        yield ours
        ours.close()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pid = 0
    finally:
        ours.close()
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.fixture
def their_directory() -> Iterator[Path]:
    """A directory that another user made in /tmp before us, open to all users."""
    directory = Path(tempfile.mkdtemp(prefix="ps-theirs-"))
    os.chown(directory, NOBODY, NOBODY)
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


@needs_root
def test_backend_and_frontend_refuse_a_directory_that_another_user_made_first(
    their_directory: Path, socket_path: Path
) -> None:
    """The attack: let the backend make its directory in ours, then put another in its place.

    A link there leads to the genuine rendezvous; the message socket beside it was the attacker's, and received the
    prompts.
    """
    path = their_directory / "penstock" / "backend.sock"
    with pytest.raises(CannotListen, match=f"the directory {their_directory} has mode 777 and owner 65534"):
        Rendezvous(path)
    assert not path.parent.exists()

    def swap(_: socket.socket) -> None:
        path.parent.mkdir()
        path.symlink_to(socket_path)

    with another_user(swap):
        pass
    with ScriptedBackend(socket_path):
        with pytest.raises(UnsafeDirectory, match=f"^{path.parent} is not safe: the directory {their_directory} has"):
            asyncio.run(join(path))
        their_directory.chmod(0o1777)  # sticky, but still not root's or ours
        with pytest.raises(UnsafeDirectory):
            asyncio.run(join(path))


@needs_root
def test_default_path_is_refused_if_another_user_was_first(
    their_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(their_directory))
    their_directory.chmod(0o700)
    with pytest.raises(CannotListen, match=r"owner 65534 \(nobody\); its owner must be 0 \(root\); choose another"):
        Rendezvous(default_socket_path())
    with pytest.raises(UnsafeDirectory):
        asyncio.run(join(default_socket_path()))


@needs_root
def test_fake_backend_of_another_user_receives_nothing(socket_path: Path) -> None:
    """Even if the directory was open for a moment, so that the other user could put a socket there."""
    socket_path.parent.chmod(0o777)

    def listen(parent: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fake:
            fake.bind(str(socket_path))
            socket_path.chmod(0o777)
            fake.listen()
            parent.send(b"ready")
            connection, _ = fake.accept()
            parent.send(b"heard: " + connection.recv(4096))

    with another_user(listen) as fake:
        assert fake.recv(100) == b"ready"
        socket_path.parent.chmod(0o700)
        with pytest.raises(Refused, match=r"^the process that listens there \(pid \d+\) belongs to user 65534, not 0$"):
            asyncio.run(join(socket_path))
        assert fake.recv(100) == b"heard: "


@needs_root
def test_modes_and_credentials_keep_other_users_out(socket_path: Path) -> None:
    def visit(parent: socket.socket) -> None:
        for _ in range(2):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(10)
                try:
                    peer.connect(str(socket_path))
                    parent.send(peer.recv(4096))
                except PermissionError:
                    parent.send(b"no permission")
                parent.recv(1)

    rendezvous = Rendezvous(socket_path)
    with another_user(visit) as visitor:
        assert visitor.recv(100) == b"no permission"
        socket_path.parent.chmod(0o755)
        socket_path.chmod(0o777)
        visitor.send(b"x")
        while not select.select([visitor], [], [], 0.01)[0]:
            rendezvous.turn()
        answer = decode_welcome(visitor.recv(4096))
        assert answer == Refusal("this backend belongs to another user")
        visitor.send(b"x")
    assert rendezvous.refused == 1
    rendezvous.close()


# Descriptors in the handshake


@contextmanager
def devices(count: int) -> Iterator[list[int]]:
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def num_open_files() -> int:
    gc.collect()  # what earlier tests left open must not be closed between two counts
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("num_fds", [0, 3, 4, 5, 40, 253])
async def test_welcome_with_wrong_descriptors_is_refused_and_leaks_none(socket_path: Path, num_fds: int) -> None:
    welcome = Welcome(1, b"i" * 16, os.getpid(), 1, 4096, 8, model_card())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fake, devices(num_fds) as fds:
        fake.bind(str(socket_path))
        fake.listen()
        fake.setblocking(False)
        before = num_open_files()
        joining = asyncio.ensure_future(join(socket_path))
        await asyncio.sleep(0)
        connection, _ = fake.accept()
        with connection:
            assert connection.recv(4096) == encode(Hello(PROTOCOL_VERSION))
            socket.send_fds(connection, [encode(welcome)], fds)
            with pytest.raises(WireError, match="first file descriptor is not" if num_fds == 4 else "file descriptors"):
                await joining
        assert num_open_files() == before


async def test_welcome_whose_descriptors_are_not_shared_memory_is_refused_and_leaks_none(socket_path: Path) -> None:
    welcome = Welcome(1, b"i" * 16, os.getpid(), 1, 4096, 8, model_card())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fake, devices(3) as fds:
        fake.bind(str(socket_path))
        fake.listen()
        fake.setblocking(False)
        before = num_open_files()
        opening = asyncio.ensure_future(Session.open(socket_path, Ledger()))
        await asyncio.sleep(0)
        connection, _ = fake.accept()
        with connection:
            assert connection.recv(4096) == encode(Hello(PROTOCOL_VERSION))
            socket.send_fds(connection, [encode(welcome)], [fake.fileno(), *fds])
            with pytest.raises(RegionError):
                await opening
        assert num_open_files() == before


async def test_backend_that_leaves_during_the_handshake_ends_it(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fake:
        fake.bind(str(socket_path))
        fake.listen()
        fake.setblocking(False)
        joining = asyncio.ensure_future(join(socket_path))
        await asyncio.sleep(0)
        fake.accept()[0].close()
        with pytest.raises(ConnectionResetError):
            await joining


def test_descriptors_that_come_with_a_hello_are_not_kept(socket_path: Path) -> None:
    rendezvous = Rendezvous(socket_path, max_connections=4)
    with devices(200) as fds:
        before = num_open_files()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(socket_path))
            socket.send_fds(peer, [encode(Hello(PROTOCOL_VERSION))], fds)
            rendezvous.turn()
            (connection,), _ = rendezvous.turn()
            assert num_open_files() == before + 2
        rendezvous.drop(connection)
        assert num_open_files() == before
    rendezvous.close()
