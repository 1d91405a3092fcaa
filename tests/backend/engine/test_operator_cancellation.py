"""The operator cancels requests of any frontend: they end at once, and others do not notice."""

from __future__ import annotations

import pytest

from penstock.shm.link.events import Question
from penstock.shm.messages import CancelOther, FailureCode, Finish, RequestName
from penstock.shm.recording.events import Arrived, Ended
from tests.backend.harness import Bench, expected_tokens
from tests.backend.recorded import Recorded

PROMPT = [21, 22, 23, 24, 25]


def ask(bench: Bench, frontend: int, request_id: int) -> tuple[Finish, int | None]:
    """Ask from another frontend; return how the question ended."""
    cancel = CancelOther(request_id=70, target=RequestName(frontend, request_id))
    bench.link.arrivals.append(Question(9, cancel))
    bench.turn()
    answer = bench.link.received.pop((9, 70))
    return answer.finishes[-1], None if answer.failure is None else answer.failure.code


def test_running_and_waiting_requests_end_with_the_reason_and_free_what_they_held() -> None:
    bench = Bench(max_running=1)
    bench.submit(PROMPT, 50, request_id=1)
    bench.submit([5, 6, 7], 50, request_id=2)
    for _ in range(6):
        bench.turn()
    for request_id in (2, 1):  # the second one waits
        assert ask(bench, 1, request_id) == (Finish.STOP, None)
        ended = bench.received(request_id)
        assert ended.finishes == [Finish.FAILED]
        assert ended.failure is not None
        assert ended.failure.code == FailureCode.CANCELLED
    bench.run_dry()
    assert (bench.board.requests_cancelled, bench.board.requests_failed, bench.board.requests_rejected) == (2, 0, 0)
    bench.close()


def test_coalesced_request_goes_on_when_its_twin_is_cancelled() -> None:
    bench = Bench()
    for request_id in (1, 2):
        bench.submit(PROMPT, 12, request_id=request_id, may_share=True)
    for _ in range(5):
        bench.turn()
    assert ask(bench, 1, 1) == (Finish.STOP, None)
    bench.run_dry()
    assert bench.received(2).token_ids == expected_tokens(PROMPT, 12, 97)
    bench.close()


@pytest.mark.parametrize("target", [(1, 4), (2, 1), (9, 70), ((1 << 63) - 1, 0)])
def test_request_that_is_not_open_is_answered_so(target: tuple[int, int]) -> None:
    bench = Bench()
    bench.submit(PROMPT, 12, request_id=1)
    bench.turn()
    assert ask(bench, *target) == (Finish.REJECTED, FailureCode.NOT_OPEN)
    bench.run_dry()
    assert ask(bench, 1, 1) == (Finish.REJECTED, FailureCode.NOT_OPEN)
    assert (bench.board.requests_finished, bench.board.requests_rejected) == (1, 0)
    bench.close()


def test_question_is_not_recorded_and_the_end_is() -> None:
    recorded = Recorded()
    recorded.bench.submit(PROMPT, 12, request_id=1)
    recorded.bench.turn()
    ask(recorded.bench, 1, 1)
    events = [event for _, event in recorded.life().events]
    assert [event.request_id for event in events if isinstance(event, Arrived)] == [1]
    (end,) = [event for event in events if isinstance(event, Ended)]
    assert (end.request_id, end.finish, end.code) == (1, Finish.FAILED, FailureCode.CANCELLED)
    recorded.close()
