"""Vectors of many inputs in one matrix."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from penstock.shm.client.refusals import Overloaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.shm.client.client import BackendClient
    from penstock.shm.client.pooled import PooledRequest, PooledStream


async def pool_into(
    client: BackendClient, requests: Sequence[PooledRequest], matrix: memoryview, *, max_open: int = 128
) -> None:
    """Write each request's vector to its row of matrix, which is writable and contiguous: float32 [requests, width].

    max_open requests are with the backend at a time, so that others find places beside them. Give all of them one
    group. Raises ValueError for a matrix that does not fit, PooledFailed, and what `BackendClient.submit_pooled` raises
    while none is open; then the others are cancelled.
    """
    rows = matrix.cast("B")
    row_bytes, left_bytes = divmod(len(rows), max(1, len(requests)))
    if left_bytes:
        raise ValueError(f"matrix has {len(rows)} bytes; {len(requests)} vectors of one width do not fill it")
    streams: deque[tuple[int, PooledStream]] = deque()

    async def take_first() -> None:
        place, stream = streams[0]
        values = memoryview((await stream.result()).values).cast("B")
        if len(values) != row_bytes:
            raise ValueError(f"matrix has rows of {row_bytes} bytes; the result of request {place} has {len(values)}")
        rows[place * row_bytes : (place + 1) * row_bytes] = values
        streams.popleft()

    try:
        place = 0
        while place < len(requests) or streams:
            if place < len(requests) and len(streams) < max_open:
                try:
                    streams.append((place, client.submit_pooled(requests[place])))
                    place += 1
                    continue
                except Overloaded:
                    if not streams:
                        raise
            await take_first()
    finally:
        for _, stream in streams:
            stream.cancel()
