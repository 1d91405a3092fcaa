"""Positions at which segments of a long context begin in prefill attention. Needs neither torch nor numpy."""

from __future__ import annotations

MAX_CONTEXT_TOKENS = 1 << 24
SHORTEST_SEGMENT_TOKENS = 2048
ENOUGH_BLOCKS = 1024
"""Blocks that fill any device. A step with this many tiles is not cut further."""


def segment_starts() -> list[int]:
    """Return the first positions of all segments, as in kernels/prefill_segments.cuh."""
    starts, step = [], SHORTEST_SEGMENT_TOKENS
    position = 0
    while position < MAX_CONTEXT_TOKENS:
        starts.append(position)
        step = max(step, 1 << (position.bit_length() - 3)) if position else step
        position += step
    return starts
