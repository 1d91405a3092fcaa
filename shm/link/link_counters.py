"""Counters of the backend's end of the link."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LinkCounters:
    """Counts that only grow."""

    messages_in: int = 0
    messages_out: int = 0
    events_out: int = 0
    strangers: int = 0
    """Messages from senders that are not frontends of this backend, or were disconnected."""
    faults: int = 0
    """Malformed messages and descriptors, which were dropped or rejected."""
    blocked_sends: int = 0
    """Sends that ZeroMQ refused although there was credit: a bug of ours."""
    unreachable: int = 0
    """Sends to frontends whose connection had ended before the backend noticed their death."""
    stalled: int = 0
    """Frontends disconnected because they returned no credit in time."""
    expelled: int = 0
    """Frontends disconnected because of their faults."""
