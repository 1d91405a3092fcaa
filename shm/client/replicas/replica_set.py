"""`ReplicaSet`: several backends with the same model, with the interface of one `BackendClient`.

It has a client for each backend. A stream belongs to one client at a time. When a backend dies or makes no progress,
its streams move at once to those that are ready; if none is, they wait for the first that will be. When it drains, or
another one takes its socket over, they move as soon as others have computed their tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.shm.client.capacity import BackendUnavailable, Overloaded
from penstock.shm.client.client import BackendClient
from penstock.shm.client.connection import Membership
from penstock.shm.client.replicas.hand_over import HandOver
from penstock.shm.client.replicas.replica_chooser import Place, Replica, ReplicaChooser
from penstock.shm.client.replicas.socket_directory import SocketDirectory, index_of, name_of
from penstock.shm.client.request import GenerationRequest
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.client.streams.pooled import PooledRequest, PooledStream
from penstock.shm.client.streams.token_stream import AnswerStream, TokenStream
from penstock.shm.link.join import Refused
from penstock.shm.memory.board import FrontendBoard
from penstock.shm.memory.prefix_table import MAX_REPLICAS, PrefixTable
from penstock.shm.messages import MAX_ADAPTERS, Adapter, ModelCard, QuoteTerms

logger = logging.getLogger("penstock.client")

_LOOK_EVERY_S = 0.05
"""How often it looks for backends that drain, hang or have become ready. It learns of a death at once."""
_LOOKS_PER_PATH_CHECK = 5
"""It checks who owns each path at every fifth look."""

StreamT = TypeVar("StreamT", bound="OpenStream")


class ReplicaSet:
    """A client of several backends. Use it as a `BackendClient`, except for shared buffers, which need that class."""

    def __init__(
        self,
        socket_paths: Sequence[Path],
        *,
        resume_timeout_s: float = 600.0,
        max_held: int = 0,
        hold_timeout_s: float = 120.0,
        prefixes: PrefixTable | None = None,
        directory: SocketDirectory | None = None,
    ) -> None:
        """The other parameters are those of `BackendClient`. prefixes may be shared with other processes that have the
        same backends in the same order. With a directory, its sockets are the backends, and socket_paths names the one
        that holds requests while there are none. Raises ValueError."""
        if not 1 <= len(socket_paths) <= MAX_REPLICAS:
            raise ValueError(f"socket_paths has {len(socket_paths)} paths; a set has 1 to {MAX_REPLICAS} replicas")
        if len(set(socket_paths)) < len(socket_paths):
            raise ValueError("socket_paths contains the same path twice")
        self._model: ModelCard | None = None
        self._chooser = ReplicaChooser(PrefixTable.private(secrets.token_bytes(32)) if prefixes is None else prefixes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_looks = 0
        self._is_started = self._is_closed = False
        self._new_client = functools.partial(
            BackendClient, resume_timeout_s=resume_timeout_s, max_held=max_held, hold_timeout_s=hold_timeout_s
        )
        self._directory = directory
        if directory is not None:
            self._places = [self._make_place(index_of(path), name_of(path), path) for path in socket_paths]
            return
        names = [""] if len(socket_paths) == 1 else [str(index + 1) for index in range(len(socket_paths))]
        self._places = [
            self._make_place(index, name, path)
            for index, (name, path) in enumerate(zip(names, socket_paths, strict=True))
        ]

    def _make_place(self, index: int, name: str, path: Path) -> Place:
        return Place(index, path, self._make_replica(index, name, path))

    def _make_replica(self, index: int, name: str, path: Path) -> Replica:
        membership = Membership(
            accept=lambda card: self._accept(replica, card),
            lost=lambda: self._lose(replica),
            has_others=lambda: bool(self._others(replica)),
        )
        replica = Replica(index, name, self._new_client(path, membership=membership))
        return replica

    async def start(self) -> None:
        """Begin to connect, and return at once."""
        if not self._is_started and self._directory is not None:
            self._follow(self._directory.look())
        for replica in self.replicas:
            await replica.client.start()
        if not self._is_started:
            self._begin(self._watch(), "replica-set")
        self._is_started = True

    async def close(self) -> None:
        """Open streams end CANCELLED."""
        self._is_closed = True
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas:
            await replica.client.close()

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Log an exception of a task: a bug of ours."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("%s stopped because of a bug", task.get_name(), exc_info=error)

    @property
    def replicas(self) -> list[Replica]:
        """All replicas; during a takeover a path has two."""
        return [replica for place in self._places for replica in place.replicas]

    @property
    def shown(self) -> list[Replica]:
        """One replica for each path: during a takeover the old one."""
        return [place.replicas[0] for place in self._places]

    @property
    def model(self) -> ModelCard | None:
        """The model of all replicas, with the shortest of their contexts and the adapters of any. None before the
        first connection."""
        return self._model

    @property
    def ready(self) -> bool:
        """Whether at least one replica is ready."""
        return any(replica.client.ready for replica in self.replicas)

    @property
    def retry_after_s(self) -> int:
        """The shortest `BackendClient.retry_after_s` of the replicas."""
        candidates = self._ready() or list(self.replicas)
        return min(replica.client.retry_after_s for replica in candidates)

    @property
    def board(self) -> FrontendBoard:
        """The board of any connected replica, for numbers that belong to no stream. Sums over all replicas are right
        with any of them."""
        connected = (replica for replica in self.replicas if replica.client.backend_board is not None)
        return next(connected, self.replicas[0]).client.board

    def check_capacity(self, tenant: bytes, *, may_share: bool) -> None:
        """See `BackendClient.check_capacity`. One replica with a place is enough."""
        refusals: list[Exception] = []
        for replica in self._ready() or [self._holder_of()]:
            try:
                replica.client.check_capacity(tenant, may_share=may_share)
            except (BackendUnavailable, Overloaded) as refusal:
                refusals.append(refusal)
            else:
                return
        raise refusals[0]

    async def wait_for_room(self) -> None:
        """See `BackendClient.wait_for_room`. Room at one replica is enough."""
        waits = [asyncio.ensure_future(replica.client.wait_for_room()) for replica in self._ready() or self.replicas]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def submit(self, request: GenerationRequest) -> TokenStream:
        """See `BackendClient.submit`. Raises ValueError for a request with shared buffers."""
        if request.output is not None:
            raise ValueError("output is a shared buffer; that needs a client of one backend")
        return self._place(request, lambda client: client.submit(request))

    def ask_quote(self, request: GenerationRequest, terms: QuoteTerms) -> AnswerStream:
        """See `BackendClient.ask_quote`."""
        return self._place(request, lambda client: client.ask_quote(request, terms))

    def submit_pooled(self, request: PooledRequest) -> PooledStream:
        """See `BackendClient.submit_pooled`."""
        return self._place(request, lambda client: client.submit_pooled(request))

    def _place(self, request: GenerationRequest | PooledRequest, submit: Callable[[BackendClient], StreamT]) -> StreamT:
        """Submit to the best replica, or if that is full, to the least loaded one that is not."""
        ready = self._ready()
        adapter = request.adapter if isinstance(request, GenerationRequest) else ""
        holder = self._holder_of(adapter)
        if not any(replica.has_adapter(adapter) for replica in ready) and (not ready or holder.has_adapter(adapter)):
            return self._named(submit(holder.client), holder)
        if len(self._places) == 1:
            return submit(ready[0].client)
        tokens = request.prompt_tokens()
        best = self._chooser.place(ready, request.to_message(0, len(tokens)), tokens)
        try:
            return self._named(submit(best.client), best)
        except Overloaded:
            others = [replica for replica in ready if replica is not best and replica.has_adapter(adapter)]
            for other in sorted(others, key=lambda one: one.load):
                with contextlib.suppress(Overloaded):
                    return self._named(submit(other.client), other)
            raise

    def _named(self, stream: StreamT, replica: Replica) -> StreamT:
        stream.backend = replica.name
        return stream

    def _holder_of(self, adapter: str = "") -> Replica:
        """The one that holds new requests while none is ready that has their adapter: always the same, so that its
        limits hold for all. If none is to come back with the adapter, any."""
        newest = [place.newest for place in self._places if not place.is_dropped]
        return next((replica for replica in newest if replica.has_adapter(adapter)), self._places[0].newest)

    def _ready(self) -> list[Replica]:
        return [
            replica
            for place in self._places
            for replica in place.replicas
            if replica.client.ready and not place.is_leaving(replica)
        ]

    def _others(self, replica: Replica) -> list[Replica]:
        return [other for other in self._ready() if other is not replica]

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _follow(self, paths: Sequence[Path]) -> None:
        """Add paths that have appeared and drop those that have gone. The last one stays: it holds requests until
        another appears."""
        known = {place.path: place for place in self._places}
        for path in paths:
            if path in known:
                known[path].is_dropped = False
                continue
            place = self._make_place(index_of(path), name_of(path), path)
            self._places.append(place)
            if self._is_started:
                logger.info("%s is taken up", place.newest.title)
                self._begin(place.newest.client.start(), "replica")
        for place in list(self._places):
            if place.path not in paths and any(not other.is_dropped for other in self._places if other is not place):
                place.is_dropped = True
                if not any(replica.client.board.requests_open for replica in place.replicas):
                    self._remove(place)

    def _remove(self, place: Place) -> None:
        """Forget a path that has gone and has no streams."""
        self._places.remove(place)
        if self._is_started:
            logger.info("%s is dropped", place.newest.title)
        for replica in place.replicas:
            self._begin(replica.client.close(), "retirement")
        self._show_model()

    def _look(self) -> None:
        self._num_looks += 1
        if self._directory is not None and self._num_looks % _LOOKS_PER_PATH_CHECK == 0:
            self._follow(self._directory.look())
        for place in self._places:
            for replica in place.replicas:
                if replica.client.board.requests_open and (not replica.client.ready or place.is_leaving(replica)):
                    self._empty(replica)
            if self._num_looks % _LOOKS_PER_PATH_CHECK == 0 and place.was_taken_over():
                successor = self._make_replica(place.index, place.newest.name, place.path)
                place.replicas.append(successor)
                self._begin(successor.client.start(), "successor")

    def _empty(self, replica: Replica) -> None:
        """Move all streams away. While the backend still computes them, each waits until its target has computed its
        tokens."""
        if not replica.computes:
            self._relieve(replica, backend_died=False)
        elif not replica.hands_over and self._others(replica):
            replica.hands_over = True
            self._begin(self._hand_over(replica), "hand-over")

    async def _hand_over(self, replica: Replica) -> None:
        try:
            await HandOver(replica, self._target_of, self._move, self._chooser.twin_of).run()
        finally:
            replica.hands_over = False

    def _target_of(self, stream: OpenStream, source: Replica) -> Replica | None:
        """The replica that should take the stream. None if no other is ready, or none has its adapter while the source
        may come back."""
        others = self._others(source)
        if not any(other.has_adapter(stream.message.adapter) for other in others) and self._comes_back(source):
            return None
        return self._chooser.place(others, stream.message, stream.tokens) if others else None

    def _comes_back(self, replica: Replica) -> bool:
        return any(replica in place.replicas and not place.is_leaving(replica) for place in self._places)

    def _lose(self, replica: Replica) -> None:
        """Its backend has died, or has ended after a drain. If the path has two clients, one is removed."""
        if self._is_closed:
            return
        self._relieve(replica, backend_died=True)
        place = next((place for place in self._places if replica in place.replicas), None)
        if place is None or (place.is_dropped and len(place.replicas) == 1):
            return
        if place.is_leaving(replica):
            place.replicas.remove(replica)
            self._begin(_retire(replica, place.newest), "retirement")
            self._show_model()
        elif replica is not place.newest and place.newest.client.backend_board is None:
            gone = place.replicas.pop()
            self._begin(_retire(gone, replica), "retirement")

    def _relieve(self, replica: Replica, *, backend_died: bool) -> None:
        """Move the streams of a replica that cannot continue to others, if there are any."""
        parts: dict[Replica, list[OpenStream]] = {}
        for stream in replica.client.open_streams:
            if (target := self._target_of(stream, replica)) is not None:
                parts.setdefault(target, []).append(stream)
        for target, moving in parts.items():
            logger.info("%d streams of %s continue on %s", len(moving), replica.title, target.title)
            self._move(replica, moving, target, backend_died=backend_died)

    def _move(
        self, source: Replica, streams: Sequence[OpenStream], target: Replica, *, backend_died: bool = False
    ) -> None:
        moved = [self._named(stream, target) for stream in source.client.give_streams(streams)]
        target.client.adopt(moved, backend_died=backend_died)

    def _accept(self, replica: Replica, card: ModelCard) -> None:
        """Raises Refused for a model that differs from the others'. If the last replica with the old model has gone,
        the set's model changes, and open streams fail: nobody can continue them."""
        replica.offered = card
        model = self._model
        if model is not None and model.identity != card.identity:
            for other in self.replicas:
                if other is not replica and other.offered is not None and other.offered.identity == model.identity:
                    raise Refused(f"it is no replica of the others: {difference(model, card)}")
            for each in self.replicas:
                each.client.fail_streams()
        self._model = card
        self._show_model()

    def _show_model(self) -> None:
        """Choose the card to show: that of the first path's newest backend."""
        offers = [place.newest.offered for place in self._places] + [replica.offered for replica in self.replicas]
        cards = [card for card in offers if card is not None and self._is_shown(card)]
        if cards:
            shortest = min(card.max_context_tokens for card in cards)
            by_name: dict[str, Adapter] = {}
            for adapter in (adapter for card in cards for adapter in card.adapters):
                by_name.setdefault(adapter.name, adapter)
            adapters = tuple(by_name.values())[:MAX_ADAPTERS]
            self._model = msgspec.structs.replace(cards[0], max_context_tokens=shortest, adapters=adapters)

    def _is_shown(self, card: ModelCard) -> bool:
        return self._model is not None and card.identity == self._model.identity


