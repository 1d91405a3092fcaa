"""Both ends of the link in one thread, turn by turn, over the real sockets; and frontends that die or stop."""

from __future__ import annotations

import errno
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from penstock.shm.client.session import Session
from penstock.shm.link import backend_link, connected_frontend
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.connected_frontend import MAX_EVENTS_PER_MESSAGE, MAX_LOGPROBS_PER_MESSAGE
from penstock.shm.link.events import Cancellation, FrontendDeath, Submission
from penstock.shm.link.join import Invitation
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.ledger import Ledger
from penstock.shm.messages import (
    MAX_LOGPROBS,
    MAX_TO_FRONTEND_BYTES,
    NO_TOKEN,
    PROTOCOL_VERSION,
    ArenaRef,
    Cancel,
    Credit,
    EventLogprobs,
    Failure,
    FailureCode,
    Finish,
    Hello,
    Refusal,
    Sampling,
    Started,
    StepOutputs,
    Submit,
    Welcome,
    decode_welcome,
    encode,
)
from tests.shm.scripted_backend import Script, ScriptedBackend, model_card

ROOT = Path(__file__).parents[3]
CREDIT = 8
Event = Submission | Cancellation | FrontendDeath


class Backend:
    """A BackendLink turned by hand."""

    def __init__(self, socket_path: Path, stall_limit_s: float = 0.2) -> None:
        self.path = socket_path
        self.board = BackendBoard.create()
        self.link = BackendLink(
            socket_path, model_card(max_context_tokens=1 << 20), self.board, credit=CREDIT, stall_limit_s=stall_limit_s
        )
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.events: list[Event] = []
        self.num_sent = 0

    def turn(self, timeout_s: float = 0.0) -> list[Event]:
        self.link.wait(timeout_s, self.wake_fd)
        events = self.link.receive()
        self.link.flush()
        self.events += events
        return events

    def close(self) -> None:
        self.link.close()
        self.board.close()
        os.close(self.wake_fd)

    def until(self, wanted: type[Event], count: int = 1) -> list[Event]:
        """Turns until so many events of this kind have come; returns all events of those turns."""
        events: list[Event] = []
        end_s = time.monotonic() + 10
        while sum(isinstance(event, wanted) for event in events) < count:
            assert time.monotonic() < end_s, events
            events += self.turn(0.1)
        return events

    def settle(self) -> list[Event]:
        """Turns until all has come that its frontends have sent; returns what happened."""
        events: list[Event] = []
        end_s = time.monotonic() + 10
        while self.link.counters.messages_in < self.num_sent:
            assert time.monotonic() < end_s, (self.link.counters, self.num_sent)
            events += self.turn(0.1)
        return events

    def until_balanced(self) -> None:
        """Turns until nothing is held any more."""
        end_s = time.monotonic() + 10
        while self.link.balance():
            assert time.monotonic() < end_s, self.link.balance()
            self.turn(0.1)

    def invite(self) -> Invitation:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.connect(str(self.path))
        control.send(encode(Hello(PROTOCOL_VERSION)))
        while not select.select([control], [], [], 0)[0]:
            self.turn(0.1)
        data, fds, _, _ = socket.recv_fds(control, 65536, 3)
        control.setblocking(False)
        welcome = decode_welcome(data)
        assert isinstance(welcome, Welcome)
        return Invitation(control, welcome, *fds)

    @contextmanager
    def session(self) -> Iterator[Frontend]:
        session = Session(self.invite(), Ledger())
        try:
            yield Frontend(session, self)
        finally:
            session.close()


class Frontend:
    def __init__(self, session: Session, backend: Backend) -> None:
        self.session = session
        self.backend = backend
        self.epoch = session.epoch

    def submit(self, request_id: int, tokens: list[int], **changes: object) -> None:
        fields: dict[str, object] = {
            "request_id": request_id,
            "tokens": b"\0" * 4,
            "num_prompt_tokens": len(tokens),
            "max_tokens": 10,
            "sampling": Sampling(),
        }
        assert self.session.send_submit(Submit(**(fields | changes)), array("i", tokens), 0)
        self.backend.num_sent += 1

    def send(self, message: Submit | Cancel | Credit) -> None:
        assert self.session._link.send(message)
        self.backend.num_sent += 1

    def send_raw(self, *parts: bytes) -> None:
        self.session._link._socket.send_multipart(list(parts), zmq.NOBLOCK)
        self.backend.num_sent += 1

    def receive(self, num_messages: int) -> list[StepOutputs]:
        """Turns the backend until so many have come. Without returning credits."""
        outputs = self.session.receive()
        end_s = time.monotonic() + 10
        while len(outputs) < num_messages:
            assert time.monotonic() < end_s, outputs
            self.backend.turn()
            select.select([self.session.link_fd], [], [], 0.01)
            outputs += self.session.receive()
        assert len(outputs) == num_messages
        return outputs

    def expelled(self) -> bool:
        return bool(select.select([self.session.control_fd], [], [], 10)[0]) and self.session.control_ended()


