"""Malformed, forged and excessive messages harm only their sender."""

from __future__ import annotations

import os
import random
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from penstock.shm.link.events import FrontendDeath, Submission
from penstock.shm.link.listening_address import connectable_path
from penstock.shm.messages import (
    MAX_TO_BACKEND_BYTES,
    NO_TOKEN,
    ArenaRef,
    Cancel,
    Credit,
    Failure,
    FailureCode,
    Finish,
    Generate,
    Hello,
    Sampling,
    encode,
)
from tests.shm.link.harness import CREDIT, Backend, columns


def generate(request_id: int, tokens: bytes | ArenaRef, num_prompt_tokens: int) -> Generate:
    return Generate(
        request_id=request_id, tokens=tokens, num_prompt_tokens=num_prompt_tokens, max_tokens=1, sampling=Sampling()
    )


@pytest.mark.parametrize(
    "submit",
    [
        generate(1, b"\0" * 7, 1),
        generate(1, b"\0" * 8, 3),
        generate(1, ArenaRef(0, 0, 8), 2),
        generate(1, ArenaRef(60_000, 0, 8), 2),
        generate(1, ArenaRef(0, 0, 1 << 26), 2),
    ],
)
def test_incomplete_submission_is_rejected_and_the_third_one_disconnects(backend: Backend, submit: Generate) -> None:
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
                        raw = bytearray(encode(generate(rng.randrange(9), rng.randbytes(8), 2)))
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
        frontend.session._link._socket.send(b"x" * (MAX_TO_BACKEND_BYTES + 1), zmq.NOBLOCK)
        honest.submit(1, [1])
        assert isinstance(backend.until(Submission)[0], Submission)
        assert backend.link.counters.messages_in == 1


@contextmanager
def peer(message_socket_fd: int, identity: bytes) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ peer with this identity, of a process that has the fd of the backend's message socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.connect(f"ipc://{connectable_path(message_socket_fd)}")
        yield dealer


def test_second_peer_with_the_same_identity_receives_nothing(backend: Backend) -> None:
    with backend.session() as frontend:
        frontend.submit(1, [1])
        assert [type(event) for event in backend.until(Submission)] == [Submission]
        identity = frontend.session._link._socket.getsockopt(zmq.IDENTITY)
        with peer(backend.link._message_socket_fd, identity) as thief:
            thief.send(encode(Cancel(1)))
            assert backend.settle() == []
            backend.link.push(frontend.epoch, 1, 5)
            backend.link.flush()
            assert columns(frontend.receive(1)) == [(1, 5, 0)]
            assert not thief.poll(50)
            assert backend.settle() == []


def test_peer_without_a_handshake_is_not_heard_even_with_the_socket(backend: Backend) -> None:
    with backend.session() as frontend:
        frontend.submit(1, [1])
        backend.until(Submission)
        for identity in (b"mine", secrets.token_bytes(16)):
            with peer(backend.link._message_socket_fd, identity) as stranger:
                before = backend.link.counters.strangers
                for message in (generate(2, b"\0" * 4, 1), Cancel(1)):
                    stranger.send(encode(message))
                while backend.link.counters.strangers < before + 2:
                    assert backend.turn(0.1) == []
                backend.link.push(frontend.epoch, 1, 5)
                backend.link.flush()
                assert columns(frontend.receive(1)) == [(1, 5, 0)]
                assert not stranger.poll(20)
        assert backend.link.balance()["request"] == 1


def test_message_socket_has_no_name_to_connect_by(backend: Backend) -> None:
    number = os.fstat(backend.link._message_socket_fd).st_ino
    directory = backend.path.parent
    assert number not in {entry.inode() for entry in os.scandir(directory)}
    with pytest.raises(FileNotFoundError), socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(directory / f".{backend.path.name}.messages"))
