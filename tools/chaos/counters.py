"""The server's own numbers, from /metrics and /ready, compared with the clients' numbers."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.tools.bench.load_generator.http_client import ConnectionBroken, HttpClient
from penstock.tools.chaos.errors import ChaosError
from penstock.tools.chaos.ledger import Answer, Ledger

_SAMPLE = re.compile(r"^(penstock_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_SOURCE = re.compile(r'(?:model|replica)="(?:[^"\\]|\\.)*",?')
"""Labels that tell backends apart."""
_IS_ZERO_WHEN_IDLE = (
    "penstock_sequences_running",
    "penstock_sequences_waiting",
    'penstock_kv_pages{state="used"}',
    "penstock_streams_open",
)
_ENDED = tuple(
    f'penstock_requests_total{{outcome="{name}"}}' for name in ("finished", "cancelled", "failed", "expired")
)
_ACCEPTED = "penstock_requests_accepted_total"
_FINISHED = 'penstock_requests_total{outcome="finished"}'
_POLL_S = 0.1
_TOTALS_S = 0.6
"""The totals of all frontends are updated four times a second."""

Samples = dict[str, float]
_UP, _BACKENDS = "penstock_backend_up", "backends"


def parse_metrics(text: str) -> Samples:
    """Samples by name with labels; those of several backends are added up. `backends` is their number."""
    samples: Samples = {}
    for name, labels, value in _SAMPLE.findall(text):
        rest = _SOURCE.sub("", labels).rstrip(",")
        full = f"{name}{{{rest}}}" if rest else name
        samples[full] = samples.get(full, 0.0) + float(value)
        if name == _UP:
            samples[_BACKENDS] = samples.get(_BACKENDS, 0.0) + 1
    return samples


def num_frontends(samples: Samples) -> float:
    """Return how many workers a backend knows on average."""
    return samples.get("penstock_frontends", -1.0) / max(1.0, samples.get(_UP, 0.0))


class Numbers:
    """Reads a server's /metrics."""

    def __init__(self, http: HttpClient) -> None:
        self.http = http
        self.may_sleep = False
        """Backends come and go with their models, and their counts with them."""

    async def read(self) -> Samples | None:
        """None while the server or one of its backends does not answer. A model that sleeps has no numbers."""
        try:
            reply = await self.http.get("/metrics")
        except ConnectionBroken:
            return None
        samples = parse_metrics(reply.body.decode(errors="replace")) if reply.status == 200 else {}
        if not samples or (samples.get(_UP) != samples.get(_BACKENDS) and not self.may_sleep):
            return None
        return dict.fromkeys(_IS_ZERO_WHEN_IDLE, 0.0) | {_ACCEPTED: 0.0} | samples if self.may_sleep else samples


async def is_ready(http: HttpClient) -> bool:
    try:
        return (await http.get("/ready")).status == 200
    except ConnectionBroken:
        return False


async def wait_ready(http: HttpClient, timeout_s: float) -> None:
    """Raises ChaosError."""
    deadline_s = time.monotonic() + timeout_s
    while not await is_ready(http):
        if time.monotonic() > deadline_s:
            raise ChaosError(f"/ready was not green for {timeout_s:g} s")
        await asyncio.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class IdleServer:
    """The last samples of a server that became idle, or did not in time."""

    samples: Samples
    waited_s: float
    num_reads: int
    """Times that /metrics was read."""


async def wait_idle(numbers: Numbers, timeout_s: float) -> IdleServer:
    """Wait until nothing runs, waits or holds a page and the books of the backend balance.

    After the time-out the samples are what they are. Raises ChaosError if nobody answers.
    """
    started_s, num_reads = time.monotonic(), 0
    latest: Samples | None = None
    while True:
        samples = await numbers.read()
        num_reads += samples is not None
        latest = samples or latest
        waited_s = time.monotonic() - started_s
        if latest is not None and (waited_s > timeout_s or (samples is not None and not _unbalanced(samples))):
            return IdleServer(latest, waited_s, num_reads)
        if waited_s > timeout_s:
            raise ChaosError(f"/metrics of a connected backend was not to be had for {timeout_s:g} s")
        await asyncio.sleep(_POLL_S)


