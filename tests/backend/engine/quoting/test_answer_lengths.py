"""Expected lengths of answers, against averages over the same answers."""

from __future__ import annotations

import random

import pytest

from penstock.backend.engine.quoting.history import AnswerLengths


def known(*lengths: int, cut: tuple[int, ...] = ()) -> AnswerLengths:
    answer_lengths = AnswerLengths()
    for length in lengths:
        answer_lengths.note(length, is_cut=False)
    for length in cut:
        answer_lengths.note(length, is_cut=True)
    return answer_lengths


def test_without_a_history_nothing_is_expected() -> None:
    assert AnswerLengths().expected(0, 100) is None


def test_expectation_is_the_average_of_the_lengths_up_to_the_limit() -> None:
    lengths = [random.Random(1).randint(1, 300) for _ in range(200)]
    for limit in (1, 50, 1000):
        average = sum(min(length, limit) for length in lengths) / len(lengths)
        assert known(*lengths).expected(0, limit) == pytest.approx(average, abs=0.51)


def test_answer_in_progress_is_compared_with_answers_that_were_longer() -> None:
    lengths = [10, 20, 30, 40]
    assert known(*lengths).expected(20, 1000) == 35
    assert known(*lengths).expected(29, 1000) == 35
    assert known(*lengths).expected(40, 1000) == 80, "as long again, if it is longer than all others"
    assert known(*lengths).expected(40, 60) == 60


def test_answers_cut_by_their_limit_count_as_longer() -> None:
    # Of the answers that reach 10 tokens, which all do, half end at 20; the cut ones would have done the same.
    assert known(20, 30, cut=(10, 10)).expected(0, 1000) == 25
    assert known(cut=(10, 10)).expected(0, 40) == 40, "none is known to end"


def test_longest_of_several_answers_is_longer_than_one() -> None:
    lengths = list(range(1, 101))
    assert known(*lengths).expected_longest(1, 1000) in (50, 51)
    assert known(*lengths).expected_longest(4, 1000) == pytest.approx(80, abs=2)


def test_old_answers_are_forgotten() -> None:
    answer_lengths = known(*[1000] * 50)
    for _ in range(256):
        answer_lengths.note(5, is_cut=False)
    assert answer_lengths.expected(0, 10_000) == 5
