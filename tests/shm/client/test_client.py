"""The client against the real link, with a scripted backend in a thread or in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from penstock.shm.client import (
    BackendClient,
    BackendUnavailable,
    GenerationRequest,
    Overloaded,
    TokenBatch,
    TokenStream,
)
from penstock.shm.client.overload import DrainRate
from penstock.shm.client.session import Session
from penstock.shm.memory.board import Board, FrontendBoard
from penstock.shm.messages import PROTOCOL_VERSION, Constraints, FailureCode, Finish, Grammar, Sampling, Submit
from tests.shm.scripted_backend import (
    FAILING_TOKEN,
    KILLING_TOKEN,
    BackendProcess,
    Script,
    ScriptedBackend,
    ScriptedEngine,
    expected_tokens,
    model_card,
)

ROOT = Path(__file__).parents[3]
GREEDY = Sampling(temperature=0.0)
LONG = 1 << 20
"""A context for which an arena has its fewest slots, four."""


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - other threads and processes bring it about
            await asyncio.sleep(0.002)


def at_base(client: BackendClient) -> bool:
    """Nothing is held but the connection itself; credits are returned a quarter of the window at a time."""
    return {kind for kind in client.balance() if kind != "credits_owed"} <= {"session"}


@asynccontextmanager
async def connected(socket_path: Path, **options: Any) -> AsyncIterator[BackendClient]:
    client = BackendClient(socket_path, **options)
    await client.start()
    try:
        await until(lambda: client.ready)
        yield client
        await until(lambda: at_base(client))
    finally:
        await client.close()
        client.ledger.check()


def request(prompt: list[int], max_tokens: int, *stop: int) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens, GREEDY, stop)


async def read(stream: TokenStream) -> tuple[list[int], TokenBatch]:
    """All tokens, and the last batch."""
    tokens: list[int] = []
    last = TokenBatch([])
    async for batch in stream:
        assert last.finish is Finish.NONE
        assert batch.token_ids or batch.finish
        tokens += batch.token_ids
        last = batch
    assert last.finish is not Finish.NONE
    return tokens, last


async def tokens_of(stream: TokenStream) -> list[int]:
    tokens, last = await read(stream)
    assert last.finish is Finish.LENGTH, last
    return tokens


async def test_tokens_arrive_in_order_and_complete(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            prompts = [[n, n + 1, n + 2] for n in range(50)]
            results = await asyncio.gather(*(tokens_of(client.submit(request(p, 40))) for p in prompts))
            assert results == [expected_tokens(p, 40) for p in prompts]
        await until(lambda: len(backend.engine.deaths) == 1)
        assert backend.engine.link.balance() == {}
        # One message a step, however many streams: the backend made few steps for 2,000 tokens.
        counters = backend.engine.link.counters
        assert counters.events_out == 2000
        assert counters.messages_out <= backend.engine.board.steps


def test_client_runs_on_uvloop(socket_path: Path) -> None:
    async def main() -> None:
        async with connected(socket_path) as client:
            prompts = [[n, n + 1, n + 2] for n in range(20)]
            readers = [asyncio.create_task(tokens_of(client.submit(request(p, 60)))) for p in prompts]
            await until(lambda: client.balance().get("stream", 0) < 20 or backend.engine.board.generated_tokens > 100)
            assert await asyncio.gather(*readers) == [expected_tokens(p, 60) for p in prompts]

    with (
        ScriptedBackend(socket_path, Script(step_s=0.001)) as backend,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(main())


async def test_stop_token_is_the_last(socket_path: Path) -> None:
    with ScriptedBackend(socket_path):
        async with connected(socket_path) as client:
            undisturbed = expected_tokens([5, 6], 30)
            tokens, last = await read(client.submit(request([5, 6], 30, undisturbed[7])))
            assert tokens == undisturbed[:8]
            assert last.finish is Finish.STOP


async def test_failures_and_rejections_carry_their_reason(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(model_card(max_context_tokens=100))):
        async with connected(socket_path) as client:
            _, last = await read(client.submit(request([1] * 60, 50)))
            assert (last.finish, last.failure, last.failure_limit) == (
                Finish.REJECTED,
                FailureCode.CONTEXT_TOO_LONG,
                50,
            )
            _, last = await read(client.submit(request([1000], 5)))
            assert (last.finish, last.failure, last.failure_limit) == (Finish.REJECTED, FailureCode.BAD_TOKEN, 1000)
            tokens, last = await read(client.submit(request([FAILING_TOKEN], 5)))
            assert (len(tokens), last.finish, last.failure) == (1, Finish.FAILED, FailureCode.INTERNAL)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GenerationRequest([], 5, GREEDY), "token_ids is empty"),
        (GenerationRequest([1 << 31], 5, GREEDY), "token_ids: "),
        (GenerationRequest([1], 0, GREEDY), "at max_tokens$"),
        (GenerationRequest([1], 1 << 40, GREEDY), "at max_tokens$"),
        (GenerationRequest([1], 5, Sampling(temperature=-1.0)), "at sampling.temperature$"),
        (GenerationRequest([1], 5, Sampling(temperature=float("nan"))), "at sampling.temperature$"),
        (GenerationRequest([1], 5, Sampling(seed=1 << 63)), "at sampling.seed$"),
        (GenerationRequest([1], 5, Sampling(logit_bias=((1, 0.0),) * 301)), "at sampling.logit_bias$"),
        (GenerationRequest([1], 5, Sampling(logit_bias=((1, 101.0),))), "at sampling.logit_bias$"),
        (GenerationRequest([1], 5, GREEDY, tuple(range(65))), "at stop_token_ids$"),
        (GenerationRequest([1], 5, GREEDY, salt=bytes(17)), "at salt$"),
        (GenerationRequest([1], 5, GREEDY, priority=1001), "at priority$"),
        (GenerationRequest([1], 5, GREEDY, constraints=Constraints(Grammar("regex", ""))), "constraints.grammar.text$"),
    ],
)
async def test_request_outside_its_bounds_is_refused_before_it_is_sent(
    socket_path: Path, bad: GenerationRequest, message: str
) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            with pytest.raises(ValueError, match=message):
                client.submit(bad)
            assert await tokens_of(client.submit(request([1], 5))) == expected_tokens([1], 5)
            assert backend.engine.link.counters.faults == 0


async def test_first_batch_brings_cached_tokens_and_queue_time(socket_path: Path) -> None:
    with ScriptedBackend(socket_path):
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 3))
            await anext(stream)
            assert stream.cached_tokens == 0
            assert stream.queue_s > 0
            stream.cancel()


# Cancelling


async def test_cancelling_ends_the_stream_and_frees_the_backend(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.001)) as backend:
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 30_000))
            await anext(stream)
            stream.cancel()
            stream.cancel()
            _, last = await read(stream)
            assert last.finish is Finish.CANCELLED
            await until(lambda: not backend.engine.running)
            assert backend.engine.num_cancellations == 1
            stream.cancel()
            assert backend.engine.link.balance() == {"frontend": 1}


async def test_cancelling_wakes_a_waiting_reader(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 10))
            reader = asyncio.create_task(read(stream))
            await until(lambda: backend.engine.running)
            stream.cancel()
            tokens, last = await reader
            assert (tokens, last.finish) == ([], Finish.CANCELLED)
            await until(lambda: not backend.engine.running)


async def test_cancelling_before_anything_was_sent_is_normal(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            for _ in range(100):
                client.submit(request([1, 2], 10)).cancel()
            assert await tokens_of(client.submit(request([3], 5))) == expected_tokens([3], 5)
            await until(lambda: backend.engine.link.balance() == {"frontend": 1})


async def test_cancelling_after_the_end_is_normal(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 5))
            assert await tokens_of(stream) == expected_tokens([1, 2], 5)
            stream.cancel()
            await tokens_of(client.submit(request([3], 5)))
            assert backend.engine.num_cancellations == 0
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_cancelled_reader_task_leaves_the_stream_usable(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 10))
            reader = asyncio.create_task(read(stream))
            await until(lambda: backend.engine.running)
            reader.cancel()
            backend.engine.paused = False
            os.eventfd_write(backend.engine.wake_fd, 1)
            await asyncio.gather(reader, return_exceptions=True)
            assert await tokens_of(stream) == expected_tokens([1, 2], 10)


async def test_closing_the_client_ends_its_streams_and_frees_the_backend(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.001)) as backend:
        client = BackendClient(socket_path)
        await client.start()
        await until(lambda: client.ready)
        readers = [asyncio.create_task(read(client.submit(request([n], 30_000)))) for n in range(5)]
        await until(lambda: len(backend.engine.running) == 5)
        await client.close()
        assert [last.finish for _, last in await asyncio.gather(*readers)] == [Finish.CANCELLED] * 5
        await until(lambda: backend.engine.link.balance() == {})
        assert client.balance() == {}
        with pytest.raises(BackendUnavailable):
            client.submit(request([1], 1))


async def test_many_cancellations_leave_other_streams_whole_and_nothing_held(socket_path: Path) -> None:
    rng = random.Random(7)
    script = Script(model_card(max_context_tokens=LONG))
    with ScriptedBackend(socket_path, script) as backend:
        async with connected(socket_path) as client:

            async def one(n: int) -> None:
                prompt = [n % 1000] * rng.choice((1, 3, 50, 5000))
                await asyncio.sleep(rng.random() * 0.2)
                stream = client.submit(request(prompt, 50))
                if n % 2:
                    assert await tokens_of(stream) == expected_tokens(prompt, 50)
                    return
                if rng.random() < 0.7:
                    await anext(stream)
                await asyncio.sleep(rng.random() * 0.01)
                stream.cancel()
                async for batch in stream:
                    assert batch.finish in (Finish.CANCELLED, Finish.LENGTH)

            await asyncio.gather(*(one(n) for n in range(300)))
            await until(lambda: at_base(client))
            await until(lambda: backend.engine.link.balance() == {"frontend": 1})
            assert not backend.engine.running
            assert backend.engine.link.counters.faults == 0
            assert backend.engine.link.counters.blocked_sends == 0


# The arena


async def test_more_long_prompts_than_slots_are_all_served(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(model_card(max_context_tokens=LONG))) as backend:
        async with connected(socket_path) as client:
            prompts = [[n] * 5000 for n in range(20)]
            streams = [client.submit(request(p, 5)) for p in prompts]
            assert client.balance()["slot"] == 4
            assert client.balance()["unsent"] == 16
            assert [await tokens_of(stream) for stream in streams] == [expected_tokens(p, 5) for p in prompts]
            assert backend.engine.link.counters.faults == 0


async def test_slot_of_a_cancelled_prompt_is_freed_after_the_backend_has_read_it(socket_path: Path) -> None:
    with BackendProcess(socket_path, max_context_tokens=LONG) as backend:
        async with connected(socket_path) as client:
            backend.signal(signal.SIGSTOP)
            for n in range(6):
                client.submit(request([n] * 5000, 5)).cancel()
            stream = client.submit(request([7] * 5000, 5))
            assert client.balance()["slot"] == 4
            backend.signal(signal.SIGCONT)
            assert await tokens_of(stream) == expected_tokens([7] * 5000, 5)


async def test_prompt_that_no_slot_holds_is_rejected_with_the_limit(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(model_card(max_context_tokens=5000))):
        async with connected(socket_path) as client:
            _, last = await read(client.submit(request([1] * 9000, 5)))
            assert (last.finish, last.failure, last.failure_limit) == (
                Finish.REJECTED,
                FailureCode.CONTEXT_TOO_LONG,
                5000,
            )


# Flow


async def test_slow_reader_receives_whole_batches(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 500))
            await until(lambda: backend.engine.board.requests_finished == 1)
            await until(lambda: at_base(client))
            batch = await anext(stream)
            assert batch.token_ids == expected_tokens([1, 2], 500)
            assert batch.finish is Finish.LENGTH


async def test_credits_return_before_the_backend_runs_out(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(credit=4)) as backend:
        async with connected(socket_path) as client:
            for n in range(5):
                assert await tokens_of(client.submit(request([n], 400))) == expected_tokens([n], 400)
            assert backend.engine.link.counters.messages_out > 4
            assert backend.engine.link.counters.stalled == 0


async def test_full_wait_queue_is_reported_before_anything_is_sent(socket_path: Path) -> None:
    script = Script(model_card(max_waiting=2), max_running=1)
    with ScriptedBackend(socket_path, script) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            streams = [client.submit(request([n], 5)) for n in range(3)]
            await until(lambda: backend.engine.board.waiting == 2)
            with pytest.raises(Overloaded) as overloaded:
                client.submit(request([9], 5))
            assert 1 <= overloaded.value.retry_after_s <= 60
            backend.engine.paused = False
            os.eventfd_write(backend.engine.wake_fd, 1)
            assert [await tokens_of(s) for s in streams] == [expected_tokens([n], 5) for n in range(3)]
            await until(lambda: backend.engine.board.waiting == 0)
            assert await tokens_of(client.submit(request([9], 5))) == expected_tokens([9], 5)


async def test_shareable_request_is_sent_even_when_the_wait_queue_is_full(socket_path: Path) -> None:
    script = Script(model_card(max_waiting=1), max_running=1)
    with ScriptedBackend(socket_path, script) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            streams = [client.submit(request([n], 5)) for n in range(2)]
            await until(lambda: backend.engine.board.waiting == 1)
            streams.append(client.submit(replace(request([0], 5), may_share=True)))
            await until(lambda: backend.engine.board.waiting == 2)
            with pytest.raises(Overloaded):
                client.submit(request([0], 5))
            backend.engine.paused = False
            os.eventfd_write(backend.engine.wake_fd, 1)
            assert [await tokens_of(s) for s in streams] == [expected_tokens([n], 5) for n in (0, 1, 0)]


async def test_shareable_request_is_refused_while_the_outbox_is_not_empty(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(model_card(max_waiting=1), max_running=1)
    with ScriptedBackend(socket_path, script) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            streams = [client.submit(request([n], 5)) for n in range(2)]
            await until(lambda: backend.engine.board.waiting == 1)
            with monkeypatch.context() as patch:
                patch.setattr(Session, "send_submit", lambda *_: False)
                streams.append(client.submit(replace(request([0], 5), may_share=True)))
                with pytest.raises(Overloaded):
                    client.submit(replace(request([0], 5), may_share=True))
            backend.engine.paused = False
            os.eventfd_write(backend.engine.wake_fd, 1)
            assert [await tokens_of(s) for s in streams[:2]] == [expected_tokens([n], 5) for n in range(2)]
            assert await tokens_of(streams[2]) == expected_tokens([0], 5)


@pytest.mark.parametrize(
    ("waiting", "finished", "age_s", "retry_after_s"),
    [(100, 50, 5.0, 10), (10, 1000, 5.0, 1), (1000, 1, 5.0, 60), (10, 0, 5.0, 1), (10, 50, 300.0, 1), (10, -5, 5.0, 1)],
)
def test_retry_after_is_the_time_in_which_the_wait_queue_drains(
    monkeypatch: pytest.MonkeyPatch, waiting: int, finished: int, age_s: float, retry_after_s: int
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("penstock.shm.client.overload.time.monotonic", lambda: now_s)
    rate = DrainRate()
    assert rate.retry_after_s(waiting, 500) == 1
    now_s += age_s
    assert rate.retry_after_s(waiting, 500 + finished) == retry_after_s


async def test_frontend_board_shows_its_counts_to_the_backend(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            await tokens_of(client.submit(request([1], 7)))
            await read(client.submit(request([FAILING_TOKEN], 5)))
            await until(lambda: at_base(client))
            (board,) = backend.engine.link.frontends.values()
            told = {name: value for name, value in board.values().items() if value and "_us_" not in name}
            assert told == {"pid": os.getpid(), "requests_length": 1, "requests_failed": 1, "tokens_streamed": 8}
            assert {"pid": os.getpid()} | client.counters == board.values()
            itl, sum_us = FrontendBoard.itl_us.read(board.values())
            assert sum(itl) == 6  # between the first one's seven tokens; the other had one
            assert sum_us > 0
            assert sum(FrontendBoard.queue_us.read(board.values())[0]) == 2
            assert client.backend_counters is not None
            assert client.backend_counters["generated_tokens"] == 8


async def test_tokens_that_arrive_together_share_the_time_since_the_token_before(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.shm.link.connected_frontend._MAX_HOLD_S", 60.0)
    with ScriptedBackend(socket_path, Script(step_s=0.01)) as backend:
        async with connected(socket_path) as client:
            bundled = replace(request([1], 9), batch_delivery=True)
            batches = [batch async for batch in client.submit(bundled)]
            assert [len(batch.token_ids) for batch in batches] == [1, 8]
            assert [token for batch in batches for token in batch.token_ids] == expected_tokens([1], 9)
            await until(lambda: at_base(client))
            (board,) = backend.engine.link.frontends.values()
            itl, sum_us = FrontendBoard.itl_us.read(board.values())
            assert sorted(itl)[-1] == sum(itl) == 8
            assert sum_us >= 8 * 10_000


async def test_backend_board_adds_up_all_frontends_including_departed_ones(socket_path: Path) -> None:
    def totals(client: BackendClient) -> dict[str, int]:
        counters = client.backend_counters or {}
        return {name.removeprefix(Board.TOTALS): value for name, value in counters.items()}

    with ScriptedBackend(socket_path):
        async with connected(socket_path) as stays:
            async with connected(socket_path) as goes:
                goes.board.count_response(200)
                stays.board.count_response(200)
                stays.board.count_response(777)
                await tokens_of(goes.submit(request([1], 7)))
                await tokens_of(stays.submit(request([2], 5)))
                await until(lambda: totals(stays)["tokens_streamed"] == 12)
                assert totals(stays)["frontends"] == 2
            await until(lambda: totals(stays)["frontends"] == 1)
            told = totals(stays)
            assert told["tokens_streamed"] == 12
            assert told["requests_length"] == 2
            assert (told["responses_200"], told["responses_other"]) == (2, 1)
            assert sum(told[word] for word in FrontendBoard.itl_us.words[:-1]) == 6 + 4


async def test_stream_counts_its_preemptions(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.002)) as backend:
        async with connected(socket_path) as client:
            streams = [client.submit(request([number], 30_000)) for number in range(2)]
            for stream in streams:
                await anext(stream)
            link = backend.engine.link
            (frontend,) = link.frontends
            for request_id in (streams[0].request_id, streams[0].request_id, 999):
                backend.engine.asked.append(partial(link.note_preemption, frontend, request_id))
            backend.engine.asked.append(partial(link.note_preemption, frontend + 1, 0))
            await until(lambda: [stream.num_preemptions for stream in streams] == [2, 0])
            for stream in streams:
                stream.cancel()


async def test_each_backend_receives_what_was_counted_since_the_previous_one(socket_path: Path) -> None:
    client = BackendClient(socket_path)
    await client.start()
    client.board.count_response(503)
    with ScriptedBackend(socket_path) as backend:
        await until(lambda: client.ready)
        await tokens_of(client.submit(request([1], 3)))
        (board,) = backend.engine.link.frontends.values()
        assert (board.responses_503, board.tokens_streamed, board.pid) == (1, 3, os.getpid())
    await until(lambda: client.backend_counters is None)
    client.board.count_response(503)
    with ScriptedBackend(socket_path) as backend:
        await until(lambda: client.ready)
        await tokens_of(client.submit(request([1], 2)))
        (board,) = backend.engine.link.frontends.values()
        assert (board.responses_503, board.tokens_streamed, board.requests_open) == (1, 2, 0)
    assert (client.counters["responses_503"], client.counters["tokens_streamed"]) == (2, 5)
    await client.close()


# Terms and deadlines


def expiring(prompt: list[int], max_tokens: int, in_s: float) -> GenerationRequest:
    return GenerationRequest(prompt, max_tokens, GREEDY, deadline_s=time.monotonic() + in_s)


def submits_of(engine: ScriptedEngine) -> list[Submit]:
    return [running.submission.submit for running in engine.running.values()]


@pytest.mark.parametrize("length", [3, 5000])
async def test_request_fields_reach_the_backend_inline_and_through_the_arena(socket_path: Path, length: int) -> None:
    with ScriptedBackend(socket_path) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            terms = {"salt": b"a tenant", "may_share": True, "priority": -3, "deadline_s": time.monotonic() + 1000}
            stream = client.submit(GenerationRequest([1] * length, 5, GREEDY, **terms))  # type: ignore[arg-type]
            await until(lambda: backend.engine.running)
            (submit,) = submits_of(backend.engine)
            assert (submit.salt, submit.may_share, submit.priority) == (b"a tenant", True, -3)
            assert 990_000 < submit.timeout_ms <= 1_000_000
            stream.cancel()


async def test_stream_learns_that_it_is_coalesced(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(is_coalesced=True)):
        async with connected(socket_path) as client:
            stream = client.submit(request([1], 3))
            assert stream.is_coalesced is None
            await tokens_of(stream)
            assert stream.is_coalesced is True


async def test_passed_deadline_ends_the_stream_before_it_is_sent(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            tokens, last = await read(client.submit(expiring([1], 5, in_s=-1.0)))
            assert (tokens, last.finish) == ([], Finish.EXPIRED)
            assert client.counters["requests_expired"] == 1
            assert await tokens_of(client.submit(request([1], 5))) == expected_tokens([1], 5)
            assert backend.engine.board.requests_accepted == 1


async def test_client_cancels_when_the_backend_misses_a_deadline(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            stream = client.submit(expiring([1], 30_000, in_s=0.05))
            tokens, last = await read(stream)
            assert last.finish is Finish.EXPIRED
            assert tokens == expected_tokens([1], len(tokens))
            await until(lambda: not backend.engine.running)
            assert backend.engine.num_cancellations == 1


async def test_deadline_ends_a_stream_without_a_backend(socket_path: Path) -> None:
    client = BackendClient(socket_path)
    await client.start()
    with BackendProcess(socket_path, step_s=0.005):
        await until(lambda: client.ready)
        stream = client.submit(expiring([1], 10_000, in_s=0.3))
    tokens, last = await read(stream)
    assert last.finish is Finish.EXPIRED
    assert tokens == expected_tokens([1], len(tokens))
    assert client.counters["requests_open"] == 0
    await client.close()


async def test_next_backend_receives_the_remaining_time(socket_path: Path) -> None:
    client = BackendClient(socket_path)
    await client.start()
    with BackendProcess(socket_path, step_s=0.005):
        await until(lambda: client.ready)
        stream = client.submit(expiring([1], 10_000, in_s=1000.0))
        await until(lambda: client.board.tokens_streamed)
        began_s = time.monotonic()
    with ScriptedBackend(socket_path) as backend:
        backend.engine.paused = True
        await until(lambda: backend.engine.running)
        (submit,) = submits_of(backend.engine)
        passed_ms = 1000 * (time.monotonic() - began_s)
        assert 1_000_000 - passed_ms - 30_000 < submit.timeout_ms < 1_000_000
        stream.cancel()
        await client.close()


# Readiness, death and return


async def test_client_is_ready_once_the_first_backend_starts(socket_path: Path) -> None:
    client = BackendClient(socket_path)
    await client.start()
    await asyncio.sleep(0.01)
    assert not client.ready
    assert client.model is None
    with pytest.raises(BackendUnavailable):
        client.submit(request([1], 1))
    with ScriptedBackend(socket_path):
        await until(lambda: client.ready)
        assert client.model == model_card()
        assert await tokens_of(client.submit(request([1], 5))) == expected_tokens([1], 5)
    await until(lambda: not client.ready)
    assert client.model == model_card()
    await client.close()
    assert client.balance() == {}


async def test_backend_without_progress_is_not_ready(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            monkeypatch.setattr(backend.engine.board, "beat", lambda: None)
            backend.engine.board.heartbeat_ns -= 3_000_000_000
            await until(lambda: not client.ready)
            with pytest.raises(BackendUnavailable):
                client.submit(request([1], 1))
            monkeypatch.undo()
            await until(lambda: client.ready)


async def test_draining_backend_is_not_ready(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            backend.engine.board.draining = 1
            assert not client.ready


async def test_streams_go_on_after_their_backend_is_killed_and_restarted(socket_path: Path) -> None:
    with BackendProcess(socket_path, step_s=0.005) as backend:
        async with connected(socket_path) as client:
            prompts = [[n, n + 1] for n in range(8)] + [[n] * 4090 for n in range(3)] + [[n] * 6000 for n in range(2)]
            streams = [client.submit(request(p, 150)) for p in prompts]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            for already in (20, 70, 110):
                shortest = min(streams, key=lambda stream: len(stream.tokens) - stream.submit.num_prompt_tokens)
                await until(lambda s=shortest, a=already: len(s.tokens) - s.submit.num_prompt_tokens >= a)
                backend.restart()
            assert await asyncio.gather(*readers) == [expected_tokens(p, 150) for p in prompts]
            assert client.counters["requests_resumed"] == 3 * len(prompts)


async def test_lost_message_is_noticed_and_the_stream_resumes_whole(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(step_s=0.001)) as backend:
        async with connected(socket_path) as client:
            reader = asyncio.create_task(tokens_of(client.submit(request([1, 2], 200))))
            await until(lambda: client.board.tokens_streamed > 20)
            (frontend,) = backend.engine.link._frontends.values()
            frontend._next_sequence += 1
            assert await reader == expected_tokens([1, 2], 200)
            assert client.counters["requests_resumed"] == 1
            assert len(backend.engine.deaths) == 1


async def test_cancelled_stream_is_not_resubmitted(socket_path: Path) -> None:
    async with connected_to_nothing_after_two_streams(socket_path) as (client, streams):
        streams[0].cancel()
        _, last = await read(streams[0])
        assert last.finish is Finish.CANCELLED
        with ScriptedBackend(socket_path) as backend:
            assert await tokens_of(streams[1]) == expected_tokens([1, 2], 300)
            assert backend.engine.board.requests_accepted == 1
            assert backend.engine.num_cancellations == 0
            assert client.ready


@asynccontextmanager
async def connected_to_nothing_after_two_streams(
    socket_path: Path, **options: Any
) -> AsyncIterator[tuple[BackendClient, list[TokenStream]]]:
    """Two streams in their midst, and their backend is dead."""
    client = BackendClient(socket_path, **options)
    await client.start()
    with BackendProcess(socket_path, step_s=0.005):
        await until(lambda: client.ready)
        streams = [client.submit(request([n, n + 1], 300)) for n in range(2)]
        await until(lambda: client.board.tokens_streamed > 10)
    await until(lambda: not client.ready)
    try:
        yield client, streams
    finally:
        await client.close()
        client.ledger.check()


async def test_streams_fail_without_a_new_backend_in_time(socket_path: Path) -> None:
    async with connected_to_nothing_after_two_streams(socket_path, resume_timeout_s=0.05) as (client, streams):
        for stream in streams:
            _, last = await read(stream)
            assert (last.finish, last.failure) == (Finish.FAILED, FailureCode.UNAVAILABLE)
        assert client.balance() == {}


async def test_backend_with_another_model_does_not_continue_streams(socket_path: Path) -> None:
    async with connected_to_nothing_after_two_streams(socket_path) as (client, streams):
        with ScriptedBackend(socket_path, Script(model_card(fingerprint="another"))) as backend:
            for stream in streams:
                _, last = await read(stream)
                assert (last.finish, last.failure) == (Finish.FAILED, FailureCode.UNAVAILABLE)
            await until(lambda: client.ready)
            assert backend.engine.board.requests_accepted == 0
            assert await tokens_of(client.submit(request([1], 5))) == expected_tokens([1], 5)


async def test_request_that_kills_backends_is_given_up_and_others_finish(socket_path: Path) -> None:
    with BackendProcess(socket_path, step_s=0.02) as backend:
        async with connected(socket_path) as client:
            innocent = asyncio.create_task(tokens_of(client.submit(request([1, 2], 100))))
            await until(lambda: client.board.tokens_streamed > 3)
            poison = asyncio.create_task(read(client.submit(request([KILLING_TOKEN], 5))))
            while not poison.done():
                await asyncio.to_thread(backend.wait_for_death, 0.5)
                if not backend.alive:
                    backend.restart()
            _, last = await poison
            assert (last.finish, last.failure) == (Finish.FAILED, FailureCode.INTERNAL)
            assert await innocent == expected_tokens([1, 2], 100)


async def test_backend_of_another_protocol_version_is_logged_and_not_used(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.shm.link.join.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with BackendProcess(socket_path):
        client = BackendClient(socket_path)
        await client.start()
        await until(lambda: f"protocol version {PROTOCOL_VERSION}, the frontend {PROTOCOL_VERSION + 1}" in caplog.text)
        assert not client.ready
        await client.close()


LIGHT = """
import asyncio, json, sys
from pathlib import Path
from penstock.shm.client import BackendClient, GenerationRequest
from penstock.shm.messages import Sampling

async def main() -> None:
    client = BackendClient(Path(sys.argv[1]))
    await client.start()
    while not client.ready:
        await asyncio.sleep(0.005)
    async for batch in client.submit(GenerationRequest([1, 2], 50, Sampling())):
        pass
    await client.close()

asyncio.run(main())
with open("/proc/self/status") as status:
    rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
print(json.dumps({"rss_kib": rss, "modules": sorted(name.partition(".")[0] for name in sys.modules)}))
"""


def test_client_process_is_small_and_imports_no_numpy_torch_or_pickle_codec(socket_path: Path) -> None:
    with BackendProcess(socket_path):
        result = subprocess.run(
            [sys.executable, "-c", LIGHT, str(socket_path)], capture_output=True, text=True, check=True, cwd=ROOT
        )
    report = json.loads(result.stdout)
    assert not {"numpy", "torch", "cupy", "cloudpickle", "dill"} & set(report["modules"])
    assert report["rss_kib"] < 48 << 10
