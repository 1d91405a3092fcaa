"""The trace that a request belongs to: W3C Trace Context, https://www.w3.org/TR/trace-context/#traceparent-header."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits: the caller's span."""
    is_sampled: bool
    """The caller records the trace."""


def parse_traceparent(value: bytes | None) -> TraceContext | None:
    """Return the header's content; None without a header, or for an invalid one, which the specification says to
    ignore."""
    found = _TRACEPARENT.fullmatch((value or b"").decode("latin-1"))
    if found is None or not int(found[1], 16) or not int(found[2], 16) or (found[0].startswith("00") and found[4]):
        return None
    return TraceContext(found[1], found[2], bool(int(found[3], 16) & _SAMPLED))
