"""A step is planned shortly before the device is free, not earlier."""

from __future__ import annotations

import pytest

from penstock.backend.engine.steps.step_timing import StepTiming
from tests.backend.harness import Bench, expected_tokens


def timed(*steps: tuple[int, float], plan_s: float = 0.0, launch_s: float = 0.0) -> StepTiming:
    """A StepTiming that has seen steps of (tokens, seconds)."""
    step_timing = StepTiming()
    for num_tokens, step_s in steps:
        step_timing.note_plan(num_tokens, plan_s)
        step_timing.note_result(num_tokens, step_s, launch_s)
    return step_timing


def spare_s(step_timing: StepTiming, *sizes: int, ran_s: float = 0.0) -> float:
    for size in sizes:
        step_timing.note_plan(size, 0.0)
    return step_timing.spare_s(ran_s)


def test_plan_is_due_at_once_for_an_idle_device_and_for_a_step_of_unknown_length() -> None:
    assert StepTiming().spare_s(0.0) == 0.0
    assert spare_s(StepTiming(), 7) == 0.0
    assert spare_s(timed((100, 1.0)), 0) == 0.0


def test_plan_behind_short_steps_is_due_at_once() -> None:
    assert spare_s(timed((7, 0.0029)), 7) == 0.0
    assert spare_s(timed((7, 0.0031)), 7) > 0.0
    assert spare_s(timed((7, 0.0029)), 7, 7) > 0.0


def test_plan_waits_for_the_rest_of_the_steps_in_flight() -> None:
    assert spare_s(timed((7, 1.0)), 7) == pytest.approx(1.0, abs=0.01)
    assert spare_s(timed((7, 1.0)), 7, ran_s=0.75) == pytest.approx(0.25, abs=0.01)
    assert spare_s(timed((7, 1.0)), 7, 7, ran_s=0.75) == pytest.approx(1.25, abs=0.01)
    assert spare_s(timed((7, 1.0)), 7, ran_s=0.999) == spare_s(timed((7, 1.0)), 7, ran_s=3.0) == 0.0


def test_shortest_recent_step_counts() -> None:
    assert spare_s(timed((7, 0.5), (7, 2.0), (7, 9.0)), 7) == pytest.approx(0.5, abs=0.01)
    assert spare_s(timed((7, 0.5), *[(7, 2.0)] * 4), 7) == pytest.approx(2.0, abs=0.01)


def test_unseen_size_is_estimated_between_a_smaller_and_a_share_of_a_larger_one() -> None:
    assert spare_s(timed((4, 1.0)), 7) == pytest.approx(1.0, abs=0.01)
    assert spare_s(timed((10, 1.0)), 7) == pytest.approx(0.7, abs=0.01)
    assert spare_s(timed((4, 0.4), (10, 1.0)), 7) == pytest.approx(0.7, abs=0.01)
    assert spare_s(timed((4, 0.9), (10, 1.0)), 7) == pytest.approx(0.9, abs=0.01)


def test_slow_step_of_another_size_does_not_raise_the_estimate_of_a_known_size() -> None:
    steps = (7, 2.0), (8, 0.5), (12, 0.5)
    assert spare_s(timed(*steps), 8) == pytest.approx(0.5, abs=0.01)
    assert spare_s(timed(*steps), 10) == pytest.approx(0.5, abs=0.01)
    assert spare_s(timed((7, 2.0), (10, 0.5)), 9) == pytest.approx(0.5, abs=0.01)


def test_step_that_runs_longer_than_expected_does_not_shorten_those_behind_it() -> None:
    assert spare_s(timed((7, 1.0)), 7, 7, ran_s=60.0) == pytest.approx(1.0, abs=0.01)


def test_planning_and_launching_get_twice_their_recent_time() -> None:
    assert spare_s(timed((7, 1.0), plan_s=0.1), 7) == pytest.approx(0.8, abs=0.01)
    assert spare_s(timed((7, 1.0), plan_s=0.1, launch_s=0.2), 7) == pytest.approx(0.4, abs=0.01)
    long_ago = timed((7, 1.0), plan_s=0.1)
    for _ in range(500):
        long_ago.note_plan(7, 0.0)
        long_ago.note_result(7, 1.0, 0.0)
    assert spare_s(long_ago, 7) == pytest.approx(1.0, abs=0.01)


def test_late_plans_make_later_ones_earlier_for_a_while() -> None:
    step_timing = timed((7, 1.0))
    usual_s = spare_s(step_timing, 7)
    for _ in range(4):
        step_timing.note_late()
    assert step_timing.spare_s(0.0) == pytest.approx(usual_s - 0.002, abs=1e-6)
    for _ in range(1000):
        step_timing.note_late()
    assert step_timing.spare_s(0.0) >= usual_s - 0.005
    for _ in range(1000):
        step_timing.note_plan(7, 0.0)
        step_timing.note_result(7, 1.0, 0.0)
    assert step_timing.spare_s(0.0) == pytest.approx(usual_s, abs=1e-6)


def test_failed_and_empty_steps_are_not_measured() -> None:
    assert spare_s(timed((7, 1.0), (0, 0.0)), 7) == pytest.approx(1.0, abs=0.01)


def learned(bench: Bench) -> Bench:
    """A running sequence whose steps are known to take a second; one of them is running now."""
    bench.executor.step_s = 1.0
    bench.submit([1, 2, 3], 30)
    for _ in range(6):
        bench.turn()
    assert bench.executor.num_planned == 1
    assert bench.engine.plan_due_s == pytest.approx(1.0, abs=0.1)
    return bench


def test_request_that_arrives_during_a_step_is_in_the_next_one() -> None:
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


def test_step_that_ends_early_is_followed_at_once() -> None:
    bench = learned(Bench())
    bench.turn()
    assert bench.executor.num_planned == 1
    bench.run_dry()
    assert bench.received().token_ids == expected_tokens([1, 2, 3], 30, bench.vocab_size)


def test_plan_is_late_only_if_it_was_put_off_until_the_device_was_free(monkeypatch: pytest.MonkeyPatch) -> None:
    num_late = 0

    def note_late(_: StepTiming) -> None:
        nonlocal num_late
        num_late += 1

    bench = learned(Bench())
    monkeypatch.setattr(StepTiming, "note_late", note_late)
    bench.executor.ran_s = 0.9999
    bench.engine.turn()
    assert (bench.executor.num_planned, num_late) == (2, 0)
    bench.executor.ran_s = 0.0
    bench.turn()
    assert (bench.executor.num_planned, num_late) == (1, 0)
    bench.turn()
    assert (bench.executor.num_planned, num_late) == (1, 1)


def test_no_plan_is_due_without_work() -> None:
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
