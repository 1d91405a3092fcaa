"""Returns freed memory to the system while weights are loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Within the context, blocks of 8 MB or more go back to the system as soon as they are freed, and so do smaller
    ones at the end of the heap above 16 MB; after it, all freed memory does.

    By default glibc keeps blocks of up to 32 MB in its heap, and loading would end with a third more memory than the
    weights take. If smaller blocks went back too, page faults would take more time than packing. After the context
    blocks are kept, so a step's arrays cost no page faults. Without glibc: no effect.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 8 << 20)
    libc.mallopt(_M_TRIM_THRESHOLD, 16 << 20)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        libc.malloc_trim(0)
