"""BackendClient: submit, stream, cancel. The frontend uses it, and so may any other asyncio server.

Streams outlive the backend: when it dies they stay open, and the next backend with the same model is sent their
prompts with the tokens so far. Sampling depends on position, not on history, so the continuation is the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections import deque
from typing import TYPE_CHECKING

from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.buffers.shared_buffers import BufferGone, BuffersExhausted, BufferSlice, SharedBuffer, SharedBuffers
from penstock.shm.client.session import Session
from penstock.shm.client.stream import GenerationRequest, LogprobEntry, TokenBatch, TokenStream
from penstock.shm.link.frontend_link import LinkBroken
from penstock.shm.link.join import Refused
from penstock.shm.memory.arena import ArenaFull
from penstock.shm.memory.board import FrontendBoard
from penstock.shm.memory.ledger import Ledger
from penstock.shm.memory.region import RegionError
from penstock.shm.messages import (
    MAX_CONTEXT_TOKENS,
    NO_TOKEN,
    BufferContent,
    BufferKind,
    BufferRef,
    BufferRequest,
    FailureCode,
    Finish,
    ModelCard,
    Submit,
    WireError,
    decode_to_backend,
    encode,
)

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.shm.buffers.device_api import OpenDevice
    from penstock.shm.messages import EventLogprobs, PromptLogprobs, StepOutputs

__all__ = [
    "BackendClient",
    "BackendUnavailable",
    "BufferGone",
    "BufferSlice",
    "BuffersExhausted",
    "GenerationRequest",
    "Overloaded",
    "SharedBuffer",
    "TokenBatch",
    "TokenStream",
]

_log = logging.getLogger("penstock.client")

_RECONNECT_S = 0.05
_LAST_WORDS_S = 0.02
"""How long a dead backend's last messages, which may still be on their way between our threads, are waited for."""
_REFUSED_S = 1.0
_HEARTBEAT_LIMIT_S = 2.0
_MAX_FRUITLESS_LIVES = 4
"""Backends that may die in a row with a request and without giving it a token: it may be what kills them."""
_MAX_RETRY_AFTER_S = 60
_RATE_WINDOW_S = 10.0
_PLACEHOLDER = bytes(4)
_EXPIRY_GRACE_S = 0.1
"""The backend ends an expired stream on time. This much later the client does, for a backend that is dead or hangs."""
_MAX_TIMEOUT_MS = 1 << 31
_OUTCOMES: dict[Finish, str] = {
    finish: f"requests_{finish.name.lower()}" for finish in Finish if finish is not Finish.NONE
}
"""Fields of the board."""


class BackendUnavailable(Exception):
    """No backend, or none that came back in time. HTTP 503."""


