import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tools.bench.load_generator.workload import Lengths, Workload, parse_lengths
from penstock.tools.bench.options import parse_counts


@given(st.integers(1, 60), st.integers(), st.floats(0, 1), st.floats(0, 1))
def test_shares_are_exact_to_one_request(count: int, seed: int, duplicates: float, drop: float) -> None:
    workload = Workload(Lengths(8, 8), Lengths(4, 9), vocab_size=1000, duplicates=duplicates, drop=drop)
    requests = workload.draw(count, seed)
    assert len(requests) == count
    assert sum(request.drop is not None for request in requests) == round(drop * count)
    assert len({request.prompt for request in requests}) == count - min(round(duplicates * count), count - 1)


@given(st.integers(1, 40), st.integers())
def test_same_seed_draws_the_same_requests(count: int, seed: int) -> None:
    workload = Workload(Lengths(1, 20), Lengths(1, 9), vocab_size=None, duplicates=0.3, drop=0.3, rate_per_s=5.0)
    assert workload.draw(count, seed) == workload.draw(count, seed)


@given(st.integers(1, 40), st.integers())
def test_client_hangs_up_before_its_answer_ends(count: int, seed: int) -> None:
    requests = Workload(Lengths(1, 1), Lengths(1, 12), vocab_size=64, drop=1.0).draw(count, seed)
    assert all(request.drop is not None for request in requests)
    assert all(0 <= request.drop.after_events < max(request.output_tokens, 2) for request in requests if request.drop)


@given(st.integers(0, 1000), st.integers(8, 50_000))
def test_lengths_and_token_ids_stay_in_bounds(seed: int, vocab_size: int) -> None:
    for request in Workload(Lengths(2, 5), Lengths(3, 7), vocab_size=vocab_size).draw(20, seed):
        assert 2 <= len(request.prompt) <= 5
        assert 3 <= request.output_tokens <= 7
        assert all(isinstance(token, int) and 0 <= token < vocab_size for token in request.prompt)


def test_arrivals_are_a_poisson_process_of_the_given_rate() -> None:
    due_s = [request.due_s for request in Workload(Lengths(1, 1), Lengths(1, 1), rate_per_s=20.0).draw(4000, 7)]
    gaps_s = [after - before for before, after in pairwise(due_s)]
    assert due_s[0] == 0.0
    assert all(gap_s >= 0 for gap_s in gaps_s)
    # Exponential gaps: mean and standard deviation are both 1 / rate; 4000 draws bring them within 5 %.
    assert statistics.mean(gaps_s) == pytest.approx(0.05, rel=0.05)
    assert statistics.stdev(gaps_s) == pytest.approx(0.05, rel=0.05)


def test_requests_of_a_closed_loop_are_all_due_at_once() -> None:
    assert {request.due_s for request in Workload(Lengths(1, 1), Lengths(1, 1)).draw(9, 0)} == {0.0}


def test_text_prompt_has_one_word_per_token() -> None:
    (request,) = Workload(Lengths(17, 17), Lengths(1, 1)).draw(1, 0)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 17


def test_lengths_are_parsed() -> None:
    assert parse_lengths("64") == Lengths(64, 64)
    assert parse_lengths("16:128") == Lengths(16, 128)


@pytest.mark.parametrize("text", ["", "0", "-1", "8:", "8:4", "a:b", "1:2:3"])
def test_bad_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="length"):
        parse_lengths(text)


def test_counts_are_parsed() -> None:
    assert parse_counts("1,4, 16") == (1, 4, 16)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "x", "-4", "5000"])
def test_bad_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list of counts"):
        parse_counts(text)
