"""Requests wait in the client for a slot or a full link; a full wait queue refuses them."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.shm.client import GenerationRequest, Overloaded, capacity
from penstock.shm.client.session import Session
from penstock.shm.messages import FailureCode, Finish, Picture
from tests.shm.client.harness import GREEDY, LONG, at_base, connected, read, request, tokens_of, until
from tests.shm.scripted_backend import BackendProcess, Script, ScriptedBackend, expected_tokens, model_card

_NUMBERS = itertools.count(1)


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


def with_pictures(prompt: list[int], *sizes: int) -> GenerationRequest:
    pictures = tuple(Picture(((0, 1),), next(_NUMBERS).to_bytes(32), (size,), (1, 1, 1)) for size in sizes)
    pixels = tuple(map(bytes, sizes))
    return GenerationRequest(prompt, 5, GREEDY, pictures=pictures, pixels=pixels)


async def test_requests_pass_those_whose_pictures_find_no_room(socket_path: Path) -> None:
    """The arena has 16 slots for pixels."""
    card = msgspec.structs.replace(model_card(max_context_tokens=LONG), max_picture_bytes=60_000)
    with ScriptedBackend(socket_path, Script(card)) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            prompts = [[n] for n in range(10)]
            streams = [client.submit(with_pictures(prompt, 60_000, 50_000)) for prompt in prompts]
            too_many = client.submit(with_pictures([1], *[60_000] * 17))
            words = client.submit(request([3], 5))
            assert (client.balance()["pixels"], client.balance()["unsent"]) == (8, 2)
            streams.pop(0).cancel()
            await until(lambda: client.balance()["unsent"] == 1)
            backend.engine.paused = False
            assert await tokens_of(words) == expected_tokens([3], 5)
            assert [await tokens_of(stream) for stream in streams] == [expected_tokens(p, 5) for p in prompts[1:]]
            assert (await read(too_many))[1].failure is FailureCode.BAD_PICTURE


async def test_equal_pictures_are_written_once_and_pixels_that_wait_are_bounded(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = msgspec.structs.replace(model_card(max_context_tokens=LONG), max_picture_bytes=60_000)
    monkeypatch.setattr(capacity, "MAX_WAITING_PIXEL_BYTES", 150_000)
    with ScriptedBackend(socket_path, Script(card)) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            twice = with_pictures([7], 60_000, 60_000)
            streams = [client.submit(twice) for _ in range(20)]
            assert client.balance()["pixels"] == 20
            assert "unsent" not in client.balance()
            others = [client.submit(with_pictures([n], *[60_000] * 4)) for n in range(4)]
            assert client.balance()["unsent"] == 1
            with pytest.raises(Overloaded, match="more than 150000 bytes of pixels, the limit, would wait"):
                client.submit(with_pictures([5], 60_000))
            with pytest.raises(Overloaded):
                client.submit(replace(twice, pictures=twice.pictures * 4, pixels=twice.pixels * 4))
            backend.engine.paused = False
            for stream in [*streams, *others]:
                await read(stream)
            assert "pixels" not in client.balance()


async def test_small_pictures_do_not_pass_large_ones_that_wait(socket_path: Path) -> None:
    """The arena has 16 slots for pixels."""
    card = msgspec.structs.replace(model_card(max_context_tokens=LONG), max_picture_bytes=60_000)
    with ScriptedBackend(socket_path, Script(card)) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            streams = [client.submit(with_pictures([n], 60_000, 60_000)) for n in range(7)]
            large = client.submit(with_pictures([8], *[60_000] * 4))
            small = client.submit(with_pictures([9], 60_000))
            assert (client.balance()["pixels"], client.balance()["unsent"]) == (7, 2)
            streams.pop().cancel()
            await until(lambda: client.balance()["unsent"] == 1)
            backend.engine.paused = False
            assert await tokens_of(large) == expected_tokens([8], 5)
            assert await tokens_of(small) == expected_tokens([9], 5)


async def test_slow_reader_receives_all_tokens_in_bounded_batches(socket_path: Path) -> None:
    with ScriptedBackend(socket_path) as backend:
        async with connected(socket_path) as client:
            stream = client.submit(request([1, 2], 500))
            await until(lambda: backend.engine.board.requests_finished == 1)
            await until(lambda: at_base(client))
            batches = [batch async for batch in stream]
            assert [token for batch in batches for token in batch.token_ids] == expected_tokens([1, 2], 500)
            assert [len(batch.token_ids) for batch in batches] == [64] * 7 + [52]
            assert [batch.finish for batch in batches] == [Finish.NONE] * 7 + [Finish.LENGTH]


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


async def test_tenant_with_few_open_requests_is_sent_to_a_backend_whose_wait_queue_is_full(socket_path: Path) -> None:
    script = Script(model_card(max_waiting=16), max_running=1)
    with ScriptedBackend(socket_path, script) as backend:
        backend.engine.paused = True
        async with connected(socket_path) as client:
            flood = [client.submit(replace(request([n, 0], 5), tenant=b"flood")) for n in range(17)]
            await until(lambda: backend.engine.board.waiting == 16)
            with pytest.raises(Overloaded, match="16"):
                client.submit(replace(request([9], 5), tenant=b"flood"))
            other = replace(request([8], 5), tenant=b"other")
            sent = [client.submit(other) for _ in range(2)]
            with pytest.raises(Overloaded):
                client.submit(other)
            await until(lambda: backend.engine.board.waiting == 18)
            sent[0].cancel()
            sent.append(client.submit(other))  # it has less open again
            backend.engine.paused = False
            os.eventfd_write(backend.engine.wake_fd, 1)
            assert [await tokens_of(stream) for stream in flood] == [expected_tokens([n, 0], 5) for n in range(17)]
            assert [await tokens_of(stream) for stream in sent[1:]] == [expected_tokens([8], 5)] * 2


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
                patch.setattr(Session, "send_prompt", lambda *_: False)
                streams.append(client.submit(replace(request([0], 5), may_share=True)))
                with pytest.raises(Overloaded):
                    client.submit(replace(request([0], 5), may_share=True))
            backend.engine.paused = False
            os.eventfd_write(backend.engine.wake_fd, 1)
            assert [await tokens_of(s) for s in streams[:2]] == [expected_tokens([n], 5) for n in range(2)]
            assert await tokens_of(streams[2]) == expected_tokens([0], 5)
