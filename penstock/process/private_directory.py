"""Directories that other users cannot change: for sockets, state and compiled code.

A user who can write one directory of a path can replace everything below it. So every directory is checked from the
root down, as sshd does (StrictModes): its owner is root or this user, and others cannot write it unless it is sticky,
as /tmp is. Symbolic links are followed one at a time, and each target is checked in the same way. Each step begins at
the fd of a checked directory, so nothing can be swapped between the check and the use. Rights that an access control
list grants show in the mode bits of the group.
"""

from __future__ import annotations

import enum
import errno
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAX_LINKS = 40


class UnsafeDirectory(Exception):
    """Another user could change the directory or what leads to it. The message is one line with the remedy."""


class Trust(enum.Enum):
    """The trust that a directory's use requires.

    The value: mode bits that it may not have, and mode bits that the directories above it may not have.
    """

    PRIVATE = 0o077, 0o022
    """Only this user may enter: sockets of the backend, state. Created with mode 700."""
    READABLE = 0o022, 0o022
    """This user or root owns it, and others may read: compiled code. Created with mode 700."""
    SHARED = 0o002, 0o002
    """Contains a socket for other users. Its group is trusted. Never created."""


def default_socket_path() -> Path:
    """The backend's socket: one per user, in XDG_RUNTIME_DIR (mode 0700 by its specification) or else under /tmp."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    private = f"/tmp/penstock-{os.getuid()}"  # noqa: S108 - the rendezvous makes it 0700 and checks it
    base = Path(runtime_dir) if runtime_dir else Path(private)
    return base / "penstock" / "backend.sock"


def open_directory(path: Path, trust: Trust, *, create: bool = True) -> int:
    """Check and open a directory; create it, and those above it, where they are missing. The caller closes the fd
    (O_PATH).

    Use it as dir_fd, or as `path_in(fd, name)` where only a path will do.

    Raises UnsafeDirectory. Raises OSError if it cannot be entered or created, is not a directory, or is missing and may
    not be created.
    """
    may_create = create and trust is not Trust.SHARED
    pending = list(reversed(path.absolute().parts[1:]))
    fd, name = _open_root(), "/"
    num_links = 0
    try:
        _check_directory(os.fstat(fd), name, path, trust, is_last=not pending)
        while pending:
            part = pending.pop()
            above, name = name, os.path.join(name, part)
            found = _open_part(part, fd, may_create)
            status = os.fstat(found)
            if stat.S_ISLNK(status.st_mode):
                target = _read_link(found, status, name, path)
                num_links += 1
                if num_links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                pending += [part for part in reversed(target.split("/")) if part]
                name = above
                if target.startswith("/"):
                    root = _open_root()  # may fail, so fd stays open until then
                    os.close(fd)
                    fd, name = root, "/"
                # The link leads to a directory that was checked as one above others; check it as the last one too.
                pending = pending or ["."]
                continue
            os.close(fd)
            fd = found
            _check_directory(status, name, path, trust, is_last=not pending)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def opened_directory(path: Path, trust: Trust, *, create: bool = True) -> Iterator[int]:
    """`open_directory` for a block."""
    fd = open_directory(path, trust, create=create)
    try:
        yield fd
    finally:
        os.close(fd)


def check_directory(path: Path, trust: Trust, *, create: bool = True) -> None:
    """Like `open_directory`, without the fd. Afterwards the path is safe to use: only root and this user can change
    it."""
    os.close(open_directory(path, trust, create=create))


@contextmanager
def private_umask() -> Iterator[None]:
    """Files created inside are for this user only. The umask belongs to the whole process: keep the block short."""
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)


def path_in(directory_fd: int, name: str) -> str:
    """A short path of a file in an open directory, for calls that take no dir_fd, such as bind and connect."""
    return f"/proc/self/fd/{directory_fd}/{name}"


def _open_root() -> int:
    return os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _read_link(fd: int, status: os.stat_result, name: str, path: Path) -> str:
    """Return where a symbolic link leads, and close its fd."""
    try:
        _check_owner(status, f"symbolic link {name}", path)
        return os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)


def _open_part(name: str, directory_fd: int, may_create: bool) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=directory_fd)
    except FileNotFoundError:
        if not may_create:
            raise
    with suppress(FileExistsError):  # another process has just made it; the caller checks it like any other
        os.mkdir(name, 0o700, dir_fd=directory_fd)
    return os.open(name, flags, dir_fd=directory_fd)


def _check_directory(status: os.stat_result, name: str, path: Path, trust: Trust, *, is_last: bool) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
    _check_owner(status, f"directory {name}", path, may_be_root=not is_last or trust is not Trust.PRIVATE)
    here, above = trust.value
    forbidden = status.st_mode & (here if is_last else above)
    # In a sticky directory others can make files of their own, and cannot replace ours.
    is_excused = status.st_mode & stat.S_ISVTX and (not is_last or trust is Trust.SHARED)
    if not forbidden or is_excused:
        return
    if is_last and trust is Trust.PRIVATE:
        remedy = f"chmod 700 {name}"
    else:
        remedy = f"chmod {'go-w' if forbidden & stat.S_IWGRP else 'o-w'} {name}"
    could = "change" if forbidden & (stat.S_IWGRP | stat.S_IWOTH) else "enter"
    raise UnsafeDirectory(
        f"{path} is not safe: other users can {could} the directory {name}, which has mode "
        f"{stat.S_IMODE(status.st_mode):o} and owner {_user(status.st_uid)}; {remedy}, or choose another path"
    )


def _check_owner(status: os.stat_result, what: str, path: Path, *, may_be_root: bool = True) -> None:
    allowed = {os.geteuid(), 0} if may_be_root else {os.geteuid()}
    if status.st_uid not in allowed:
        raise UnsafeDirectory(
            f"{path} is not safe: the {what} has mode {stat.S_IMODE(status.st_mode):o} and owner "
            f"{_user(status.st_uid)}; its owner must be {' or '.join(map(_user, sorted(allowed)))}; choose another path"
        )


def _user(uid: int) -> str:
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:  # this user has no name
        return str(uid)
