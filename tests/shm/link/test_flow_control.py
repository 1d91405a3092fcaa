"""Credit, held events and the sizes of messages."""

from __future__ import annotations

import pytest

from penstock.shm.link import backend_link, connected_frontend
from penstock.shm.link.connected_frontend import MAX_EVENTS_PER_MESSAGE, MAX_LOGPROBS_PER_MESSAGE
from penstock.shm.link.events import FrontendDeath, Submission
from penstock.shm.messages import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_TO_FRONTEND_BYTES,
    NO_TOKEN,
    Credit,
    EventLogprobs,
    Failure,
    FailureCode,
    Finish,
    Started,
    StreamRecord,
)
from tests.shm.link.harness import CREDIT, Backend, columns


def test_held_tokens_are_sent_with_the_next_urgent_event(backend: Backend) -> None:
    with backend.session() as frontend:
        for request_id in (1, 2):
            frontend.submit(request_id, [1], batch_delivery=True)
        frontend.submit(3, [1])
        backend.until(Submission, 3)
        link, epoch = backend.link, frontend.epoch
        link.push(epoch, 1, 10, started=Started(1, 0, 0.0))  # the first token is never held
        link.flush()
        assert columns(frontend.receive(1)) == [(1, 10, 0)]
        link.push_tokens(epoch, [1, 2], [11, 21])
        link.push(epoch, 1, 12)
        link.flush()
        frontend.send(Credit(1))  # credit alone sends nothing
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


def test_each_record_comes_before_or_with_the_end_of_its_question(backend: Backend) -> None:
    with backend.session() as frontend:
        for request_id in (1, 2, 3):
            frontend.submit(request_id, [1])
        backend.until(Submission, 3)
        link, epoch = backend.link, frontend.epoch
        link.push(epoch, 3, 10)
        for request_id in (1, 2):
            link.push_answer(epoch, StreamRecord(request_id, b"%d" % request_id))
            link.push(epoch, request_id, NO_TOKEN, Finish.STOP)
        link.push(epoch, 3, 11)
        link.flush()
        first, second = frontend.receive(2)
        assert columns([first]) == [(3, 10, 0), (1, NO_TOKEN, Finish.STOP)]
        assert columns([second]) == [(2, NO_TOKEN, Finish.STOP), (3, 11, 0)]
        assert [first.record, second.record] == [StreamRecord(1, b"1"), StreamRecord(2, b"2")]
        link.push(epoch, 3, 12)
        link.flush()
        assert frontend.receive(1)[0].record is None
        link.push_answer(epoch, StreamRecord(2, b"late"))  # it is not open
        link.push_answer(epoch + 1, StreamRecord(2, b"nobody"))
        assert "unsent" not in link.balance()


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
        # Without any other event the wait ends at the limit.
        assert backend.until(FrontendDeath) == [FrontendDeath(slow.epoch)]
        assert slow.expelled()
        backend.link.push(slow.epoch, 1, 5)
        backend.link.flush()
        assert backend.link.counters.stalled == 1


def test_many_events_are_split_into_messages_in_order(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("num_named", "num_tokens", "num_messages"),
    [(MAX_LOGPROBS, MAX_LOGPROBS_PER_MESSAGE - 1, 2), (MAX_LOGPROB_TOKEN_IDS, 3000, 4)],
)
def test_log_probabilities_of_prompts_and_tokens_together_fit_a_message(
    backend: Backend, num_named: int, num_tokens: int, num_messages: int
) -> None:
    """The most entries possible wait, each of maximal length, and all of them arrive."""
    num_each = MAX_LOGPROBS_PER_MESSAGE - 1
    named = tuple(range((1 << 31) - num_named, 1 << 31)), (-1.5,) * num_named
    top_ids, top = tuple(range((1 << 31) - MAX_LOGPROBS, 1 << 31)), (-1.5,) * MAX_LOGPROBS
    with backend.session() as frontend:
        frontend.submit((1 << 63) - 1, [1])
        (submission,) = backend.until(Submission)
        names = submission.frontend, submission.request_id
        for index in range(num_each):
            entry = EventLogprobs(index + 1, -1.5, 1 << 30, top_ids, top)
            backend.link.push_prompt_logprobs(*names, entry)
        for index in range(num_tokens):
            backend.link.push(*names, index, logprobs=EventLogprobs(0, -1.5, 1 << 30, *named))
        sizes = []
        original = backend_link.encode
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                backend_link, "encode", lambda message: sizes.append(len(original(message))) or original(message)
            )
            backend.link.flush()
        outputs = frontend.receive(num_messages)
        assert max(sizes) <= MAX_TO_FRONTEND_BYTES
        prompt_events = [
            entry.event for output in outputs for scored in output.prompt_logprobs for entry in scored.entries
        ]
        assert prompt_events == list(range(1, num_each + 1))
        assert [event[1] for event in columns(outputs)] == list(range(num_tokens))
        assert [entry.event for output in outputs for entry in output.logprobs] == [
            event for output in outputs for event in range(len(output.finishes))
        ]
