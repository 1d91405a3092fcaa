"""One tenant alone has all places of a limit; others find places though it has taken them all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shm.process.tenant_places import HARD_BOUND, TenantPlaces, is_over_share

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
