"""The log line that is written when a request ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.frontend.telemetry.trace_context import TraceContext
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.memory.board import FrontendBoard

ReportSpans = Callable[["RequestLogEntry", float], str]
"""Makes the spans of a request that ended at a monotonic time; returns the id of its trace."""

logger = logging.getLogger("penstock.request")

_UNANSWERED = ("error", "cancelled", "timeout")


@dataclass(slots=True)
class RequestLogEntry:
    """Fields of one request's log line.

    Times are monotonic seconds; None if the request did not get so far.
    """

    request_id: str
    received_s: float
    http_request_id: str = "-"
    """The client's X-Request-Id, or the one that the server made."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    coalesced: str | None = None
    """joined or none, as in the X-Penstock-Coalesced header."""
    completion_tokens: int = 0
    first_token_s: float | None = None
    finish_reason: str = "error"
    key: str | None = None
    """Name of the request's API key."""
    max_tokens: int | None = None
    """The limit of each answer: the request's, or the rest of the context."""
    model: str = ""
    path: str = ""
    """The endpoint's path."""
    trace: TraceContext | None = None
    """The trace that the client named."""
    report_spans: ReportSpans | None = None
    """None without tracing."""
    submitted_s: float | None = None
    replica: str = ""
    """The backend where it ended, if the model has several; several names if its choices ended on several."""
    num_moves: int = 0
    """Number of times that another replica took over one of its choices."""
    queue_s: float = 0.0
    """Time in the backend's queue, of the first choice; 0 until the backend has started it."""
    last_token_s: float | None = None
    """None without tracing."""

    def observe(self, board: FrontendBoard, ended_s: float) -> None:
        """Log the line, count the request's latencies on the board, and report its spans."""
        if self.first_token_s is not None:
            board.ttft_us.observe(int(1e6 * (self.first_token_s - self.received_s)))
        if self.finish_reason not in _UNANSWERED:
            board.latency_us.observe(int(1e6 * (ended_s - self.received_s)))
        trace_id = None if self.trace is None else self.trace.trace_id
        self.write(ended_s, trace_id if self.report_spans is None else self.report_spans(self, ended_s))

    def note_replicas(self, streams: Iterable[OpenStream]) -> None:
        """Record where the request was computed. Streams of a single backend have no replica."""
        names: set[str] = set(self.replica.split(",")) if self.replica else set()
        for stream in streams:
            names |= {stream.backend} if stream.backend else set()
            self.num_moves += stream.num_moves
        self.replica = ",".join(sorted(names))

    def write(self, ended_s: float, trace_id: str | None = None) -> None:
        """Log the line.

        prompt_tps is over the time to the first token, generation_tps over the time after it, total_tps over the whole
        time.
        """
        if not logger.isEnabledFor(logging.INFO):
            return
        latency_s = ended_s - self.received_s
        ttft_s = None if self.first_token_s is None else self.first_token_s - self.received_s
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "coalesced": self.coalesced,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "max_tokens": self.max_tokens,
            "ttft_ms": None if ttft_s is None else round(1000 * ttft_s, 1),
            "prompt_tps": None if ttft_s is None else _rate(self.prompt_tokens, ttft_s),
            "generation_tps": None if ttft_s is None else _rate(self.completion_tokens - 1, latency_s - ttft_s),
            "total_tps": _rate(self.prompt_tokens + self.completion_tokens, latency_s),
            "latency_ms": round(1000 * latency_s, 1),
            "finish_reason": self.finish_reason,
            "key": self.key,
            "http_request_id": self.http_request_id,
            **({"replica": self.replica, "moves": self.num_moves} if self.replica else {}),
            **({} if trace_id is None else {"trace_id": trace_id}),
        }
        line = " ".join(f"{name}={'-' if value is None else value}" for name, value in fields.items())
        logger.info("%s", line, extra={"fields": fields})


def _rate(count: int, duration_s: float) -> float | None:
    return round(count / duration_s, 1) if count > 0 and duration_s > 0 else None
