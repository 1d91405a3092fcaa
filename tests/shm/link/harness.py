"""Both ends of the link in one thread."""

from __future__ import annotations

import os
import select
import socket
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from penstock.shm.client.session import Session
from penstock.shm.link.backend_link import BackendLink
from penstock.shm.link.events import Cancellation, FrontendDeath, Submission
from penstock.shm.link.join import Invitation
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.ledger import Ledger
from penstock.shm.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Generate,
    Hello,
    Sampling,
    StepOutputs,
    Welcome,
    decode_welcome,
    encode,
)
from tests.shm.scripted_backend import model_card

ROOT = Path(__file__).parents[3]
CREDIT = 8
Event = Submission | Cancellation | FrontendDeath


class Backend:
    """A BackendLink that tests turn by hand."""

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

    def until(self, kind: type[Event], count: int = 1) -> list[Event]:
        """Turn until count events of this kind have arrived. Returns all events of those turns."""
        events: list[Event] = []
        end_s = time.monotonic() + 10
        while sum(isinstance(event, kind) for event in events) < count:
            assert time.monotonic() < end_s, events
            events += self.turn(0.1)
        return events

    def settle(self) -> list[Event]:
        """Turn until everything that the frontends sent has arrived. Returns the events."""
        events: list[Event] = []
        end_s = time.monotonic() + 10
        while self.link.counters.messages_in < self.num_sent:
            assert time.monotonic() < end_s, (self.link.counters, self.num_sent)
            events += self.turn(0.1)
        return events

    def until_balanced(self) -> None:
        """Turn until nothing is held."""
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
        data, fds, _, _ = socket.recv_fds(control, 65536, 4)
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
        assert self.session.send_prompt(Generate(**(fields | changes)), array("i", tokens))
        self.backend.num_sent += 1

    def send(self, message: Generate | Cancel | Credit) -> None:
        assert self.session._link.send(message)
        self.backend.num_sent += 1

    def send_raw(self, *parts: bytes) -> None:
        self.session._link._socket.send_multipart(list(parts), zmq.NOBLOCK)
        self.backend.num_sent += 1

    def receive(self, num_messages: int) -> list[StepOutputs]:
        """Turn the backend until num_messages have arrived. Returns no credit."""
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
