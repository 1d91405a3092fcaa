"""The table of resumable streams: their readers, their tokens, and their expiry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from penstock.backend.engine.coalescer import Presented
from penstock.backend.engine.interfaces import IEngineLink
from penstock.backend.engine.requests.delivery import Delivery
from penstock.backend.engine.requests.request_table import Deadlines, OpenRequest, RequestTable
from penstock.backend.sequences.resumable_stream import ResumableChoice, ResumableStream
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.shm.link.events import Submission
from penstock.shm.memory.arena import DescriptorError
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import AskStream, Failure, FailureCode, Finish, Generate, StreamName, StreamRecord

NO_READER = (1 << 63) - 1
"""Stands for the frontend of a request whose reader has gone. The link knows no such frontend, and sends it nothing."""
MAX_STREAMS = 4096
MAX_BYTES = 256 << 20
"""Limit of records, of pixels that are kept, and of tokens of ended streams."""


class StreamTable:
    """A request that lingers is open until it ends, with or without a reader, and is counted once. After its end the
    tokens stay as long as the stream. A new reader takes the place of the one before it."""

    def __init__(
        self,
        link: IEngineLink,
        board: BackendBoard,
        open_requests: RequestTable,
        delivery: Delivery,
        clock: Callable[[], float],
        *,
        max_streams: int = MAX_STREAMS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._link = link
        self._board = board
        self._open_requests = open_requests
        self._delivery = delivery
        self._clock = clock
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        self._streams: dict[StreamName, ResumableStream] = {}
        self._by_number: dict[int, ResumableStream] = {}
        self._num_bytes = 0
        self._next_number = 0
        self._deadlines = Deadlines(self._deadline_of)
        open_requests.on_resumable_left = self._note_left

    def __len__(self) -> int:
        return len(self._streams)

    # New requests

    def find_refusal(self, submission: Submission[Generate]) -> Failure | None:
        """Why the request cannot linger, after ended streams have made room; None if it can or need not."""
        message, linger = submission.message, submission.message.linger
        if linger is None:
            return None
        if message.num_prompt_logprobs >= 0 or submission.output is not None or submission.embeddings is not None:
            return Failure(message.request_id, FailureCode.INTERNAL, text="such a request cannot linger")
        if linger.stream in self._streams:
            return None
        num_bytes = len(linger.record) + sum(
            each.pixels.num_bytes for each in message.pictures if each.pixels is not None
        )
        self._evict(self._max_bytes - num_bytes, self._max_streams - 1)
        if len(self._streams) < self._max_streams and self._num_bytes + num_bytes <= self._max_bytes:
            return None
        text = f"too many lingering streams are open: the limits are {self._max_streams}, and {self._max_bytes} bytes"
        return Failure(message.request_id, FailureCode.OVERLOADED, self._max_streams, text)

    def enter(self, message: Generate, sequence: Sequence, subscriber: Subscriber) -> None:
        """Add a request that is about to subscribe to the sequence.

        Not if log probabilities of its first tokens are unknown, because an earlier backend has computed them.
        """
        linger = message.linger
        num_generated = len(sequence.tokens) - sequence.num_prompt_tokens
        if linger is None or (sequence.past_logprobs is not None and len(sequence.past_logprobs) != num_generated):
            return
        stream = self._streams.get(linger.stream)
        if stream is None:
            stream = ResumableStream(self._next_number, linger.stream, message.tenant, linger.linger_s)
            self._next_number += 1
            self._streams[stream.name] = self._by_number[stream.number] = stream
        before = stream.num_bytes if stream.choices else 0
        stream.record = stream.record or linger.record
        if subscriber.read_pixels is not None:
            with suppress(DescriptorError):  # the tower reads them again, and says so
                subscriber.read_pixels = stream.keep_pixels(message.pictures, subscriber.read_pixels)
        subscriber.resumable = ResumableChoice(stream, (subscriber.frontend, subscriber.request_id))
        stream.choices[linger.choice] = subscriber.resumable
        stream.expires_s = None
        self._count(stream.num_bytes - before)

    # Readers

    def resume(self, submission: Submission[Generate]) -> bool:
        """Let the request read its stream again, from its first missing token on.

        False if the stream is unknown, or if its tokens contradict the request's.
        """
        linger = submission.message.linger
        stream = None if linger is None else self._streams.get(linger.stream)
        choice = None if stream is None or linger is None else stream.choices.get(linger.choice)
        if choice is None:
            return False
        if choice.finish is Finish.NONE:
            return self._take_over(submission, choice)
        message = submission.message
        received = submission.tokens[4 * message.num_prompt_tokens :]
        if received != choice.tokens[: len(received) // 4].tobytes():
            self._drop(choice.stream)
            return False
        self._note_return(choice)
        self._delivery.repeat(submission.frontend, message, choice, len(received) // 4)
        self._renew(choice.stream)
        return True

    def _take_over(self, submission: Submission[Generate], choice: ResumableChoice) -> bool:
        """`resume` for a request that runs."""
        message = submission.message
        presented = Presented(submission.frontend, submission.tokens, message.num_prompt_tokens)
        found = self._open_requests.find(*choice.open_as)
        if found is None:
            raise RuntimeError(f"the resumable request {choice.open_as} is not open")
        sequence, subscriber = found
        is_same = sequence.num_prompt_tokens == message.num_prompt_tokens and presented.agrees_with(sequence.tokens)
        if not is_same or presented.num_tokens > len(sequence.tokens):
            self._drop(choice.stream)
            return False
        self._dismiss(choice)
        self._note_return(choice)
        self._rename(found, choice, submission.frontend, message.request_id)
        choice.has_reader, choice.stream.expires_s = True, None
        subscriber.next_index, subscriber.is_started, subscriber.resumed = presented.num_tokens, False, None
        if sequence.order >= 0:  # otherwise `Intake.admit_after_grace` replays it
            self._delivery.replay(sequence, subscriber)
        return True

    def detach(self, request: OpenRequest, choice: ResumableChoice) -> None:
        """The reader has gone; the request runs on."""
        self._rename(request, choice, NO_READER, self._next_number)
        self._next_number += 1
        choice.has_reader = False
        self._renew(choice.stream)

    def answer(self, frontend: int, message: AskStream) -> None:
        """Answer a question about a stream."""
        request_id, question = message.request_id, message.question
        stream = self._streams.get(question.stream)
        if stream is None or not stream.record:
            failure = Failure(request_id, FailureCode.NOT_OPEN)
            self._delivery.answer(frontend, request_id, Finish.REJECTED, failure)
            return
        if question.action == "drop":
            self._drop(stream)
        else:
            self._link.push_answer(frontend, StreamRecord(request_id, stream.record))
        self._delivery.answer(frontend, request_id, Finish.STOP)

    # The end

    def expire(self, *, is_draining: bool = False) -> None:
        """Drop the streams whose time is up. A draining backend drops all without a reader: no reader can come back."""
        for _, number in self._deadlines.passed(self._clock()):
            self._drop(self._by_number[number])
        if is_draining:
            for stream in [stream for stream in self._streams.values() if not stream.is_read]:
                self._drop(stream)

    def next_due_s(self, at_most_s: float) -> float:
        return self._deadlines.next_due_s(self._clock(), at_most_s)

    def _note_left(self, choice: ResumableChoice) -> None:
        """Called when a resumable request leaves the table of open requests."""
        choice.has_reader = False
        stream = choice.stream
        if choice.finish is not Finish.NONE:
            self._count(choice.num_bytes - ResumableChoice(stream, choice.open_as).num_bytes)
        for number in [number for number, other in stream.choices.items() if other is choice]:
            if choice.finish is Finish.NONE:
                self._count(-stream.choices.pop(number).num_bytes)
        if all(other.finish is not Finish.NONE for other in stream.choices.values()):
            self._count(-sum(map(len, stream.pixels.values())))
            stream.pixels.clear()
        if not stream.choices:
            self._forget(stream)
            return
        self._renew(stream)
        self._evict(self._max_bytes, self._max_streams)

    def _renew(self, stream: ResumableStream) -> None:
        """Begin the stream's time, unless somebody reads it."""
        if stream.number in self._by_number and not stream.is_read:
            stream.expires_s = self._clock() + stream.linger_s
            self._deadlines.note(0, stream.number, stream.expires_s)

    def _drop(self, stream: ResumableStream) -> None:
        """End the running requests of the stream, and forget it."""
        for choice in list(stream.choices.values()):
            if choice.finish is Finish.NONE and (found := self._open_requests.find(*choice.open_as)) is not None:
                self._dismiss(choice)
                self._open_requests.remove(*found)  # calls `_note_left`
                self._board.requests_cancelled += 1
        if stream.number in self._by_number:
            self._forget(stream)

    def _dismiss(self, choice: ResumableChoice) -> None:
        if choice.has_reader:
            frontend, request_id = choice.open_as
            failure = Failure(request_id, FailureCode.TAKEN_OVER)
            self._delivery.answer(frontend, request_id, Finish.FAILED, failure)

    def _forget(self, stream: ResumableStream) -> None:
        del self._streams[stream.name], self._by_number[stream.number]
        self._count(-stream.num_bytes)

    def _evict(self, max_bytes: int, max_streams: int) -> None:
        """Forget ended streams, of the tenant that has the most, until there is room or none is left."""
        while self._num_bytes > max_bytes or len(self._streams) > max_streams:
            num_of = Counter(stream.tenant for stream in self._streams.values())
            ended = [stream for stream in self._streams.values() if stream.has_ended]
            if not ended:
                return
            self._forget(max(ended, key=lambda stream: (num_of[stream.tenant], -(stream.expires_s or 0.0))))

    def _rename(self, request: OpenRequest, choice: ResumableChoice, frontend: int, request_id: int) -> None:
        self._open_requests.rename(request, frontend, request_id)
        choice.open_as = (frontend, request_id)

    def _note_return(self, choice: ResumableChoice) -> None:
        if choice.stream.choices.get(0) is choice:
            self._board.streams_reattached += 1

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._board.lingering_bytes = self._num_bytes
        self._board.lingering_streams = len(self._streams)

    def _deadline_of(self, _: int, number: int) -> float | None:
        stream = self._by_number.get(number)
        return None if stream is None else stream.expires_s

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each stream is read or expires, each request that runs is open, and the bytes
        add up."""
        for stream in self._streams.values():
            if stream.is_read == (stream.expires_s is not None):
                raise RuntimeError(f"stream {stream.name} is read: {stream.is_read}, expires at {stream.expires_s}")
            for choice in stream.choices.values():
                found = self._open_requests.find(*choice.open_as)
                runs = found is not None and found.subscriber.resumable is choice
                if runs != (choice.finish is Finish.NONE):
                    raise RuntimeError(f"{choice.open_as} is open: {runs}, and its finish is {choice.finish}")
        num_bytes = sum(stream.num_bytes for stream in self._streams.values())
        if num_bytes != self._num_bytes:
            raise RuntimeError(f"{self._num_bytes} bytes are counted, the streams have {num_bytes}")
