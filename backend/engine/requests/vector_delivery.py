"""Sends finished vectors to their subscribers, and keeps them for equal requests that come later."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from penstock.backend.engine.interfaces import IEngineLink
from penstock.backend.engine.requests.delivery import Delivery
from penstock.backend.engine.requests.request_table import RequestTable
from penstock.backend.engine.steps.vectors import Vectors, pack_dense, pack_sparse
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.shm.link.events import Submission
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import MAX_VECTOR_PART_BYTES, Finish, Pool, Pooled, Started, VectorPart

logger = logging.getLogger("penstock.backend")

_SPARSE_PART_VALUES = MAX_VECTOR_PART_BYTES // 8
"""Values and indices of a part together obey the limit of values alone, so that a message holds any part."""
_ENTRY_BYTES = 512
"""Memory of an entry in addition to its values: objects and the key, rounded up."""
_KEY_BYTES = 32
_Due = tuple["Sequence", "Subscriber", Vectors]


class VectorCache:
    """At most max_bytes of vectors; the least recently used one goes first. Different salts share nothing.

    Entries are found by a hash with a secret key, so nobody can make two inputs that have the same one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._secret = secrets.token_bytes(_KEY_BYTES)
        self._entries: OrderedDict[bytes, Vectors] = OrderedDict()
        self.num_bytes = 0

    def key(self, salt: bytes, pooled: Pooled, tokens: bytes) -> bytes:
        """Return a hash of everything that an input's vector depends on. tokens are packed int32."""
        head = f"{pooled.kind} {pooled.second_start} {len(salt)} ".encode()
        return hashlib.blake2b(b"".join((head, salt, tokens)), digest_size=_KEY_BYTES, key=self._secret).digest()

    def get(self, key: bytes) -> Vectors | None:
        if (vectors := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return vectors

    def put(self, key: bytes, vectors: Vectors) -> None:
        """Keep a copy if it fits."""
        num_bytes = _entry_bytes(vectors)
        if num_bytes > self._max_bytes:
            return
        if (old := self._entries.pop(key, None)) is not None:
            self.num_bytes -= _entry_bytes(old)
        self._entries[key] = vectors.copy()
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= _entry_bytes(oldest)


class VectorDelivery:
    """Packs vectors of a step together that are requested in the same form."""

    def __init__(
        self,
        link: IEngineLink,
        board: BackendBoard,
        open_requests: RequestTable,
        delivery: Delivery,
        cache: VectorCache | None = None,
    ) -> None:
        self._link = link
        self._board = board
        self._open_requests = open_requests
        self._delivery = delivery
        self._cache = cache

    def deliver_cached(self, submission: Submission[Pool]) -> bool:
        """Answer the request at once if its vector is in the cache. False if it is not, or nothing is cached."""
        message, cache = submission.message, self._cache
        if cache is None or not message.may_share:
            return False
        vectors = cache.get(cache.key(message.own_salt, message.pooled, submission.tokens))
        if vectors is None:
            self._board.vector_cache_misses += 1
            return False
        self._board.vector_cache_hits += 1
        self._board.requests_accepted += 1
        started = Started(message.request_id, message.num_prompt_tokens, 0.0)
        (values,) = _pack([vectors], message.pooled)
        self._send(submission.frontend, message.request_id, vectors, values, started)
        return True

    def deliver(self, finished: list[tuple[Sequence, Vectors]]) -> None:
        """Send each sequence's vectors to its subscribers, which then end with their sequences. An error fails only its
        own request."""
        groups: defaultdict[tuple[int, int, bool], list[_Due]] = defaultdict(list)
        for sequence, vectors in finished:
            if self._cache is not None and sequence.pooled is not None:
                key = self._cache.key(sequence.salt, sequence.pooled, sequence.tokens.tobytes())
                self._cache.put(key, vectors)
                self._board.vector_cache_bytes = self._cache.num_bytes
            width = -1 if vectors.indices is not None else vectors.values.shape[1]
            for subscriber in sequence.subscribers:
                if (pooled := subscriber.pooled) is not None:
                    groups[width, pooled.num_dimensions, pooled.normalize].append((sequence, subscriber, vectors))
        for group in groups.values():
            pooled = group[0][1].pooled or Pooled("embed")
            for due, values in zip(group, _pack_each([vectors for _, _, vectors in group], pooled), strict=True):
                self._deliver_one(due, values)

    def _deliver_one(self, due: _Due, values: bytes | None) -> None:
        """Deliver to one subscriber. values is None if they could not be packed."""
        sequence, subscriber, vectors = due
        if values is None:
            self._delivery.fail_one(sequence, subscriber)
            return
        try:
            started = self._delivery.start(sequence, subscriber)
            self._send(subscriber.frontend, subscriber.request_id, vectors, values, started)
        except Exception:  # deliberately broad: a bug that one request triggers must not end the others
            logger.exception("a vector could not be delivered; its request fails")
            self._delivery.fail_one(sequence, subscriber)
        else:
            self._open_requests.remove(sequence, subscriber)

    def _send(self, frontend: int, request_id: int, vectors: Vectors, values: bytes, started: Started) -> None:
        if (recorder := self._open_requests.recorder) is not None:
            recorder.note_end(frontend, request_id, Finish.STOP, None)
        self._link.push_vectors(frontend, request_id, _parts(request_id, vectors, values), started)
        self._board.requests_finished += 1


def _pack_each(group: list[Vectors], pooled: Pooled) -> list[bytes | None]:
    """`_pack`; None for one that cannot be packed."""
    try:
        return list(_pack(group, pooled))
    except Exception:
        logger.exception("%d vectors could not be packed together", len(group))
        return [None] if len(group) == 1 else [packed for each in group for packed in _pack_each([each], pooled)]


def _pack(group: list[Vectors], pooled: Pooled) -> list[bytes]:
    """The values that a subscriber receives of each vector; all are sparse, or all have the same width."""
    if group[0].indices is not None:
        return [pack_sparse(vectors, pooled) for vectors in group]
    return pack_dense(group, pooled)


def _parts(request_id: int, vectors: Vectors, values: bytes) -> Iterator[VectorPart]:
    num_vectors, num_values = vectors.num_vectors, len(values) // 4
    if vectors.indices is None:
        if len(values) <= MAX_VECTOR_PART_BYTES:
            yield VectorPart(request_id, num_vectors, num_values, values)
            return
        for start in range(0, len(values), MAX_VECTOR_PART_BYTES):
            yield VectorPart(request_id, num_vectors, num_values, values[start : start + MAX_VECTOR_PART_BYTES])
        return
    indices, part_bytes = vectors.indices.tobytes(), 4 * _SPARSE_PART_VALUES
    for start in range(0, max(1, len(values)), part_bytes):
        part = slice(start, start + part_bytes)
        yield VectorPart(request_id, num_vectors, num_values, values[part], indices[part])


def _entry_bytes(vectors: Vectors) -> int:
    return vectors.num_bytes + _ENTRY_BYTES
