import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.tools.bench.load_generator.stats import Aim, ObservedRequest, Outcome, percentile, spread_ms, summarize

times = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(times, st.floats(0, 100))
def test_percentile_equals_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_percentile_of_nothing_is_none() -> None:
    assert percentile([], 50) is None
    assert spread_ms([]).mean is None


def record(started_s: float, events_s: list[float], outcome: Outcome = Outcome.COMPLETED) -> ObservedRequest:
    return ObservedRequest(started_s, events_s, events_s[-1], 10, len(events_s), outcome)


def test_summary_of_two_known_streams_is_right() -> None:
    records = [record(0.0, [0.1, 0.2, 0.4]), record(1.0, [1.5, 2.0])]
    summary = summarize("c=2", records, generator_cpu_s=0.001)
    assert (summary.requests, summary.completed, summary.failed) == (2, 2, 0)
    assert summary.duration_s == 2.0
    assert summary.output_tokens_per_s == 5 / 2
    assert summary.prompt_tokens_per_s == 20 / 2
    assert summary.requests_per_s == 1.0
    assert summary.ttft_ms.p50 == pytest.approx(300)
    assert summary.itl_ms.p50 == pytest.approx(200)
    assert summary.itl_ms.p99 == pytest.approx(200 + 0.98 * 300)
    assert summary.e2e_ms.mean == pytest.approx(700)
    assert summary.generator_cpu_us_per_token == pytest.approx(200)


def test_dropped_and_failed_requests_count_tokens_but_no_latency() -> None:
    failed = ObservedRequest(0.0, ended_s=0.1, error="status 500")
    records = [record(0.0, [0.5, 1.0]), record(0.0, [0.2], Outcome.DROPPED), failed]
    summary = summarize("c=3", records, generator_cpu_s=0.0)
    assert (summary.completed, summary.dropped, summary.failed) == (1, 1, 1)
    assert summary.output_tokens == 3
    assert summary.e2e_ms.p99 == pytest.approx(1000)
    assert summary.first_error == "status 500"


@pytest.mark.parametrize(
    ("direction", "reached"), [("at least", [False, True, True]), ("at most", [True, True, False])]
)
def test_aim_is_reached_at_its_limit(direction: str, reached: list[bool]) -> None:
    assert [Aim("x", value, direction, 1.0).reached for value in (0.9, 1.0, 1.1)] == reached  # type: ignore[arg-type]


def test_failed_run_has_finite_rates() -> None:
    summary = summarize("c=1", [ObservedRequest(0.0, ended_s=1.0)], generator_cpu_s=0.1)
    assert math.isfinite(summary.output_tokens_per_s)
    assert math.isfinite(summary.generator_cpu_us_per_token)
