"""The present state of a running engine, as `live.LiveEngine` reads it: plain values to display."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

NOT_FOUND = -1


class StepColumn(NamedTuple):
    """One step that has ended. Times are in seconds of CLOCK_MONOTONIC."""

    step: int
    ended_s: float
    step_s: float
    waited_s: float
    """How long the device waited before it while there were requests; 0 if that is not known."""
    num_decodes: int
    """Rows that computed one generated token."""
    num_prefills: int
    """Rows that computed given tokens, without those that are restored."""
    num_restored: int
    """Rows of sequences that continue after a preemption, or with pages from host memory."""
    num_listeners: int
    """Coalesced requests beside the first listener of each row."""
    num_tokens: int
    num_dropped: int
    """Rows whose sequence had ended or was preempted before the step ended."""
    num_running: int
    num_waiting: int
    pages_held: int
    pages_idle: int
    is_failed: bool


class EventKind(enum.StrEnum):
    ARRIVED = "arrived"
    JOINED = "joined"
    """It is coalesced with a sequence."""
    STARTED = "started"
    """number is the number of tokens found in the prefix cache."""
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    """A preempted sequence continues, or a request of an earlier backend. number is the cached tokens."""
    CANCELLED = "cancelled"
    ENDED = "ended"
    """number is a `Finish`."""
    FAILED_STEP = "failed step"
    """number is the step."""
    RESTARTED = "restarted"
    """A backend begins. number is its process id."""
    FRONTEND_LEFT = "frontend left"
    """A frontend has died or has been stopped. number names it."""


class EngineEvent(NamedTuple):
    time_s: float
    kind: EventKind
    request: int
    """`LiveRequest.key`, or NOT_FOUND."""
    sequence: int
    """`LiveSequence.number`, or NOT_FOUND."""
    number: int = 0


class Wait(enum.StrEnum):
    """Why a request waits, concluded from the last step's numbers."""

    PREEMPTED = "preempted: its pages were needed"
    SLOTS = "all slots run"
    PAGES = "too few free pages"
    GRAMMAR = "its grammar, or its turn"
    TURN = "its turn"


@dataclass(slots=True, eq=False)
class LiveRequest:
    """An open request."""

    key: int
    """A count of the requests that the reader has seen, so it reveals nothing about who sent one."""
    frontend: int
    request_id: int
    tenant: str
    """The tenant's digest in the backend; empty if all requests belong to one tenant."""
    arrived_s: float
    num_prompt_tokens: int
    num_tokens: int
    max_tokens: int
    has_grammar: bool
    pooled: str
    sequence: LiveSequence | None = None
    """None while it waits."""
    is_coalesced: bool = False
    is_resumed: bool = False


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence that has a slot, or had one before it was preempted."""

    number: int
    slot: int
    started_s: float
    num_tokens: int = 0
    """Known when it started."""
    num_cached: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    is_running: bool = True
    is_restored: bool = False
    """Its next row is the first one since it was restored."""
    requests: dict[tuple[int, int], LiveRequest] = field(default_factory=dict)
    """By frontend and request id, first listener first; empty if it started before the reader's first record."""


@dataclass(slots=True)
class Changes:
    """Changes since the last poll."""

    steps: list[StepColumn] = field(default_factory=list)
    events: list[EngineEvent] = field(default_factory=list)
    left: list[LiveRequest] = field(default_factory=list)
    """Requests that are no longer open."""
    has_gap: bool = False
    """Records were overwritten before they were read, so that steps are missing and open requests are forgotten."""
