"""Summarizes the records of a run. Times are time.perf_counter() seconds; a LoadSummary has milliseconds."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal


class Outcome(enum.Enum):
    COMPLETED = "completed"
    DROPPED = "dropped"
    """The client hung up, as the workload planned."""
    FAILED = "failed"


@dataclass(slots=True)
class ObservedRequest:
    """One request as its client observed it."""

    started_s: float
    """When it was sent. In an open loop, when it was due: a late generator must not flatter the server."""
    event_times_s: list[float] = field(default_factory=list)
    """Arrival of each event that carried text."""
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As in the server's usage; without usage, the number of events."""
    outcome: Outcome = Outcome.FAILED
    error: str = ""
    times_sent: int = 0
    """2 if the server had closed the reused connection; 0 if there was no connection."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles and mean; None if there is nothing to measure."""

    p50: float | None
    p99: float | None
    mean: float | None


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """One row of the table. Rates count the tokens of dropped requests too; e2e counts completed answers only."""

    load: str
    """ "c=16" for a closed loop, "2.5/s" for arrivals at a rate."""
    requests: int
    completed: int
    dropped: int
    failed: int
    sent_again: int
    """Requests sent a second time, because the server had closed the reused connection. Their times include both."""
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    events: int
    """Events that carried text. A server that lags puts several tokens into one event."""
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    """Gaps between events that carried text."""
    e2e_ms: Spread
    generator_cpu_us_per_token: float
    """CPU time of the load generator itself."""
    first_error: str = ""


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolate linearly between the two nearest ranks, as numpy.percentile does. values need not be sorted."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def spread_ms(seconds: Sequence[float]) -> Spread:
    def ms(value: float | None) -> float | None:
        return None if value is None else value * 1000

    mean = math.fsum(seconds) / len(seconds) if seconds else None
    return Spread(ms(percentile(seconds, 50)), ms(percentile(seconds, 99)), ms(mean))


def ttfts_s(records: Sequence[ObservedRequest]) -> list[float]:
    return [record.event_times_s[0] - record.started_s for record in records if record.event_times_s]


def itls_s(records: Sequence[ObservedRequest]) -> list[float]:
    return [after - before for record in records for before, after in pairwise(record.event_times_s)]


def duration_s(records: Sequence[ObservedRequest]) -> float:
    """Return the time from the first start to the last end."""
    return max(record.ended_s for record in records) - min(record.started_s for record in records)


def summarize(load: str, records: Sequence[ObservedRequest], generator_cpu_s: float) -> LoadSummary:
    """records are those of one run, at least one."""
    lasted_s = duration_s(records)
    by_outcome: dict[Outcome, list[ObservedRequest]] = {outcome: [] for outcome in Outcome}
    for record in records:
        by_outcome[record.outcome].append(record)
    completed = by_outcome[Outcome.COMPLETED]
    output_tokens = sum(record.output_tokens for record in records)
    prompt_tokens = sum(record.prompt_tokens for record in records)
    return LoadSummary(
        load=load,
        requests=len(records),
        completed=len(completed),
        dropped=len(by_outcome[Outcome.DROPPED]),
        failed=len(by_outcome[Outcome.FAILED]),
        sent_again=sum(record.times_sent > 1 for record in records),
        duration_s=lasted_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        events=sum(len(record.event_times_s) for record in records),
        output_tokens_per_s=output_tokens / lasted_s,
        prompt_tokens_per_s=prompt_tokens / lasted_s,
        requests_per_s=len(completed) / lasted_s,
        ttft_ms=spread_ms(ttfts_s(records)),
        itl_ms=spread_ms(itls_s(records)),
        e2e_ms=spread_ms([record.ended_s - record.started_s for record in completed]),
        generator_cpu_us_per_token=1e6 * generator_cpu_s / max(output_tokens, 1),
        first_error=next((record.error for record in by_outcome[Outcome.FAILED]), ""),
    )


Direction = Literal["at least", "at most"]


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure and the limit that it should keep."""

    name: str
    value: float
    direction: Direction
    limit: float

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.direction == "at least" else self.value <= self.limit
