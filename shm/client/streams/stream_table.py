"""The table of open streams. StepOutputs from the backend become tokens and ends of streams here."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator

from penstock.shm.buffers.shared_buffers import SharedBuffers
from penstock.shm.client.counters import ClientCounters
from penstock.shm.client.session import Session
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.client.streams.pooled import PooledStream
from penstock.shm.client.streams.token_stream import LogprobEntry, TokenStream
from penstock.shm.link.frontend_link import LinkBroken
from penstock.shm.memory.ledger import Ledger
from penstock.shm.messages import (
    NO_TOKEN,
    Adapter,
    EventLogprobs,
    FailureCode,
    Finish,
    PromptLogprobs,
    StepOutputs,
    VectorPart,
)

_SLICE_EVENTS = 512


class OpenStreams:
    """Streams that have no finish yet, by request id."""

    def __init__(self, counters: ClientCounters, ledger: Ledger) -> None:
        self._streams: dict[int, OpenStream] = {}
        self._num_of: Counter[bytes] = Counter()
        """Open streams of each tenant."""
        self._counters = counters
        self._ledger = ledger
        self.buffers: SharedBuffers | None = None
        """The present session's shared buffers."""
        self.free_pixels: Callable[[int], None] = lambda _: None
        """`Session.free_pixels` of the present session."""
        self.on_shutting_down: Callable[[OpenStream], bool] = lambda _: False
        """Called with a stream that the backend refused because it ends; True if it stays open for the next one."""
        self.on_adapters: Callable[[tuple[Adapter, ...]], None] = lambda _: None
        """Called if the backend has other adapters now."""
        self.room = asyncio.Event()
        """Unset from the refusal of a pooled request by a full backend until that backend has room, or is gone."""
        self.room.set()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[OpenStream]:
        """Iterate over a copy, so streams may end during the iteration."""
        return iter(list(self._streams.values()))

    def num_of(self, tenant: bytes) -> int:
        return self._num_of.get(tenant, 0)

    def add(self, stream: OpenStream) -> None:
        self._streams[stream.request_id] = stream
        self._num_of[stream.message.tenant] += 1
        self._counters.board.requests_open = len(self._streams)
        self._ledger.acquire("stream", stream.request_id, "client")

    def finish(self, stream: OpenStream, finish: Finish) -> None:
        """Call once per stream."""
        self._forget(stream)
        if stream.is_queued and self.buffers is not None:
            # The backend never received the request, so it cannot return the buffers.
            for ref in stream.loans:
                self.buffers.take_back(ref.index, ref.generation)
        if stream.pixels:
            stream.pixels = ()  # the outbox may keep the stream for a while
        self._counters.count_finish(finish, len(self._streams))
        stream.end(finish)

    def remove(self, stream: OpenStream) -> None:
        """The stream stays open and belongs to another client."""
        self._forget(stream)
        self._counters.board.requests_open = len(self._streams)

    def _forget(self, stream: OpenStream) -> None:
        tenant = stream.message.tenant
        if stream.pixels:
            self.free_pixels(stream.request_id)
        del self._streams[stream.request_id]
        self._num_of[tenant] -= 1
        if not self._num_of[tenant]:
            del self._num_of[tenant]
        self._ledger.release("stream", stream.request_id)

    def fail(self, stream: OpenStream, code: FailureCode, finish: Finish = Finish.FAILED, limit: int = 0) -> None:
        stream.note_failure(code, limit)
        self.finish(stream, finish)

    def fail_all(self) -> None:
        """Fail all open streams: no backend can continue them."""
        for stream in self:
            self.fail(stream, FailureCode.UNAVAILABLE)

    def dispatch(self, session: Session, outputs: StepOutputs) -> Iterator[None]:
        """Deliver one message, in slices of at most a millisecond or two.

        Raises LinkBroken and ValueError when it contradicts what was sent.
        """
        if outputs.returned:
            if session.buffers is None:
                raise LinkBroken("the backend returns a shared buffer that was never lent")
            session.buffers.accept(outputs.returned)
        self._dispatch_notes(outputs)
        if outputs.has_room:
            self.room.set()
        if outputs.adapters is not None:
            self.on_adapters(outputs.adapters)
        if outputs.vectors:
            self._dispatch_vectors(session, outputs.vectors)
        request_ids = memoryview(outputs.request_ids).cast("Q")
        if session.holds_slots:
            for request_id in request_ids:
                session.free_slot(request_id)
        yield from self._dispatch_tokens(outputs, request_ids)

    def _dispatch_notes(self, outputs: StepOutputs) -> None:
        """Apply the parts of a message that most messages lack."""
        streams = self._streams
        for started in outputs.started:
            stream = streams.get(started.request_id)
            if stream is not None and not stream.has_tokens:
                stream.cached_tokens, stream.queue_s = started.cached_tokens, started.queue_s
                stream.is_coalesced = started.is_coalesced
                if not started.is_coalesced:
                    self._counters.board.queue_us.observe(int(1e6 * max(0.0, started.queue_s)))
        for failure in outputs.failures:
            if (stream := streams.get(failure.request_id)) is not None:
                stream.note_failure(FailureCode(failure.code), failure.limit, failure.text, failure.retry_after_s)
                if failure.code == FailureCode.OVERLOADED and isinstance(stream, PooledStream):
                    self.room.clear()
        for quote in outputs.quotes:
            if (stream := streams.get(quote.request_id)) is not None:
                stream.quote = quote
        if (record := outputs.record) is not None and (stream := streams.get(record.request_id)) is not None:
            stream.record = record.data
        for progress in outputs.progress:
            if isinstance(stream := streams.get(progress.request_id), TokenStream):
                stream.note_progress(progress)
        for prompt_logprobs in outputs.prompt_logprobs:
            stream = streams.get(prompt_logprobs.request_id)
            if isinstance(stream, TokenStream):
                _add_prompt_logprobs(stream, prompt_logprobs)
        for request_id in outputs.preempted:
            if (stream := streams.get(request_id)) is not None:
                stream.num_preemptions += 1

    def _dispatch_vectors(self, session: Session, parts: tuple[VectorPart, ...]) -> None:
        for part in parts:
            stream = self._streams.get(part.request_id)
            if isinstance(stream, PooledStream):
                stream.add_part(part, session.model)
            elif stream is not None:
                raise LinkBroken("a vector came for a request that generates tokens")

    def _dispatch_tokens(self, outputs: StepOutputs, request_ids: memoryview[int]) -> Iterator[None]:
        token_ids = memoryview(outputs.token_ids).cast("i")
        if not len(request_ids) == len(token_ids) == len(outputs.finishes):
            raise LinkBroken("the columns of a message differ in length")
        logprobs = {entry.event: entry for entry in outputs.logprobs}
        now_ns = time.monotonic_ns()
        num_by_stream: dict[TokenStream, int] = {}
        for start in range(0, len(request_ids), _SLICE_EVENTS):
            if start:
                yield
            events = slice(start, start + _SLICE_EVENTS)
            columns = request_ids[events].tolist(), token_ids[events].tolist(), outputs.finishes[events]
            self._dispatch_slice(start, columns, logprobs, num_by_stream)
        self._count_tokens(num_by_stream, now_ns)

    def _dispatch_slice(
        self,
        start: int,
        columns: tuple[list[int], list[int], bytes],
        logprobs: dict[int, EventLogprobs],
        num_by_stream: dict[TokenStream, int],
    ) -> None:
        """Deliver the events from start on, and add to num_by_stream."""
        find, num_before = self._streams.get, num_by_stream.get
        for event, (request_id, token_id, finish) in enumerate(zip(*columns, strict=True), start):
            stream = find(request_id)
            if stream is None:
                continue
            if token_id != NO_TOKEN:
                if not isinstance(stream, TokenStream):
                    raise LinkBroken("a token came for a request that generates none")
                if stream.pending_logprobs is not None:
                    stream.pending_logprobs.append(_logprob_entry(logprobs.get(event)))
                stream.tokens.append(token_id)
                num_by_stream[stream] = num_before(stream, 0) + 1
                if stream.is_waiting:
                    stream.wake_reader()
            if finish == Finish.REJECTED and stream.is_refused_by_ending_backend and self.on_shutting_down(stream):
                continue
            if finish:
                stream.check_finish(Finish(finish))
                self.finish(stream, Finish(finish))

    def _count_tokens(self, num_by_stream: dict[TokenStream, int], now_ns: int) -> None:
        """Count tokens and their gaps. Tokens that arrive together share the time since the token before them, if there
        is one."""
        self._counters.board.tokens_streamed += sum(num_by_stream.values())
        num_by_gap_us: dict[int, int] = {}  # few entries: most streams of a message got their last token together
        for stream, num_tokens in num_by_stream.items():
            stream.restarts_without_progress = 0
            last_ns, stream.last_token_ns = stream.last_token_ns or now_ns, now_ns
            num_gaps = num_tokens if last_ns < now_ns else num_tokens - 1
            if num_gaps:
                gap_us = (now_ns - last_ns) // (1000 * num_gaps)
                num_by_gap_us[gap_us] = num_by_gap_us.get(gap_us, 0) + num_gaps
        for gap_us, total in num_by_gap_us.items():
            self._counters.board.itl_us.observe(gap_us, total)


def _logprob_entry(received: EventLogprobs | None) -> LogprobEntry:
    if received is None:
        raise LinkBroken("a token came without the log probability that the request asks for")
    return LogprobEntry(received.logprob, received.rank, received.top_ids, received.top_logprobs)


def _add_prompt_logprobs(stream: TokenStream, received: PromptLogprobs) -> None:
    """A new backend starts again at the first token, so entries may be overwritten."""
    for entry in received.entries:
        index = entry.event - 1
        if not 0 <= index <= len(stream.prompt_logprobs):
            raise LinkBroken(
                f"log probabilities of prompt token {entry.event} came after {len(stream.prompt_logprobs)} entries"
            )
        stream.prompt_logprobs[index:] = [_logprob_entry(entry)]
