"""The events of the engine view's stream: those of viewers who see all requests, and those of one tenant."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct, field

from penstock.shm.memory.board import BackendBoard, Board, FrontendBoard, Histogram
from penstock.shm.recording.live import LiveEngine
from penstock.shm.recording.live_state import EngineEvent, LiveRequest, LiveSequence, StepColumn

MAX_STEPS = 1000
"""Steps in one event, at most. If there are more, the last ones are sent and the others count as lost."""
MAX_EVENTS = 500
MAX_WAITING = 200
_MAX_KEYS = 16
_RATE_WINDOW_S = 5.0
_PAGE_GRAINS = 64
"""A lone request of another tenant shows its length in so many steps at most."""
_US_PER_S = 1e6

_COUNTERS = (
    "pid",
    "running",
    "waiting",
    "max_waiting",
    "steps",
    "pages_used",
    "pages_idle",
    "pages_total",
    "page_size_tokens",
    "host_pages_used",
    "pages_saved",
    "pages_restored",
    "requests_accepted",
    "requests_finished",
    "requests_cancelled",
    "requests_rejected",
    "requests_failed",
    "requests_expired",
    "requests_coalesced",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "wasted_tokens",
    "preemptions",
    "draining",
)


class ShownSequence(NamedTuple):
    """A sequence that runs or is preempted. It belongs to one tenant."""

    number: int
    tenant: int
    """-1 if it started before the flight recorder's first record."""
    is_running: bool
    num_computed: int
    num_prompt_tokens: int
    max_tokens: int
    num_cached: int
    num_listeners: int
    num_preemptions: int
    started_s: float
    arrived_s: float
    requests: list[int]
    """Keys of the first requests that listen to it."""


class ShownWaiting(NamedTuple):
    key: int
    tenant: int
    arrived_s: float
    num_tokens: int
    max_tokens: int
    reason: str


class TenantPages(NamedTuple):
    """Pages that a tenant's sequences fill. A page that several sequences share counts for each."""

    tenant: int
    num_pages: int
    num_full: int
    """Full pages: those whose tokens have a name in the prefix cache."""


class ShownHistogram(Struct):
    bounds_s: list[float]
    counts: list[int]
    """One more than the bounds: the last counts the values above all of them."""
    sum_s: float


class Sums(Struct):
    """The requests of all tenants together, for a viewer who sees only its own one by one."""

    running: int
    waiting: int
    pages: int
    """Pages held, rounded up to a sixty-fourth of all."""
    tokens_per_s: int
    """Generated in the last seconds."""


class EngineUpdate(Struct, tag="engine"):
    """The state of one backend. Times are in seconds of the machine's monotonic clock.

    A viewer who sees only its own requests receives these and the sums, and no steps, counters of requests and
    histograms: while one other request runs, they describe it.
    """

    time_s: float
    model: str
    problem: str | None = None
    """Why there are no steps and sequences: the backend is away, or has no flight recorder that can be read."""
    has_gap: bool = False
    """Steps are missing: the reader was stopped for longer than the flight recorder remembers."""
    max_running: int = 0
    max_batch_tokens: int = 0
    """The budget of a step."""
    page_size: int = 0
    num_pages: int = 0
    steps: list[StepColumn] = field(default_factory=list)
    events: list[EngineEvent] = field(default_factory=list)
    sequences: list[ShownSequence] = field(default_factory=list)
    waiting: list[ShownWaiting] = field(default_factory=list)
    num_waiting: int = 0
    """All waiting requests; the list may contain fewer."""
    tenants: list[TenantPages] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    sums: Sums | None = None
    histograms: dict[str, ShownHistogram] = field(default_factory=dict)
    """Time to first token, between tokens, in the queue, and of steps, since the backend started."""


class OwnUpdate(Struct, tag="own"):
    """The part that only the viewer's tenant receives, after each engine event."""

    lost_steps: int
    """Steps since the last engine event that this viewer was too slow to receive."""
    tenant: int
    """The viewer's own number among the tenants; -1 if it has no request."""
    requests: list[tuple[int, str]]
    """Keys of the viewer's own requests in the engine event, with their names: frontend.request."""


_Name = TypeVar("_Name", bound=Hashable)


