"""The state read from a running engine's ring is the engine's own."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shm.link.events import FrontendDeath
from penstock.shm.memory.ring import BLOCK_BYTES, RingReader, RingWriter
from penstock.shm.recording.events import BackendStarted, pack_event
from penstock.shm.recording.live import LiveEngine
from penstock.shm.recording.live_state import EventKind, Wait
from penstock.shm.recording.records import FORMAT_VERSION
from tests.backend.recorded import Recorded

operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 14), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("die"), st.just(0), st.just(0)),
        st.tuples(st.just("turn"), st.just(0), st.just(0)),
        st.tuples(st.just("turn"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=25)
@given(todo=operations, num_pages=st.integers(5, 12), late=st.integers(0, 30))
def test_open_requests_and_ended_steps_are_those_of_the_engine(
    todo: list[tuple[str, int, int]], num_pages: int, late: int
) -> None:
    recorded = Recorded(num_pages=num_pages, max_running=4, max_batch_tokens=8, max_context=4 * num_pages)
    bench, frontend = recorded.bench, 1
    ring = RingReader(recorded.fd)
    live, steps = LiveEngine(ring), []
    for number, (what, first, second) in enumerate(todo):
        if what == "submit":
            prompt = [first, *range(first)]
            bench.submit(prompt, second, frontend=frontend, request_id=number, may_share=first % 2 == 0)
        elif what == "cancel":
            bench.cancel(first, frontend)
        elif what == "die":
            bench.link.arrivals.append(FrontendDeath(frontend))
            frontend += 1
        else:
            bench.turn()
        if number < late:  # the first poll reads much at once
            continue
        steps += live.poll().steps
        seen = set(live.requests)
        assert seen == {name for name in seen if bench.requests.table.is_open(*name)}
        assert len(seen) == bench.requests.table.num_open
        ends = {row.sequence: row.end for rows in recorded.plans for row in rows}
        for sequence in live.sequences.values():
            if sequence.is_running:
                assert sequence.num_computed == ends[sequence.number]
            assert set(sequence.requests) <= seen
    bench.run_dry()
    steps += live.poll().steps
    assert not live.requests
    assert not live.sequences
    assert live.waiting() == []
    assert [step.step for step in steps] == list(range(len(recorded.plans)))
    for step, rows in zip(steps, recorded.plans, strict=True):
        assert step.num_decodes + step.num_prefills + step.num_restored == len(rows)
        assert step.num_tokens == sum(row.length for row in rows)
    ring.close()
    recorded.close()


def test_time_without_requests_is_no_wait_of_the_device() -> None:
    recorded = Recorded()
    recorded.recorder._clock = recorded.bench.clock
    ring = RingReader(recorded.fd)
    live = LiveEngine(ring)
    for number in range(2):
        recorded.bench.now_s += 60
        recorded.bench.submit([3, 5, 7], 3, request_id=number)
        recorded.bench.run_dry()
    steps = live.poll().steps
    assert steps[-1].ended_s - steps[0].ended_s >= 60
    assert max(step.waited_s for step in steps) < 1
    ring.close()
    recorded.close()


def test_life_of_a_request_and_why_others_wait() -> None:
    recorded = Recorded(num_pages=9, max_running=2, max_batch_tokens=8, max_context=36)
    bench = recorded.bench
    ring = RingReader(recorded.fd)
    live = LiveEngine(ring)
    for request_id in range(4):  # the first two are equal
        bench.submit([request_id // 2, 3, 5, 7, 11, 13], 14, request_id=request_id, may_share=True, tenant=b"t" * 16)
    for request_id in (4, 5):
        bench.submit([request_id] * 20, 12, request_id=request_id)
    listeners, kinds, reasons = 0, set(), set()
    while not bench.is_idle:
        bench.turn()
        changes = live.poll()
        listeners = max(listeners, *(step.num_listeners for step in changes.steps), 0)
        kinds |= {event.kind for event in changes.events}
        reasons |= {live.why_it_waits(request) for request in live.waiting()}
        for request in live.requests.values():
            assert request.tenant == (b"t" * 16 if request.request_id < 4 else b"").hex()
    assert bench.board.requests_coalesced == 2
    assert listeners == 2
    assert bench.board.preemptions
    assert {EventKind.ARRIVED, EventKind.JOINED, EventKind.PREEMPTED, EventKind.RESUMED, EventKind.ENDED} <= kinds
    assert {Wait.PREEMPTED, Wait.PAGES} & reasons
    ring.close()
    recorded.close()


def test_overwritten_records_and_a_new_backend_are_told() -> None:
    recorded = Recorded()
    bench = recorded.bench
    ring = RingReader(recorded.fd)
    live = LiveEngine(ring)
    assert not live.poll().has_gap
    bench.submit([1, 2, 3], 100)
    bench.turn()
    bench.turn()
    live.poll()
    assert list(live.requests) == [(1, 0)]
    start, request_ids = ring.written, count(1)
    while ring.written < start + ring.num_bytes + BLOCK_BYTES:
        bench.submit([5, 6], 3, request_id=next(request_ids))
        bench.turn()
        bench.turn()
    changes = live.poll()
    assert changes.has_gap
    assert changes.steps
    started = BackendStarted(FORMAT_VERSION, 77, 0.0, "next", 8, 16, 64, 4, 256, 97, 1000, 1)
    writer = RingWriter(recorded.fd)
    writer.append(pack_event(started, 5.0))
    assert [event[1:] for event in live.poll().events] == [(EventKind.RESTARTED, -1, -1, 77)]
    assert live.started == started
    assert not live.requests
    writer.close()
    ring.close()
    recorded.close()
