"""Follows one backend for all viewers of this worker, and only while there are some.

Viewers read from a short queue of encoded updates at their own pace. A viewer slower than its queue loses updates, and
learns how many steps they had; neither the engine nor other viewers wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.server.engine_updates import (
    MAX_EVENTS,
    MAX_STEPS,
    EngineUpdate,
    Numbers,
    OwnUpdate,
    describe_counters,
    describe_engine,
    describe_sums,
)
from penstock.frontend.generation.models.served_model import ModelKeeper
from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shorten
from penstock.frontend.transport.exchange import Exchange
from penstock.frontend.transport.sse import EventStream
from penstock.shm.client import BackendClient, backends_of
from penstock.shm.memory.ring import RingReader
from penstock.shm.recording.events import BackendStarted, unpack_event
from penstock.shm.recording.live import LiveEngine
from penstock.shm.recording.live_state import Changes, EngineEvent, LiveRequest, StepColumn
from penstock.shm.recording.records import unpack
from penstock.shm.recording.rings import NoRing, open_ring

logger = logging.getLogger("penstock.engine_view")

_EVERY_S = 0.25
_AT_LEAST_EVERY_S = 1.0
"""An update is sent at least this often, even if nothing has happened."""
_REOPEN_EVERY_S = 2.0
MAX_QUEUED = 12
_MAX_NAMES = 20_000
_ONLY_TENANT = 0
"""The number of a viewer's tenant in its own view."""


@dataclass(frozen=True, slots=True)
class OwnView:
    """What a tenant receives that sees only its own requests one by one."""

    data: bytes
    """The engine event."""
    requests: list[tuple[int, str]]
    """Each request's key and name."""


@dataclass(frozen=True, slots=True)
class Update:
    data: bytes
    """The engine event for viewers who see all."""
    views: dict[str, OwnView]
    """For each other viewer's tenant."""
    first_step: int
    """Number of steps that were read before this update's."""
    end_step: int
    owners: dict[str, list[tuple[int, str]]]
    """Tenant → its requests in the update: each one's key and name."""
    numbers: dict[str, int]
    """Tenant → its number."""

    def events(self, tenant: str, lost_steps: int, *, sees_all: bool) -> bytes:
        """Return the two events for one viewer."""
        if sees_all:
            own = OwnUpdate(lost_steps, self.numbers.get(tenant, -1), self.owners.get(tenant, []))
            return self.data + _event(own)
        view = self.views[tenant]
        return view.data + _event(OwnUpdate(0, _ONLY_TENANT, view.requests))


