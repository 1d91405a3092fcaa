"""The table of open requests, from the submission of each to its one end, and their deadlines."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from penstock.backend.engine.coalescer import Coalescer
from penstock.backend.engine.quoting.quote_queue import QuoteQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backend.engine.interfaces import ISequenceScheduler
    from penstock.backend.engine.quoting.quote_queue import WaitingForQuote
    from penstock.backend.engine.recorder import Recorder
    from penstock.backend.scheduling.restart_grace import RestartGrace
    from penstock.backend.sequences.resumable_stream import ResumableChoice
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.subscribers import Subscriber
    from penstock.backend.structured_output.grammar_queue import GrammarQueue, WaitingSubmission
    from penstock.shm.memory.board import BackendBoard

_MIN_ENTRIES = 64


class Deadlines:
    """A heap of (deadline, frontend, request id). Requests that end in time stay in it as stale entries."""

    def __init__(self, deadline_of: Callable[[int, int], float | None]) -> None:
        """deadline_of(frontend, request id) is the open request's deadline; None if it has none, or is not open."""
        self._deadline_of = deadline_of
        self._heap: list[tuple[float, int, int]] = []
        self._compact_at = _MIN_ENTRIES

    def note(self, frontend: int, request_id: int, deadline_s: float | None) -> None:
        """deadline_s of None is ignored."""
        if deadline_s is None:
            return
        if len(self._heap) >= self._compact_at:  # most entries are stale
            self._heap = [entry for entry in set(self._heap) if self._deadline_of(*entry[1:]) == entry[0]]
            heapq.heapify(self._heap)
            self._compact_at = _MIN_ENTRIES + 2 * len(self._heap)
        heapq.heappush(self._heap, (deadline_s, frontend, request_id))

    def passed(self, now_s: float) -> Iterator[tuple[int, int]]:
        """(frontend, request id) of each open request whose deadline has passed, once."""
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, frontend, request_id = heapq.heappop(self._heap)
            if self._deadline_of(frontend, request_id) == deadline_s:
                yield frontend, request_id

    def next_due_s(self, now_s: float, at_most_s: float) -> float:
        """Seconds until the next entry, which may be stale; at most at_most_s."""
        return min(at_most_s, max(0.0, self._heap[0][0] - now_s)) if self._heap else at_most_s


class OpenRequest(NamedTuple):
    """A request that has a sequence."""

    sequence: Sequence
    subscriber: Subscriber


