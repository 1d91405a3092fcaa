"""Reports to a service manager such as systemd, and takes over the socket that it passes.

The protocols are those of sd_notify(3) and sd_listen_fds(3). The variables are removed from the environment, so that
child processes do not use them.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from penstock.process.failure import fail

logger = logging.getLogger("penstock.service_manager")

_FIRST_ACTIVATED_FD = 3


class ServiceManager:
    """Reports this process's state over a datagram socket."""

    def __init__(self, connected: socket.socket, watchdog_s: float | None) -> None:
        """watchdog_s: the manager kills the process if two beats are further apart than this; None is never."""
        self._socket = connected
        self.beat_every_s = None if watchdog_s is None else watchdog_s / 3
        """The longest time between two calls of `beat`."""
        self._next_beat_s = 0.0

    @classmethod
    def from_environment(cls) -> ServiceManager | None:
        """Return None unless NOTIFY_SOCKET is set. Raises ValueError for a variable that has no valid value."""
        address = os.environ.pop("NOTIFY_SOCKET", "")
        watchdog_us, watched_pid = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")
        if not address:
            return None
        if address[0] not in "/@":
            raise ValueError(f"NOTIFY_SOCKET is {address!r}; it must be a path, or a name that begins with @")
        watchdog_s = None
        if watchdog_us and watched_pid in ("", str(os.getpid())):
            if not (watchdog_us.isascii() and watchdog_us.isdigit() and 0 < int(watchdog_us) < 1 << 63):
                raise ValueError(f"WATCHDOG_USEC is {watchdog_us!r}; it must be a number of microseconds")
            watchdog_s = int(watchdog_us) / 1e6
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            connected.connect("\0" + address[1:] if address[0] == "@" else address)
        except OSError as error:
            connected.close()
            raise ValueError(f"NOTIFY_SOCKET {address} cannot be used: {error.strerror}") from error
        return cls(connected, watchdog_s)

    def close(self) -> None:
        self._socket.close()

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def beat(self) -> None:
        """Report life, at most as often as it is needed: cheap enough for each turn of a loop."""
        if self.beat_every_s is None:
            return
        now_s = time.monotonic()
        if now_s >= self._next_beat_s and self._send("WATCHDOG=1"):
            self._next_beat_s = now_s + self.beat_every_s

    def _send(self, state: str) -> bool:
        """A full or closed socket must not stop the server; the manager notices the silence."""
        try:
            self._socket.send(state.encode())
        except OSError as error:
            logger.warning("the service manager does not take %s: %s", state, error.strerror)
            return False
        return True


def find_service_manager(command: str) -> ServiceManager | None:
    """Return the service manager that started this process; None without one.

    Exits with one line that begins with the command if its variables are unusable.
    """
    try:
        return ServiceManager.from_environment()
    except ValueError as error:
        fail(command, str(error))


def activated_fd(command: str) -> int | None:
    """Return the fd of the listening socket that a service manager opened for this process; None without one.

    Exits with one line that begins with the command if there are several.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or count in ("", "0"):
        return None
    if count != "1":
        fail(command, f"LISTEN_FDS is {count!r}; the server listens on one socket")
    return _FIRST_ACTIVATED_FD