@pytest.fixture
def backend(socket_path: Path) -> Iterator[Backend]:
    backend = Backend(socket_path)
    yield backend
    backend.until_balanced()
    backend.link.ledger.check()
    births = {event.frontend for event in backend.events}
    deaths = [event.frontend for event in backend.events if isinstance(event, FrontendDeath)]
    assert sorted(births) == sorted(deaths)
    backend.close()


def columns(outputs: list[StepOutputs]) -> list[tuple[int, int, int]]:
    return [
        event
        for output in outputs
        for event in zip(
            memoryview(output.request_ids).cast("Q"),
            memoryview(output.token_ids).cast("i"),
            output.finishes,
            strict=True,
        )
    ]


def test_submission_arrives_whole(backend: Backend) -> None:
    sampling = Sampling(temperature=0.5, logit_bias=((3, 1.5),), seed=9)
    with backend.session() as frontend:
        frontend.submit(5, [1, 2, 3], num_prompt_tokens=2, sampling=sampling, stop_token_ids=(7,))
        (event,) = backend.until(Submission)
        assert (event.frontend, event.request_id) == (frontend.epoch, 5)
        assert event.tokens == array("i", [1, 2, 3]).tobytes()
        submit = event.submit
        assert (submit.num_prompt_tokens, submit.max_tokens) == (2, 10)
        assert (submit.sampling, submit.stop_token_ids) == (sampling, (7,))
        backend.link.push(frontend.epoch, 5, 42, Finish.STOP)
        backend.link.flush()
        assert columns(frontend.receive(1)) == [(5, 42, Finish.STOP)]


def test_one_message_per_step_carries_all_events_of_a_frontend(backend: Backend) -> None:
    with backend.session() as one, backend.session() as two:
        for request_id in range(20):
            one.submit(request_id, [1])
            two.submit(request_id, [1])
        backend.until(Submission, 40)
        for step in range(5):
            for request_id in range(20):
                backend.link.push(one.epoch, request_id, step)
                backend.link.push(two.epoch, request_id, 100 + step)
            backend.link.flush()
        assert columns(one.receive(5)) == [(r, s, 0) for s in range(5) for r in range(20)]
        assert columns(two.receive(5)) == [(r, 100 + s, 0) for s in range(5) for r in range(20)]
        assert backend.link.counters.messages_out == 10
        assert backend.link.counters.events_out == 200


def test_tokens_pushed_together_skip_closed_requests(
    backend: Backend,
) -> None:
    backend.link.push_tokens(12345, [0], [1])
    with backend.session() as frontend:
        for request_id in range(3):
            frontend.submit(request_id, [1])
        backend.until(Submission, 3)
        backend.link.push_tokens(frontend.epoch, [0, 1, 2], [10, 11, 12])
        backend.link.push(frontend.epoch, 1, 13, Finish.STOP)
        backend.link.push_tokens(frontend.epoch, [0, 1, 2], [20, 21, 22])
        backend.link.flush()
        assert columns(frontend.receive(1)) == [
            *[(0, 10, 0), (1, 11, 0), (2, 12, 0)],
            *[(1, 13, Finish.STOP), (0, 20, 0), (2, 22, 0)],
        ]


