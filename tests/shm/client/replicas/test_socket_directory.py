"""Which entries of a directory are backends; what is none is said once."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from pathlib import Path

import pytest

from penstock.shm.client.replicas.socket_directory import SocketDirectory, index_of, name_of
from penstock.shm.link.listening_address import MAX_NAME_BYTES
from penstock.shm.memory.prefix_table import MAX_REPLICAS


@pytest.fixture
def directory(socket_path: Path) -> Path:
    made = socket_path.with_name("d")
    made.mkdir(mode=0o700)
    return made


def bind(path: Path) -> Path:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        fd = os.open(path.parent, os.O_PATH)
        try:
            made.bind(f"/proc/self/fd/{fd}/{path.name}")
        finally:
            os.close(fd)
    return path


def test_only_sockets_with_the_suffix_are_backends_and_others_are_named_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = [bind(directory / name) for name in ("a.sock", "b.sock")]
    for name in (".hidden.sock", "a.sock.messages", "b-next.sock", "control"):
        bind(directory / name)
    (directory / "file.sock").touch()
    (directory / "link.sock").symlink_to(found[0])
    (directory / "a.sock.lock").touch()
    (directory / "folder.sock").mkdir()
    bind(directory / f"{'x' * 68}.sock")
    watched = SocketDirectory(directory)
    assert [watched.look() for _ in range(3)] == [found] * 3
    lines = [record.getMessage() for record in caplog.records]
    ignored = [f"{directory / name}.sock is ignored: it is no socket" for name in ("file", "folder", "link")]
    assert [line for line in lines if "no socket" in line] == ignored
    assert [line.partition("ignored: ")[2] for line in lines if "limit" in line] == [
        f"its name has 73 bytes; the limit is {MAX_NAME_BYTES}"
    ]
    assert len(lines) == 4
    found[0].unlink()
    assert watched.look() == found[1:]


def test_directory_that_cannot_be_read_changes_nothing_and_says_so_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = SocketDirectory(directory)
    assert watched.look() == []
    found = [bind(directory / "a.sock")]
    assert watched.look() == found
    shutil.rmtree(directory)
    assert [watched.look() for _ in range(2)] == [found] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot read the directory of backends {directory}: No such file or directory; the backends stay"
    ]
    directory.mkdir()
    assert watched.look() == []


def test_more_sockets_than_a_set_has_replicas_are_left_out(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(MAX_REPLICAS + 1):
        bind(directory / f"{number:03}.sock")
    found = SocketDirectory(directory).look()
    assert [name_of(path) for path in (found[0], found[-1])] == ["000", f"{MAX_REPLICAS - 1:03}"]
    assert f"has {MAX_REPLICAS + 1} sockets; the first {MAX_REPLICAS} are used" in caplog.text


def test_number_of_a_replica_depends_on_its_name_alone() -> None:
    assert index_of(Path("/a/x.sock")) == index_of(Path("/b/x.sock")) != index_of(Path("/a/y.sock"))
    assert {index_of(Path(f"{n}.sock")) for n in range(2000)} <= set(range(MAX_REPLICAS))
