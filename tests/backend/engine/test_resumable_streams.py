"""Requests that linger: they run on without a reader, and a later request with the same name reads all of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backend.engine.requests.stream_table import NO_READER
from penstock.shm.link.events import Cancellation, FrontendDeath, Question
from penstock.shm.messages import AskStream, FailureCode, Finish, Keep, Linger, Sampling, StreamName, StreamQuestion
from tests.backend.harness import Bench, Received, expected_tokens
from tests.backend.recorded import Recorded

PROMPT = [21, 22, 23, 24, 25]
LINGER_S = 30
RECORD = b"what a frontend needs"


def linger(stream: str = "s", tenant: bytes = b"t", choice: int = 0, record: bytes = RECORD) -> Linger:
    return Linger(StreamName(tenant, stream), LINGER_S, choice, record)


def ask(bench: Bench, stream: str = "s", tenant: bytes = b"t", action: Any = "read") -> Received:
    question = StreamQuestion(StreamName(tenant, stream), action)
    bench.link.arrivals.append(Question(9, AskStream(request_id=70, question=question)))
    bench.turn()
    return bench.link.received.pop((9, 70))


def is_kept(bench: Bench, stream: str = "s", tenant: bytes = b"t") -> bool:
    answer = ask(bench, stream, tenant)
    if answer.finishes == [Finish.STOP]:
        assert answer.record == RECORD
        return True
    assert answer.failure is not None
    assert (answer.finishes, answer.failure.code) == ([Finish.REJECTED], FailureCode.NOT_OPEN)
    return False


def turn(bench: Bench, count: int) -> None:
    for _ in range(count):
        bench.turn()


def kill(bench: Bench, frontend: int) -> None:
    bench.link.arrivals.append(FrontendDeath(frontend))
    bench.turn()
    bench.link.dead.add(frontend)


@pytest.mark.parametrize("num_turns", [0, 1, 2, 7, 40])
def test_stream_of_a_dead_frontend_is_read_whole_by_another(num_turns: int) -> None:
    bench = Bench()
    bench.submit(PROMPT, 20, request_id=1, linger=linger())
    turn(bench, num_turns)
    kill(bench, 1)
    turn(bench, 3)
    assert is_kept(bench)
    bench.submit(PROMPT, 20, frontend=2, request_id=5, linger=linger())
    bench.run_dry()
    received = bench.received(5, frontend=2)
    assert received.token_ids == expected_tokens(PROMPT, 20, 97)
    assert received.finishes == [Finish.LENGTH]
    board = bench.board
    assert (board.requests_accepted, board.requests_finished, board.requests_cancelled) == (1, 1, 0)
    assert board.streams_reattached == 1
    bench.close()


def test_every_reader_gets_the_start_that_the_first_one_got() -> None:
    bench = Bench()
    bench.submit(PROMPT, 30, request_id=7)  # leaves its pages in the prefix cache
    bench.run_dry()
    bench.submit(PROMPT, 20, request_id=1, linger=linger())
    turn(bench, 6)
    first = bench.received(1).started
    assert first is not None
    assert first.cached_tokens > 0
    for request_id in (2, 3):
        bench.submit(PROMPT, 20, frontend=2, request_id=request_id, linger=linger())
        turn(bench, 2)
    bench.run_dry()
    bench.submit(PROMPT, 20, frontend=2, request_id=4, linger=linger())
    bench.run_dry()
    for request_id in (2, 3, 4):
        started = bench.received(request_id, frontend=2).started
        assert started is not None
        assert (started.cached_tokens, started.queue_s, started.is_coalesced) == (
            first.cached_tokens,
            first.queue_s,
            first.is_coalesced,
        )
    bench.close()


def test_later_reader_takes_over_and_the_earlier_one_is_told() -> None:
    bench = Bench()
    bench.submit(PROMPT, 20, request_id=1, linger=linger())
    turn(bench, 6)
    bench.submit(PROMPT, 20, frontend=2, request_id=5, linger=linger())
    bench.run_dry()
    earlier = bench.received(1)
    assert earlier.finishes == [Finish.FAILED]
    assert earlier.failure is not None
    assert earlier.failure.code == FailureCode.TAKEN_OVER
    assert bench.received(5, frontend=2).token_ids == expected_tokens(PROMPT, 20, 97)
    bench.close()


def test_reader_that_resubmits_with_its_tokens_receives_the_rest() -> None:
    bench = Bench()
    tokens = expected_tokens(PROMPT, 20, 97)
    bench.submit(PROMPT, 20, request_id=1, linger=linger())
    turn(bench, 10)
    kill(bench, 1)
    bench.submit(PROMPT + tokens[:3], 20, frontend=2, request_id=5, num_prompt_tokens=5, linger=linger(), admitted_ns=1)
    bench.run_dry()
    assert bench.received(5, frontend=2).token_ids == tokens[3:]
    bench.close()


def test_tokens_that_contradict_what_is_kept_begin_a_stream_of_their_own() -> None:
    bench = Bench()
    bench.submit(PROMPT, 20, request_id=1, linger=linger())
    turn(bench, 10)
    kill(bench, 1)
    bench.submit([*PROMPT, 1, 2], 20, frontend=2, request_id=5, num_prompt_tokens=5, linger=linger(), admitted_ns=1)
    bench.run_dry()
    assert bench.received(5, frontend=2).token_ids == expected_tokens([*PROMPT, 1, 2], 18, 97)
    bench.close()


@pytest.mark.parametrize("has_ended", [False, True])
def test_stream_without_a_reader_is_freed_when_its_time_is_up(has_ended: bool) -> None:
    bench = Bench()
    bench.submit(PROMPT, 20 if has_ended else 200, request_id=1, linger=linger())
    turn(bench, 4)
    kill(bench, 1)
    turn(bench, 30)
    bench.now_s += LINGER_S - 0.1
    assert is_kept(bench)
    assert bench.engine.next_turn_s() <= 0.11
    bench.now_s += 0.2
    bench.turn()
    assert not is_kept(bench)
    assert (bench.board.lingering_streams, bench.board.lingering_bytes) == (0, 0)
    assert bench.requests.table.num_open == 0
    bench.close()


def test_stream_that_is_read_does_not_expire_before_it_ends() -> None:
    bench = Bench()
    bench.submit(PROMPT, 30, request_id=1, linger=linger())
    turn(bench, 4)
    bench.now_s += 10 * LINGER_S
    bench.run_dry()
    assert bench.received(1).finishes == [Finish.LENGTH]
    assert is_kept(bench)
    bench.now_s += LINGER_S + 0.1
    bench.turn()
    assert not is_kept(bench)
    bench.close()


@pytest.mark.parametrize(
    ("keep", "num_generated"), [(Keep.NOTHING, None), (Keep.TOKENS, 3), (Keep.ALL, 20)], ids=lambda value: str(value)
)
def test_cancel_says_what_stays(keep: Keep, num_generated: int | None) -> None:
    bench = Bench()
    bench.submit(PROMPT, 20, request_id=1, linger=linger())
    while len(bench.received(1).token_ids) < 3:
        bench.turn()
    bench.link.arrivals.append(Cancellation(1, 1, 0, keep))
    bench.run_dry()
    assert is_kept(bench) == (num_generated is not None)
    if num_generated is not None:
        bench.submit(PROMPT, 20, frontend=2, request_id=5, linger=linger())
        bench.run_dry()
        received = bench.received(5, frontend=2)
        assert received.token_ids == expected_tokens(PROMPT, 20, 97)[:num_generated]
        assert received.finishes == [Finish.LENGTH]
    bench.close()


def test_another_tenants_question_finds_nothing_and_drops_nothing() -> None:
    bench = Bench()
    bench.submit(PROMPT, 20, request_id=1, linger=linger())
    turn(bench, 4)
    assert not is_kept(bench, tenant=b"other")
    assert ask(bench, tenant=b"other", action="drop").finishes == [Finish.REJECTED]
    assert not is_kept(bench, stream="other")
    assert is_kept(bench)
    bench.run_dry()
    bench.close()


def test_dropped_stream_frees_its_pages_and_ends_its_reader() -> None:
    bench = Bench()
    for choice in range(2):
        bench.submit([*PROMPT, choice], 200, request_id=choice, linger=linger(choice=choice))
    turn(bench, 6)
    assert ask(bench, action="drop").finishes == [Finish.STOP]
    assert [bench.received(request_id).finishes for request_id in range(2)] == [[Finish.FAILED]] * 2
    assert not is_kept(bench)
    bench.run_dry()
    assert bench.board.requests_cancelled == 2
    assert bench.board.lingering_bytes == 0
    bench.close()


def test_failure_and_expiry_are_repeated_to_the_next_reader() -> None:
    bench = Bench()
    bench.submit(PROMPT, 200, request_id=1, linger=linger(), timeout_ms=5000)
    turn(bench, 6)
    kill(bench, 1)
    bench.now_s += 5.1
    bench.turn()
    bench.submit(PROMPT, 200, frontend=2, request_id=5, linger=linger())
    bench.turn()
    received = bench.received(5, frontend=2)
    assert received.finishes == [Finish.EXPIRED]
    assert received.token_ids == expected_tokens(PROMPT, 200, 97)[: len(received.token_ids)]
    bench.close()


def test_log_probabilities_are_repeated() -> None:
    bench = Bench()
    sampling = Sampling(temperature=1.0, seed=5, num_logprobs=2)
    bench.submit(PROMPT, 12, request_id=1, sampling=sampling, linger=linger())
    bench.run_dry()
    bench.submit(PROMPT, 12, frontend=2, request_id=5, sampling=sampling, linger=linger())
    bench.run_dry()
    bench.submit(PROMPT, 12, request_id=2, sampling=sampling)
    bench.run_dry()
    first, second = bench.received(1), bench.received(5, frontend=2)
    assert second.token_ids == first.token_ids
    assert second.logprobs == first.logprobs
    assert None not in second.logprobs
    bench.close()


def test_new_stream_takes_the_place_of_one_that_has_ended_but_of_none_that_runs() -> None:
    bench = Bench()
    lingering = bench.requests.streams
    lingering._max_streams = 2
    for number in range(3):
        bench.submit(PROMPT, 8, request_id=number, linger=linger(f"s{number}"))
        bench.run_dry()
        bench.now_s += 1.0
    assert [is_kept(bench, f"s{number}") for number in range(3)] == [False, True, True]
    for number in (3, 4):
        bench.submit(PROMPT, 200, request_id=number, linger=linger(f"s{number}"))
        turn(bench, 4)
    bench.submit(PROMPT, 8, request_id=5, linger=linger("s5"))
    bench.turn()
    refused = bench.received(5)
    assert refused.finishes == [Finish.REJECTED]
    assert refused.failure is not None
    assert (refused.failure.code, refused.failure.limit) == (FailureCode.OVERLOADED, 2)
    bench.cancel(3)
    bench.cancel(4)
    bench.run_dry()
    bench.close()


def test_draining_backend_drops_what_nobody_reads() -> None:
    bench = Bench()
    bench.submit(PROMPT, 200, request_id=1, linger=linger("gone"))
    bench.submit([5, 6], 12, frontend=3, request_id=2, linger=linger("read"))
    turn(bench, 4)
    kill(bench, 1)
    bench.engine._intake.is_draining = True
    bench.run_dry()
    assert bench.received(2, frontend=3).token_ids == expected_tokens([5, 6], 12, 97)
    assert bench.requests.table.num_open == 0
    bench.close()


def test_request_that_shares_its_sequence_lingers_alone() -> None:
    bench = Bench()
    bench.submit(PROMPT, 20, request_id=1, may_share=True, linger=linger())
    bench.submit(PROMPT, 40, frontend=3, request_id=2, may_share=True)
    turn(bench, 6)
    kill(bench, 1)
    bench.submit(PROMPT, 20, frontend=2, request_id=5, linger=linger())
    bench.run_dry()
    assert bench.received(5, frontend=2).token_ids == expected_tokens(PROMPT, 20, 97)
    assert bench.received(2, frontend=3).token_ids == expected_tokens(PROMPT, 40, 97)
    assert bench.board.requests_coalesced == 1
    bench.close()


def test_recording_of_a_resumed_stream_can_be_read() -> None:
    recorded = Recorded()
    bench = recorded.bench
    bench.submit(PROMPT, 20, request_id=1, linger=linger())
    turn(bench, 6)
    kill(bench, 1)
    turn(bench, 3)
    bench.submit(PROMPT, 20, frontend=2, request_id=5, linger=linger())
    bench.run_dry()
    names = {(event.frontend, event.request_id) for _, event in recorded.life().events if hasattr(event, "request_id")}
    assert {(1, 1), (2, 5)} <= names
    assert all(frontend in (1, 2, NO_READER) for frontend, _ in names)
    recorded.close()


class LingeringMachine(RuleBasedStateMachine):
    """Frontends come and go. A stream's reader has received the beginning of the answer, and the last one all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_pages=24, max_running=3)
        self.frontend = 1
        self.next_id = 0
        self.streams: dict[int, tuple[list[int], int]] = {}
        self.readers: dict[int, tuple[int, int]] = {}

    @initialize()
    def begin(self) -> None:
        self.submit(prompt=[1, 2, 3], max_tokens=9)

    @rule(prompt=st.lists(st.integers(0, 96), min_size=1, max_size=9), max_tokens=st.integers(1, 24))
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        if len(self.streams) < 12:
            self.streams[len(self.streams)] = (prompt, max_tokens)
            self._read(len(self.streams) - 1)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self._read(data.draw(st.sampled_from(sorted(self.streams))))

    def _read(self, stream: int) -> None:
        prompt, max_tokens = self.streams[stream]
        self.next_id += 1
        self.readers[stream] = (self.frontend, self.next_id)
        name = linger(str(stream))
        self.bench.submit(prompt, max_tokens, frontend=self.frontend, request_id=self.next_id, linger=name)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        frontend, request_id = self.readers.pop(data.draw(st.sampled_from(sorted(self.readers))))
        if not self.bench.received(request_id, frontend).finishes:  # the link drops a cancel that comes later
            self.bench.link.arrivals.append(Cancellation(frontend, request_id, 0, Keep.ALL))
            self.bench.turn()

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        turn(self.bench, count)

    @rule()
    def frontend_dies(self) -> None:
        self.bench.turn()
        kill(self.bench, self.frontend)
        self.frontend += 1
        self.readers.clear()

    @invariant()
    def what_was_read_is_a_beginning(self) -> None:
        for stream, (frontend, request_id) in self.readers.items():
            prompt, max_tokens = self.streams[stream]
            tokens = self.bench.received(request_id, frontend).token_ids
            assert tokens == expected_tokens(prompt, max_tokens, 97)[: len(tokens)]

    def teardown(self) -> None:
        for stream in self.streams:
            self._read(stream)
        self.bench.run_dry()
        for stream, (prompt, max_tokens) in self.streams.items():
            frontend, request_id = self.readers[stream]
            assert self.bench.received(request_id, frontend).token_ids == expected_tokens(prompt, max_tokens, 97)
        assert self.bench.board.requests_accepted == len(self.streams)
        assert self.bench.board.requests_finished == len(self.streams)
        self.bench.now_s += LINGER_S + 1.0
        self.bench.turn()
        assert self.bench.board.lingering_bytes == 0
        self.bench.close()


TestLingeringMachine = LingeringMachine.TestCase
TestLingeringMachine.settings = settings(max_examples=30, stateful_step_count=25)