class Numbers(Generic[_Name]):
    """Small numbers for tenants and frontends, whose own names are long and secret."""

    _MAX = 1 << 16

    def __init__(self) -> None:
        self._numbers: dict[_Name, int] = {}

    def number(self, name: _Name) -> int:
        if len(self._numbers) >= self._MAX:
            self._numbers.clear()
        return self._numbers.setdefault(name, len(self._numbers))

    def find(self, name: _Name) -> int:
        """Return the name's number; -1 if it has none."""
        return self._numbers.get(name, -1)


def describe_engine(
    update: EngineUpdate, live: LiveEngine, tenants: Numbers[str], only: str | None = None
) -> list[LiveRequest]:
    """Fill in the open sequences and requests, or only those of one tenant; return the open requests that are shown."""
    if (started := live.started) is not None:
        update.max_running, update.max_batch_tokens = started.max_running, started.max_batch_tokens
        update.page_size, update.num_pages = started.page_size, started.num_pages
    shown: list[LiveRequest] = []
    for sequence in live.sequences.values():
        requests = [request for request in sequence.requests.values() if only in (None, request.tenant)]
        if requests or only is None:
            update.sequences.append(_shown_sequence(sequence, requests, tenants))
            shown += requests[:_MAX_KEYS]
    waiting = [request for request in live.waiting() if request.sequence is None and only in (None, request.tenant)]
    update.num_waiting = len(waiting)
    for request in waiting[:MAX_WAITING]:
        reason = live.why_it_waits(request).value
        number = tenants.number(request.tenant)
        update.waiting.append(
            ShownWaiting(request.key, number, request.arrived_s, request.num_tokens, max(0, request.max_tokens), reason)
        )
        shown.append(request)
    update.tenants = _tenant_pages(update.sequences, update.page_size)
    return shown


def _shown_sequence(sequence: LiveSequence, requests: list[LiveRequest], tenants: Numbers[str]) -> ShownSequence:
    """requests are those of its listeners that are shown."""
    first = requests[0] if requests else None
    return ShownSequence(
        sequence.number,
        -1 if first is None else tenants.number(first.tenant),
        sequence.is_running,
        max(0, sequence.num_computed),
        sequence.num_tokens if first is None else first.num_prompt_tokens,
        0 if first is None else max(0, *(request.max_tokens for request in requests)),
        sequence.num_cached,
        len(requests),
        sequence.num_preemptions,
        sequence.started_s,
        sequence.started_s if first is None else first.arrived_s,
        [request.key for request in requests[:_MAX_KEYS]],
    )


def _tenant_pages(sequences: Iterable[ShownSequence], page_size: int) -> list[TenantPages]:
    pages: dict[int, tuple[int, int]] = {}
    for sequence in sequences:
        if sequence.is_running and page_size:
            num_pages, num_full = pages.get(sequence.tenant, (0, 0))
            num_full += sequence.num_computed // page_size
            pages[sequence.tenant] = num_pages + -(-sequence.num_computed // page_size), num_full
    return [TenantPages(tenant, *counts) for tenant, counts in sorted(pages.items())]


def describe_counters(update: EngineUpdate, board: Mapping[str, int]) -> None:
    update.counters = {name: board[name] for name in _COUNTERS}
    update.histograms = {
        "ttft": _histogram(FrontendBoard.ttft_us, board, Board.TOTALS),
        "itl": _histogram(FrontendBoard.itl_us, board, Board.TOTALS),
        "queue": _histogram(FrontendBoard.queue_us, board, Board.TOTALS),
        "step": _histogram(BackendBoard.step_us, board),
    }


def describe_sums(update: EngineUpdate, board: Mapping[str, int], steps: Iterable[StepColumn]) -> None:
    """steps are the last ones."""
    total, begin_s = board["pages_total"], update.time_s - _RATE_WINDOW_S
    grain = max(1, total // _PAGE_GRAINS)
    pages = min(total, -(-board["pages_used"] // grain) * grain)
    num_tokens = sum(step.num_decodes for step in steps if step.ended_s >= begin_s)
    running, waiting = board["running"], board["waiting"]
    update.sums = Sums(running, waiting, pages, round(num_tokens / _RATE_WINDOW_S))
    update.counters = {"pages_total": total, "pages_used": pages}


def _histogram(histogram: Histogram, board: Mapping[str, int], prefix: str = "") -> ShownHistogram:
    counts, total = histogram.read(board, prefix)
    return ShownHistogram([bound / _US_PER_S for bound in histogram.bounds], counts, total / _US_PER_S)
