"""The mailbox keeps one file descriptor for processes that come later."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.shm.memory.fd_mailbox import MAX_FDS, FdMailbox, close_all


def memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def content(mailbox: FdMailbox) -> bytes | None:
    fds = mailbox.find()
    assert not any(map(os.get_inheritable, fds))
    try:
        return b" and ".join(os.pread(fd, 100, 0) for fd in fds) if fds else None
    finally:
        close_all(fds)


def test_last_fd_that_was_left_is_found_any_number_of_times_until_it_is_cleared() -> None:
    mailbox = FdMailbox.create()
    assert mailbox.is_empty
    assert content(mailbox) is None
    first, second = memfd(b"first"), memfd(b"second")
    mailbox.leave([first])
    assert mailbox.holds(first)
    os.close(first)
    assert [content(mailbox) for _ in range(3)] == [b"first"] * 3
    third = memfd(b"third")
    mailbox.leave([second, third])
    assert content(mailbox) == b"second and third"
    assert mailbox.holds(second)
    assert not mailbox.holds(third)
    os.close(third)
    assert not mailbox.is_empty
    mailbox.clear()
    assert content(mailbox) is None
    assert not mailbox.holds(second)
    for fds in ([], [second] * (MAX_FDS + 1)):
        with pytest.raises(OSError, match=f"{len(fds)} fds for a mailbox; it takes 1 to {MAX_FDS}"):
            mailbox.leave(fds)
    os.close(second)
    mailbox.close()


CHILD = """
import fcntl, os, sys
from penstock.shm.memory.fd_mailbox import FdMailbox
fds = tuple(map(int, sys.argv[1:]))
try:
    fcntl.lockf(fds[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("entered", flush=True)
except BlockingIOError:
    print("locked out", flush=True)
mailbox = FdMailbox.attach(fds)
fd = os.memfd_create("test")
os.write(fd, b"of a child")
mailbox.leave([fd])
os.kill(os.getpid(), 9)
"""


def run_child(mailbox: FdMailbox) -> str:
    argv = [sys.executable, "-P", "-c", CHILD, *map(str, mailbox.fds)]
    done = subprocess.run(argv, pass_fds=mailbox.fds, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    return done.stdout.strip()


def test_fd_outlives_the_process_that_left_it_and_only_one_process_has_the_lock() -> None:
    mailbox = FdMailbox.create()
    with mailbox.locked():
        assert run_child(mailbox) == "locked out"
    assert content(mailbox) == b"of a child"
    assert run_child(mailbox) == "entered"
    with mailbox.locked():  # the dead child has left
        pass
    mailbox.close()


def test_fds_of_something_else_are_refused() -> None:
    fd = memfd(b"")
    with pytest.raises(OSError, match="is no socket"):
        FdMailbox.attach((fd, fd))
    os.close(fd)
