"""Finds the flight recorders of this user's running servers, through the fds in /proc.

The kernel lets a process open another one's fds only if both belong to the same user.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.shm.memory.region import RegionError
from penstock.shm.memory.ring import RingReader
from penstock.shm.recording.events import BackendStarted, unpack_event
from penstock.shm.recording.records import FORMAT_VERSION, unpack

_LINK = "/memfd:penstock-ring"
_PROC = Path("/proc")


class NoRing(Exception):
    """No ring was found. The message is one sentence with the remedy."""


@dataclass(slots=True)
class _Found:
    pids: set[int] = field(default_factory=set)
    path: str = ""
    """One of the links in /proc that lead to it."""


def open_ring(pid: int | None, *, newest: bool = False) -> tuple[RingReader, BackendStarted]:
    """Open the ring of this process, a server or its backend; with None, the only ring of this user.

    Of several, newest takes that of the backend that has started last. Raises NoRing.
    """
    found = _find(pid)
    if not found:
        raise NoRing(
            "no running server of this user has a flight recorder"
            if pid is None
            else f"process {pid} is not a server of this user with a flight recorder"
        )
    opened = [_open(ring.path) for ring in found]
    rings = sorted((ring for ring in opened if ring is not None), key=lambda ring: ring[1].wall_s)
    chosen = rings.pop() if len(rings) == 1 or (newest and rings) else None
    for ring, _ in rings:
        ring.close()
    if chosen is not None:
        return chosen
    if not rings:
        raise NoRing("the flight recorder is one of another version of Penstock, or its backend has not started yet")
    choices = ", ".join(f"--pid {started.pid} ({started.model})" for _, started in rings)
    raise NoRing(f"there are {len(rings)} backends with a flight recorder; choose one: {choices}")


def _find(pid: int | None) -> list[_Found]:
    """The rings of the process, or of all processes of this user; each once."""
    pids = [pid] if pid is not None else [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()]
    rings: dict[tuple[int, int], _Found] = {}
    for candidate in pids:
        with suppress(OSError):  # it has ended, or belongs to another user
            for entry in os.scandir(_PROC / str(candidate) / "fd"):
                if not os.readlink(entry.path).startswith(_LINK):
                    continue
                status = os.stat(entry.path)
                if status.st_uid == os.geteuid():
                    ring = rings.setdefault((status.st_dev, status.st_ino), _Found())
                    ring.pids.add(candidate)
                    ring.path = entry.path
    return list(rings.values())


def _open(path: str) -> tuple[RingReader, BackendStarted] | None:
    """None if the ring has another version, or no backend yet."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # its process has just ended
        return None
    try:
        ring = RingReader(fd)
    except RegionError:
        return None
    finally:
        os.close(fd)
    with suppress(ValueError):
        started = unpack_event(unpack(ring.read_note()).body)
        if isinstance(started, BackendStarted) and started.version == FORMAT_VERSION:
            return ring, started
    ring.close()
    return None
