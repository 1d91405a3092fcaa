"""The handshake: who may connect, and how peers that misbehave are refused."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.join import Invitation, Refused, join
from penstock.shm.link.listening_address import (
    MAX_NAME_BYTES,
    AddressInUse,
    CannotListen,
    ListeningAddress,
    successor_path,
    take_over,
)
from penstock.shm.link.rendezvous import Rendezvous
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import (
    MAX_ADAPTERS,
    MAX_CARD_BYTES,
    PROTOCOL_VERSION,
    Adapter,
    Cancel,
    Hello,
    Refusal,
    Welcome,
    decode_welcome,
    encode,
)
from tests.shm.scripted_backend import BackendProcess, Script, ScriptedBackend, model_card

ROOT = Path(__file__).parents[3]


@pytest.fixture
def rendezvous(socket_path: Path) -> Iterator[Rendezvous]:
    rendezvous = Rendezvous(socket_path, max_connections=4, handshake_timeout_s=0.1)
    yield rendezvous
    rendezvous.close()
    assert not socket_path.exists()


def connect(socket_path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(60)
    peer.connect(str(socket_path))
    return peer


def welcome() -> Welcome:
    return Welcome(1, b"i" * 16, os.getpid(), 1, 4096, 8, model_card())


def settle(rendezvous: Rendezvous) -> None:
    """Turn until nothing is readable."""
    while select.select([rendezvous], [], [], 0)[0]:
        rendezvous.turn()


def reason(peer: socket.socket) -> str:
    """The backend's last message; then it has closed the connection."""
    answer = decode_welcome(peer.recv(4096))
    assert isinstance(answer, Refusal)
    assert peer.recv(1) == b""
    return answer.reason


def test_hello_is_welcomed_with_fds_and_the_end_of_its_connection_is_a_death(
    rendezvous: Rendezvous, socket_path: Path
) -> None:
    with connect(socket_path) as peer:
        peer.send(encode(Hello(PROTOCOL_VERSION)))
        settle_arrived, died = rendezvous.turn()
        assert not settle_arrived  # accepted only
        (connection,), died = rendezvous.turn()
        assert not died
        assert connection.pid == os.getpid()
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
        assert rendezvous.welcome(connection, welcome(), fds)
        data, received, _, _ = socket.recv_fds(peer, 65536, 4)
        assert decode_welcome(data) == welcome()
        assert len(received) == 3
        for fd in (*fds, *received):
            os.close(fd)
        assert rendezvous.turn() == ([], [])
    assert rendezvous.turn() == ([], [connection])
    assert rendezvous.turn() == ([], [])


def test_frontend_that_sends_after_its_hello_is_dropped(rendezvous: Rendezvous, socket_path: Path) -> None:
    with connect(socket_path) as peer:
        peer.send(encode(Hello(PROTOCOL_VERSION)))
        rendezvous.turn()
        (connection,), _ = rendezvous.turn()
        assert rendezvous.welcome(connection, welcome(), [])
        peer.send(b"more")
        assert rendezvous.turn() == ([], [connection])


def test_refusal_of_another_protocol_version_names_both_versions(rendezvous: Rendezvous, socket_path: Path) -> None:
    with connect(socket_path) as peer:
        peer.send(encode(Hello(PROTOCOL_VERSION + 6)))
        settle(rendezvous)
        assert reason(peer) == (
            f"the backend speaks protocol version {PROTOCOL_VERSION}, the frontend {PROTOCOL_VERSION + 6}"
        )
    assert rendezvous.refused == 1


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xdd\xff\xff\xff\xff", b"x" * 5000, encode(Cancel(1))]
)
def test_malformed_hello_is_refused(rendezvous: Rendezvous, socket_path: Path, garbage: bytes) -> None:
    with connect(socket_path) as peer:
        peer.send(garbage)
        settle(rendezvous)
        assert reason(peer) == "not a Hello"


