"""The simulated device and clients under the real loop. The loop itself takes no time here, so all counts are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.tools.bench.components.simulated_device import STEP_S, VOCAB_SIZE
from penstock.tools.bench.components.simulation import WIRE_S, Burst, Simulation, SimulationResult
from penstock.tools.bench.load_generator.workload import Lengths, PlannedRequest, Workload

WORKLOAD = Workload(Lengths(40, 40), Lengths(10, 10), VOCAB_SIZE)
CAPACITIES = (0, 1, 2, 4)


@pytest.fixture(autouse=True)
def free_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.thread_time_ns", lambda: 0)


def run(
    capacity: int, requests: list[PlannedRequest], concurrency: int, bursts: tuple[Burst, ...] = ()
) -> SimulationResult:
    load = Simulation(capacity, max_running=16, max_batch_tokens=64)
    try:
        return load.run(requests, concurrency, bursts)
    finally:
        load.close()


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_single_request_takes_one_step_per_token_and_the_wire_time(capacity: int) -> None:
    load = run(capacity, WORKLOAD.draw(1, 0), 1)
    assert (load.steps, load.output_tokens, load.computed_tokens) == (10, 10, 49)
    assert (load.wasted_tokens, load.saved_tokens, load.idle_s) == (0, 0, 0)
    assert load.ttfts_ms == [pytest.approx(1000 * (STEP_S + 2 * WIRE_S))]
    assert load.duration_s == pytest.approx(10 * STEP_S + 2 * WIRE_S)


def test_device_waits_for_the_loop_only_without_a_plan_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 10**12, 250_000))
    monkeypatch.setattr("time.thread_time_ns", lambda: next(clock))
    none_ahead, one_ahead = (run(capacity, WORKLOAD.draw(4, 0), 4) for capacity in (0, 1))
    # The engine reads the clock twice in a turn, so a turn has three parts.
    assert none_ahead.idle_us == pytest.approx(3 * 250 * (none_ahead.steps - 1) / none_ahead.steps)
    assert one_ahead.idle_s == pytest.approx(0.0)


@pytest.mark.parametrize("place_in_step", [0.3, 0.5])
def test_plan_ahead_adds_no_step_for_a_request_that_arrives_before_it_is_due(place_in_step: float) -> None:
    bursts = (Burst((8 + place_in_step) * STEP_S, WORKLOAD.draw(3, 7)),)
    firsts = [run(capacity, WORKLOAD.draw(4, 0), 4, bursts).burst_steps[0][0] for capacity in CAPACITIES]
    assert firsts == [2, 2, 2, 2]


def test_plan_ahead_adds_one_step_for_a_request_that_arrives_after_it() -> None:
    bursts = (Burst((8 + 0.75) * STEP_S, WORKLOAD.draw(3, 7)),)
    firsts = [run(capacity, WORKLOAD.draw(4, 0), 4, bursts).burst_steps[0][0] for capacity in CAPACITIES]
    assert firsts == [2, 3, 3, 3]


def test_steps_of_unknown_length_are_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backend.engine.step_timing.StepTiming.spare_s", lambda *_: 0.0)
    bursts = (Burst(4.5 * STEP_S, WORKLOAD.draw(3, 7)),)
    firsts = [run(capacity, WORKLOAD.draw(4, 0), 4, bursts).burst_steps[0][0] for capacity in CAPACITIES]
    assert firsts == [2 + capacity for capacity in CAPACITIES]


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_client_that_hung_up_is_in_no_later_step(capacity: int) -> None:
    requests = replace(WORKLOAD, drop=0.5).draw(60, 3)
    load = run(capacity, requests, 8)
    assert 0 < load.output_tokens < 600
    assert (load.saved_tokens > 0) == (capacity > 0)
    assert load.wasted_tokens <= 30 * 40


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_client_that_stays_gets_all_tokens(capacity: int) -> None:
    bursts = (Burst(0.03, WORKLOAD.draw(5, 9)), Burst(0.07, WORKLOAD.draw(5, 11)))
    load = run(capacity, WORKLOAD.draw(30, 1), 6, bursts)
    assert load.output_tokens == 40 * 10
    assert load.computed_tokens == 40 * 49
    assert [len(burst) for burst in load.burst_steps] == [5, 5]
    assert len(load.ttfts_ms) == 30