def test_held_tokens_are_sent_with_the_next_urgent_event(backend: Backend) -> None:
    with backend.session() as frontend:
        for request_id in (1, 2):
            frontend.submit(request_id, [1], batch_delivery=True)
        frontend.submit(3, [1])
        backend.until(Submission, 3)
        link, epoch = backend.link, frontend.epoch
        link.push(epoch, 1, 10, started=Started(1, 0, 0.0))  # the first one is never kept
        link.flush()
        assert columns(frontend.receive(1)) == [(1, 10, 0)]
        link.push_tokens(epoch, [1, 2], [11, 21])
        link.push(epoch, 1, 12)
        link.flush()
        frontend.send(Credit(1))  # is no reason to send anything
        backend.settle()
        assert link.counters.messages_out == 1
        link.push_tokens(epoch, [1, 2, 3], [13, 22, 31])
        link.flush()
        assert columns(frontend.receive(1)) == [(1, 11, 0), (2, 21, 0), (1, 12, 0), (1, 13, 0), (2, 22, 0), (3, 31, 0)]
        link.push_tokens(epoch, [1, 2], [14, 23])
        link.flush()
        link.push(epoch, 2, 24, Finish.LENGTH)
        link.flush()
        assert columns(frontend.receive(1)) == [(1, 14, 0), (2, 23, 0), (2, 24, Finish.LENGTH)]
        link.push(epoch, 1, NO_TOKEN, Finish.FAILED, failure=Failure(1, FailureCode.INTERNAL))
        link.flush()
        assert columns(frontend.receive(1)) == [(1, NO_TOKEN, Finish.FAILED)]