class Overloaded(Exception):
    """The backend's queue is full. HTTP 429."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"overloaded, retry after {retry_after_s} s")
        self.retry_after_s = retry_after_s


class BackendClient:
    """The link to one backend. Survives the backend's death: reconnects by itself, and resubmits what was running.

    Lives in one event loop. Nothing here blocks or polls while connected: all is driven by two fds.
    """

    def __init__(
        self,
        socket_path: Path,
        *,
        resume_timeout_s: float = 30.0,
        buffers: BufferRequest | None = None,
        open_device: OpenDevice | None = None,
    ) -> None:
        """buffers is what to ask the backend for, see `take_buffer`; those on a GPU need open_device, which is
        `cuda_driver.open_device`. Where both kinds are wished for and the GPU's cannot be opened here, it is the
        host's. Raises ValueError.
        """
        if buffers is not None and BufferKind.CUDA in buffers.kinds and open_device is None:
            raise ValueError("buffers.kinds has CUDA; that needs open_device")
        self._wish = buffers
        self._open_device = open_device
        self._socket_path = socket_path
        self._resume_timeout_s = resume_timeout_s
        self._model: ModelCard | None = None
        self._session: Session | None = None
        self._linked = False  # the session's backend lives, as far as we know
        self._session_over = asyncio.Event()
        self._connector: asyncio.Task[None] | None = None
        self._give_up: asyncio.TimerHandle | None = None
        self._next_request_id = 0
        self._streams: dict[int, TokenStream] = {}  # those that have no finish yet
        self._outbox: deque[TokenStream | int] = deque()  # streams to submit, request ids to cancel
        self._suspects: deque[TokenStream] = deque()  # to be submitted one after the other
        self._on_trial: TokenStream | None = None
        self._counted_before = dict.fromkeys(FrontendBoard.fields, 0)  # with backends that are gone
        self.board = FrontendBoard.private()
        """This process's own numbers: of the present session, or since the last one ended; the backend adds up all its
        frontends'. The client's user writes what it alone knows, such as its answers' times. Ask for it each time."""
        self._rate_sample = (0.0, 0)  # monotonic time, the backend's finished requests
        self.ledger = Ledger()

    async def start(self) -> None:
        """Begins to connect and returns at once; the backend may come later."""
        if self._connector is None:
            self._connector = asyncio.create_task(self._connect_for_ever(), name="backend-client")
            self._connector.add_done_callback(_report_end)

    async def close(self) -> None:
        """Open streams end CANCELLED, and the backend forgets them."""
        for stream in list(self._streams.values()):
            self._finish(stream, Finish.CANCELLED)
        if self._connector is not None:
            self._connector.cancel()
            await asyncio.gather(self._connector, return_exceptions=True)
            self._connector = None
        self._outbox.clear()
        self._stop_waiting_for_a_backend()

    @property
    def model(self) -> ModelCard | None:
        """The backend's model, None before the first connection; kept over a reconnection."""
        return self._model

    @property
    def ready(self) -> bool:
        """Connected, and the backend makes progress: its board's heartbeat is younger than 2 s."""
        if self._session is None or not self._linked:
            return False
        board = self._session.backend_board
        return not board.draining and board.seconds_since_beat() < _HEARTBEAT_LIMIT_S

    @property
    def backend_counters(self) -> dict[str, int] | None:
        """The backend's board as it stands; None when not connected."""
        return None if self._session is None else self._session.backend_board.values()

    @property
    def counters(self) -> dict[str, int]:
        """This process's numbers since its start, by their names on its board (`FrontendBoard`)."""
        now = self.board.values()
        counted = {name: value + self._counted_before[name] for name, value in now.items() if name != "pid"}
        return counted | {"requests_open": len(self._streams)}

    def balance(self) -> dict[str, int]:
        """What is held at this moment: sessions, streams, slots, and messages and credits not sent yet."""
        held = self.ledger.balance()
        held["unsent"] = len(self._outbox)
        held["credits_owed"] = 0 if self._session is None else self._session.credits_owed
        return {kind: count for kind, count in held.items() if count}

    def take_buffer(self) -> SharedBuffer:
        """One of the shared buffers that were asked for: the caller's, until it is released or the backend ends.

        Raises BuffersExhausted when none is free, BufferGone when there are none, or no backend at present.
        """
        return self._buffers(self._session).take()

    @staticmethod
    def _buffers(session: Session | None) -> SharedBuffers:
        if session is None or session.buffers is None:
            raise BufferGone("no shared buffers: none were asked for, or no backend is connected")
        return session.buffers

    def submit(self, request: GenerationRequest) -> TokenStream:
        """Raises BackendUnavailable when not ready, Overloaded when the board shows a full queue. A request that may
        join another's stream is sent all the same, and refused by the backend if it finds none.

        Raises ValueError for a request outside the wire's bounds; the model's own are checked by the backend. Raises
        ValueError, BufferGone and DeviceError for shared buffers that cannot be lent; they stay the caller's then.
        """
        session = self._session
        if session is None or not self.ready:
            raise BackendUnavailable("the backend is not ready")
        board = session.backend_board
        if board.waiting >= session.model.max_waiting and not self._may_join(request):
            raise Overloaded(self._retry_after_s(board.waiting, board.requests_finished))
        tokens = _prompt_tokens(request)
        submit = Submit(
            request_id=self._next_request_id,
            tokens=_PLACEHOLDER,
            num_prompt_tokens=len(tokens),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            salt=request.salt,
            may_share=_may_share(request),
            priority=request.priority,
            constraints=request.constraints,
            num_prompt_logprobs=request.num_prompt_logprobs,
            batch_delivery=request.batch_delivery,
        )
        try:
            # What the backend's decoder would drop must fail here, where somebody can still be told.
            decode_to_backend(encode(submit))
        except (WireError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        if isinstance(request.token_ids, BufferSlice) or request.output is not None:
            submit = self._buffers(session).lend_with(submit, request.token_ids, request.output)
        self._next_request_id += 1
        stream = TokenStream(submit, tokens, self._cancel, request.deadline_s)
        self._streams[submit.request_id] = stream
        self.board.requests_open = len(self._streams)
        self.ledger.acquire("stream", submit.request_id, "client")
        if request.deadline_s is not None:
            delay_s = max(0.0, request.deadline_s - time.monotonic()) + _EXPIRY_GRACE_S
            stream._expiry = asyncio.get_running_loop().call_later(delay_s, self._abandon, stream, Finish.EXPIRED)
        self._enqueue(stream)
        self._send_outbox()
        return stream

    def _may_join(self, request: GenerationRequest) -> bool:
        """Whether to ask the backend, which alone knows, if the request finds a twin in flight. Only while it takes
        what it is sent: behind a full link or arena nothing is piled up for a refusal."""
        return _may_share(request) and not self._outbox

    def _retry_after_s(self, num_waiting: int, num_finished: int) -> int:
        """Seconds in which the queue would drain at the rate of late; at least 1, and 1 while nothing is known."""
        now_s = time.monotonic()
        then_s, finished_then = self._rate_sample
        age_s, num_new = now_s - then_s, num_finished - finished_then
        if age_s > _RATE_WINDOW_S or num_new < 0:
            self._rate_sample = (now_s, num_finished)
        if num_new <= 0 or age_s > 2 * _RATE_WINDOW_S:
            return 1
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(num_waiting * age_s / num_new)))

    # Streams

    def _cancel(self, stream: TokenStream) -> None:
        self._abandon(stream, Finish.CANCELLED)

    def _abandon(self, stream: TokenStream, finish: Finish) -> None:
        """Ends it here and now; the backend is told."""
        if stream._finish is not Finish.NONE:
            return
        self._finish(stream, finish)
        # A stream still in the outbox is skipped there; only what the backend knows of needs a message.
        if not stream._queued and self._session is not None:
            self._outbox.append(stream._submit.request_id)
            self._send_outbox()

    def _finish(self, stream: TokenStream, finish: Finish) -> None:
        request_id = stream._submit.request_id
        del self._streams[request_id]
        if stream._queued:
            self._take_back(stream)
        self.ledger.release("stream", request_id)
        self.board.increase(_OUTCOMES[finish])
        self.board.requests_open = len(self._streams)
        if stream._expiry is not None:
            stream._expiry.cancel()
            stream._expiry = None
        stream._finish = finish
        stream._wake()

    def _take_back(self, stream: TokenStream) -> None:
        """What was lent with a stream that was never sent comes back at once; else the backend returns it."""
        if self._session is not None and self._session.buffers is not None:
            for ref in stream._loans:
                self._session.buffers.take_back(ref.index, ref.generation)

    def _fail(self, stream: TokenStream, code: FailureCode, finish: Finish = Finish.FAILED, limit: int = 0) -> None:
        stream._failure, stream._failure_limit = code, limit
        self._finish(stream, finish)

    def _dispatch(self, session: Session, outputs: StepOutputs) -> None:
        streams = self._streams
        if outputs.returned:
            if session.buffers is None:
                raise LinkBroken("a shared buffer is returned that was never lent")
            session.buffers.accept(outputs.returned)
        for started in outputs.started:
            stream = streams.get(started.request_id)
            if stream is not None and len(stream._tokens) == stream._submit.num_prompt_tokens:
                stream.cached_tokens, stream.queue_s = started.cached_tokens, started.queue_s
                stream.is_coalesced = started.is_coalesced
                if not started.is_coalesced:
                    self.board.queue_us.observe(int(1e6 * max(0.0, started.queue_s)))
        for failure in outputs.failures:
            stream = streams.get(failure.request_id)
            if stream is not None:
                stream._failure, stream._failure_limit = FailureCode(failure.code), failure.limit
                stream._failure_text = failure.text
        for scored in outputs.prompt_logprobs:
            if (stream := streams.get(scored.request_id)) is not None:
                _note_prompt_logprobs(stream, scored)
        logprobs = {entry.event: entry for entry in outputs.logprobs}
        for request_id in outputs.preempted:
            stream = streams.get(request_id)
            if stream is not None:
                stream.num_preemptions += 1
        request_ids = memoryview(outputs.request_ids).cast("Q")
        token_ids = memoryview(outputs.token_ids).cast("i")
        if session.awaits_copies:
            for request_id in request_ids:
                session.heard_of(request_id)
        now_ns = time.monotonic_ns()
        num_by_stream: dict[TokenStream, int] = {}
        columns = zip(request_ids, token_ids, outputs.finishes, strict=True)
        for event, (request_id, token_id, finish) in enumerate(columns):
            stream = streams.get(request_id)
            if stream is None:
                continue
            if token_id != NO_TOKEN:
                if stream._logprobs is not None:
                    stream._logprobs.append(_token_logprobs(logprobs.get(event)))
                stream._tokens.append(token_id)
                stream._fruitless_lives = 0
                num_by_stream[stream] = num_by_stream.get(stream, 0) + 1
                waiter = stream._waiter
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
            if finish:
                self._finish(stream, Finish(finish))
        self.board.tokens_streamed += sum(num_by_stream.values())
        self._note_gaps(num_by_stream, now_ns)

    def _note_gaps(self, num_by_stream: dict[TokenStream, int], now_ns: int) -> None:
        """Between a stream's tokens; those that came together share the time since the one before them, if there is."""
        num_alike: dict[tuple[int, int], int] = {}  # streams of one message mostly got their last token together
        for stream, num_tokens in num_by_stream.items():
            last_ns, stream._last_token_ns = stream._last_token_ns or now_ns, now_ns
            num_gaps = num_tokens if last_ns < now_ns else num_tokens - 1
            if num_gaps:
                num_alike[last_ns, num_gaps] = num_alike.get((last_ns, num_gaps), 0) + num_gaps
        for (last_ns, num_gaps), total in num_alike.items():
            self.board.itl_us.observe((now_ns - last_ns) // (1000 * num_gaps), total)

    # The outbox: what waits for the link to stand, for room in it, or for a slot of the arena

    def _enqueue(self, stream: TokenStream) -> None:
        stream._queued = True
        self._outbox.append(stream)

    def _send_outbox(self) -> None:
        session = self._session
        if session is None or not self._linked:
            return
        self._try_suspects()
        while self._outbox:
            item = self._outbox[0]
            if isinstance(item, int):
                if not session.send_cancel(item):
                    break
            elif item._finish is Finish.NONE and not self._send_stream(session, item):
                break
            else:
                item._queued = False
            self._outbox.popleft()
        if session.readable:
            # A send may have taken the wake-up that the fd owed us.
            asyncio.get_running_loop().call_soon(self._on_link, session)

    def _send_stream(self, session: Session, stream: TokenStream) -> bool:
        """True when there is nothing left to send for it."""
        timeout_ms = 0
        if stream._deadline_s is not None:
            left_s = stream._deadline_s - time.monotonic()
            if left_s <= 0.0:
                self._finish(stream, Finish.EXPIRED)
                return True
            timeout_ms = min(_MAX_TIMEOUT_MS, math.ceil(1000 * left_s))
        if isinstance(stream._submit.tokens, BufferRef):
            return session.send_as_lent(stream._submit, timeout_ms)
        if not session.holds(len(stream._tokens)):
            limit = session.model.max_context_tokens
            self._fail(stream, FailureCode.CONTEXT_TOO_LONG, Finish.REJECTED, limit)
            return True
        try:
            return session.send_submit(stream._submit, stream._tokens, timeout_ms)
        except ArenaFull:
            return False

    # The session: one connection to one backend

    async def _connect_for_ever(self) -> None:
        while True:
            pause_s = _RECONNECT_S
            try:
                session = await Session.open(self._socket_path, self.ledger, self._wish, self._open_device)
            except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BlockingIOError):
                pass  # no backend yet, or it is busy with many of us
            except DeviceError as error:
                pause_s = self._without_device(error)
            except (OSError, Refused, WireError, RegionError) as error:
                _log.warning("the backend at %s cannot be used: %s", self._socket_path, error)
                pause_s = _REFUSED_S
            else:
                try:
                    self._attach(session)
                    await self._session_over.wait()
                finally:
                    self._detach(session)
            await asyncio.sleep(pause_s)

    def _without_device(self, error: DeviceError) -> float:
        """The backend's GPU cannot be used here: buffers on the host, if those will do. Returns when to try again."""
        if self._wish is not None and BufferKind.HOST in self._wish.kinds:
            _log.warning("shared buffers are on the host, for the GPU's cannot be opened: %s", error)
            self._wish = BufferRequest(self._wish.num_buffers, self._wish.num_bytes, (BufferKind.HOST,))
            return _RECONNECT_S
        _log.warning("the GPU's shared buffers cannot be opened: %s", error)
        return _REFUSED_S

    def _attach(self, session: Session) -> None:
        self._session = session
        self._session_over = asyncio.Event()
        self._show_board(session)
        self._stop_waiting_for_a_backend()
        previous, self._model = self._model, session.model
        same = previous is None or _identity(previous) == _identity(session.model)
        if same:
            self._resume()
        else:
            self._fail_all()
        self._linked = True
        loop = asyncio.get_running_loop()
        loop.add_reader(session.control_fd, self._on_control, session)
        loop.add_reader(session.link_fd, self._on_link, session)
        self._on_link(session)

    def _resume(self) -> None:
        """Submits the open streams again.

        Two backends in a row that died with a stream and without a token for it make it suspect of having killed them.
        Suspects are tried one after the other, so that the innocent make progress and the guilty is found out.
        """
        suspects = []
        for stream in list(self._streams.values()):
            if not stream._queued:
                stream._fruitless_lives += 1
            if stream._fruitless_lives > _MAX_FRUITLESS_LIVES:
                _log.error("a request of %d prompt tokens is given up", stream._submit.num_prompt_tokens)
                self._fail(stream, FailureCode.INTERNAL)
                continue
            self.board.requests_resumed += 1
            if stream._fruitless_lives < 2:
                self._enqueue(stream)
            else:
                stream._queued = True
                suspects.append(stream)
        self._suspects = deque(sorted(suspects, key=lambda stream: stream._fruitless_lives))
        self._on_trial = None

    def _try_suspects(self) -> None:
        while self._suspects:
            tried = self._on_trial
            if tried is not None and tried._fruitless_lives and tried._finish is Finish.NONE:
                return
            self._on_trial = self._suspects.popleft()
            self._enqueue(self._on_trial)

    def _detach(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(session.control_fd)
        loop.remove_reader(session.link_fd)
        self._session = None
        self._linked = False
        # The dead backend owes nothing: cancels are moot, and what is open will be submitted to the next one.
        self._outbox.clear()
        self._suspects.clear()
        # Shared buffers go with the session, and with them the streams that use some.
        for stream in [stream for stream in self._streams.values() if stream._loans]:
            self._fail(stream, FailureCode.UNAVAILABLE)
        self._leave_board()
        session.close()
        if self._streams:
            self._give_up = loop.call_later(self._resume_timeout_s, self._fail_all)

    def _fail_all(self) -> None:
        for stream in list(self._streams.values()):
            self._fail(stream, FailureCode.UNAVAILABLE)

    def _stop_waiting_for_a_backend(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None

    def _on_control(self, session: Session) -> None:
        if session is self._session and session.control_ended():
            self._linked = False
            loop = asyncio.get_running_loop()
            loop.remove_reader(session.control_fd)
            loop.call_later(_LAST_WORDS_S, self._session_over.set)

    def _on_link(self, session: Session) -> None:
        if session is not self._session or self._session_over.is_set():
            return
        try:
            for outputs in session.receive():
                self._dispatch(session, outputs)
        except (LinkBroken, ValueError) as error:
            _log.error("the backend's messages do not add up, reconnecting: %s", error)
            self._linked = False
            self._session_over.set()
            return
        session.return_credits()
        self._send_outbox()

    def _show_board(self, session: Session) -> None:
        """From here on the backend sees what is counted, and what has been since it last did."""
        session.board.add(self.board)
        self.board.close()
        self.board = session.board

    def _leave_board(self) -> None:
        """The session is about to end, and its board with it."""
        self._counted_before = {
            name: value + self._counted_before[name] for name, value in self.board.values().items()
        } | {"requests_open": 0}
        self.board = FrontendBoard.private()
        self.board.requests_open = len(self._streams)


def _is_embedded(request: GenerationRequest) -> bool:
    """Its prompt is embeddings in a shared buffer."""
    prompt = request.token_ids
    return isinstance(prompt, BufferSlice) and prompt.content is BufferContent.PROMPT_EMBEDDINGS


def _may_share(request: GenerationRequest) -> bool:
    """Another's tokens will do for it."""
    return request.may_share and request.output is None and not _is_embedded(request)


def _prompt_tokens(request: GenerationRequest) -> array[int]:
    """The prompt; of one in a shared buffer, which this process need not be able to read, its length. Raises
    ValueError."""
    if isinstance(request.token_ids, BufferSlice):
        num_rows = request.token_ids.num_rows
        if not 1 <= num_rows <= MAX_CONTEXT_TOKENS:
            raise ValueError(f"token_ids.num_rows is {num_rows}; a prompt has 1 to {MAX_CONTEXT_TOKENS} rows")
        if _is_embedded(request) and request.num_prompt_logprobs >= 0:
            raise ValueError(
                f"num_prompt_logprobs is {request.num_prompt_logprobs}; with embeddings only -1 is allowed"
            )
        return array("i", bytes(4 * num_rows))
    try:
        return array("i", request.token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token_ids: {error}") from None


def _report_end(connector: asyncio.Task[None]) -> None:
    """The connector ends by being cancelled; anything else is our bug and must not stay unheard."""
    if not connector.cancelled() and (error := connector.exception()) is not None:
        _log.critical("the backend client has stopped", exc_info=error)


def _identity(model: ModelCard) -> tuple[str, str, int]:
    """What must be equal for a stream to go on with another backend."""
    return model.model_id, model.fingerprint, model.vocab_size


def _token_logprobs(told: EventLogprobs | None) -> LogprobEntry:
    if told is None:
        raise LinkBroken("a token without the log probability that was asked for")
    return LogprobEntry(told.logprob, told.rank, told.top_ids, told.top_logprobs)


def _note_prompt_logprobs(stream: TokenStream, scored: PromptLogprobs) -> None:
    """A backend that comes after one that died begins at the first again."""
    for entry in scored.entries:
        place = entry.event - 1
        if not 0 <= place <= len(stream.prompt_logprobs):
            raise LinkBroken(f"log probabilities of a prompt's token {entry.event} after {len(stream.prompt_logprobs)}")
        stream.prompt_logprobs[place:] = [_token_logprobs(entry)]
