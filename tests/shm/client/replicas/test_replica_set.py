"""Streams of several backends: a replica that dies, drains or hangs hands its streams to the others at once."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.shm.client import (
    BackendUnavailable,
    GenerationRequest,
    Overloaded,
    PooledFailed,
    PooledRequest,
    ReplicaSet,
    SocketDirectory,
)
from penstock.shm.client.replicas.socket_directory import FIRST_NAME
from penstock.shm.link.listening_address import take_over
from penstock.shm.messages import NO_TOKEN, Adapter, Failure, FailureCode, Finish
from tests.shm.client.harness import GREEDY, at_base, read, request, tokens_of, until
from tests.shm.scripted_backend import BackendProcess, Script, ScriptedBackend, expected_tokens, model_card


@pytest.fixture
def paths(socket_path: Path) -> list[Path]:
    return [socket_path.with_name(f"{name}.sock") for name in ("a", "b")]


@asynccontextmanager
async def connected_to(
    paths: Sequence[Path], num_ready: int | None = None, **options: Any
) -> AsyncIterator[ReplicaSet]:
    """A set of which num_ready replicas, by default all, are ready. At its end no stream may be left."""
    replicas = ReplicaSet(paths, **options)
    await replicas.start()
    try:
        wanted = len(paths) if num_ready is None else num_ready
        await until(lambda: sum(replica.client.ready for replica in replicas.replicas) >= wanted)
        yield replicas
        await until(lambda: all(at_base(replica.client) for replica in replicas.replicas))
    finally:
        await replicas.close()
        for replica in replicas.replicas:
            replica.client.ledger.check()


def num_open(replicas: ReplicaSet) -> list[int]:
    return [replica.client.board.requests_open for replica in replicas.replicas]


async def test_streams_of_a_killed_replica_continue_on_the_other(paths: list[Path]) -> None:
    prompts = [[n, n + 1, n + 2] for n in range(20, 84)]
    with BackendProcess(paths[0], step_s=0.01) as first, BackendProcess(paths[1], step_s=0.01):
        async with connected_to(paths) as replicas:
            streams = [replicas.submit(request(prompt, 100)) for prompt in prompts]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            assert num_open(replicas) == [32, 32]
            await until(lambda: min(stream.num_generated for stream in streams) > 20)
            first.kill()
            assert await asyncio.gather(*readers) == [expected_tokens(prompt, 100) for prompt in prompts]
            assert sorted(stream.num_moves for stream in streams) == [0] * 32 + [1] * 32
            assert {stream.backend for stream in streams} == {"2"}


async def test_stream_with_an_adapter_waits_for_the_only_backend_that_has_it(paths: list[Path]) -> None:
    script = Script(model_card(adapters=(Adapter("sql", "sql-id", 4),)), step_s=0.005)
    with ScriptedBackend(paths[1], Script(step_s=0.005)), ExitStack() as life:
        life.enter_context(ScriptedBackend(paths[0], script))
        async with connected_to(paths) as replicas:
            streams = [
                replicas.submit(replace(request([n, n], 300), adapter=name)) for n, name in ((20, "sql-id"), (21, ""))
            ]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            await until(lambda: min(stream.num_generated for stream in streams) > 10)
            await asyncio.to_thread(life.close)
            life.enter_context(ScriptedBackend(paths[0], script))
            assert await asyncio.gather(*readers) == [expected_tokens([n, n], 300) for n in (20, 21)]
            assert streams[0].num_moves == 0
            assert streams[0].backend == "1"


@pytest.mark.parametrize("comes_last", [False, True])
async def test_new_request_for_an_adapter_waits_for_the_only_backend_that_has_it(
    paths: list[Path], comes_last: bool
) -> None:
    """The other one would refuse it, whether it is there all the time or comes back before."""
    script = Script(model_card(adapters=(Adapter("sql", "sql-id", 4),)))
    with ExitStack() as without, ExitStack() as having:
        other = without.enter_context(ScriptedBackend(paths[0]))
        having.enter_context(ScriptedBackend(paths[1], script))
        async with connected_to(paths, max_held=1) as replicas:
            await asyncio.to_thread(having.close)
            if comes_last:
                await asyncio.to_thread(without.close)
            await until(lambda: sum(replica.client.ready for replica in replicas.replicas) == (not comes_last))
            stream = replicas.submit(replace(request([20, 21], 5), adapter="sql-id"))
            with pytest.raises(BackendUnavailable):  # not the 404 of a backend that has no such adapter
                replicas.submit(replace(request([22, 23], 5), adapter="sql-id"))
            if comes_last:
                other = without.enter_context(ScriptedBackend(paths[0]))
                await until(lambda: replicas.ready)
            having.enter_context(ScriptedBackend(paths[1], script))
            assert await tokens_of(stream) == expected_tokens([20, 21], 5)
            assert stream.backend == "2"
            assert not other.engine.board.requests_accepted


async def test_streams_survive_deaths_of_both_replicas_in_turn(paths: list[Path]) -> None:
    prompts = [[n, n + 1] for n in range(20, 28)]
    with BackendProcess(paths[0], step_s=0.005) as first, BackendProcess(paths[1], step_s=0.005) as second:
        async with connected_to(paths) as replicas:
            streams = [replicas.submit(request(prompt, 200)) for prompt in prompts]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            for already, backend in ((20, first), (60, second), (100, first)):
                await until(lambda n=already: min(stream.num_generated for stream in streams) > n)
                await until(lambda: all(replica.client.ready for replica in replicas.replicas))
                await asyncio.to_thread(backend.restart)
            assert await asyncio.gather(*readers) == [expected_tokens(prompt, 200) for prompt in prompts]


async def test_streams_of_a_draining_replica_move_before_it_ends(paths: list[Path]) -> None:
    with ScriptedBackend(paths[0], Script(step_s=0.005)) as first, ScriptedBackend(paths[1], Script(step_s=0.005)):
        async with connected_to(paths) as replicas:
            streams = [replicas.submit(request([n, n], 300)) for n in range(20, 24)]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            await until(lambda: min(stream.num_generated for stream in streams) > 10)
            first.engine.calls.append(lambda: setattr(first.engine.board, "draining", 1))
            await until(lambda: num_open(replicas)[0] == 0)
            await until(lambda: not first.engine.running)  # it has received the cancels
            assert await asyncio.gather(*readers) == [expected_tokens([n, n], 300) for n in range(20, 24)]


async def test_streams_of_a_stopped_replica_move_and_its_late_tokens_are_ignored(paths: list[Path]) -> None:
    with BackendProcess(paths[0], step_s=0.01) as first, BackendProcess(paths[1], step_s=0.01) as second:
        async with connected_to(paths) as replicas:
            streams = [replicas.submit(request([n, n], 500)) for n in range(20, 24)]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            await until(lambda: min(stream.num_generated for stream in streams) > 10)
            first.signal(signal.SIGSTOP)
            await until(lambda: num_open(replicas)[0] == 0)
            first.signal(signal.SIGCONT)
            await until(lambda: replicas.replicas[0].client.ready)
            second.kill()  # streams come back to the first, which still sends tokens of their earlier stay
            assert await asyncio.gather(*readers) == [expected_tokens([n, n], 500) for n in range(20, 24)]


@pytest.mark.parametrize("num_paths", [1, 2])
async def test_streams_move_to_the_backend_that_takes_the_path_over(paths: list[Path], num_paths: int) -> None:
    script = Script(step_s=0.005)
    new_path = paths[0].with_name("new.sock")
    with ExitStack() as backends:
        old, *_ = [backends.enter_context(BackendProcess(path, step_s=0.005)) for path in paths[:num_paths]]
        async with connected_to(paths[:num_paths]) as replicas:
            streams = [replicas.submit(request([n, n], 400)) for n in range(20, 36)]
            streams += [replicas.submit(GenerationRequest([7, 8], 400, GREEDY, may_share=True)) for _ in range(3)]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            await until(lambda: min(stream.num_generated for stream in streams) > 10)
            before = replicas.replicas[0].client.counters
            new = backends.enter_context(ScriptedBackend(new_path, script))
            take_over(paths[0], new_path)
            await until(lambda: len(replicas.replicas) == num_paths + 1)
            await until(lambda: replicas.replicas[1].client.ready)
            await until(lambda: num_open(replicas)[0] == 0)
            later = replicas.submit(request([50], 5))  # the old one still lives, and receives nothing new
            await asyncio.to_thread(old.kill)
            await until(lambda: len(replicas.replicas) == num_paths)
            expected = [expected_tokens([n, n], 400) for n in range(20, 36)] + 3 * [expected_tokens([7, 8], 400)]
            assert await asyncio.gather(*readers) == expected
            assert await tokens_of(later) == expected_tokens([50], 5)
            assert new.engine.board.requests_accepted or num_paths > 1
            shown = replicas.shown[0].client.counters
            assert shown["tokens_streamed"] >= before["tokens_streamed"] > 0


async def test_backend_that_takes_a_path_over_and_dies_leaves_streams_with_the_old_one(paths: list[Path]) -> None:
    new_path = paths[0].with_name("new.sock")
    with ScriptedBackend(paths[0], Script(step_s=0.005)), BackendProcess(new_path, step_s=0.005) as new:
        async with connected_to(paths[:1]) as replicas:
            streams = [replicas.submit(request([n, n], 600)) for n in range(20, 24)]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            take_over(paths[0], new_path)
            await until(lambda: any(stream.num_moves for stream in streams))
            await asyncio.to_thread(new.kill)
            assert await asyncio.gather(*readers) == [expected_tokens([n, n], 600) for n in range(20, 24)]


async def test_requests_wait_while_no_replica_is_ready_and_go_to_the_first_that_is(paths: list[Path]) -> None:
    async with connected_to(paths, num_ready=0, max_held=4) as replicas:
        streams = [replicas.submit(request([n], 5)) for n in range(20, 24)]
        with pytest.raises(BackendUnavailable):
            replicas.submit(request([30], 5))
        with ScriptedBackend(paths[1]):
            assert await asyncio.gather(*map(tokens_of, streams)) == [expected_tokens([n], 5) for n in range(20, 24)]


async def test_backend_with_another_model_is_refused_and_the_difference_named(
    paths: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    good = Script(model_card(traits=(("weights", "aa"), ("dtype", "bf16"))))
    bad = Script(model_card(fingerprint="scripted-2", traits=(("weights", "aa"), ("dtype", "fp32"))))
    with ScriptedBackend(paths[0], good):
        async with connected_to(paths, num_ready=1) as replicas:
            with ScriptedBackend(paths[1], bad) as second:
                await until(lambda: "no replica of the others: dtype is fp32, not bf16" in caplog.text)
                assert not replicas.replicas[1].client.ready
                assert await tokens_of(replicas.submit(request([20], 5))) == expected_tokens([20], 5)
                assert second.engine.board.requests_accepted == 0


async def test_model_changes_when_no_replica_has_the_old_one(paths: list[Path]) -> None:
    new = Script(model_card(fingerprint="scripted-2"))
    async with connected_to(paths, num_ready=0) as replicas:
        with ExitStack() as backends:
            for path in paths:
                backends.enter_context(ScriptedBackend(path, Script(step_s=0.01)))
            await until(lambda: all(replica.client.ready for replica in replicas.replicas))
            stream = replicas.submit(request([20], 10_000))
            await until(lambda: stream.num_generated > 3)
        await until(lambda: not replicas.ready)
        with ScriptedBackend(paths[0], new), ScriptedBackend(paths[1], new):
            _, last = await read(stream)
            assert (last.finish, last.failure) == (Finish.FAILED, FailureCode.UNAVAILABLE)
            await until(lambda: all(replica.client.ready for replica in replicas.replicas))
            assert replicas.model is not None
            assert replicas.model.fingerprint == "scripted-2"


async def test_shortest_context_of_the_replicas_is_that_of_the_set(paths: list[Path]) -> None:
    scripts = [Script(model_card(max_context_tokens=tokens)) for tokens in (4096, 2048)]
    with ScriptedBackend(paths[0], scripts[0]), ScriptedBackend(paths[1], scripts[1]):
        async with connected_to(paths) as replicas:
            assert replicas.model is not None
            assert replicas.model.max_context_tokens == 2048


async def test_full_replica_leaves_requests_to_the_other(paths: list[Path]) -> None:
    script = Script(model_card(max_waiting=1), max_running=1, step_s=0.005)
    with ScriptedBackend(paths[0], script) as first, ScriptedBackend(paths[1], script) as second:
        async with connected_to(paths) as replicas:
            streams = []
            for backend in (first, second):
                backend.engine.paused = True
            for n in range(20, 24):
                streams.append(replicas.submit(request([n], 5)))
                await until(lambda: len(first.engine.running) + len(second.engine.running) == len(streams))
            await until(lambda: first.engine.board.waiting == second.engine.board.waiting == 1)
            for n in range(2):
                with pytest.raises(Overloaded):
                    replicas.submit(request([30 + n], 5))
            for backend in (first, second):
                backend.engine.paused = False
            assert await asyncio.gather(*map(tokens_of, streams)) == [expected_tokens([n], 5) for n in range(20, 24)]


async def test_input_that_a_full_replica_has_refused_goes_to_one_with_room(paths: list[Path]) -> None:
    """It is not sent again and again to the full replica, where it was placed first."""
    with ScriptedBackend(paths[0]) as first, ScriptedBackend(paths[1]) as second:
        async with connected_to(paths) as replicas:
            engines = [first.engine, second.engine]
            for engine in engines:
                engine.paused = True
            pooled = PooledRequest([1, 2], "embed", may_share=True, has_begun=True)
            for number in range(2):
                stream = replicas.submit_pooled(pooled)
                await until(lambda: any(engine.running for engine in engines))
                (full,) = (engine for engine in engines if engine.running)
                engines.remove(full)
                failure = Failure(stream.request_id, FailureCode.OVERLOADED, 5)
                (epoch,) = full.link.frontends
                push = partial(full.link.push, epoch, stream.request_id, NO_TOKEN, Finish.REJECTED, failure=failure)
                full.calls += [full.running.clear, push]
                with pytest.raises(PooledFailed, match="overloaded"):
                    await stream.result()
                room = asyncio.ensure_future(replicas.wait_for_room())
                for _ in range(10):
                    await asyncio.sleep(0)
                assert room.done() is (number == 0)
            full.calls.append(partial(full.link.announce_room, epoch))
            await room


async def test_equal_requests_meet_at_one_replica_and_others_spread(paths: list[Path]) -> None:
    with ScriptedBackend(paths[0], Script(step_s=0.005)), ScriptedBackend(paths[1], Script(step_s=0.005)):
        async with connected_to(paths) as replicas:
            equal = [replicas.submit(GenerationRequest([7, 8], 50, GREEDY, may_share=True)) for _ in range(12)]
            assert len({stream.backend for stream in equal}) == 1
            others = [replicas.submit(request([n], 50)) for n in range(20, 32)]
            assert num_open(replicas) == [12, 12]
            await asyncio.gather(*map(tokens_of, equal + others))


async def test_requests_follow_their_prefix_unless_its_replica_is_overloaded(paths: list[Path]) -> None:
    document = list(range(100, 400))
    with ScriptedBackend(paths[0], Script(step_s=0.005)), ScriptedBackend(paths[1], Script(step_s=0.005)):
        async with connected_to(paths) as replicas:
            followers = [replicas.submit(request([*document, n], 50)) for n in range(8)]
            assert len({stream.backend for stream in followers}) == 1
            followers += [replicas.submit(request([*document, n], 50)) for n in range(8, 48)]
            assert min(num_open(replicas)) >= 12
            await asyncio.gather(*map(tokens_of, followers))


async def test_replicas_are_checked_when_the_set_is_made(paths: list[Path]) -> None:
    with pytest.raises(ValueError, match="has 0 paths"):
        ReplicaSet([])
    with pytest.raises(ValueError, match="same path twice"):
        ReplicaSet([paths[0], paths[0]])


async def test_sockets_that_appear_in_the_directory_are_taken_up_and_those_that_vanish_are_dropped(
    socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    directory = socket_path.with_name("backends")
    directory.mkdir(mode=0o700)
    first, second = directory / "one.sock", directory / "two.sock"
    options: dict[str, Any] = {"directory": SocketDirectory(directory), "max_held": 10}
    with ExitStack() as backends:
        async with connected_to([directory / FIRST_NAME], num_ready=0, **options) as replicas:
            held = replicas.submit(request([5, 6], 10))  # there is no backend yet
            assert [replica.name for replica in replicas.shown] == ["backend"]
            backends.enter_context(BackendProcess(first, step_s=0.005))
            assert await tokens_of(held) == expected_tokens([5, 6], 10)
            await until(lambda: [replica.name for replica in replicas.shown] == ["one"])
            streams = [replicas.submit(request([n, n], 300)) for n in range(20, 24)]
            readers = [asyncio.create_task(tokens_of(stream)) for stream in streams]
            backends.enter_context(BackendProcess(second, step_s=0.005))
            await until(lambda: len(replicas.shown) == 2 and all(one.client.ready for one in replicas.shown))
            await until(lambda: min(stream.num_generated for stream in streams) > 10)
            first.unlink()  # its backend lives, and computes until its streams have moved
            await until(lambda: [replica.name for replica in replicas.shown] == ["two"])
            assert {stream.backend for stream in streams} == {"two"}
            later = replicas.submit(request([50], 5))
            assert await asyncio.gather(*readers) == [expected_tokens([n, n], 300) for n in range(20, 24)]
            assert await tokens_of(later) == expected_tokens([50], 5)
            second.unlink()
            await asyncio.sleep(0)
            assert [replica.name for replica in replicas.shown] == ["two"]  # the last one holds what comes
    assert "replica one is taken up" in caplog.text
    assert "replica one is dropped" in caplog.text
    assert caplog.text.index("replica two is taken up") < caplog.text.index("streams of a leaving backend continue")


async def test_socket_that_comes_back_before_its_streams_have_moved_is_kept(socket_path: Path) -> None:
    directory = socket_path.with_name("backends")
    directory.mkdir(mode=0o700)
    paths = [directory / "one.sock", directory / "two.sock"]
    with ScriptedBackend(paths[0], Script(step_s=0.005)), ScriptedBackend(paths[1], Script(step_s=0.005)):
        async with connected_to(paths, directory=SocketDirectory(directory)) as replicas:
            place = replicas._places[0]
            stream = replicas.submit(request([5], 50))
            while stream.backend != "one":
                stream = replicas.submit(request([5], 50))
            replicas._follow(paths[1:])
            assert place.is_dropped
            replicas._follow(paths)
            assert not place.is_dropped
            assert await tokens_of(stream) == expected_tokens([5], 50)
            assert replicas._places[0] is place
