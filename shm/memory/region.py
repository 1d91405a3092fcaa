"""Anonymous shared memory: memfds without a name, with all pages allocated and a size that cannot change."""

from __future__ import annotations

import fcntl
import mmap
import os

F_SEAL_FUTURE_WRITE = 0x0010
"""Existing mappings can still write, new ones cannot. Linux 5.1; the fcntl module lacks the constant."""

_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class RegionError(ValueError):
    """The fd is not a sealed region of the expected size."""


def create(label: str, num_bytes: int) -> int:
    """An fd of num_bytes of zeroes, not sealed yet, owned by the caller. The label shows in /proc only.

    Allocates all pages: raises OSError (ENOSPC, ENOMEM) now, where a sparse file would kill a writer with SIGBUS later.
    """
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal(fd: int, further: int = 0) -> None:
    """Fix the size, add the further seals, and forbid more seals."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_SEAL | further)


def attach(fd: int, num_bytes: int, *, writable: bool) -> mmap.mmap:
    """Map a sealed region. The mapping holds its own fd; the caller still owns and closes this one.

    Raises RegionError unless the region is sealed at num_bytes or more, so no peer can shrink it.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RegionError(f"the fd is not a memfd that can be sealed: {error.strerror}") from None
    size = os.fstat(fd).st_size
    if seals & _FIXED_SIZE != _FIXED_SIZE or size < num_bytes:
        raise RegionError(f"a region of {size} bytes with seals {seals:#x}; expected {num_bytes} sealed bytes")
    return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