def test_held_tokens_are_sent_after_a_moment(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    with backend.session() as frontend:
        frontend.submit(1, [1], batch_delivery=True)
        backend.until(Submission)
        backend.link.push_tokens(frontend.epoch, [1], [10])
        backend.link.flush()
        assert backend.link.counters.messages_out == 0
        monkeypatch.setattr(connected_frontend, "_MAX_HOLD_S", 0.0)
        backend.link.flush()
        assert columns(frontend.receive(1)) == [(1, 10, 0)]


def test_long_prompt_uses_the_arena_and_its_slot_is_freed_at_once(backend: Backend) -> None:
    prompt = list(range(100_000))
    with backend.session() as frontend:
        slots = backend.link._frontends[frontend.epoch].arena_slots
        for request_id in range(3 * slots):
            frontend.submit(request_id, prompt)
            (event,) = backend.until(Submission)
            assert isinstance(event, Submission)
            assert event.tokens == array("i", prompt).tobytes()
            outputs = frontend.receive(1)
            assert columns(outputs) == [(request_id, NO_TOKEN, Finish.NONE)]
            frontend.session.free_slot(request_id)
            assert not frontend.session.holds_slots
            frontend.send(Credit(1))


def test_cancels_in_any_order_are_normal(backend: Backend) -> None:
    with backend.session() as frontend:
        frontend.send(Cancel(1))
        frontend.submit(1, [1])
        frontend.send(Cancel(1))
        frontend.send(Cancel(1))
        frontend.send(Cancel(99))
        events = backend.until(Cancellation)
        assert [type(event) for event in events] == [Submission, Cancellation]
        assert backend.settle() == []
        backend.link.push(frontend.epoch, 1, 5)
        backend.link.push(frontend.epoch, 1, NO_TOKEN, Finish.CANCELLED)
        assert backend.link.balance() == {"frontend": 1}
        frontend.submit(1, [2])
        assert isinstance(backend.until(Submission)[0], Submission)
        assert backend.link.counters.faults == 0


def test_pushes_for_closed_requests_do_nothing(backend: Backend) -> None:
    backend.link.push(12345, 0, 1)
    with backend.session() as frontend:
        backend.link.push(frontend.epoch, 0, 1)
        frontend.submit(0, [1])
        backend.until(Submission)
        backend.link.push(frontend.epoch, 0, 1, Finish.LENGTH)
        backend.link.push(frontend.epoch, 0, 2, Finish.LENGTH)
        backend.link.flush()
        assert columns(frontend.receive(1)) == [(0, 1, Finish.LENGTH)]


@pytest.mark.parametrize(
    "submit",
    [
        Submit(1, b"\0" * 7, 1, 1, Sampling()),
        Submit(1, b"\0" * 8, 3, 1, Sampling()),
        Submit(1, ArenaRef(0, 0, 8), 2, 1, Sampling()),
        Submit(1, ArenaRef(60_000, 0, 8), 2, 1, Sampling()),
        Submit(1, ArenaRef(0, 0, 1 << 26), 2, 1, Sampling()),
    ],
)
def test_incomplete_submission_is_rejected_and_the_third_one_disconnects(
    backend: Backend, submit: Submit
) -> None:
    with backend.session() as honest, backend.session() as frontend:
        for _ in range(2):
            frontend.send(submit)
            (output,) = frontend.receive(1)
            assert columns([output]) == [(1, NO_TOKEN, Finish.REJECTED)]
            assert output.failures == (Failure(1, FailureCode.BAD_DESCRIPTOR),)
        frontend.submit(2, [1])
        assert isinstance(backend.until(Submission)[0], Submission)
        frontend.send(submit)
        assert backend.until(FrontendDeath) == [FrontendDeath(frontend.epoch)]
        assert frontend.expelled()
        frontend.submit(3, [1])
        assert backend.settle() == []
        assert backend.link.counters.strangers == 1
        assert backend.link.counters.expelled == 1
        honest.submit(4, [1])
        assert isinstance(backend.until(Submission)[0], Submission)


@pytest.mark.parametrize(
    "parts",
    [(b"",), (b"\xc1",), (b"\x91" * 10_000,), (encode(Hello(1)),), (encode(Cancel(1)), b"more"), (b"x",) * 20_000],
    ids=["empty", "reserved", "depth", "another's", "two parts", "20,000 parts"],
)
def test_third_malformed_message_disconnects(backend: Backend, parts: tuple[bytes, ...]) -> None:
    with backend.session() as frontend:
        for _ in range(3):
            frontend.send_raw(*parts)
        assert backend.until(FrontendDeath) == [FrontendDeath(frontend.epoch)]
        assert backend.link.counters.faults == 3
        assert frontend.expelled()


def test_open_request_id_cannot_be_submitted_again(backend: Backend) -> None:
    with backend.session() as frontend:
        for _ in range(3):
            frontend.submit(1, [1])
        events = backend.until(Submission)
        assert len(events) == 1
        assert backend.link.counters.faults == 2
        backend.link.push(frontend.epoch, 1, 7)
        backend.link.flush()
        assert columns(frontend.receive(1)) == [(1, 7, 0)]


def test_excess_credit_is_a_fault(backend: Backend) -> None:
    with backend.session() as frontend:
        frontend.send(Credit(1))
        backend.settle()
        assert backend.link.counters.faults == 1
        assert backend.link._frontends[frontend.epoch].credit == CREDIT


def test_random_messages_never_disturb_another_frontend(backend: Backend) -> None:
    rng = random.Random(11)
    with backend.session() as honest:
        honest.submit(1, [1])
        backend.until(Submission)
        for round_ in range(30):
            with backend.session() as hostile:
                for _ in range(100):
                    kind = rng.randrange(4)
                    if kind == 0:
                        raw = rng.randbytes(rng.randrange(100))
                    else:
                        raw = bytearray(encode(Submit(rng.randrange(9), rng.randbytes(8), 2, 1, Sampling())))
                        raw[rng.randrange(len(raw))] = rng.randrange(256)
                    hostile.send_raw(bytes(raw))
                backend.settle()
            backend.until(FrontendDeath, 0)
            backend.link.push(honest.epoch, 1, round_)
            backend.link.flush()
            assert columns(honest.receive(1)) == [(1, round_, 0)]
            honest.send(Credit(1))


def test_message_over_the_limit_is_dropped_and_the_backend_goes_on(backend: Backend) -> None:
    with backend.session() as honest, backend.session() as frontend:
        frontend.session._link._socket.send(b"x" * (1 << 20), zmq.NOBLOCK)
        honest.submit(1, [1])
        assert isinstance(backend.until(Submission)[0], Submission)
        assert backend.link.counters.messages_in == 1


def test_output_waits_for_credit_while_others_are_served(backend: Backend) -> None:
    with backend.session() as slow, backend.session() as other:
        slow.submit(1, [1])
        other.submit(1, [1])
        backend.until(Submission, 2)
        for step in range(3 * CREDIT):
            backend.link.push(slow.epoch, 1, step)
            backend.link.push(other.epoch, 1, step)
            backend.link.flush()
            assert columns(other.receive(1)) == [(1, step, 0)]
            other.send(Credit(1))
            backend.settle()
        assert columns(slow.receive(CREDIT)) == [(1, step, 0) for step in range(CREDIT)]
        assert backend.link.balance()["unsent"] == 2 * CREDIT
        slow.send(Credit(CREDIT))
        backend.settle()
        assert columns(slow.receive(1)) == [(1, step, 0) for step in range(CREDIT, 3 * CREDIT)]
        assert backend.link.counters.blocked_sends == 0


def test_frontend_that_returns_no_credit_is_disconnected(backend: Backend) -> None:
    with backend.session() as slow:
        slow.submit(1, [1])
        backend.until(Submission)
        for step in range(CREDIT + 1):
            backend.link.push(slow.epoch, 1, step)
            backend.link.flush()
        # No one else's event is needed: the wait ends by itself when the limit is reached.
        assert backend.until(FrontendDeath) == [FrontendDeath(slow.epoch)]
        assert slow.expelled()
        backend.link.push(slow.epoch, 1, 5)
        backend.link.flush()
        assert backend.link.counters.stalled == 1


def test_many_events_are_split_into_messages_in_order(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connected_frontend, "MAX_EVENTS_PER_MESSAGE", 10)
    assert MAX_EVENTS_PER_MESSAGE > 10
    with backend.session() as frontend:
        for request_id in range(25):
            frontend.submit(request_id, [1])
        backend.until(Submission, 25)
        for request_id in range(25):
            failure = Failure(request_id, FailureCode.INTERNAL)
            backend.link.push(frontend.epoch, request_id, NO_TOKEN, Finish.FAILED, failure=failure)
        backend.link.flush()
        outputs = frontend.receive(3)
        assert [len(output.finishes) for output in outputs] == [10, 10, 5]
        assert [event[0] for event in columns(outputs)] == list(range(25))
        assert [failure.request_id for output in outputs for failure in output.failures] == list(range(25))


def test_log_probabilities_of_prompts_and_tokens_together_fit_a_message(backend: Backend) -> None:
    """A frontend that was slow: as many as possible wait of both, each as long as possible, and all of them arrive."""
    num_each = MAX_LOGPROBS_PER_MESSAGE - 1
    top_ids, top = tuple(range((1 << 31) - MAX_LOGPROBS, 1 << 31)), (-1.5,) * MAX_LOGPROBS
    with backend.session() as frontend:
        frontend.submit((1 << 63) - 1, [1])
        (submission,) = backend.until(Submission)
        names = submission.frontend, submission.request_id
        for index in range(num_each):
            told = EventLogprobs(index + 1, -1.5, 1 << 30, top_ids, top)
            backend.link.push_prompt_logprobs(*names, told)
            backend.link.push(*names, index, logprobs=told)
        sizes = []
        original = backend_link.encode
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                backend_link, "encode", lambda message: sizes.append(len(original(message))) or original(message)
            )
            backend.link.flush()
        outputs = frontend.receive(2)
        assert max(sizes) <= MAX_TO_FRONTEND_BYTES
        scored = [entry.event for output in outputs for told in output.prompt_logprobs for entry in told.entries]
        assert scored == list(range(1, num_each + 1))
        assert [event[1] for event in columns(outputs)] == list(range(num_each))
        assert [entry.event for output in outputs for entry in output.logprobs] == [
            event for output in outputs for event in range(len(output.finishes))
        ]


