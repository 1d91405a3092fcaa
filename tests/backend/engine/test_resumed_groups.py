"""Requests that shared a sequence come back as a group: computed once, and nobody receives another frontend's claim."""

from __future__ import annotations

from itertools import permutations

import pytest

from penstock.backend.scheduling.restart_grace import RestartGrace
from penstock.shm.link.events import Cancellation
from penstock.shm.messages import Finish, Sampling
from tests.backend.engine.duplicates import PROMPT, rows_for, share
from tests.backend.harness import Bench, expected_tokens

NUM_TOKENS = 12


def resume(bench: Bench, request_id: int, got: list[int], *, frontend: int = 1, **options: object) -> None:
    """Submit again a request whose stream has received these tokens."""
    options = {"admitted_ns": 1 + request_id} | options
    share(bench, request_id, NUM_TOKENS, PROMPT + got, num_prompt_tokens=3, frontend=frontend, **options)


def whole(bench: Bench) -> list[int]:
    return expected_tokens(PROMPT, NUM_TOKENS, bench.vocab_size)


def num_sequences(bench: Bench) -> int:
    bench.engine.turn()
    return bench.scheduler.num_running + bench.scheduler.num_waiting


@pytest.mark.parametrize("order", [*permutations(((1, 6), (2, 4), (1, 5), (2, 0)))])
def test_members_of_two_frontends_share_one_sequence_whatever_each_has_received(
    order: tuple[tuple[int, int], ...],
) -> None:
    bench = Bench()
    tokens = whole(bench)
    for request_id, (frontend, num_received) in enumerate(order):
        resume(bench, request_id, tokens[:num_received], frontend=frontend)
    assert num_sequences(bench) == 1
    bench.run_dry()
    for request_id, (frontend, num_received) in enumerate(order):
        assert bench.received(request_id, frontend).token_ids == tokens[num_received:]
    assert bench.board.requests_coalesced == 3


@pytest.mark.parametrize("sampling", [Sampling(temperature=20.0, seed=5), Sampling(temperature=0.0, num_logprobs=2)])
@pytest.mark.parametrize("lengths", [(6, 4, 5), (0, 6), (3, 3)])
def test_members_with_seeds_or_log_probabilities_are_computed_once(
    sampling: Sampling, lengths: tuple[int, ...]
) -> None:
    alone = Bench()
    share(alone, 0, NUM_TOKENS, sampling=sampling)
    alone.run_dry()
    expected = alone.received(0)
    bench = Bench()
    for request_id, length in enumerate(lengths):
        resume(bench, request_id, expected.token_ids[:length], sampling=sampling)
    assert num_sequences(bench) == 1
    bench.run_dry()
    for request_id, length in enumerate(lengths):
        assert bench.received(request_id).token_ids == expected.token_ids[length:]
        assert bench.received(request_id).logprobs == expected.logprobs[length:]


def test_tokens_of_one_frontend_are_not_computed_again_for_its_own_streams() -> None:
    bench = Bench()
    for request_id, length in enumerate((9, 7, 0)):
        resume(bench, request_id, whole(bench)[:length])
    bench.run_dry()
    assert [len(bench.received(i).token_ids) for i in range(3)] == [3, 5, 12]
    assert bench.board.generated_tokens == NUM_TOKENS - 9


@pytest.mark.parametrize("is_forged_first", [True, False])
def test_forged_claim_reaches_only_the_stream_that_it_came_with(is_forged_first: bool) -> None:
    bench = Bench()
    tokens = whole(bench)
    honest = [(0, tokens[:2], 2), (1, [], 2), (2, tokens[:5], 3)]
    forged = [(3, [*tokens[:3], 66, 66, 66], 1)]
    for request_id, got, frontend in forged + honest if is_forged_first else honest + forged:
        resume(bench, request_id, got, frontend=frontend)
    assert num_sequences(bench) <= 2
    share(bench, 4, NUM_TOKENS, frontend=4)
    bench.run_dry()
    for request_id, got, frontend in honest:
        assert bench.received(request_id, frontend).token_ids == tokens[len(got) :]
    assert bench.received(4, 4).token_ids == tokens
    lie = PROMPT + forged[0][1]
    assert bench.received(3, 1).token_ids == expected_tokens(lie, NUM_TOKENS - 6, bench.vocab_size)
    assert bench.board.requests_accepted == bench.board.requests_finished == 5


def test_separated_request_can_be_cancelled_and_keeps_its_deadline() -> None:
    for is_cancelled in (True, False):
        bench = Bench()
        resume(bench, 0, [], frontend=2)
        resume(bench, 1, [66] * 6, timeout_ms=3000)
        while bench.scheduler.num_running < 2:
            bench.turn()
        bench.now_s = 4.0
        if is_cancelled:
            bench.link.arrivals.append(Cancellation(1, 1))
        bench.run_dry()
        assert bench.received(1).finishes == ([] if is_cancelled else [Finish.EXPIRED])
        assert bench.received(0, 2).token_ids == whole(bench)
        assert bench.board.requests_accepted == 2