def _event(value: EngineUpdate | OwnUpdate) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EngineReader:
    """Reads one backend's ring and board. Its methods run in one thread at a time."""

    def __init__(self, find_backend: Callable[[], BackendClient]) -> None:
        """find_backend returns the client of the backend: another one after its replacement."""
        self._find_backend = find_backend
        self._ring: RingReader | None = None
        self._live: LiveEngine | None = None
        self._problem: str | None = None
        self._reopen_at_s = 0.0
        self._num_steps = 0
        self._sent_s = 0.0
        self._tenants: Numbers[str] = Numbers()
        self._frontends: Numbers[int] = Numbers()
        self._names: dict[int, tuple[str, str]] = {}
        """Request key → tenant and name."""
        self._steps: deque[StepColumn] = deque(maxlen=MAX_STEPS)
        self._events: deque[EngineEvent] = deque(maxlen=MAX_EVENTS)

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
        self._ring = self._live = None

    def read(
        self, *, wants_all: bool, now_s: float, tenants: Collection[str] = ()
    ) -> tuple[Update | None, Update | None]:
        """Read what is new. tenants are those of viewers who see only their own requests.

        Returns an update since the last one, or None if nothing is new; and, if wanted, an update with all remembered
        steps and events.
        """
        backend = self._find_backend()
        board, model = backend.backend_counters, backend.model
        self._choose_ring(None if board is None else board.get("pid", 0), now_s)
        changes = self._poll()
        first_step = self._num_steps
        self._num_steps += len(changes.steps)
        self._steps.extend(changes.steps)
        self._events.extend(changes.events)
        is_due = now_s - self._sent_s >= _AT_LEAST_EVERY_S
        if not (wants_all or is_due or changes.steps or changes.events):
            return None, None
        self._sent_s = now_s
        update = EngineUpdate(now_s, "" if model is None else model.model_id)
        update.problem, update.has_gap = self._problem, changes.has_gap
        shown = [] if self._live is None else describe_engine(update, self._live, self._tenants)
        if board is not None and "steps" in board:
            describe_counters(update, board)
        self._remember([*shown, *changes.left])
        update.steps, update.events = changes.steps[-MAX_STEPS:], changes.events[-MAX_EVENTS:]
        own = [(tenant, *self._own_update(update, tenant, board)) for tenant in tenants]
        fresh = self._encode(update, shown, max(first_step, self._num_steps - MAX_STEPS), own)
        if not wants_all:
            return fresh, None
        update.steps, update.events = list(self._steps), list(self._events)
        return fresh, self._encode(update, shown, self._num_steps - len(self._steps), own)

    def _own_update(
        self, update: EngineUpdate, tenant: str, board: Mapping[str, int] | None
    ) -> tuple[EngineUpdate, list[LiveRequest]]:
        own = EngineUpdate(update.time_s, update.model, update.problem)
        shown = [] if self._live is None else describe_engine(own, self._live, Numbers(), tenant)
        if board is not None and "steps" in board:
            describe_sums(own, board, self._steps)
        return own, shown

    def _encode(
        self,
        update: EngineUpdate,
        shown: list[LiveRequest],
        first_step: int,
        own_updates: Iterable[tuple[str, EngineUpdate, list[LiveRequest]]],
    ) -> Update:
        views = {tenant: self._view(tenant, own, own_shown, update) for tenant, own, own_shown in own_updates}
        owners: dict[str, list[tuple[int, str]]] = {}
        for key in dict.fromkeys([*(request.key for request in shown), *(event.request for event in update.events)]):
            if (known := self._names.get(key)) is not None:
                owners.setdefault(known[0], []).append((key, known[1]))
        numbers = {tenant: self._tenants.find(tenant) for tenant in owners}
        return Update(_event(update), views, first_step, self._num_steps, owners, numbers)

    def _view(self, tenant: str, own: EngineUpdate, shown: list[LiveRequest], update: EngineUpdate) -> OwnView:
        names = {request.key: self._names[request.key] for request in shown}
        for event in update.events:
            if (name := self._names.get(event.request)) is not None and name[0] == tenant:
                names[event.request] = name
        own.events = [event for event in update.events if event.request in names]
        return OwnView(_event(own), [(key, name) for key, (_, name) in names.items()])

    def _remember(self, requests: list[LiveRequest]) -> None:
        for request in requests:
            frontend = 1 + self._frontends.number(request.frontend)
            self._names[request.key] = request.tenant, f"{frontend}.{request.request_id}"
        while len(self._names) > _MAX_NAMES:
            del self._names[next(iter(self._names))]

    def _poll(self) -> Changes:
        if self._live is None:
            return Changes()
        try:
            return self._live.poll()
        except ValueError as error:
            logger.warning("the flight recorder cannot be read: %s; the engine view tries again", error)
            self.close()
            self._problem = "the flight recorder cannot be read"
            return Changes()

    def _choose_ring(self, pid: int | None, now_s: float) -> None:
        """Open the ring of the backend with this pid, unless it is open."""
        if pid is None:
            self._problem = "no backend is connected"
            return
        if (self._ring is not None and _writer_pid(self._ring) == pid) or now_s < self._reopen_at_s:
            if self._ring is not None:
                self._problem = None
            return
        self._reopen_at_s = now_s + _REOPEN_EVERY_S
        try:
            ring, _ = open_ring(pid)
        except NoRing:
            self.close()
            self._problem = "the backend has no flight recorder that this server can read; see --flight-recorder"
            return
        self.close()
        self._ring, self._live, self._problem = ring, LiveEngine(ring), None
        self._steps.clear()
        self._events.clear()
        self._names.clear()


def _writer_pid(ring: RingReader) -> int:
    """The process id of the backend that writes the ring; 0 if it cannot be read now."""
    if not (note := ring.read_note()):
        return 0
    event = unpack_event(unpack(note).body)
    return event.pid if isinstance(event, BackendStarted) else 0


class EngineFeed:
    """Reads the backend while it has viewers. Belongs to the event loop."""

    def __init__(self, find_backend: Callable[[], BackendClient]) -> None:
        self._find_backend = find_backend
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def join(self, only_tenant: str | None = None) -> Viewer:
        """Return a viewer, which leaves with `leave`. only_tenant: it sees this tenant's requests one by one."""
        viewer = Viewer(only_tenant)
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._wake.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        self._wake.set()

    async def _run(self) -> None:
        """Read until the last viewer has left. Viewers that join meanwhile are served too."""
        reader = EngineReader(self._find_backend)
        try:
            while self._viewers:
                self._wake.clear()
                wants_all = any(viewer.is_new for viewer in self._viewers)
                tenants = {viewer.only_tenant for viewer in self._viewers if viewer.only_tenant is not None}
                # In a thread, because the first read takes all that the ring holds.
                fresh, everything = await asyncio.to_thread(
                    reader.read, wants_all=wants_all, now_s=time.monotonic(), tenants=tenants
                )
                for viewer in self._viewers:
                    viewer.put(fresh, everything)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _EVERY_S)
        except Exception:
            logger.critical("the engine view's reader stopped because of a bug", exc_info=True)
        finally:  # after an error the viewers' streams end, and the browsers ask for new ones
            for viewer in self._viewers:
                viewer.end()
            reader.close()
            self._task = None