def test_incomplete_handshake_times_out_without_blocking_others(rendezvous: Rendezvous, socket_path: Path) -> None:
    with connect(socket_path) as silent, connect(socket_path) as honest:
        honest.send(encode(Hello(PROTOCOL_VERSION)))
        rendezvous.turn()
        (connection,), _ = rendezvous.turn()
        assert rendezvous.welcome(connection, welcome(), [])
        due_s = rendezvous.deadline_s()
        assert due_s is not None
        select.select([], [], [], max(0.0, due_s - time.monotonic()) + 0.001)
        assert rendezvous.turn() == ([], [])
        assert reason(silent) == "no Hello in time"
        assert rendezvous.deadline_s() is None


def test_peer_that_leaves_during_the_handshake_is_removed(rendezvous: Rendezvous, socket_path: Path) -> None:
    connect(socket_path).close()
    with connect(socket_path) as peer:
        peer.send(encode(Hello(PROTOCOL_VERSION)))
    rendezvous.turn()
    (connection,), died = rendezvous.turn()
    assert not died
    assert not rendezvous.welcome(connection, welcome(), [])
    settle(rendezvous)
    assert rendezvous.deadline_s() is None


def test_connections_are_bounded(rendezvous: Rendezvous, socket_path: Path) -> None:
    peers = [connect(socket_path) for _ in range(6)]
    settle(rendezvous)
    assert [reason(peer) for peer in peers[4:]] == ["4 frontends are connected already"] * 2
    for peer in peers:
        peer.close()
    settle(rendezvous)
    with connect(socket_path) as peer:
        peer.send(encode(Hello(PROTOCOL_VERSION)))
        rendezvous.turn()
        assert len(rendezvous.turn()[0]) == 1


