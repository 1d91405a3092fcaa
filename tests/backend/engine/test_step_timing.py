"""A step is planned when the device will soon want it, and not before."""

from __future__ import annotations

import pytest

from penstock.backend.engine.step_timing import StepTiming
from tests.backend.harness import Bench, expected_tokens


def paced(*steps: tuple[int, float], plan_s: float = 0.0, launch_s: float = 0.0) -> StepTiming:
    """Steps of so many tokens have taken so long."""
    step_timing = StepTiming()
    for num_tokens, step_s in steps:
        step_timing.note_plan(num_tokens, plan_s)
        step_timing.note_result(num_tokens, step_s, launch_s)
    return step_timing


def spare_s(step_timing: StepTiming, *sizes: int, ran_s: float = 0.0) -> float:
    for size in sizes:
        step_timing.note_plan(size, 0.0)
    return step_timing.spare_s(ran_s)


def test_an_idle_device_and_one_whose_step_nobody_knows_are_planned_for_at_once() -> None:
    assert StepTiming().spare_s(0.0) == 0.0
    assert spare_s(StepTiming(), 7) == 0.0
    assert spare_s(paced((100, 1.0)), 0) == 0.0


def test_a_plan_waits_for_what_is_left_of_the_steps_in_flight() -> None:
    assert spare_s(paced((7, 1.0)), 7) == pytest.approx(1.0, abs=0.01)
    assert spare_s(paced((7, 1.0)), 7, ran_s=0.75) == pytest.approx(0.25, abs=0.01)
    assert spare_s(paced((7, 1.0)), 7, 7, ran_s=0.75) == pytest.approx(1.25, abs=0.01)
    assert spare_s(paced((7, 1.0)), 7, ran_s=0.999) == spare_s(paced((7, 1.0)), 7, ran_s=3.0) == 0.0


def test_the_shortest_of_the_last_steps_counts() -> None:
    assert spare_s(paced((7, 0.5), (7, 2.0), (7, 9.0)), 7) == pytest.approx(0.5, abs=0.01)
    assert spare_s(paced((7, 0.5), *[(7, 2.0)] * 4), 7) == pytest.approx(2.0, abs=0.01)


def test_a_step_of_another_size_takes_as_long_as_a_smaller_one_at_least_and_its_share_of_a_larger_one() -> None:
    assert spare_s(paced((4, 1.0)), 7) == pytest.approx(1.0, abs=0.01)
    assert spare_s(paced((10, 1.0)), 7) == pytest.approx(0.7, abs=0.01)
    assert spare_s(paced((4, 0.4), (10, 1.0)), 7) == pytest.approx(0.7, abs=0.01)
    assert spare_s(paced((4, 0.9), (10, 1.0)), 7) == pytest.approx(0.9, abs=0.01)


def test_one_slow_step_of_another_size_says_nothing_of_a_size_that_is_known_or_lies_below_a_faster_one() -> None:
    steps = (7, 2.0), (8, 0.5), (12, 0.5)
    assert spare_s(paced(*steps), 8) == pytest.approx(0.5, abs=0.01)
    assert spare_s(paced(*steps), 10) == pytest.approx(0.5, abs=0.01)
    assert spare_s(paced((7, 2.0), (10, 0.5)), 9) == pytest.approx(0.5, abs=0.01)


def test_a_step_that_takes_longer_than_thought_leaves_those_behind_it_as_long_as_they_are() -> None:
    assert spare_s(paced((7, 1.0)), 7, 7, ran_s=60.0) == pytest.approx(1.0, abs=0.01)


def test_planning_and_launching_get_twice_the_time_that_they_lately_took() -> None:
    assert spare_s(paced((7, 1.0), plan_s=0.1), 7) == pytest.approx(0.8, abs=0.01)
    assert spare_s(paced((7, 1.0), plan_s=0.1, launch_s=0.2), 7) == pytest.approx(0.4, abs=0.01)
    long_ago = paced((7, 1.0), plan_s=0.1)
    for _ in range(500):
        long_ago.note_plan(7, 0.0)
        long_ago.note_result(7, 1.0, 0.0)
    assert spare_s(long_ago, 7) == pytest.approx(1.0, abs=0.01)


def test_a_step_that_failed_or_had_no_rows_left_says_nothing() -> None:
    assert spare_s(paced((7, 1.0), (0, 0.0)), 7) == pytest.approx(1.0, abs=0.01)


def learned(bench: Bench) -> Bench:
    """A sequence runs whose steps are known to take a second; one of them is running now."""
    bench.executor.step_s = 1.0
    bench.submit([1, 2, 3], 30)
    for _ in range(6):
        bench.turn()
    assert bench.executor.num_planned == 1
    assert bench.engine.plan_due_s == pytest.approx(1.0, abs=0.1)
    return bench


def test_who_comes_while_a_step_runs_is_in_the_next_one() -> None:
    bench = learned(Bench())
    bench.submit([4, 5], 5, request_id=1)
    bench.engine.turn()
    assert bench.executor.num_planned == 1
    bench.executor.ran_s = 0.9999
    bench.engine.turn()
    assert bench.executor.num_planned == 2
    assert bench.executor.batches[-1].num_rows == 2
    assert bench.engine.plan_due_s is None
    bench.run_dry()
    assert bench.received(1).token_ids == expected_tokens([4, 5], 5, bench.vocab_size)


def test_a_step_that_ends_sooner_than_thought_is_followed_at_once() -> None:
    bench = learned(Bench())
    bench.turn()
    assert bench.executor.num_planned == 1
    bench.run_dry()
    assert bench.received().token_ids == expected_tokens([1, 2, 3], 30, bench.vocab_size)


def test_nothing_is_due_where_nothing_is_to_be_planned() -> None:
    bench = Bench()
    bench.executor.step_s = 1.0
    bench.submit([1, 2, 3], 3)
    for _ in range(3):  # the last token's step is running
        bench.turn()
    bench.executor.ran_s = 0.9999
    bench.engine.turn()
    assert bench.engine.plan_due_s is None
    assert bench.engine.next_turn_s() == 0.5
    bench.run_dry()
