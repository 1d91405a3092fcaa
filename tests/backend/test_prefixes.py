"""How much two texts have in common; what the engine does with it is in test_coalescing.py and the simulation."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from backend.page_keys import extend_page_keys, part_key
from backend.prefixes import count_common

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TOKENS, TOKENS, TOKENS)
def test_tokens_in_common_are_counted_from_the_beginning(common: list[int], one: list[int], other: list[int]) -> None:
    first, second = array("i", common + one), array("i", common + other)
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    assert count_common(first.tobytes(), second.tobytes()) == expected


def test_the_key_of_a_part_of_a_page_is_no_full_pages_key() -> None:
    tokens = array("i", range(8))
    keys: list[bytes] = []
    extend_page_keys(keys, tokens, 8, 4, b"tenant")
    assert part_key(keys[0], tokens[4:].tobytes()) not in keys
    assert part_key(b"tenant", tokens[:2].tobytes()) != part_key(b"other", tokens[:2].tobytes())
