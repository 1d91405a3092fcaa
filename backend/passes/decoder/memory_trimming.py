"""Returns freed memory to the system while weights are loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Within the context, a block of 64 KB or more goes back to the system as soon as it is freed.

    By default glibc keeps blocks of up to 32 MB in its heap, and loading would end with a third more memory than the
    weights take. After the context blocks are kept, so a step's arrays cost no page faults. Without glibc: no effect.
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