class Viewer:
    """One stream's queue."""

    def __init__(self, only_tenant: str | None = None) -> None:
        self.only_tenant = only_tenant
        """The tenant whose requests it sees; None sees all."""
        self.is_new = True
        """It has not received an update yet."""
        self._queue: deque[Update] = deque(maxlen=MAX_QUEUED)
        self._changed = asyncio.Event()
        self._has_ended = False
        self._next_step = -1

    def put(self, fresh: Update | None, everything: Update | None) -> None:
        """everything is an update for new viewers. Displaces the oldest update if the queue is full."""
        update = everything if self.is_new else fresh
        # A viewer that came while the update was made waits for the next one.
        if update is not None and (self.only_tenant is None or self.only_tenant in update.views):
            self.is_new = False
            self._queue.append(update)
            self._changed.set()

    def end(self) -> None:
        self._has_ended = True
        self._changed.set()

    async def next(self) -> tuple[Update, int] | None:
        """Return the next update, and the number of steps that were lost before it; None at the end."""
        while not self._queue:
            if self._has_ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        update = self._queue.popleft()
        num_lost = 0 if self._next_step < 0 else max(0, update.first_step - self._next_step)
        self._next_step = update.end_step
        return update, num_lost


MAX_VIEWERS = 64
"""Streams of one worker, at most."""
_RETRY_AFTER_S = 5


class EngineStreams:
    """One worker's streams. They are not requests to a model, so they take no request's place."""

    def __init__(self) -> None:
        self._feeds: dict[tuple[ModelKeeper, str], EngineFeed] = {}
        """By model, and the replica's name."""
        self._num_viewers = 0

    async def watch(self, exchange: Exchange, context: EndpointContext) -> None:
        """Send events until the client hangs up or the server drains. Raises ApiError, ClientGoneError."""
        sees_all = context.admission.identify_viewer(exchange)
        self._check(exchange, context)
        key = _choose(exchange, context)
        stream = EventStream(exchange, lambda: ())
        if exchange.method == "HEAD":
            await stream.end(b"")
            return
        feed = self._feeds.setdefault(key, EngineFeed(lambda: _backend(*key)))
        tenant = exchange.payer.hex()
        viewer = feed.join(None if sees_all else tenant)
        self._num_viewers += 1
        try:
            async with exchange.cancelled_on_disconnect():
                while (next_one := await viewer.next()) is not None and not context.exchanges.is_draining:
                    update, num_lost = next_one
                    await stream.write(update.events(tenant, num_lost, sees_all=sees_all))
            await stream.end(b"")
        finally:
            self._num_viewers -= 1
            feed.leave(viewer)

    def _check(self, exchange: Exchange, context: EndpointContext) -> None:
        context.admission.cors.refuse_foreign(exchange, "watch the engine")
        if self._num_viewers >= MAX_VIEWERS:
            message = f"too many viewers of the engine: the limit of this worker is {MAX_VIEWERS}; retry later"
            raise retry_later(ErrorKind.OVERLOADED, message, _RETRY_AFTER_S)


def _backend(keeper: ModelKeeper, name: str) -> BackendClient:
    """The replica of this name; the first one if its socket has vanished."""
    backends = dict(backends_of(keeper.backend))
    return backends.get(name) or next(iter(backends.values()))


def _choose(exchange: Exchange, context: EndpointContext) -> tuple[ModelKeeper, str]:
    """The model and the replica that the query names, or the first ones. Raises ApiError."""
    query = parse_qs(exchange.query.decode("latin-1"))
    model = query.get("model")
    keeper = context.models.generation if model is None else context.models.find("any", model[0])
    names = [name for name, _ in backends_of(keeper.backend)]
    name = query.get("replica", names)[0]
    if name not in names:
        message = f"replica: there is none named {shorten(name)}; there are {', '.join(names)}"
        raise ApiError(ErrorKind.INVALID_VALUE, message, param="replica")
    return keeper, name
