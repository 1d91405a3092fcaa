from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.generation.choices.stop_strings import StopMatcher

TEXT = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(tuple(stops))
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + ("" if matcher.matched else matcher.flush()), matcher.matched


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Search character by character: the first end of any stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_any_split_gives_the_same_result_as_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    assert run(pieces, stops) == reference(text, stops)


@given(text=TEXT, stops=STOPS)
def test_only_a_possible_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    passed = matcher.push(text)
    held = matcher.flush()
    if matcher.matched is None:
        assert passed + held == text
        assert not held or any(stop.startswith(held) for stop in stops)


def test_without_stop_strings_text_passes_at_once() -> None:
    matcher = StopMatcher(())
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""


def test_nothing_is_returned_after_a_match() -> None:
    matcher = StopMatcher(("b",))
    assert matcher.push("abc") == "a"
    assert matcher.push("d") == ""
    assert matcher.matched == "b"