def test_second_peer_with_the_same_identity_receives_nothing(backend: Backend) -> None:
    with backend.session() as frontend, zmq.Context() as context:
        identity = frontend.session._link._socket.getsockopt(zmq.IDENTITY)
        endpoint = frontend.session._link._socket.getsockopt(zmq.LAST_ENDPOINT)
        frontend.submit(1, [1])
        assert [type(event) for event in backend.until(Submission)] == [Submission]
        thief = context.socket(zmq.DEALER)
        thief.setsockopt(zmq.LINGER, 0)
        thief.setsockopt(zmq.IDENTITY, identity)
        thief.connect(endpoint.rstrip(b"\0").decode())
        thief.send(encode(Cancel(1)))
        assert backend.settle() == []
        backend.link.push(frontend.epoch, 1, 5)
        backend.link.flush()
        assert columns(frontend.receive(1)) == [(1, 5, 0)]
        assert not thief.poll(50)
        assert backend.settle() == []
        thief.close()


def test_new_frontend_is_refused_without_memory_and_others_stay(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(num_slots: int, slot_bytes: int) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with backend.session() as frontend:
        with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as newcomer:
            patch.setattr("penstock.shm.memory.arena.create_fd", no_memory)
            newcomer.connect(str(backend.path))
            newcomer.send(encode(Hello(PROTOCOL_VERSION)))
            while not select.select([newcomer], [], [], 0)[0]:
                backend.turn(0.1)
            answer = decode_welcome(newcomer.recv(4096))
            assert isinstance(answer, Refusal)
            assert "no memory" in answer.reason
        with backend.session():
            frontend.submit(1, [1])
            assert isinstance(backend.until(Submission)[0], Submission)


def test_messages_of_strangers_are_counted_and_dropped(backend: Backend) -> None:
    with zmq.Context() as context:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"ipc://{backend.path}.zmq")
        stranger.send(encode(Submit(1, b"\0" * 4, 1, 1, Sampling())))
        while not backend.link.counters.strangers:
            assert backend.turn(0.1) == []
        stranger.close()