def test_new_equal_request_joins_a_resumed_sequence_of_its_own_frontend_and_not_of_another() -> None:
    bench = Bench()
    resume(bench, 0, whole(bench)[:6])
    bench.turn()
    share(bench, 1, NUM_TOKENS)
    assert num_sequences(bench) == 1
    share(bench, 0, NUM_TOKENS, frontend=2)
    share(bench, 1, NUM_TOKENS, frontend=2)
    assert num_sequences(bench) == 2
    bench.run_dry()
    assert bench.received(1).token_ids == bench.received(0, 2).token_ids == bench.received(1, 2).token_ids
    assert bench.received(1).token_ids == whole(bench)


def test_new_equal_request_does_not_shorten_a_resumed_group() -> None:
    bench = Bench()
    resume(bench, 0, whole(bench)[:6])
    share(bench, 1, NUM_TOKENS, frontend=2)
    bench.run_dry()
    assert bench.received(0).token_ids == whole(bench)[6:]
    assert bench.received(1, 2).token_ids == whole(bench)
    assert bench.board.generated_tokens == NUM_TOKENS - 6 + NUM_TOKENS  # nothing of the group is computed again


def test_frontend_that_registers_anew_joins_the_sequence_that_others_kept_running() -> None:
    bench = Bench()
    share(bench, 0, NUM_TOKENS, frontend=2)
    for _ in range(6):
        bench.turn()
    for request_id, length in ((1, 2), (2, 0), (3, 1)):
        resume(bench, request_id, whole(bench)[:length], frontend=3)
    assert num_sequences(bench) == 1
    bench.run_dry()
    for request_id, length in ((1, 2), (2, 0), (3, 1)):
        assert bench.received(request_id, 3).token_ids == whole(bench)[length:]
    assert bench.executor.num_rows_run == rows_for(PROMPT, NUM_TOKENS)


def test_nothing_runs_at_the_start_until_all_seem_to_have_come_back() -> None:
    bench = Bench()
    restart_grace = RestartGrace(bench.clock, start_s=0.5, quiet_s=0.1, longest_s=2.0)
    bench.requests.table.restart_grace = restart_grace
    resume(bench, 0, whole(bench)[:6])
    bench.turn()
    bench.submit([8], 3, request_id=7)
    bench.now_s = 0.45
    bench.turn()
    resume(bench, 1, [], frontend=2)
    bench.turn()
    assert bench.board.waiting == 2
    assert bench.executor.batches == []
    bench.now_s = 0.5
    assert restart_grace.next_due_s(1.0) == pytest.approx(0.05)
    bench.now_s = 0.56
    bench.turn()
    assert len(bench.executor.batches[0].slots) == 2
    bench.run_dry()
    assert bench.received(0).token_ids == whole(bench)[6:]
    assert bench.received(1, 2).token_ids == whole(bench)
    assert bench.received(7).token_ids == expected_tokens([8], 3, bench.vocab_size)


def test_sequences_of_a_replica_run_as_soon_as_none_has_come_for_a_moment() -> None:
    bench = Bench()
    restart_grace = RestartGrace(bench.clock, start_s=0.5, quiet_s=0.1, longest_s=2.0, later_quiet_s=0.005)
    bench.requests.table.restart_grace = restart_grace
    bench.now_s = 10.0
    resume(bench, 0, whole(bench)[:6])
    bench.turn()
    assert bench.executor.batches == []
    assert restart_grace.next_due_s(1.0) == pytest.approx(0.005)
    bench.now_s = 10.01
    bench.turn()
    assert bench.executor.batches
    bench.run_dry()
    assert bench.received(0).token_ids == whole(bench)[6:]


def test_false_resumptions_that_never_end_hold_nothing_for_long() -> None:
    bench = Bench()
    bench.requests.table.restart_grace = RestartGrace(bench.clock, start_s=0.5, quiet_s=0.1, longest_s=2.0)
    for request_id in range(100):
        bench.submit([1, request_id % 90], 1, request_id=request_id, admitted_ns=1)
        bench.turn()
        bench.now_s += 0.05
        if bench.executor.batches:
            break
    assert bench.now_s < 2.2
    bench.submit([8], 3, request_id=200)
    bench.run_dry()
    assert bench.received(200).token_ids == expected_tokens([8], 3, bench.vocab_size)


def test_sequences_of_a_leaving_replica_that_come_one_by_one_hold_each_other_only_for_a_moment() -> None:
    bench = Bench()
    restart_grace = RestartGrace(bench.clock, start_s=0.5, quiet_s=0.1, longest_s=2.0, later_quiet_s=0.005)
    bench.requests.table.restart_grace = restart_grace
    for number in range(14):
        bench.now_s = 10.0 + 0.004 * number
        resume(bench, number, whole(bench)[: 6 + number % 2])
        bench.turn()
        assert bool(bench.executor.batches) == (number == 13)
