"""Which pages of a sequence are needed, against the definition of a window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.kv_cache.kv_groups import KvGroups

WINDOWS = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4).map(tuple)


@given(st.integers(1, 9), WINDOWS, st.integers(0, 120))
def test_pages_are_passed_when_no_later_token_attends_to_them(
    size: int, windows: tuple[int | None, ...], num_computed: int
) -> None:
    groups = KvGroups.of(size, windows, 0, 0)
    for window, num_passed in zip(windows, groups.num_passed(num_computed), strict=True):
        first_needed = 0 if window is None else max(0, num_computed - (window - 1))
        assert num_passed * size <= first_needed < (num_passed + 1) * size


@given(st.integers(1, 9), WINDOWS, st.integers(1, 20), st.integers(0, 3), st.integers(1, 200))
def test_sequence_never_holds_more_than_its_most_pages(
    size: int, windows: tuple[int | None, ...], step: int, num_ahead: int, length: int
) -> None:
    """Computed in steps of as many tokens as may be, with as many planned ahead; each is planned before its pages."""
    groups = KvGroups.of(size, windows, step, num_ahead)
    num_planned = 0
    while num_planned < length:
        num_planned = min(length, num_planned + step)
        num_applied = max(0, num_planned - step * (num_ahead + 1))
        passed = groups.num_passed(num_applied)
        num_held = groups.pages_for(num_planned) - sum(passed)
        assert num_held <= groups.most_pages(length)
        listed = groups.first_pages(length, passed)
        assert groups.pages_for(num_planned) <= listed
        assert listed - sum(passed) + groups.later_pages(length, passed, listed) <= groups.most_pages(length)