def backends_of(client: BackendClient | ReplicaSet) -> list[tuple[str, BackendClient]]:
    """Each backend's name and client. A single backend has no name."""
    if isinstance(client, ReplicaSet):
        return [(replica.name, replica.client) for replica in client.shown]
    return [("", client)]


def clients_of(client: BackendClient | ReplicaSet) -> list[BackendClient]:
    """The clients of all backends: during a takeover a path has two."""
    return [replica.client for replica in client.replicas] if isinstance(client, ReplicaSet) else [client]


async def _retire(replica: Replica, heir: Replica) -> None:
    """Close the client of a replica without streams. The other client of its path inherits its numbers."""
    await replica.client.close()
    heir.client.inherit(replica.client)


def difference(model: ModelCard, other: ModelCard) -> str:
    """Describe how the other model differs, for people: names and both values."""
    traits, own = dict(model.traits), dict(other.traits)
    pairs = [("model", model.model_id, other.model_id), ("vocabulary", model.vocab_size, other.vocab_size)]
    pairs += [(name, traits.get(name, "unknown"), own.get(name, "unknown")) for name in traits | own]
    found = [f"{name} is {theirs}, not {ours}" for name, ours, theirs in pairs if ours != theirs]
    return "; ".join(found) or f"fingerprint is {other.fingerprint}, not {model.fingerprint}"
