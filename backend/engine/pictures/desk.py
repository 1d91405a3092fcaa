"""Decides which picture the tower encodes next, and keeps the results for the sequences that need them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from penstock.backend.engine.pictures.tower_thread import BadPixels, Encoding, EncodingCancelled, TowerThread
from penstock.backend.forward_pass.extensions import PICTURE_CACHE_BYTES
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.sequences.pictures import PictureCache, SequencePictures
from penstock.shm.messages import FailureCode

if TYPE_CHECKING:
    import queue

    from penstock.backend.engine.interfaces import ISequenceScheduler
    from penstock.backend.forward_pass import PassSpec
    from penstock.backend.scheduling.admission import AwaitedPictures
    from penstock.backend.sequences.pictures import PictureKey
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.subscribers import Subscriber
    from penstock.shm.messages import Generate

logger = logging.getLogger("penstock.backend")


class ITowerThread(Protocol):
    """Runs encodings one after the other: `TowerThread`."""

    results: queue.SimpleQueue[Encoding]

    def start(self, encoding: Encoding) -> None: ...


class IDelivery(Protocol):
    """Ends requests: `Delivery`."""

    def fail(self, sequence: Sequence, code: FailureCode = FailureCode.INTERNAL, text: str = "") -> None:
        """End the sequence and all its requests."""

    def fail_one(
        self, sequence: Sequence, subscriber: Subscriber, code: FailureCode = FailureCode.INTERNAL, text: str = ""
    ) -> None:
        """End one request; the sequence continues for its other subscribers."""


class PictureDesk:
    """One encoding runs at a time. The next one is that of the tenant that has received the least service.

    Pictures that running sequences need next stay in the cache, and an encoding starts only if its result has room
    beside them: they go on with them, so there is room again. Sequences that wait hold nothing.
    """

    def __init__(
        self,
        thread: ITowerThread,
        cache: PictureCache,
        row_bytes: int,
        awaited: AwaitedPictures,
        delivery: IDelivery,
        *,
        sees_whole: bool = False,
    ) -> None:
        """row_bytes: of the embedding of one token. sees_whole: see `SequencePictures`."""
        self._sees_whole = sees_whole
        self._awaited = awaited
        self._delivery = delivery
        self._thread = thread
        self._cache = cache
        self._row_bytes = row_bytes
        self._running: Encoding | None = None
        self._source: tuple[Sequence, Subscriber] | None = None
        """The sequence and the request whose pixels the running encoding reads."""

    def pictures_of(self, message: Generate) -> SequencePictures | None:
        """For a new sequence. Its tokens and pictures have been checked."""
        if not message.pictures:
            return None
        return SequencePictures(message.pictures, message.salt, self._cache, sees_whole=self._sees_whole)

    def take_results(self) -> None:
        """Give the result of the last encoding to the sequences that need it. Call it before each plan."""
        while not self._thread.results.empty():
            encoding = self._thread.results.get()
            source, self._running, self._source = self._source, None, None
            if encoding.error is None:
                self._cache.add(encoding.key, encoding.rows, self._awaited.needed())
            elif not isinstance(encoding.error, EncodingCancelled):
                self._fail(encoding, source)
            self._awaited.release(encoding.key)

    def start_next(self) -> None:
        """Start the next encoding if none runs, and cancel one that nobody needs. Call it after each plan."""
        if not self._awaited.num_sequences and self._running is None:
            return
        missing = self._awaited.missing()
        if self._running is not None:
            self._running.is_cancelled = all(key != self._running.key for _, key in missing)
            return
        for sequence, key in missing:
            subscriber, encoding = _find_pixels(sequence, key)
            needed = self._awaited.needed()
            num_bytes = encoding.picture.num_tokens * self._row_bytes
            if not needed or self._cache.bytes_of(needed) + num_bytes <= self._cache.max_bytes:
                self._awaited.charge(sequence, encoding.picture.num_tokens)
                self._running, self._source = encoding, (sequence, subscriber)
                self._thread.start(encoding)
            return

    def _fail(
        self,
        encoding: Encoding,
        source: tuple[Sequence, Subscriber] | None,
    ) -> None:
        """Fail the request whose pixels were bad, or all that need the picture."""
        if isinstance(encoding.error, BadPixels):
            if source is not None and source[1] in source[0].subscribers:
                self._delivery.fail_one(*source, FailureCode.BAD_PICTURE, str(encoding.error)[:512])
            return
        logger.error("a picture could not be encoded; its requests fail", exc_info=encoding.error)
        for sequence, key in self._awaited.missing():
            if key == encoding.key:
                self._delivery.fail(sequence)


def _find_pixels(sequence: Sequence, key: PictureKey) -> tuple[Subscriber, Encoding]:
    """Return the first of the sequence's requests, all of which have the same pictures, and what to encode."""
    subscriber = next(iter(sequence.subscribers))
    picture = next(picture for picture in subscriber.pictures if picture.digest == key[1])
    if subscriber.read_pixels is None:
        raise RuntimeError(f"pixels of request {subscriber.request_id} cannot be read; this is a bug")
    return subscriber, Encoding(key, picture, subscriber.read_pixels)


def make_picture_desk(
    thread: TowerThread | None, spec: PassSpec, scheduler: ISequenceScheduler, delivery: IDelivery
) -> PictureDesk | None:
    """None for a model that takes no pictures."""
    if thread is None or not isinstance(scheduler, Scheduler):
        return None
    row_bytes = 4 * thread.tower.embedding_size * (1 + spec.picture_layers)
    cache, sees_whole = PictureCache(PICTURE_CACHE_BYTES), spec.whole_picture_tokens > 0
    return PictureDesk(thread, cache, row_bytes, scheduler.pictures, delivery, sees_whole=sees_whole)