def test_wake_fd_message_and_new_frontend_each_end_a_wait(backend: Backend) -> None:
    os.eventfd_write(backend.wake_fd, 1)
    backend.link.wait(None, backend.wake_fd)
    os.eventfd_read(backend.wake_fd)
    with backend.session() as frontend:
        frontend.submit(1, [1])
        backend.link.wait(None, backend.wake_fd)
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.connect(str(backend.path))
        control.send(encode(Hello(PROTOCOL_VERSION)))
        # Both happened before this turn, and one turn or two see to both.
        assert [type(event) for event in backend.until(Submission)] == [Submission]
        backend.until(Submission, 0)
        while not select.select([control], [], [], 0)[0]:
            backend.link.wait(None, backend.wake_fd)
            backend.turn()
        control.close()
        backend.until(FrontendDeath)


def test_closing_backend_delivers_what_it_flushed(socket_path: Path) -> None:
    backend = Backend(socket_path)
    with backend.session() as frontend:
        for request_id in range(500):
            frontend.submit(request_id, [1])
        backend.until(Submission, 500)
        for request_id in range(500):
            backend.link.push(frontend.epoch, request_id, 7, Finish.LENGTH)
        backend.link.flush()
        backend.link.close()
        assert frontend.expelled()
        outputs = frontend.session.receive()
        while not outputs:
            assert select.select([frontend.session.link_fd], [], [], 10)[0]
            outputs = frontend.session.receive()
        assert len(columns(outputs)) == 500
    backend.board.close()
    os.close(backend.wake_fd)
    assert {path.name for path in socket_path.parent.iterdir()} == {"b.sock.lock"}


FRONTEND_PROCESS = """
import asyncio, sys
from pathlib import Path
from penstock.shm.client import BackendClient, GenerationRequest
from penstock.shm.messages import Sampling

async def main() -> None:
    client = BackendClient(Path(sys.argv[1]))
    await client.start()
    while not client.ready:
        await asyncio.sleep(0.005)
    streams = [client.submit(GenerationRequest([n, n + 1], 30_000, Sampling())) for n in range(16)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    print("streaming", flush=True)
    await asyncio.gather(*(drain(stream) for stream in streams))

async def drain(stream) -> None:
    async for _ in stream:
        pass

asyncio.run(main())
"""


@contextmanager
def frontend_process(socket_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A frontend in the midst of 16 endless streams."""
    argv = [sys.executable, "-c", FRONTEND_PROCESS, str(socket_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "streaming\n"
            yield child
        finally:
            child.kill()


def wait_for(condition: threading.Event | object, timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_killed_frontend_is_noticed_once_and_leaves_nothing(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.001)) as backend:
        for round_ in range(1, 4):
            with frontend_process(socket_path) as child:
                assert len(backend.engine.running) == 16
                child.kill()
                wait_for(lambda round_=round_: len(backend.engine.deaths) == round_)
                wait_for(lambda: not backend.engine.running)
        assert len(set(backend.engine.deaths)) == 3
        assert backend.engine.link.balance() == {}


def test_stopped_frontend_blocks_no_other_and_resumes_under_a_new_epoch(socket_path: Path) -> None:
    script = Script(step_s=0.001, credit=16, stall_limit_s=0.3)
    with ScriptedBackend(socket_path, script) as backend, frontend_process(socket_path) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        with frontend_process(socket_path):
            wait_for(lambda: len(backend.engine.deaths) == 1)
            assert len(backend.engine.running) == 16
            steps = backend.engine.board.steps
            wait_for(lambda: backend.engine.board.steps > steps + 20)
            stopped.send_signal(signal.SIGCONT)
            wait_for(lambda: len(backend.engine.running) == 32)
        assert backend.engine.link.counters.stalled == 1
        assert backend.engine.link.counters.blocked_sends == 0