class RequestTable:
    """Open requests by (frontend, request id). Each waits for its grammar or its quote, or subscribes to a sequence."""

    def __init__(
        self,
        scheduler: ISequenceScheduler,
        board: BackendBoard,
        grammar_queue: GrammarQueue,
        restart_grace: RestartGrace,
        recorder: Recorder | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._board = board
        self.grammar_queue = grammar_queue
        self.quote_queue = QuoteQueue()
        self.restart_grace = restart_grace
        self.recorder = recorder
        """Notes what happens to requests, for all parts that share this table."""
        self.coalescer = Coalescer()
        self.deadlines = Deadlines(self._deadline_of)
        self.on_resumable_left: Callable[[ResumableChoice], None] = lambda _: None
        """Called after a request that lingers has been taken out."""
        self._by_frontend: dict[int, dict[int, OpenRequest]] = {}
        self._num_subscribed = 0
        self._num_subscribed_of: Counter[bytes] = Counter()
        """By tenant, without zeros."""

    @property
    def num_open(self) -> int:
        return self._num_subscribed + self.grammar_queue.num_waiting + self.quote_queue.num_waiting

    def num_open_of_each(self) -> Counter[bytes]:
        """The open requests of each tenant that has some."""
        return self._num_subscribed_of + self.grammar_queue.num_waiting_of + self.quote_queue.num_waiting_of

    def is_open(self, frontend: int, request_id: int) -> bool:
        return self.find(frontend, request_id) is not None or self._find_waiting(frontend, request_id) is not None

    def _find_waiting(self, frontend: int, request_id: int) -> WaitingSubmission | WaitingForQuote | None:
        return self.grammar_queue.find(frontend, request_id) or self.quote_queue.find(frontend, request_id)

    def remove_waiting(self, frontend: int, request_id: int) -> bool:
        """Return whether the request waited for its grammar or its quote."""
        return self.grammar_queue.remove(frontend, request_id) or self.quote_queue.remove(frontend, request_id)

    def remove_waiting_of(self, frontend: int) -> int:
        """Remove the frontend's requests that wait for grammars and quotes, and return their number."""
        return self.grammar_queue.remove_frontend(frontend) + self.quote_queue.remove_frontend(frontend)

    def find(self, frontend: int, request_id: int) -> OpenRequest | None:
        """The request if it has a sequence; None for one that waits for its grammar or its quote."""
        return self._by_frontend.get(frontend, {}).get(request_id)

    def uses_adapter(self, index: int) -> bool:
        """Whether an open request has the adapter, or may have it: it waits for its grammar or its quote."""
        if self.grammar_queue.num_waiting or self.quote_queue.num_waiting:
            return True
        by_frontend = self._by_frontend.values()
        return any(request.sequence.adapter == index for by_id in by_frontend for request in by_id.values())

    def of_frontend(self, frontend: int) -> list[OpenRequest]:
        """The frontend's requests that have a sequence."""
        return list(self._by_frontend.get(frontend, {}).values())

    def add(self, sequence: Sequence, subscriber: Subscriber) -> None:
        """Enter a request that subscribes to the sequence. From now on `remove` undoes everything that was
        done for it."""
        by_id = self._by_frontend.setdefault(subscriber.frontend, {})
        by_id[subscriber.request_id] = OpenRequest(sequence, subscriber)
        self._num_subscribed += 1
        self._num_subscribed_of[subscriber.tenant] += 1
        self._board.requests_accepted += 1
        self.deadlines.note(subscriber.frontend, subscriber.request_id, subscriber.deadline_s)

    def remove(self, sequence: Sequence, subscriber: Subscriber) -> None:
        """Take out a request. With its last subscriber the sequence ends."""
        if self.recorder is not None:
            self.recorder.note_leave(sequence, subscriber)
        by_id = self._by_frontend[subscriber.frontend]
        del by_id[subscriber.request_id]
        if not by_id:
            del self._by_frontend[subscriber.frontend]
        self._num_subscribed -= 1
        self._num_subscribed_of[subscriber.tenant] -= 1
        if not self._num_subscribed_of[subscriber.tenant]:
            del self._num_subscribed_of[subscriber.tenant]
        sequence.unsubscribe(subscriber)
        if not sequence.subscribers:
            self.coalescer.withdraw(sequence)
            self.restart_grace.remove(sequence)
            self._scheduler.remove(sequence)
        if subscriber.resumable is not None:
            self.on_resumable_left(subscriber.resumable)

    def rename(self, request: OpenRequest, frontend: int, request_id: int) -> None:
        """Give an open request to another frontend."""
        sequence, subscriber = request
        if self.recorder is not None:
            self.recorder.note_leave(sequence, subscriber)
        by_id = self._by_frontend[subscriber.frontend]
        del by_id[subscriber.request_id]
        if not by_id:
            del self._by_frontend[subscriber.frontend]
        subscriber.frontend, subscriber.request_id = frontend, request_id
        self._by_frontend.setdefault(frontend, {})[request_id] = request
        sequence.note_renamed()
        self.deadlines.note(frontend, request_id, subscriber.deadline_s)
        if self.recorder is not None:
            self.recorder.note_join(sequence, subscriber)

    def _deadline_of(self, frontend: int, request_id: int) -> float | None:
        if (found := self.find(frontend, request_id)) is not None:
            return found.subscriber.deadline_s
        waiting = self._find_waiting(frontend, request_id)
        return waiting.deadline_s if waiting is not None else None

    def check_integrity(self, num_scheduled: int) -> None:
        """Raises RuntimeError unless each request subscribes to one sequence and each of num_scheduled sequences has
        subscribers."""
        requests = [request for by_id in self._by_frontend.values() for request in by_id.values()]
        sequences = {request.sequence for request in requests}
        if len(requests) != self._num_subscribed or any(
            subscriber not in sequence.subscribers for sequence, subscriber in requests
        ):
            raise RuntimeError(f"{self._num_subscribed} requests are counted, the table has {len(requests)}")
        if self._num_subscribed_of != Counter(subscriber.tenant for _, subscriber in requests):
            raise RuntimeError(f"the counts of tenants' requests are wrong: {self._num_subscribed_of}")
        if sum(len(sequence.subscribers) for sequence in sequences) != len(requests):
            raise RuntimeError("a sequence has a subscriber that is not an open request")
        if num_scheduled != len(sequences) or any(sequence.ended for sequence in sequences):
            raise RuntimeError(f"{num_scheduled} sequences are scheduled, {len(sequences)} have subscribers")
        if len(self.coalescer) > len(sequences):
            raise RuntimeError("a sequence that has ended can still be joined")
