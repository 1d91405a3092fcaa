"""Log probabilities and sampling parameters of requests, through the whole engine."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from penstock.backend.forward_pass import SamplingParams
from penstock.shm.messages import Failure, FailureCode, Finish, Sampling
from tests.backend.harness import Bench, expected_tokens

PROMPT = [5, 6, 7, 8, 9]


def test_each_token_has_logprobs_also_for_late_subscribers() -> None:
    bench = Bench()
    sampling = Sampling(temperature=0.0, num_logprobs=3)
    bench.submit(PROMPT, 8, request_id=0, sampling=sampling, may_share=True)
    bench.submit(PROMPT, 8, request_id=1)
    for _ in range(5):
        bench.turn()
    bench.submit(PROMPT, 8, request_id=2, sampling=sampling, may_share=True)
    bench.run_dry()
    first, plain, late = (bench.received(request_id) for request_id in range(3))
    assert bench.board.requests_coalesced == 1
    assert first.token_ids == plain.token_ids == late.token_ids
    assert late.logprobs == first.logprobs
    assert plain.logprobs == [None] * 8
    for token_id, entry in zip(first.token_ids, first.logprobs, strict=True):
        assert entry is not None
        assert (entry.top_ids[0], entry.rank) == (token_id, 1)
        assert entry.top_logprobs[0] == entry.logprob > entry.top_logprobs[1]
        assert len(entry.top_ids) == 3


def test_named_tokens_are_reported_to_all_subscribers_of_their_sequence() -> None:
    bench = Bench()
    named = Sampling(temperature=0.0, num_logprobs=0, logprob_token_ids=(9, 4, 7))
    for request_id, sampling in enumerate((named, named, msgspec.structs.replace(named, logprob_token_ids=(9,)))):
        bench.submit(PROMPT, 4, request_id=request_id, sampling=sampling, may_share=True)
    bench.submit(PROMPT, 4, request_id=3, sampling=Sampling(temperature=0.0, num_logprobs=20), may_share=True)
    bench.run_dry()
    first, shared, other, top = (bench.received(request_id).logprobs for request_id in range(4))
    assert first == shared
    for mine, few, likeliest in zip(first, other, top, strict=True):
        assert mine is not None
        assert few is not None
        assert likeliest is not None
        assert (mine.top_ids, few.top_ids) == ((9, 4, 7), (9,))
        known = dict(zip(likeliest.top_ids, likeliest.top_logprobs, strict=True))
        assert known.keys() & set(mine.top_ids)
        for token_id, value in zip(mine.top_ids, mine.top_logprobs, strict=True):
            assert value == known[token_id] if token_id in known else value <= min(known.values())
    bench.submit(PROMPT, 4, request_id=4, sampling=msgspec.structs.replace(named, logprob_token_ids=(1 << 30,)))
    bench.run_dry()
    assert (bench.received(4).failure or Failure(0, 255)).code == FailureCode.BAD_TOKEN


def test_each_request_receives_its_own_number_of_top_logprobs() -> None:
    bench = Bench()
    for request_id, count in enumerate((0, 5)):
        bench.submit(PROMPT, 4, request_id=request_id, sampling=Sampling(temperature=0.0, num_logprobs=count))
    bench.run_dry()
    for request_id, count in enumerate((0, 5)):
        entries = bench.received(request_id).logprobs
        assert [len(entry.top_ids) for entry in entries if entry is not None] == [count] * 4


@pytest.mark.parametrize(("may_share", "num_kept"), [(True, 5), (False, None)])
def test_logprobs_are_kept_only_if_a_late_subscriber_may_come(may_share: bool, num_kept: int | None) -> None:
    bench = Bench()
    bench.submit(PROMPT, 20, sampling=Sampling(temperature=0.0, num_logprobs=1), may_share=may_share)
    while len(bench.received().token_ids) < 5:
        bench.turn()
    kept = bench.requests.table.of_frontend(1)[0].sequence.past_logprobs
    assert (len(kept) if kept is not None else None) == num_kept
    assert None not in bench.received().logprobs


def test_wire_and_pass_have_the_same_sampling_parameters() -> None:
    assert Sampling.__struct_fields__ == tuple(SamplingParams.__slots__)


@pytest.mark.parametrize("num_logprobs", [-1, 1])
def test_scored_prompt_receives_logprobs_of_each_token(num_logprobs: int) -> None:
    bench = Bench()
    true_start = expected_tokens(PROMPT, 3, bench.vocab_size)
    prompt = [*PROMPT, *true_start, 1, 2]
    sampling = Sampling(temperature=0.0, num_logprobs=num_logprobs)
    bench.submit(prompt, 4, request_id=0, sampling=sampling, num_prompt_logprobs=2, may_share=True)
    bench.submit(prompt, 4, request_id=1, sampling=sampling, may_share=True)
    bench.run_dry()
    scored, plain = bench.received(0), bench.received(1)
    assert scored.token_ids == plain.token_ids == expected_tokens(prompt, 4, bench.vocab_size)
    assert [entry.event for entry in scored.prompt_logprobs] == list(range(1, len(prompt)))
    assert all(len(entry.top_ids) == 2 for entry in scored.prompt_logprobs)
    likeliest = [entry.rank == 1 for entry in scored.prompt_logprobs]
    assert likeliest[len(PROMPT) - 1 : len(PROMPT) + 2] == [True] * 3
    assert scored.prompt_logprobs[len(PROMPT) - 1].top_ids[0] == true_start[0]
    assert [entry is not None for entry in scored.logprobs] == [num_logprobs >= 0] * 4
    assert plain.prompt_logprobs == []


def test_scored_prompt_takes_as_many_steps_as_any_other_and_its_pages_are_shared() -> None:
    prompt = [*range(30)]
    num_steps = []
    for num_prompt_logprobs in (-1, 0):
        bench = Bench(max_batch_tokens=16)
        bench.submit(prompt, 1, num_prompt_logprobs=num_prompt_logprobs)
        bench.run_dry()
        num_steps.append(len(bench.executor.batches))
        assert len(bench.received().prompt_logprobs) == (29 if num_prompt_logprobs >= 0 else 0)
    assert num_steps == [2, 2]
    bench.submit(prompt, 1, request_id=1)
    bench.submit(prompt, 1, request_id=2, num_prompt_logprobs=0)
    bench.run_dry()
    plain, scored = bench.received(1).started, bench.received(2).started
    assert plain is not None
    assert scored is not None
    assert plain.cached_tokens >= 28
    assert scored.cached_tokens == 0
    assert bench.received(2).prompt_logprobs == bench.received(0).prompt_logprobs


def test_what_was_scored_before_a_preemption_is_neither_computed_nor_sent_again() -> None:
    """The pages of the scored part stay cached."""
    bench = Bench(num_pages=10, page_size=4, max_batch_tokens=8)
    bench.submit([*range(20)], 1, num_prompt_logprobs=1)
    while not bench.received().prompt_logprobs:
        bench.turn()
    sequence = bench.requests.table.of_frontend(1)[0].sequence
    num_scored = sequence.num_scored
    assert num_scored == len(bench.received().prompt_logprobs) == 8
    bench.scheduler._preemption.preempt(sequence)
    bench.run_dry()
    received = bench.received()
    assert [entry.event for entry in received.prompt_logprobs] == list(range(1, 20))
    assert received.token_ids == expected_tokens([*range(20)], 1, bench.vocab_size)
    assert received.started is not None
    assert received.started.cached_tokens == num_scored


def test_penalties_do_not_count_the_tokens_of_a_scored_prompt() -> None:
    sampling = Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    bench = Bench()
    for request_id, num_prompt_logprobs in enumerate((-1, 0)):
        bench.submit(PROMPT, 8, request_id=request_id, sampling=sampling, num_prompt_logprobs=num_prompt_logprobs)
    bench.run_dry()
    assert bench.received(1).token_ids == bench.received(0).token_ids


@pytest.mark.parametrize("field", ["dry_multiplier", "xtc_probability", "top_n_sigma", "dynatemp_range"])
def test_llama_cpp_sampling_is_refused_by_a_pass_that_does_not_know_it(field: str) -> None:
    bench = Bench()
    bench.requests.intake.limits = replace(bench.requests.intake.limits, has_llama_cpp_sampling=False)
    bench.submit(PROMPT, 1, sampling=Sampling(**{field: 0.5}))  # type: ignore[arg-type]
    bench.run_dry()
    failure = bench.received().failure
    assert failure is not None
    assert (failure.code, failure.text) == (FailureCode.NOT_SAMPLED, field)


@pytest.mark.parametrize("ids", [(3,), (-2, -1), (1 << 20, -1), ()])
def test_breakers_that_are_no_runs_of_tokens_are_refused(ids: tuple[int, ...]) -> None:
    bench = Bench()
    breakers = np.array(ids, np.int32).tobytes() or b"\1\2"
    bench.submit(PROMPT, 1, sampling=Sampling(dry_multiplier=1.0, dry_breakers=breakers))
    bench.run_dry()
    failure = bench.received().failure
    assert failure is not None
    assert failure.code == FailureCode.BAD_TOKEN


def test_prompt_is_not_scored_by_a_pass_that_cannot() -> None:
    bench = Bench()
    bench.requests.intake.limits = replace(bench.requests.intake.limits, scores_prompts=False)
    bench.submit(PROMPT, 1, num_prompt_logprobs=0)
    bench.submit(PROMPT, 1, request_id=1)
    bench.run_dry()
    failure = bench.received().failure
    assert failure is not None
    assert failure.code == FailureCode.NOT_SCORED
    assert bench.received().finishes == [Finish.REJECTED]
    assert bench.received(1).finishes == [Finish.LENGTH]
