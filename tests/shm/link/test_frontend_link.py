"""The frontend's end of the link: when to drain it."""

from __future__ import annotations

from penstock.shm.link.events import Submission
from penstock.shm.messages import Cancel
from tests.shm.link.harness import Backend, columns


def test_drain_is_needed_when_a_send_may_have_consumed_the_wake_up(backend: Backend) -> None:
    with backend.session() as frontend:
        frontend.submit(0, [1])
        backend.until(Submission)
        assert frontend.receive(0) == []
        backend.link.push(frontend.epoch, 0, 5)
        backend.link.flush()
        assert frontend.session._link._socket.poll(10_000)
        assert not frontend.session.needs_drain  # nothing was sent since the drain: the fd wakes
        frontend.send(Cancel(7))
        assert frontend.session.needs_drain
        assert columns(frontend.session.receive()) == [(0, 5, 0)]
        assert not frontend.session.needs_drain
