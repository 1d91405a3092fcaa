"""The servers that this user's `penstock serve` processes run: each writes a record, and other commands read them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from penstock.process.private_directory import (
    Trust,
    UnsafeDirectory,
    check_directory,
    default_socket_path,
    private_umask,
)

_SUFFIX = ".json"


class RunningServer(msgspec.Struct, frozen=True):
    """A server that has been ready."""

    pid: int
    url: str
    """http://HOST:PORT, or unix:PATH."""
    models: tuple[str, ...]
    """Names in the API."""
    sources: tuple[str, ...]
    """What --model named, of the models that are awake or asleep."""
    since_s: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The record of this process's server."""

    path: Path

    @classmethod
    def of_this_process(cls) -> Self:
        return cls(default_socket_path().with_name(f"serve-{os.getpid()}{_SUFFIX}"))

    def write(self, server: RunningServer) -> None:
        """Raises OSError and UnsafeDirectory."""
        check_directory(self.path.parent, Trust.PRIVATE)
        with private_umask():
            self.path.write_bytes(msgspec.json.encode(server))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def running_servers() -> list[RunningServer]:
    """Return the servers of this user that run, oldest first. Records of others are removed."""
    directory = default_socket_path().parent
    servers = []
    try:
        check_directory(directory, Trust.PRIVATE, create=False)
    except (OSError, UnsafeDirectory):
        return []
    for path in directory.glob(f"serve-*{_SUFFIX}"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            server = msgspec.json.decode(path.read_bytes(), type=RunningServer)
            if Path("/proc", str(server.pid)).exists():
                servers.append(server)
            else:
                path.unlink()
    return sorted(servers, key=lambda server: server.since_s)
