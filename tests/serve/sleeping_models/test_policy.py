"""Which models wake and which sleep."""

from __future__ import annotations

from typing import Any

from penstock.serve.sleeping_models.attendant import ModelView, decide
from penstock.shm.memory.model_table import ModelState


def view(state: ModelState, **changes: Any) -> ModelView:
    fields: dict[str, Any] = {"num_bytes": 10, "num_open": 0, "used_s": 0.0, "asked_s": 0.0, "wanted_s": None}
    return ModelView(state, **fields | changes)


def awake(**changes: Any) -> ModelView:
    return view(ModelState.AWAKE, **changes)


def wanted(since_s: float = 0.0, **changes: Any) -> ModelView:
    return view(ModelState.ASLEEP, num_open=1, wanted_s=since_s, **changes)


def result(*models: ModelView, now_s: float = 100.0, idle_s: float = 0.0, budget: int | None = 20) -> tuple[Any, Any]:
    decision = decide(models, now_s, idle_s=idle_s, budget_bytes=budget)
    return decision.wake, decision.sleep


def test_model_without_requests_sleeps_after_the_idle_time_only() -> None:
    models = (awake(used_s=50.0), awake(used_s=95.0), awake(used_s=0.0, num_open=1))
    assert result(*models, idle_s=10.0) == ([], [0])
    assert result(*models, idle_s=0.0) == ([], [])


def test_last_request_may_say_how_long_its_model_is_kept() -> None:
    models = (awake(used_s=50.0, kept_s=101.0), awake(used_s=99.0, kept_s=99.5), awake(kept_s=300.0, asked_s=60.0))
    assert result(*models, idle_s=10.0) == ([], [2, 1])
    assert result(awake(used_s=50.0, kept_s=60.0), idle_s=0.0) == ([], [0])


def test_model_sleeps_when_it_is_asked_to_unless_it_was_used_since() -> None:
    models = (awake(used_s=50.0, asked_s=60.0), awake(used_s=50.0, asked_s=40.0), awake(num_open=1, asked_s=60.0))
    assert result(*models) == ([], [0])


def test_wanted_model_wakes_if_it_fits() -> None:
    assert result(awake(num_open=1), wanted()) == ([1], [])
    assert result(awake(num_bytes=1000), wanted(num_bytes=1000), budget=None) == ([1], [])


def test_least_recently_used_model_makes_room() -> None:
    assert result(awake(used_s=2.0), awake(used_s=1.0), wanted()) == ([], [1])
    assert result(awake(used_s=2.0), awake(used_s=1.0), wanted(num_bytes=20)) == ([], [1, 0])


def test_model_waits_while_requests_use_the_memory_and_no_model_sleeps_in_vain() -> None:
    assert result(awake(num_open=1), awake(used_s=1.0), wanted(num_bytes=20)) == ([], [])
    assert result(awake(num_open=1), view(ModelState.LOADING), wanted()) == ([], [])


def test_memory_of_a_model_that_falls_asleep_is_taken_until_its_end_and_not_freed_twice() -> None:
    assert result(awake(used_s=1.0), view(ModelState.FALLING_ASLEEP), wanted()) == ([], [])


def test_models_wake_in_the_order_in_which_they_were_wanted() -> None:
    models = (awake(num_open=1), wanted(2.0), wanted(1.0, num_bytes=15))
    assert result(*models) == ([], [])  # the later one would fit, but would keep the earlier one waiting
    assert result(wanted(2.0), wanted(1.0), wanted(3.0)) == ([1, 0], [])
