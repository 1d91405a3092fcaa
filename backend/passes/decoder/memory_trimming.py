"""What the C library does with memory that is given back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Inside, blocks of 64 KB and more go back to the system the moment they are freed; glibc otherwise keeps those up
    to 32 MB in its heap, and loading would end with a third more memory than the weights take. Afterwards they are
    kept, so that a step's arrays cost no page faults. Where the C library is not glibc, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)
