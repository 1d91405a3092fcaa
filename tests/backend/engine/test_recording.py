"""The flight recorder: what is read from its ring is what the engine did, whatever happens to the requests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backend.engine import recorder as module
from penstock.backend.passes.fake import FakePass
from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import Finish
from penstock.shm.recording.events import Arrived, Ended, Left, Started
from penstock.shm.recording.records import SECRET_KINDS
from tests.backend.harness import packed
from tests.backend.recorded import Recorded
from tests.fake_passes import StatefulFakePass


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    yield recorded
    recorded.close()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 14), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("die"), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
        st.tuples(st.just("turn"), st.just(0), st.just(0)),
        st.tuples(st.just("turn"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(
    todo=operations,
    capacity=st.integers(0, 3),
    num_pages=st.integers(4, 12),
    plans_per_key=st.integers(1, 8),
    kind=st.sampled_from((FakePass, StatefulFakePass)),
)
def test_rows_of_every_step_are_read_as_they_were_planned(
    todo: list[tuple[str, int, int]], capacity: int, num_pages: int, plans_per_key: int, kind: type[FakePass]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PLANS_PER_KEY_PLAN", plans_per_key)
        sizes = {"capacity": capacity, "num_pages": num_pages, "max_running": 4, "max_batch_tokens": 8}
        recorded = Recorded(**sizes, max_context=4 * num_pages, forward_pass=kind(97, 4))
        bench, frontend = recorded.bench, 1
        for number, (what, first, second) in enumerate(todo):
            if what == "submit":
                bench.submit([first, *range(first)], second, frontend=frontend, request_id=number, stop_ids=(7,))
            elif what == "cancel":
                bench.cancel(first, frontend)
            elif what == "die":
                bench.link.arrivals.append(FrontendDeath(frontend))
                frontend += 1
            elif what == "step":
                bench.executor.run_one()
            else:
                bench.engine.turn()
        bench.run_dry()
        life = recorded.life()
        rows = [step.rows for step in life.steps.values()]
        assert None not in rows
        assert [sorted(of_step or ()) for of_step in rows] == [sorted(planned) for planned in recorded.plans]
        assert all(step.ended_s is not None for step in life.steps.values())
        arrived = {(event.frontend, event.request_id) for _, event in life.events if isinstance(event, Arrived)}
        assert set(bench.link.received) <= arrived
        recorded.close()


def test_requests_are_followed_from_arrival_to_end(recorded: Recorded) -> None:
    bench = recorded.bench
    bench.submit([1, 2, 3, 4, 5], 4, request_id=7)
    bench.run_dry()
    bench.submit([1, 2, 3, 4, 5, 6], 2, request_id=8)
    bench.run_dry()
    events = [event for _, event in recorded.life().events]
    arrived = [event for event in events if isinstance(event, Arrived)]
    assert [(event.request_id, event.num_prompt_tokens, event.max_tokens) for event in arrived] == [
        (7, 5, 4),
        (8, 6, 2),
    ]
    first, second = [event for event in events if isinstance(event, Started)]
    assert (first.requests, second.requests) == (((1, 7),), ((1, 8),))
    assert (first.num_cached, second.num_cached) == (0, 5)
    assert first.prints[:8] == second.prints[:8] != b""
    assert [event.finish for event in events if isinstance(event, Ended)] == [Finish.LENGTH] * 2
    assert [(event.request_id, event.num_tokens) for event in events if isinstance(event, Left)] == [(7, 9), (8, 8)]


def test_dropped_rows_and_failed_steps_are_told(recorded: Recorded) -> None:
    bench = recorded.bench
    for request_id in range(2):
        bench.submit([1 + request_id, 2], 20, request_id=request_id)
    for _ in range(3):
        bench.turn()
    bench.cancel(0)
    bench.engine.turn()
    bench.executor.run_one()
    bench.executor.run_one()
    bench.engine.turn()
    dropped = [step for step in recorded.life().steps.values() if step.dropped_slots]
    assert dropped
    assert all(len(step.dropped_slots) == 1 for step in dropped)
    forward = bench.forward_pass.forward

    def fail(batch: object) -> object:
        bench.forward_pass.forward = forward
        raise RuntimeError("secret text")

    bench.forward_pass.forward = fail
    bench.run_dry()
    life = recorded.life()
    assert sum(step.is_failed for step in life.steps.values()) == 1
    assert "RuntimeError" in str(life.events)
    assert b"secret" not in os.pread(recorded.fd, 1 << 20, 0)


@pytest.mark.parametrize("with_tokens", [False, True])
def test_tokens_are_recorded_only_if_they_may_be(with_tokens: bool) -> None:
    recorded = Recorded(with_tokens=with_tokens)
    bench, prompt = recorded.bench, [11, 22, 33, 44, 55, 66] * 3000
    bench.submit([5, 6, 7], 6)
    bench.submit(prompt, 1, request_id=1)
    bench.run_dry()
    records, life = recorded.records(), recorded.life()
    assert any(record.kind in SECRET_KINDS for record in records.records) == with_tokens
    in_memory = packed([11, 22, 33, 44]) in os.pread(recorded.fd, 1 << 20, 0)
    assert in_memory == with_tokens
    tokens = [token_id for step in life.steps.values() for sampled in step.token_ids.values() for token_id in sampled]
    if with_tokens:
        assert life.prompts[1, 0].tokens == packed([5, 6, 7])
        assert life.prompts[1, 0].message.max_tokens == 6
        assert tokens == bench.received(0).token_ids
    else:
        assert tokens == []
        assert life.prompts == {}
    recorded.close()
