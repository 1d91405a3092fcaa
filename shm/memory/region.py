"""Anonymous shared memory: memfds that have no name, are backed by real pages, and can never change their size."""

from __future__ import annotations

import fcntl
import mmap
import os

F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1: mappings that exist may go on writing, no new one may. The fcntl module does not name it."""

_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RegionError(ValueError):
    """An fd that is no sealed region of the expected size."""


def create(label: str, num_bytes: int) -> int:
    """An fd, owned by the caller, of num_bytes of zeroes; not sealed yet. The label shows in /proc only.

    Raises OSError (ENOSPC, ENOMEM) now, where a merely truncated file would kill a writer with SIGBUS later.
    """
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal(fd: int, further: int = 0) -> None:
    """Fixes the size for ever, adds the further seals, and allows no more."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_SEAL | further)


def attach(fd: int, num_bytes: int, *, writable: bool) -> mmap.mmap:
    """Maps a sealed region. The mapping holds an fd of its own: the caller still owns and closes this one.

    Raises RegionError unless the region is sealed at num_bytes or more, so that no peer can shrink it under us.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RegionError(f"not a sealable region: {error.strerror}") from None
    size = os.fstat(fd).st_size
    if seals & _FIXED_SIZE != _FIXED_SIZE or size < num_bytes:
        raise RegionError(f"a region of {size} bytes with seals {seals:#x}; {num_bytes} sealed bytes were expected")
    return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
