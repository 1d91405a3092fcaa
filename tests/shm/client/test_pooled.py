"""Pooled requests: parts become one result, what contradicts the request breaks the link, and a restart repeats it."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.shm.client import (
    BackendUnavailable,
    Finish,
    Overloaded,
    PooledFailed,
    PooledRequest,
    PooledResult,
    pool_into,
)
from penstock.shm.link.connected_frontend import MAX_VECTOR_PART_BYTES
from penstock.shm.link.events import Submission
from penstock.shm.messages import NO_TOKEN, Failure, FailureCode, PooledWidth, VectorPart
from tests.shm.client.harness import connected, request, until
from tests.shm.scripted_backend import Script, ScriptedBackend, ScriptedEngine, model_card

WIDTH, VOCAB = 6, 1000
CARD = model_card(
    generates=False,
    pooled=(PooledWidth("embed", WIDTH), PooledWidth("token_embed", WIDTH), PooledWidth("sparse", VOCAB)),
)


def floats(count: int, seed: int = 0) -> array[float]:
    return array("f", [random.Random(f"{seed} {i}").uniform(-1, 1) for i in range(count)])


def parts_of(
    submission: Submission, values: array[float], indices: array[int] | None = None, cuts: tuple[int, ...] = ()
) -> list[VectorPart]:
    pooled = submission.message.pooled
    assert pooled is not None
    num_vectors = submission.message.num_prompt_tokens if pooled.kind.startswith("token_") else 1
    bounds = [0, *cuts, len(values)]
    return [
        VectorPart(
            submission.request_id,
            num_vectors,
            len(values),
            values[start:end].tobytes(),
            b"" if indices is None else indices[start:end].tobytes(),
        )
        for start, end in itertools.pairwise(bounds)
    ]


async def test_parts_become_the_values_of_each_request(socket_path: Path) -> None:
    def vector_parts(submission: Submission) -> list[VectorPart]:
        (first, *_), count = array("i", submission.tokens), len(submission.tokens) // 4
        return parts_of(submission, floats(count * WIDTH, first), cuts=(1, 5, 5 + first % 3))

    with ScriptedBackend(socket_path, Script(CARD, vector_parts=vector_parts)):
        async with connected(socket_path) as client:
            prompts = [[n, *range(n % 4)] for n in range(2, 200)]
            streams = [client.submit_pooled(PooledRequest(prompt, "token_embed")) for prompt in prompts]
            results = await asyncio.gather(*(stream.result() for stream in streams))
            for prompt, result in zip(prompts, results, strict=True):
                assert result.values == floats(len(prompt) * WIDTH, prompt[0])
                assert (result.num_vectors, result.num_prompt_tokens, result.indices) == (len(prompt),) * 2 + (None,)
                assert result.is_cached
                assert not result.is_coalesced


async def test_requests_of_a_group_travel_in_few_messages(socket_path: Path) -> None:
    def vector_parts(submission: Submission) -> list[VectorPart]:
        return parts_of(submission, floats(WIDTH, array("i", submission.tokens)[0]))

    with ScriptedBackend(socket_path, Script(CARD, vector_parts=vector_parts)) as backend:
        async with connected(socket_path) as client:
            num_before = backend.engine.link.counters.messages_in
            requests = [PooledRequest([100 + n], "embed", group=1) for n in range(70)]
            requests[20] = replace(requests[20], deadline_s=time.monotonic() + 600)
            requests[50] = replace(requests[50], deadline_s=time.monotonic() - 1)
            streams = [client.submit_pooled(each) for each in requests]
            assert backend.engine.link.counters.messages_in == num_before
            streams[5].cancel()
            results = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
            ends = [result.finish for result in results if isinstance(result, PooledFailed)]
            values = [result.values for result in results if isinstance(result, PooledResult)]
            assert ends == [Finish.CANCELLED, Finish.EXPIRED]
            assert values == [floats(WIDTH, 100 + n) for n in range(70) if n not in (5, 50)]
            # 0 to 4, 6 to 49, 51 to 69.
            assert backend.engine.link.counters.messages_in == num_before + 3


async def test_a_result_larger_than_a_message_arrives_whole(socket_path: Path) -> None:
    card = model_card(pooled=(PooledWidth("token_embed", 4096),), max_context_tokens=1024)
    part_values = MAX_VECTOR_PART_BYTES // 4
    values = floats(4096) * 200

    def vector_parts(submission: Submission) -> list[VectorPart]:
        return parts_of(submission, values, cuts=tuple(range(part_values, len(values), part_values)))

    with ScriptedBackend(socket_path, Script(card, vector_parts=vector_parts, credit=4)):
        async with connected(socket_path) as client:
            streams = [client.submit_pooled(PooledRequest([1] * 200, "token_embed")) for _ in range(3)]
            assert [(await stream.result()).values == values for stream in streams] == [True] * 3


async def test_sparse_result_has_indices_and_may_be_empty(socket_path: Path) -> None:
    def vector_parts(submission: Submission) -> list[VectorPart]:
        count = len(submission.tokens) // 4 - 1
        return parts_of(submission, floats(count), array("i", range(7, 7 + count)), cuts=(1,) if count > 1 else ())

    with ScriptedBackend(socket_path, Script(CARD, vector_parts=vector_parts)):
        async with connected(socket_path) as client:
            result = await client.submit_pooled(PooledRequest([1, 2, 3], "sparse")).result()
            assert (result.values, result.indices, result.num_vectors) == (floats(2), array("i", [7, 8]), 1)
            result = await client.submit_pooled(PooledRequest([1], "sparse")).result()
            assert (result.values, result.indices) == (array("f"), array("i"))


def part(values: bytes = bytes(4 * WIDTH), indices: bytes = b"", **changes: Any) -> dict[str, Any]:
    return {"num_vectors": 1, "num_values": len(values) // 4, "values": values, "indices": indices} | changes


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        pytest.param("embed", [], id="no part"),
        pytest.param("embed", [part(num_vectors=2)], id="two vectors instead of one"),
        pytest.param("embed", [part(bytes(4 * WIDTH - 4))], id="a value too few"),
        pytest.param("embed", [part(bytes(4 * WIDTH + 4))], id="a value too many"),
        pytest.param("embed", [part(num_values=1 << 62)], id="more values than there can be"),
        pytest.param("embed", [part(bytes(8), num_values=WIDTH)], id="the rest is missing"),
        pytest.param("embed", [part(), part(bytes(4), num_values=WIDTH)], id="more than the whole"),
        pytest.param("embed", [part(bytes(8), num_values=WIDTH), part(bytes(16))], id="another whole"),
        pytest.param("embed", [part(bytes(4 * WIDTH - 1), num_values=WIDTH)], id="half a value"),
        pytest.param("embed", [part(indices=bytes(4 * WIDTH))], id="indices of a dense vector"),
        pytest.param("classify", [part()], id="a kind that was not announced"),
        pytest.param("sparse", [part(bytes(8), bytes(4))], id="an index too few"),
        pytest.param("sparse", [part(bytes(8), array("i", [3, 3]).tobytes())], id="an index twice"),
        pytest.param("sparse", [part(bytes(4), array("i", [-1]).tobytes())], id="a negative index"),
        pytest.param("sparse", [part(bytes(4), array("i", [VOCAB]).tobytes())], id="an index beyond the vocabulary"),
        pytest.param(
            "sparse", [part(bytes(4 * VOCAB + 4), bytes(4 * VOCAB + 4))], id="more values than the vocabulary"
        ),
    ],
)
async def test_vector_that_was_not_asked_for_breaks_the_link(socket_path: Path, kind: Any, parts: list[Any]) -> None:
    hostile = iter([[VectorPart(0, **fields) for fields in parts]])
    fair = {"embed": floats(WIDTH), "classify": floats(0), "sparse": floats(2)}[kind]

    def vector_parts(submission: Submission) -> list[VectorPart]:
        indices = array("i", [1, 2]) if kind == "sparse" else None
        return next(hostile, parts_of(submission, fair, indices))

    with ScriptedBackend(socket_path, Script(CARD, vector_parts=vector_parts)) as backend:
        async with connected(socket_path) as client:
            stream = client.submit_pooled(PooledRequest([1, 2], kind))
            if kind == "classify":
                await until(lambda: backend.engine.deaths)
                stream.cancel()
            else:  # the client connects anew, and the second backend is honest
                assert (await stream.result()).values == fair
            assert backend.engine.deaths


async def test_token_for_a_pooled_request_and_vector_for_a_generating_one_break_the_link(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(CARD)) as backend:
        async with connected(socket_path) as client:
            engine = backend.engine
            engine.paused = True
            pooled = client.submit_pooled(PooledRequest([1], "embed"))
            await until(lambda: engine.running)
            (epoch,) = engine.link.frontends
            engine.calls.append(lambda: engine.link.push(epoch, pooled.request_id, 5))
            await until(lambda: len(engine.deaths) == 1)
            pooled.cancel()
            await until(lambda: client.ready)
            generating = client.submit(request([1], 1))
            await until(lambda: engine.running)
            (second,) = engine.link.frontends
            part = VectorPart(generating.request_id, 1, 1, bytes(4))
            engine.calls.append(lambda: engine.link.push_vectors(second, generating.request_id, [part]))
            await until(lambda: len(engine.deaths) == 2)
            generating.cancel()


async def test_result_is_computed_again_after_the_backend_died_in_the_middle_of_it(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(CARD, vector_parts=lambda s: parts_of(s, floats(WIDTH)))) as backend:
        async with connected(socket_path) as client:
            engine = backend.engine
            engine.paused = True
            stream = client.submit_pooled(PooledRequest([1, 2], "embed"))
            await until(lambda: engine.running)
            (epoch,) = engine.link.frontends

            def send_half() -> None:
                frontend = engine.link._frontends[epoch]
                frontend.add_vectors([VectorPart(stream.request_id, 1, WIDTH, bytes(8))])
                engine.link.push(epoch, 1 << 40, 0)
                engine.link._pending[epoch] = frontend
                engine.link._send(frontend)
                engine.link._disconnect(frontend)
                engine.paused = False

            engine.calls.append(send_half)
            assert (await stream.result()).values == floats(WIDTH)
            assert client.counters["requests_resumed"] == 1


async def test_reader_learns_why_there_is_no_result(socket_path: Path) -> None:
    with ScriptedBackend(socket_path):
        async with connected(socket_path) as client:
            stream = client.submit_pooled(PooledRequest([1], "embed"))
            stream.cancel()
            with pytest.raises(PooledFailed, match="cancelled") as cancelled:
                await stream.result()
            assert (cancelled.value.finish, cancelled.value.failure) == (Finish.CANCELLED, None)
            stream = client.submit_pooled(PooledRequest([2000], "embed"))
            with pytest.raises(PooledFailed, match="bad_token") as failed:
                await stream.result()
            assert failed.value.finish is Finish.REJECTED
            assert (failed.value.failure, failed.value.limit) == (FailureCode.BAD_TOKEN, 1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "colour"}, "pooled.kind"),
        ({"num_dimensions": 1 << 17}, "pooled.num_dimensions"),
        ({"kind": "sparse", "num_dimensions": 4}, 'num_dimensions is 4; for kind "sparse" it must be 0'),
        ({"second_start": 2}, "second_start is 2; the input has 2 tokens"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"group": -1}, "pooled.group"),
        ({"weight": 0.0}, "weight"),
    ],
)
async def test_bad_request_is_refused_by_name(socket_path: Path, changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"token_ids": [1, 2], "kind": "embed"}
    with ScriptedBackend(socket_path, Script(CARD)):
        async with connected(socket_path) as client:
            with pytest.raises(ValueError, match=message):
                client.submit_pooled(PooledRequest(**(fields | changes)))


async def test_vectors_of_many_inputs_fill_a_matrix(socket_path: Path) -> None:
    card = model_card(pooled=(PooledWidth("embed", WIDTH),), max_waiting=8)

    def vector_parts(submission: Submission) -> list[VectorPart]:
        return parts_of(submission, floats(WIDTH, array("i", submission.tokens)[0]))

    with ScriptedBackend(socket_path, Script(card, vector_parts=vector_parts, max_running=4)):
        async with connected(socket_path) as client:
            requests = [PooledRequest([number], "embed", group=1) for number in range(100, 200)]
            matrix = array("f", bytes(4 * WIDTH * len(requests)))
            await pool_into(client, requests, memoryview(matrix))
            assert matrix == sum((floats(WIDTH, number) for number in range(100, 200)), array("f"))
            for wrong in (matrix[:-1], matrix[: WIDTH * 50]):
                with pytest.raises(ValueError, match="matrix has"):
                    await pool_into(client, requests, memoryview(wrong))
            with pytest.raises(PooledFailed, match="bad_token"):
                await pool_into(client, [requests[0], PooledRequest([2000], "embed")], memoryview(matrix)[: 2 * WIDTH])


async def test_client_learns_that_a_full_backend_has_room_or_is_gone(socket_path: Path) -> None:
    with ScriptedBackend(socket_path, Script(CARD)) as backend:
        async with connected(socket_path) as client:
            engine = backend.engine
            engine.paused = True
            await client.wait_for_room()

            async def refused() -> int:
                """The connection whose pooled request the backend has refused."""
                stream = client.submit_pooled(PooledRequest([1], "embed"))
                await until(lambda: engine.running)
                (epoch,) = engine.link.frontends
                failure = Failure(stream.request_id, FailureCode.OVERLOADED, 5)
                push = partial(engine.link.push, epoch, stream.request_id, NO_TOKEN, Finish.REJECTED, failure=failure)
                engine.calls += [engine.running.clear, push]
                with pytest.raises(PooledFailed, match="overloaded"):
                    await stream.result()
                return epoch

            for end in (engine.link.announce_room, disconnect(engine)):
                epoch = await refused()
                waiting = asyncio.ensure_future(client.wait_for_room())
                await asyncio.sleep(0)
                assert not waiting.done()
                engine.calls.append(partial(end, epoch))
                await waiting
            await until(lambda: client.ready)


def disconnect(engine: ScriptedEngine) -> Callable[[int], None]:
    return lambda epoch: engine.link._disconnect(engine.link._frontends[epoch])


async def test_full_backend_is_asked_only_for_what_it_may_take(socket_path: Path) -> None:
    card = model_card(pooled=(PooledWidth("embed", WIDTH),), max_waiting=1)
    with ScriptedBackend(socket_path, Script(card, max_running=1)) as backend:
        async with connected(socket_path) as client:
            client.check_capacity(b"", may_share=False)
            backend.engine.paused = True
            streams = [client.submit_pooled(PooledRequest([number], "embed")) for number in range(3)]
            await until(lambda: (client.backend_counters or {})["waiting"] == 2)
            client.check_capacity(b"", may_share=True)
            client.check_capacity(b"another tenant", may_share=False)
            with pytest.raises(Overloaded):
                client.check_capacity(b"", may_share=False)
            with pytest.raises(Overloaded):
                client.submit_pooled(PooledRequest([9], "embed", may_share=False))
            streams.append(client.submit_pooled(PooledRequest([9], "embed", may_share=False, has_begun=True)))
            for stream in streams:
                stream.cancel()
    with pytest.raises(BackendUnavailable):
        client.check_capacity(b"", may_share=True)


async def test_full_backend_delays_a_matrix_that_has_begun(socket_path: Path) -> None:
    """The backend refuses every third request once, and says so only later that it has room."""
    card = model_card(pooled=(PooledWidth("embed", WIDTH),))

    def vector_parts(submission: Submission) -> list[VectorPart]:
        return parts_of(submission, floats(WIDTH, array("i", submission.tokens)[0]))

    with ScriptedBackend(socket_path, Script(card, vector_parts=vector_parts)) as backend:
        async with connected(socket_path) as client:
            engine = backend.engine
            taken, refused = engine._submit, set[int]()

            def refuse_some(submission: Submission) -> None:
                (number,) = array("i", submission.tokens)
                if number % 3 or number in refused:
                    taken(submission)
                    return
                refused.add(number)
                failure = Failure(submission.request_id, FailureCode.OVERLOADED, 5)
                engine.link.push(submission.frontend, submission.request_id, NO_TOKEN, Finish.REJECTED, failure=failure)
                engine.calls.append(partial(engine.link.announce_room, submission.frontend))

            engine._submit = refuse_some  # type: ignore[method-assign]
            requests = [PooledRequest([number], "embed", group=1) for number in range(100, 130)]
            matrix = array("f", bytes(4 * WIDTH * len(requests)))
            await pool_into(client, requests, memoryview(matrix), max_open=4)
            assert matrix == sum((floats(WIDTH, number) for number in range(100, 130)), array("f"))
            assert len(refused) == 10
            with pytest.raises(PooledFailed, match="overloaded"):
                await pool_into(client, [PooledRequest([300], "embed")], memoryview(matrix)[:WIDTH])
