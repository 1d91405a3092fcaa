"""The ids of a stream's events depend on the events alone, and a client that returns gets those that it lacks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.transport.sse import EventNumbers

EVENTS = st.lists(st.sampled_from([b"data: x\n\n", b"event: a\ndata: {}\n\n", b"data: [DONE]\n\n"]), max_size=12)


@given(EVENTS, st.integers(0, 14), st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_numbers_do_not_depend_on_how_events_are_written(
    events: list[bytes], num_received: int, sizes: list[int]
) -> None:
    numbers, rest, written = EventNumbers(num_received), list(events), b""
    for size in sizes:
        written += numbers.number(b"".join(rest[:size]))
        rest = rest[size:]
    expected = [b"id: %d\n%b" % (number, event) for number, event in enumerate(events)]
    assert written == b"".join(expected[num_received:])
