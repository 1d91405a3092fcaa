"""`ReplicaSet`: several backends with the same model, with the interface of one `BackendClient`.

It has a client for each backend. A stream belongs to one client at a time. When a backend dies, drains or makes no
progress, its streams move at once to those that are ready; if none is, they wait for the first that will be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import TYPE_CHECKING, TypeVar

import msgspec

from penstock.shm.client.client import BackendClient
from penstock.shm.client.connection import Membership
from penstock.shm.client.refusals import BackendUnavailable, Overloaded
from penstock.shm.client.replicas.routing import Replica, Router
from penstock.shm.link.join import Refused
from penstock.shm.memory.prefix_table import MAX_REPLICAS, PrefixTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.shm.client.open_stream import OpenStream
    from penstock.shm.client.pooled import PooledRequest, PooledStream
    from penstock.shm.client.request import GenerationRequest
    from penstock.shm.client.stream import TokenStream
    from penstock.shm.memory.board import FrontendBoard
    from penstock.shm.messages import ModelCard

logger = logging.getLogger("penstock.client")

_LOOK_EVERY_S = 0.05
"""How often it looks for backends that drain, hang or have become ready. A death it learns at once."""

StreamT = TypeVar("StreamT", bound="OpenStream")


class ReplicaSet:
    """A client of several backends. Use it as a `BackendClient`; shared buffers need that one."""

    def __init__(
        self,
        socket_paths: Sequence[Path],
        *,
        resume_timeout_s: float = 600.0,
        max_held: int = 0,
        hold_timeout_s: float = 120.0,
        prefixes: PrefixTable | None = None,
    ) -> None:
        """The other parameters are those of `BackendClient`. prefixes may be shared with other processes that have the
        same backends in the same order. Raises ValueError."""
        if not 1 <= len(socket_paths) <= MAX_REPLICAS:
            raise ValueError(f"socket_paths has {len(socket_paths)} paths; a set has 1 to {MAX_REPLICAS} replicas")
        if len(set(socket_paths)) < len(socket_paths):
            raise ValueError("socket_paths contains the same path twice")
        self._model: ModelCard | None = None
        self._router = Router(PrefixTable.private(secrets.token_bytes(32)) if prefixes is None else prefixes)
        self._watcher: asyncio.Task[None] | None = None
        self.replicas = tuple(
            self._make_replica(index, path, resume_timeout_s, max_held, hold_timeout_s)
            for index, path in enumerate(socket_paths)
        )

    def _make_replica(
        self, index: int, path: Path, resume_timeout_s: float, max_held: int, hold_timeout_s: float
    ) -> Replica:
        membership = Membership(
            accept=lambda card: self._accept(self.replicas[index], card),
            lost=lambda: self._relieve(self.replicas[index], backend_died=True),
            has_others=lambda: bool(self._others(self.replicas[index])),
        )
        client = BackendClient(
            path,
            resume_timeout_s=resume_timeout_s,
            max_held=max_held,
            hold_timeout_s=hold_timeout_s,
            membership=membership,
        )
        return Replica(index, str(index + 1), client)

    async def start(self) -> None:
        """Begin to connect, and return at once."""
        for replica in self.replicas:
            await replica.client.start()
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name="replica-set")

    async def close(self) -> None:
        """Open streams end CANCELLED."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        for replica in self.replicas:
            await replica.client.close()

    @property
    def model(self) -> ModelCard | None:
        """The model of all replicas, with the shortest of their contexts. None before the first connection."""
        return self._model

    @property
    def ready(self) -> bool:
        """At least one replica is."""
        return any(replica.client.ready for replica in self.replicas)

    @property
    def retry_after_s(self) -> int:
        """See `BackendClient.retry_after_s`; that of the replica which is soonest."""
        candidates = self._ready() or list(self.replicas)
        return min(replica.client.retry_after_s for replica in candidates)

    @property
    def board(self) -> FrontendBoard:
        """The board of a connected replica, for numbers that belong to no stream. The sums over all replicas are right
        whichever it is."""
        connected = (replica for replica in self.replicas if replica.client.backend_board is not None)
        return next(connected, self.replicas[0]).client.board

    def check_capacity(self, tenant: bytes, *, may_share: bool) -> None:
        """See `BackendClient.check_capacity`. One replica with a place is enough."""
        refusals: list[Exception] = []
        for replica in self._ready() or [self._holder]:
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

    def submit_pooled(self, request: PooledRequest) -> PooledStream:
        """See `BackendClient.submit_pooled`."""
        return self._place(request, lambda client: client.submit_pooled(request))

    def _place(self, request: GenerationRequest | PooledRequest, submit: Callable[[BackendClient], StreamT]) -> StreamT:
        """Submit to the best replica, or if that is full to the one with the least load that is not."""
        ready = self._ready()
        if not ready:
            return self._named(submit(self._holder.client), self._holder)
        tokens = request.prompt_tokens()
        best = self._router.place(ready, request.to_submit(0, len(tokens)), tokens)
        try:
            return self._named(submit(best.client), best)
        except Overloaded:
            for other in sorted((replica for replica in ready if replica is not best), key=lambda one: one.load):
                with contextlib.suppress(Overloaded):
                    return self._named(submit(other.client), other)
            raise

    def _named(self, stream: StreamT, replica: Replica) -> StreamT:
        stream.backend = replica.name
        return stream

    @property
    def _holder(self) -> Replica:
        """The one that holds new requests while none is ready: always the same, so that its limits hold for all."""
        return self.replicas[0]

    def _ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.client.ready]

    def _others(self, replica: Replica) -> list[Replica]:
        return [other for other in self._ready() if other is not replica]

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _look(self) -> None:
        for replica in self.replicas:
            if replica.client.board.requests_open and not replica.client.ready:
                self._relieve(replica, backend_died=False)

    def _relieve(self, replica: Replica, *, backend_died: bool) -> None:
        """Move the streams of a replica that cannot go on to others, if there are any."""
        others = self._others(replica)
        if not others:
            return
        streams = replica.client.give_streams()
        parts: dict[Replica, list[OpenStream]] = {}
        for stream in streams:
            target = self._router.place(others, stream.submit, stream.tokens)
            parts.setdefault(target, []).append(self._named(stream, target))
        for target, moved in parts.items():
            logger.info("%d streams of replica %s continue on replica %s", len(moved), replica.name, target.name)
            target.client.adopt(moved, backend_died=backend_died)

    def _accept(self, replica: Replica, card: ModelCard) -> None:
        """Raises Refused for another model than the others'. If none of them had the old model last, the set's model
        changes, and open streams fail: nobody can continue them."""
        replica.offered = card
        model = self._model
        if model is not None and model.identity != card.identity:
            for other in self.replicas:
                if other is not replica and other.offered is not None and other.offered.identity == model.identity:
                    raise Refused(f"it is no replica of the others: {difference(model, card)}")
            for each in self.replicas:
                each.client.fail_streams()
            model = None
        shortest = card.max_context_tokens if model is None else min(model.max_context_tokens, card.max_context_tokens)
        self._model = msgspec.structs.replace(model or card, max_context_tokens=shortest)


def backends_of(client: BackendClient | ReplicaSet) -> list[tuple[str, BackendClient]]:
    """Each backend's name and client. A single backend has no name."""
    if isinstance(client, ReplicaSet):
        return [(replica.name, replica.client) for replica in client.replicas]
    return [("", client)]


def difference(model: ModelCard, other: ModelCard) -> str:
    """How the other model differs, for people: names and both values."""
    traits, own = dict(model.traits), dict(other.traits)
    pairs = [("model", model.model_id, other.model_id), ("vocabulary", model.vocab_size, other.vocab_size)]
    pairs += [(name, traits.get(name, "unknown"), own.get(name, "unknown")) for name in traits | own]
    found = [f"{name} is {theirs}, not {ours}" for name, ours, theirs in pairs if ours != theirs]
    return "; ".join(found) or f"fingerprint is {other.fingerprint}, not {model.fingerprint}"
