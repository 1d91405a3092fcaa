"""Places of tenants, and times to retry: from a queue and its rate, and from how long the last outage took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.process.admission import HARD_BOUND, MAX_RETRY_AFTER_S, DrainRate, Outage, TenantPlaces, is_over_share

LIMIT = 32


@given(st.lists(st.tuples(st.sampled_from(b"abcdef"), st.integers(1, LIMIT), st.booleans()), max_size=60))
def test_places_are_bounded_and_a_newcomer_finds_one(steps: list[tuple[int, int, bool]]) -> None:
    places, taken = TenantPlaces(LIMIT), list[tuple[bytes, int]]()
    for letter, num, releases in steps:
        tenant = bytes([letter])
        if releases and taken:
            places.release(*taken.pop())
        elif places.has(tenant, num):
            places.take(tenant, num)
            taken.append((tenant, num))
        num_of: dict[bytes, int] = {}
        for holder, count in taken:
            num_of[holder] = num_of.get(holder, 0) + count
        assert places.num_taken == sum(num_of.values()) <= HARD_BOUND * LIMIT
        for name in (b"a", b"new"):
            assert places.has(name) is not is_over_share(num_of, name, LIMIT)
        assert places.has(b"new"), num_of


def test_one_tenant_has_the_limit_and_no_more() -> None:
    places = TenantPlaces(LIMIT)
    assert not places.has(b"a", LIMIT + 1)
    places.take(b"a", LIMIT)
    assert not places.has(b"a")
    assert places.has(b"b", LIMIT // 2)
    assert not places.has(b"b", LIMIT // 2 + 1)


@pytest.mark.parametrize(
    ("waiting", "finished", "age_s", "retry_after_s"),
    [(100, 50, 5.0, 10), (10, 1000, 5.0, 1), (1000, 1, 5.0, 60), (10, 0, 5.0, 5), (10, 50, 300.0, 1), (10, -5, 5.0, 1)],
)
def test_retry_after_is_the_time_in_which_the_wait_queue_drains(
    waiting: int, finished: int, age_s: float, retry_after_s: int
) -> None:
    now_s = 1000.0
    rate = DrainRate(lambda: now_s)
    assert rate.retry_after_s(waiting, 500) == 1
    now_s += age_s
    assert rate.retry_after_s(waiting, 500 + finished) == retry_after_s


def test_rate_is_that_of_the_last_ten_seconds_of_notes() -> None:
    now_s, num_finished = 1000.0, 0
    rate = DrainRate(lambda: now_s)
    for per_second in (100, 2):
        for _ in range(20):
            now_s += 1.0
            num_finished += per_second
            rate.note(num_finished)
        assert rate.retry_after_s(100, num_finished) == max(1, 100 // per_second)
    # Nothing finishes any more: the wait grows with the time in which none has.
    now_s += 9.0
    assert rate.retry_after_s(5, num_finished) >= 5
    now_s += 600.0
    assert rate.retry_after_s(5, num_finished) == 1  # unknown again


def test_outage_is_expected_to_take_as_long_as_the_last_one() -> None:
    now_s = 1000.0
    outage = Outage(lambda: now_s)
    assert outage.retry_after_s == 1
    now_s += 20.0
    assert outage.retry_after_s == 20
    outage.end()
    outage.end()
    now_s += 500.0
    outage.begin()
    assert outage.retry_after_s == 20
    now_s += 15.0
    outage.begin()
    assert outage.retry_after_s == 5
    now_s += 20.0
    assert outage.retry_after_s == 35
    now_s += 2000.0
    assert outage.retry_after_s == MAX_RETRY_AFTER_S
