"""Requests and events between both ends of the link, in one thread, turn by turn, over the real sockets."""

from __future__ import annotations

import errno
import os
import select
import socket
from array import array
from pathlib import Path

import pytest

from penstock.shm.link.events import Cancellation, FrontendDeath, Submission
from penstock.shm.messages import (
    NO_TOKEN,
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Finish,
    Hello,
    Refusal,
    Sampling,
    decode_welcome,
    encode,
)
from tests.shm.link.harness import Backend, columns


def test_submission_arrives_whole(backend: Backend) -> None:
    sampling = Sampling(temperature=0.5, logit_bias=((3, 1.5),), seed=9)
    with backend.session() as frontend:
        frontend.submit(5, [1, 2, 3], num_prompt_tokens=2, sampling=sampling, stop_token_ids=(7,))
        (event,) = backend.until(Submission)
        assert (event.frontend, event.request_id) == (frontend.epoch, 5)
        assert event.tokens == array("i", [1, 2, 3]).tobytes()
        submit = event.message
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


def test_new_frontend_is_refused_without_memory_and_others_stay(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        # Both happened before this turn; one turn or two handle both.
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
