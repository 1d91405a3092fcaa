"""The worker that takes the next connection, with several workers' views of one table."""

from __future__ import annotations

import mmap

from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.transport.serving.accept_table import MAX_WAITS, AcceptTable


def workers(count: int) -> list[AcceptTable]:
    mapping = mmap.mmap(-1, 4096)
    tables = [AcceptTable(mapping, count, worker) for worker in range(count)]
    for table in tables:
        table.open()
    return tables


@given(st.integers(2, 5), st.integers(1, 400), st.data())
def test_no_worker_has_much_more_than_another_while_all_look(
    count: int, num_connections: int, data: st.DataObject
) -> None:
    tables, held = workers(count), [0] * count
    order = data.draw(st.lists(st.integers(0, count - 1), min_size=20, max_size=20))
    for turn in range(num_connections):
        # Each is the first to look at some connections; whoever may not accept leaves it for the next.
        first = order[turn % len(order)]
        taker = next(worker % count for worker in range(first, first + count) if tables[worker % count].may_accept())
        held[taker] += 1
        tables[taker].set_connections(held[taker])
    assert max(held) <= min(held) + 3 + min(held) // 8


def test_worker_that_does_not_look_is_waited_for_only_some_times() -> None:
    busy, stopped = workers(2)
    busy.set_connections(50)
    for _ in range(MAX_WAITS):
        assert not busy.may_accept()
        busy.note_wait_in_vain()
    assert busy.may_accept()
    assert busy.may_accept()
    stopped.may_accept()  # it looks again
    assert not busy.may_accept()


def test_worker_that_takes_no_connections_is_not_waited_for() -> None:
    one, other = workers(2)
    one.set_connections(50)
    assert not one.may_accept()
    other.close()
    assert one.may_accept()
    other.open()
    assert not one.may_accept()
    other.set_connections(40)
    other.add_starting(8)
    assert one.may_accept()
