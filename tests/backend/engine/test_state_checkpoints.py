"""Sequences of a pass with a state share prefixes: they go on from checkpoints of the state at ends of pages."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.backend.kv_cache.page_store import KEY_BYTES, PageStore
from penstock.shm.messages import Finish, Sampling
from tests.backend.harness import Bench, expected_tokens
from tests.fake_passes import StatefulFakePass

if TYPE_CHECKING:
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.forward_pass.extensions import PagePlaces

PAGE = 4
"""Checkpoints are at least two pages apart; see `Bench`."""
SYSTEM = list(range(40, 60))


def bench_of(*, max_running: int = 8, **options: Any) -> Bench:
    return Bench(forward_pass=StatefulFakePass(97, max_running), max_running=max_running, page_size=PAGE, **options)


def ask(bench: Bench, prompt: list[int], request_id: int, max_tokens: int = 6, **options: Any) -> int:
    """Run the request alone. Return the number of its tokens that were cached."""
    bench.submit(prompt, max_tokens, request_id=request_id, **options)
    bench.run_dry()
    return check(bench, prompt, request_id, max_tokens)


def check(bench: Bench, prompt: list[int], request_id: int, max_tokens: int = 6) -> int:
    received = bench.received(request_id)
    assert received.token_ids == expected_tokens(prompt, max_tokens, bench.vocab_size)
    assert received.finishes == [Finish.LENGTH]
    assert received.started is not None
    return received.started.cached_tokens


def num_kept(bench: Bench) -> int:
    """Checkpoints that can be found while nothing runs."""
    states = bench.scheduler._running.states
    assert states.pool.num_held == 0
    return int(states.pool.num_idle)


def computed_tokens(bench: Bench) -> int:
    return sum(batch.num_tokens for batch in bench.executor.batches)


def test_turn_of_a_conversation_begins_at_the_last_checkpoint_of_prompt_and_answer() -> None:
    bench = bench_of()
    prompt = SYSTEM[:18]
    assert ask(bench, prompt, 1, max_tokens=20) == 0
    assert bench.board.checkpoint_bytes == 2 * 8
    assert num_kept(bench) == 2  # after 16 tokens of the prompt, and the one that moved with the answer
    prompt += [*expected_tokens(prompt, 20, bench.vocab_size), 7, 8]
    before = computed_tokens(bench)
    assert ask(bench, prompt, 2) == 32
    assert computed_tokens(bench) - before == len(prompt) - 32 + 5
    assert ask(bench, SYSTEM[:18], 3) == 16
    bench.close()


def test_prompts_that_part_leave_a_checkpoint_where_they_part() -> None:
    bench = bench_of(num_checkpoints=8)
    prompts = [[*SYSTEM, number, *range(70, 84)] for number in range(3)]
    found = [ask(bench, prompt, request_id) for request_id, prompt in enumerate(prompts)]
    assert found == [0, 0, len(SYSTEM)]
    bench.close()


def test_prompts_that_come_together_compute_their_beginning_once() -> None:
    """The second one asks for a checkpoint where it will part, before the first has computed so far."""
    bench = bench_of(max_batch_tokens=8)
    prompts = [[*SYSTEM, number, *range(70, 80)] for number in range(3)]
    for request_id, prompt in enumerate(prompts):
        bench.submit(prompt, 6, request_id=request_id)
    bench.run_dry()
    assert [check(bench, prompt, request_id) for request_id, prompt in enumerate(prompts)] == [0, 20, 20]
    assert computed_tokens(bench) == len(SYSTEM) + 3 * (11 + 5)
    bench.close()


def test_choices_of_one_prompt_begin_after_its_full_pages() -> None:
    bench = bench_of()
    for request_id in range(4):
        bench.submit(SYSTEM, 6, request_id=request_id, sampling=Sampling(temperature=1.0, seed=request_id))
    bench.run_dry()
    found = [started.cached_tokens for each in range(4) if (started := bench.received(each).started) is not None]
    assert found == [0, 16, 16, 16]
    alone = bench_of()
    alone.submit(SYSTEM, 6, sampling=Sampling(temperature=1.0, seed=3))
    alone.run_dry()
    assert bench.received(3).token_ids == alone.received().token_ids
    for each in (bench, alone):
        each.close()


def test_preempted_sequences_go_on_from_their_last_checkpoint() -> None:
    bench = bench_of(num_pages=24, num_checkpoints=8)
    prompts = [[number] * 20 for number in range(4)]
    for request_id, prompt in enumerate(prompts):
        bench.submit(prompt, 40, request_id=request_id)
    bench.run_dry()
    for request_id, prompt in enumerate(prompts):
        check(bench, prompt, request_id, 40)
    assert bench.board.preemptions
    restores = [(batch, slot) for batch in bench.executor.batches for _, slot in batch.state_restores]
    assert any(batch.context_lens[batch.slots == slot] > 20 for batch, slot in restores)
    bench.close()


def test_running_sequences_keep_at_most_half_of_the_checkpoints_for_themselves() -> None:
    bench = bench_of(num_checkpoints=4, num_pages=128)
    for request_id in range(6):
        bench.submit([request_id, 1, 2], 60, request_id=request_id)
    for _ in range(50):
        bench.turn()
        assert bench.scheduler._running.states.pool.num_held + bench.scheduler._running.states.pool.num_idle <= 2
    bench.run_dry()
    bench.close()


@pytest.mark.parametrize("num_checkpoints", [0, 1])
def test_few_checkpoints_share_less_and_change_no_token(num_checkpoints: int) -> None:
    bench = bench_of(num_checkpoints=num_checkpoints)
    for request_id in range(4):
        prompt = [*SYSTEM[:18], request_id % 2]
        assert ask(bench, prompt, request_id) == (16 if num_checkpoints and request_id else 0)
    assert num_kept(bench) == num_checkpoints
    assert bool(bench.pool.num_idle) == bool(num_checkpoints)
    bench.close()


def test_tenants_and_bad_results_share_no_state() -> None:
    bench = bench_of(num_checkpoints=8)
    assert ask(bench, SYSTEM, 1, salt=b"one") == 0
    assert ask(bench, SYSTEM, 2, salt=b"two") == 0
    assert ask(bench, SYSTEM, 3, salt=b"one") == 16
    bench.scheduler._running.prefix_cache.invalidate_tenant(b"one")
    assert num_kept(bench) == 2
    assert ask(bench, SYSTEM, 4, salt=b"one") == 0
    assert ask(bench, SYSTEM, 5, salt=b"two") == 16
    bench.close()


class PersistingPass(StatefulFakePass):
    """Its host places are in memory that outlives it. A page of 4 tokens has 32 bytes, a state 8."""

    places: PagePlaces

    def memory_of(self, page: int) -> np.ndarray:
        num_pages = len(self._sums)
        return self._sums[page] if page < num_pages else self._checkpoints[page - num_pages : page - num_pages + 1]

    def save_pages(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for page, place in pairs:
            self.places.place(place)[:] = self.memory_of(page).view(np.uint8)
            self.places.note_written(place)

    def forward(self, batch: StepBatch) -> np.ndarray:
        for place, page in batch.page_restores:
            self.memory_of(page)[:] = self.places.place(place).view(np.uint64)
        return super().forward(replace(batch, page_restores=()))


def test_later_process_goes_on_from_pages_and_states_that_an_earlier_one_has_saved() -> None:
    fd = os.memfd_create("test")
    os.truncate(fd, 1 << 14)

    def start(state_bytes: int = 8) -> Bench:
        forward_pass = PersistingPass(97, 8)
        store = PageStore(fd, bytes(KEY_BYTES), 8 * PAGE, state_bytes, num_states=3)
        forward_pass.places = store
        return Bench(forward_pass=forward_pass, page_size=PAGE, num_checkpoints=2, store=store)

    first = start()
    assert ask(first, SYSTEM, 1, max_tokens=12) == 0
    ask(first, [1, 2], 2)  # by its steps the last saves are copied
    first.close()
    second = start()
    prompt = [*SYSTEM, *expected_tokens(SYSTEM, 12, second.vocab_size), 3]
    assert ask(second, prompt, 1) == 24
    assert ask(second, [*SYSTEM[:18], 5], 2) == 16
    second.close()
    other = start(state_bytes=16)
    assert ask(other, [1, 2], 1) == 0
    assert not other.forward_pass.places.found
    other.close()
    os.close(fd)
