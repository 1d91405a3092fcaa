"""Opens the socket that listens: a TCP port, a Unix socket, or one that another process hands over."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.process.failure import fail
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory, private_umask

MAX_SOCKET_PATH_BYTES = 107
BACKLOG = 2048
"""Connections that wait to be accepted."""
_LOCK_TIMEOUT_S = 2.0


def tcp_socket(host: str, port: int, command: str) -> socket.socket:
    """Return a socket that listens on a TCP port. On failure exits with one line that begins with the command."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        is_every_address = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_every_address)
    except socket.gaierror:
        fail(command, f'--host "{host}" is not an address of this machine; use 127.0.0.1 or 0.0.0.0')
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        fail(command, f"port {port} on {host} {reason}")


def unlink(listening: socket.socket) -> None:
    """Remove the file of a Unix socket that we made, unless another server has replaced it. Open connections stay."""
    if isinstance(listening, _OwnUnixSocket):
        with suppress(FileNotFoundError):
            if os.path.samestat(listening.path.lstat(), listening.file):
                listening.path.unlink()


def address_of(listening: socket.socket, *, tls: bool) -> str:
    """Return the address for clients: http://127.0.0.1:8000, https://[::1]:8000 or unix:/run/penstock.sock."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    shown_host = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown_host}:{port}"


class _OwnUnixSocket(socket.socket):
    path: Path
    file: os.stat_result


def unix_socket(path: Path, mode: int, command: str) -> socket.socket:
    """Return a Unix socket that listens; `unlink` removes its file. On failure exits with one line that begins with the
    command."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        fail(command, f"--uds {path} is {len(os.fsencode(path))} bytes long; the limit is {MAX_SOCKET_PATH_BYTES}")
    listening = _OwnUnixSocket(socket.AF_UNIX)
    try:
        check_directory(path.parent, Trust.SHARED)
        with _locked(path.parent):
            _remove_stale(path, command)
            with private_umask():  # nobody else can connect before the mode is set
                listening.bind(os.fspath(path))
            listening.listen(BACKLOG)
        path.chmod(mode)
        listening.path, listening.file = path.absolute(), path.lstat()
    except UnsafeDirectory as error:
        listening.close()
        fail(command, f"--uds {path}: {error}")
    except OSError as error:
        listening.close()
        fail(command, f"--uds {path} cannot be used: {error.strerror}")
    return listening


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock the directory.

    Without the lock, when two servers start at once, one could remove the other's socket as stale before it listens.
    Raises OSError.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while not _lock(fd):
            if time.monotonic() > deadline_s:
                raise OSError(errno.EBUSY, "another process holds the lock of its directory")
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale(path: Path, command: str) -> None:
    """Remove the socket of a killed server; exit when a server uses it or it is not a socket. Raises OSError."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        fail(command, f"--uds {path} exists and is not a socket; remove it")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except TimeoutError:
            pass  # its queue is full, so a server uses it
    fail(command, f"--uds {path} is in use by another server")


def inherited_socket(fd: int, command: str) -> socket.socket:
    """Return the listening socket that another process handed over. On failure exits with one line that begins with the
    command."""
    try:
        inherited = socket.socket(fileno=fd)
    except OSError as error:
        fail(command, f"--listen-fd {fd} is not a socket: {error.strerror}")
    is_listening = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if inherited.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) or not is_listening:
        fail(command, f"--listen-fd {fd} is not a listening socket")
    return inherited
