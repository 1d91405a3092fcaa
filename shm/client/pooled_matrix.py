"""Vectors of many inputs in one matrix."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from penstock.shm.client.capacity import Overloaded
from penstock.shm.client.client import BackendClient
from penstock.shm.client.streams.pooled import PooledFailed, PooledRequest, PooledStream
from penstock.shm.messages import FailureCode


async def pool_into(
    client: BackendClient, requests: Sequence[PooledRequest], matrix: memoryview, *, max_open: int = 128
) -> None:
    """Write each request's vector to its row of matrix, which is writable and contiguous: float32 [requests, width].

    At most max_open requests are with the backend at a time, so that other clients find places. Give all requests one
    group.

    Before the first vector, a refusal raises what `BackendClient.submit_pooled` raises, and the other requests are
    cancelled. After it, a full backend only delays the rest. Raises ValueError for a matrix that does not fit, and
    PooledFailed.
    """
    rows = matrix.cast("B")
    row_bytes, left_bytes = divmod(len(rows), max(1, len(requests)))
    if left_bytes:
        raise ValueError(f"matrix has {len(rows)} bytes; {len(requests)} vectors of one width do not fill it")
    places = deque(range(len(requests)))
    streams: deque[tuple[int, PooledStream]] = deque()
    has_begun = is_refused = False
    try:
        while places or streams:
            if is_refused and not streams:
                await client.wait_for_room()
                is_refused = False
            if places and len(streams) < max_open and not is_refused:
                try:
                    request = replace(requests[places[0]], has_begun=has_begun)
                    streams.append((places[0], client.submit_pooled(request)))
                    places.popleft()
                except Overloaded:
                    if not streams:
                        raise
                    is_refused = True
                continue
            place, stream = streams[0]
            try:
                values = memoryview((await stream.result()).values).cast("B")
            except PooledFailed as failed:
                if failed.failure is not FailureCode.OVERLOADED or not has_begun:
                    raise
                is_refused = True
                places.appendleft(place)
            else:
                if len(values) != row_bytes:
                    raise ValueError(f"matrix has rows of {row_bytes} bytes; vector {place} has {len(values)}")
                rows[place * row_bytes : (place + 1) * row_bytes] = values
                has_begun, is_refused = True, False
            streams.popleft()
    finally:
        for _, stream in streams:
            stream.cancel()