async def wait_totals(numbers: Numbers, timeout_s: float) -> IdleServer:
    """Wait as `wait_idle` does, and until the totals count every answer before the last reading, but not that one.

    Raises ChaosError.
    """
    num_reads = (await wait_idle(numbers, timeout_s)).num_reads
    while True:
        await asyncio.sleep(_TOTALS_S)
        idle = await wait_idle(numbers, timeout_s)
        num_reads += idle.num_reads
        if idle.num_reads == 1 or idle.waited_s > timeout_s:
            return replace(idle, num_reads=num_reads)


def _unbalanced(samples: Samples) -> dict[str, tuple[float, float]]:
    """Return each wrong number of an idle server, with its right value."""
    wrong = {name: (samples.get(name, -1.0), 0.0) for name in _IS_ZERO_WHEN_IDLE if samples.get(name) != 0}
    accepted, ended = (
        samples.get(_ACCEPTED, -1.0),
        sum(samples.get(name, 0) for name in _ENDED),
    )
    if accepted != ended:
        wrong[f"{_ACCEPTED} against its outcomes"] = (accepted, ended)
    return wrong


def check_idle(ledger: Ledger, samples: Samples, when: str) -> None:
    for name, (got, want) in _unbalanced(samples).items():
        ledger.imbalance(f"an idle server has {name}", f"{when}: {got:g} instead of {want:g}")


@dataclass(frozen=True, slots=True)
class CountedRound:
    """Answers that undisturbed clients received: the server must have counted them, no more and no less."""

    requests: int
    streams: int
    """Streams, one for each choice."""
    tokens: int
    reads: int
    """Answers of /metrics that the samples count: the one that the samples before come from, but not the last one."""
    most_checks: int | None
    """Health checks of proxies that may have been answered, at most. None: others may have asked any number
    of times."""

    @classmethod
    def of(cls, answers: Sequence[Answer], reads: int, most_checks: int | None) -> CountedRound:
        choices, tokens = 0, 0
        for answer in answers:
            choices, tokens = choices + len(answer.choices), tokens + answer.received_tokens
        return cls(sum(answer.refusal is None for answer in answers), choices, tokens, reads, most_checks)


@dataclass(frozen=True, slots=True)
class StormTotals:
    """The counts of clients and server at one moment when all were idle."""

    samples: Samples
    choices: int
    complete_choices: int
    tokens: int

    @classmethod
    def of(cls, samples: Samples, ledger: Ledger) -> StormTotals:
        return cls(samples, ledger.num_choices, ledger.num_complete_choices, ledger.tokens_received)


def check_storm(ledger: Ledger, before: StormTotals, after: StormTotals, when: str) -> None:
    """Check the counters of a round in which no process died.

    Clients that hang up do not know how far their requests came, so these are bounds and not equations.
    """

    def grew(name: str) -> float:
        return after.samples.get(name, 0.0) - before.samples.get(name, 0.0)

    accepted, finished = grew(_ACCEPTED), grew(_FINISHED)
    tokens = grew("penstock_tokens_streamed_total")
    complete, sent = after.complete_choices - before.complete_choices, after.choices - before.choices
    for name, less, more in (
        ("finished requests are fewer than complete answers", complete, finished),
        ("accepted requests are fewer than finished ones", finished, accepted),
        ("accepted requests are more than were sent", accepted, sent),
        ("streamed tokens are fewer than arrived", after.tokens - before.tokens, tokens),
    ):
        if less > more:
            ledger.imbalance(name, f"{when}: {less:g} and {more:g}")


def check_counted(ledger: Ledger, before: Samples, after: Samples, counted: CountedRound) -> None:
    """Compare the growth of the counters with what the clients received."""

    def grew(*names: str) -> float:
        return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names)

    ledger.expect("undisturbed requests that the backend accepted", grew(_ACCEPTED), counted.streams)
    ledger.expect("undisturbed requests that the backend finished", grew(_FINISHED), counted.streams)
    ended = [f'penstock_streams_total{{outcome="{name}"}}' for name in ("stop", "length")]
    ledger.expect("undisturbed streams that frontends finished", grew(*ended), counted.streams)
    ledger.expect("tokens of undisturbed streams", grew("penstock_tokens_streamed_total"), counted.tokens)
    answered = grew('penstock_http_responses_total{status="200"}')
    least = counted.requests + counted.reads
    most = math.inf if counted.most_checks is None else least + counted.most_checks
    if not least <= answered <= most:
        wanted = f"{least}" if most == least else f"{least} to {most:g}"
        ledger.imbalance("answers of status 200", f"{answered:g} instead of {wanted}")