def test_accepting_pauses_while_no_fds_are_free(rendezvous: Rendezvous, socket_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect(socket_path) as peer:
        peer.send(encode(Hello(PROTOCOL_VERSION)))
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            assert rendezvous.turn() == ([], [])
            # It ignores the listener, which stays readable.
            assert not select.select([rendezvous], [], [], 0)[0]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        due_s = rendezvous.deadline_s()
        assert due_s is not None
        select.select([], [], [], max(0.0, due_s - time.monotonic()) + 0.001)
        arrived = [connection for _ in range(3) for connection in rendezvous.turn()[0]]
        assert len(arrived) == 1


def test_second_backend_on_the_socket_fails_with_one_line(rendezvous: Rendezvous, socket_path: Path) -> None:
    with pytest.raises(AddressInUse, match=rf"another backend \(pid {os.getpid()}\) serves {socket_path}$"):
        Rendezvous(socket_path)
    with connect(socket_path):
        pass


def test_socket_of_a_killed_backend_is_reused(socket_path: Path) -> None:
    with BackendProcess(socket_path) as backend:
        backend.signal(signal.SIGKILL)
        backend.kill()
        assert socket_path.is_socket()
        Rendezvous(socket_path).close()


def test_file_that_is_not_a_socket_is_never_removed(socket_path: Path) -> None:
    socket_path.write_text("precious")
    with pytest.raises(CannotListen, match="not a socket"):
        Rendezvous(socket_path)
    assert socket_path.read_text() == "precious"


def test_directory_and_sockets_are_private_whatever_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        path = tmp_path / "a" / "b" / "s"
        with ScriptedBackend(path):
            for made in (path.parent, path.parent.parent, path, path.with_name("s.lock")):
                assert stat.S_IMODE(made.stat().st_mode) & 0o077 == 0, made
            assert sorted(entry.name for entry in path.parent.iterdir()) == ["s", "s.lock"]  # messages have no name
    finally:
        os.umask(previous)


def test_directory_that_others_may_enter_is_refused(socket_path: Path) -> None:
    socket_path.parent.chmod(0o755)
    with pytest.raises(CannotListen, match="has mode 755"):
        Rendezvous(socket_path)


def test_directory_that_cannot_be_created_is_named(socket_path: Path) -> None:
    socket_path.write_text("a file")
    with pytest.raises(CannotListen, match=f"^cannot create or enter {socket_path}: "):
        Rendezvous(socket_path / "s")


@pytest.mark.parametrize(
    ("name", "expected"), [(".b.sock.messages", "cannot make a socket in"), ("b.sock.lock", "cannot create or lock")]
)
def test_backend_that_cannot_make_its_sockets_or_lock_says_so_in_one_line(
    socket_path: Path, name: str, expected: str
) -> None:
    socket_path.with_name(name).mkdir()
    board = BackendBoard.create()
    with pytest.raises(CannotListen, match=f"^{expected} .*: Is a directory$"):
        BackendLink(socket_path, model_card(), board)
    assert not socket_path.exists()
    socket_path.with_name(name).rmdir()
    BackendLink(socket_path, model_card(), board).close()
    board.close()


def test_path_too_long_for_a_socket_is_refused(socket_path: Path) -> None:
    with pytest.raises(CannotListen, match="the limit is 107"):
        Rendezvous(socket_path.with_name("x" * 100))


def test_name_that_the_directory_fd_leaves_no_room_for_is_refused(socket_path: Path) -> None:
    longest = socket_path.with_name("x" * MAX_NAME_BYTES)
    address = ListeningAddress(longest)
    listener, fd = address.unnamed_listener()
    os.close(fd)
    listener.close()
    address.close()
    with pytest.raises(CannotListen, match=f"73 bytes; the limit is {MAX_NAME_BYTES}"):
        Rendezvous(socket_path.with_name("x" * 73))


async def test_fifty_frontends_at_once_are_all_welcomed(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:

        async def persist() -> Invitation:
            while True:
                try:
                    return await join(socket_path)
                except BlockingIOError:  # the backlog is full
                    await asyncio.sleep(0.005)

        invitations = await asyncio.gather(*(persist() for _ in range(50)))
        assert len({invitation.welcome.epoch for invitation in invitations}) == 50
        assert len({invitation.welcome.identity for invitation in invitations}) == 50
        for invitation in invitations:
            invitation.control.close()
            invitation.close_fds()
        async with asyncio.timeout(10):
            while len(backend.engine.deaths) < 50:  # noqa: ASYNC110 - another thread brings it about
                await asyncio.sleep(0.002)
        assert backend.engine.link.balance() == {}


async def test_longest_card_that_a_backend_may_announce_reaches_frontends(socket_path: Path) -> None:
    bare = model_card(model_dir="", aliases=("x",))
    padding = MAX_CARD_BYTES - len(encode(bare))
    card = model_card(aliases=tuple("x" * 512 for _ in range(64)), adapters=adapters_of(padding - 64 * 515))
    assert MAX_CARD_BYTES - 600 < len(encode(card)) <= MAX_CARD_BYTES
    with ScriptedBackend(socket_path, Script(card)):
        invitation = await join(socket_path)
        assert invitation.welcome.model == card
        invitation.control.close()
        invitation.close_fds()


def adapters_of(num_bytes: int) -> tuple[Adapter, ...]:
    """Return adapters that take at most num_bytes together, and nearly so many."""
    one = Adapter("a" * 512, "i" * 64, 8)
    return (one,) * min(MAX_ADAPTERS, num_bytes // len(encode(one)))


async def test_join_raises_different_errors_without_a_backend_and_for_a_refusal(socket_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await join(socket_path.with_name("none"))
    # A long time for a Hello: if the places of these peers became free, nobody would answer the next one.
    rendezvous = Rendezvous(socket_path, max_connections=4, handshake_timeout_s=60.0)
    peers = [connect(socket_path) for _ in range(4)]
    loop = asyncio.get_running_loop()
    loop.add_reader(rendezvous.fileno(), rendezvous.turn)
    for _ in range(20):
        with pytest.raises(Refused, match="4 frontends are connected already"):
            await join(socket_path)
    loop.remove_reader(rendezvous.fileno())
    rendezvous.close()
    for peer in peers:
        peer.close()


def test_successor_removes_the_socket_that_it_took_over_and_only_its_own(tmp_path: Path) -> None:
    path = tmp_path / "s-2.sock"
    old, new = ListeningAddress(path), ListeningAddress(successor_path(path))
    with socket.socket(socket.AF_UNIX) as old_listener, socket.socket(socket.AF_UNIX) as new_listener:
        old.listen(old_listener)
        new.listen(new_listener)
        take_over(path, successor_path(path))
        old.unlink()
        assert path.is_socket()
        new.unlink()
        assert [entry.name for entry in tmp_path.iterdir()] == ["s-2.sock.lock"]
    old.close()
    new.close()
