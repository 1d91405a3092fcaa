"""Shared buffers through BackendClient, against a scripted backend."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.shm.buffers.buffer_export import BufferExporter
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.client import (
    BackendClient,
    BackendUnavailable,
    BufferGone,
    BuffersExhausted,
    BufferSlice,
    GenerationRequest,
)
from penstock.shm.messages import BufferContent, BufferKind, BufferRequest, FailureCode, Finish
from tests.shm.buffers.buffer_backend import BLOCK, BOTH, CONTENTS, VOCAB
from tests.shm.buffers.fake_device import FakeDevice
from tests.shm.buffers.host.harness import EMBEDDINGS, GREEDY, LOGITS, ON_HOST, TOKENS
from tests.shm.client.harness import at_base, until
from tests.shm.scripted_backend import BackendProcess, Script, ScriptedBackend, expected_tokens


@asynccontextmanager
async def connected(socket_path: Path, buffer_request: BufferRequest = ON_HOST) -> AsyncIterator[BackendClient]:
    client = BackendClient(socket_path, buffers=buffer_request)
    await client.start()
    try:
        await until(lambda: client.ready)
        yield client
        await until(lambda: at_base(client))
    finally:
        await client.close()


def scripted(socket_path: Path, **changes: object) -> ScriptedBackend:
    exporter = BufferExporter((BufferKind.HOST,), CONTENTS, 1 << 20)
    return ScriptedBackend(socket_path, Script(exporter=exporter, **changes))  # type: ignore[arg-type]


async def test_client_receives_logits_beside_its_tokens(socket_path: Path) -> None:
    with scripted(socket_path):
        async with connected(socket_path) as client:
            assert set(client.buffer_contents) == {TOKENS, LOGITS, EMBEDDINGS}
            assert client.buffer_contents[LOGITS].num_values == VOCAB
            buffer = client.take_buffer()
            assert (buffer.kind, client.num_free_buffers) == (BufferKind.HOST, 1)
            request = GenerationRequest([1, 2], 8, GREEDY, may_share=True, output=BufferSlice(buffer, LOGITS, 4))
            tokens = [token async for batch in client.submit(request) for token in batch.token_ids]
            assert tokens == expected_tokens([1, 2], 8)
            assert [row[0] for row in buffer.rows().tolist()] == tokens[:4]
            buffer.release()


async def test_client_submits_a_prompt_in_a_buffer(socket_path: Path) -> None:
    with scripted(socket_path):
        async with connected(socket_path) as client:
            buffer = client.take_buffer()
            buffer.view()[:12] = array("i", [5, 6, 7]).tobytes()
            stream = client.submit(GenerationRequest(BufferSlice(buffer, TOKENS, 3), 4, GREEDY))
            assert [token async for batch in stream for token in batch.token_ids] == expected_tokens([5, 6, 7], 4)
            assert bytes(buffer.view()[:12]) == array("i", [5, 6, 7]).tobytes()
            buffer.release()


async def test_client_submits_a_prompt_of_embeddings(socket_path: Path) -> None:
    with scripted(socket_path):
        async with connected(socket_path) as client:
            buffer, output = client.take_buffer(), client.take_buffer()
            prompt, logits = BufferSlice(buffer, EMBEDDINGS, 3), BufferSlice(output, LOGITS, 1)
            request = GenerationRequest(prompt, 4, GREEDY, may_share=True, output=logits)
            stream = client.submit(request)
            assert [token async for batch in stream for token in batch.token_ids] == expected_tokens([0, 0, 0], 4)
            for each in (buffer, output):
                each.view()  # the end of the stream returned it
                each.release()


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ({"num_rows": 0}, {}, "token_ids.num_rows is 0; a prompt has 1 to 16777216 rows"),
        ({"num_rows": 1 << 40}, {}, "token_ids.num_rows is 1099511627776; a prompt has 1 to 16777216 rows"),
        ({"num_rows": 513}, {}, "token_ids.num_rows is 513; the buffer holds 1 to 512 rows"),
        ({}, {"num_prompt_logprobs": 0}, "num_prompt_logprobs is 0; with embeddings only -1 is allowed"),
        ({"content": LOGITS}, {}, "token_ids.content is LOGITS; this backend offers TOKENS, PROMPT_EMBEDDINGS"),
    ],
)
async def test_embeddings_that_cannot_be_lent_are_refused_before_they_are_sent(
    socket_path: Path, part: dict[str, object], changes: dict[str, object], message: str
) -> None:
    with scripted(socket_path):
        async with connected(socket_path) as client:
            buffer = client.take_buffer()
            fields: dict[str, object] = {"buffer": buffer, "content": EMBEDDINGS, "num_rows": 1}
            prompt = BufferSlice(**(fields | part))  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=message):
                client.submit(GenerationRequest(prompt, 1, GREEDY, **changes))  # type: ignore[arg-type]
            buffer.view()  # still the caller's
            buffer.release()


async def test_released_buffer_is_free_once_its_cancelled_request_has_ended(socket_path: Path) -> None:
    with scripted(socket_path, step_s=0.001):
        async with connected(socket_path) as client:
            taken = [client.take_buffer(), client.take_buffer()]
            with pytest.raises(BuffersExhausted, match="all 2"):
                client.take_buffer()
            stream = client.submit(GenerationRequest([1], 10_000, GREEDY, output=BufferSlice(taken[0], LOGITS, 1)))
            await anext(stream)
            taken[0].release()
            with pytest.raises(BuffersExhausted):
                client.take_buffer()
            stream.cancel()
            assert (await anext(stream)).finish is Finish.CANCELLED
            assert client._connection.session is not None
            assert client._connection.session.buffers is not None
            buffers = client._connection.session.buffers
            await until(lambda: buffers.num_free == 1)
            assert client.take_buffer() is taken[0]
            assert buffers.num_lent == buffers.num_returned


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"content": BufferContent.HIDDEN_STATES}, "output.content is HIDDEN_STATES; this backend offers LOGITS"),
        ({"content": TOKENS}, "output.content is TOKENS; this backend offers LOGITS"),
        ({"num_rows": 5}, "output.num_rows is 5; the buffer holds 1 to 4 rows"),
        ({"num_rows": 0}, "output.num_rows is 0"),
    ],
)
async def test_buffer_that_cannot_be_lent_is_refused_before_it_is_sent(
    socket_path: Path, part: dict[str, object], message: str
) -> None:
    with scripted(socket_path):
        async with connected(socket_path) as client:
            buffer = client.take_buffer()
            fields: dict[str, object] = {"buffer": buffer, "content": LOGITS, "num_rows": 1}
            with pytest.raises(ValueError, match=message):
                client.submit(GenerationRequest([1], 1, GREEDY, output=BufferSlice(**(fields | part))))  # type: ignore[arg-type]
            buffer.view()  # still the caller's
            both = BufferSlice(buffer, TOKENS, 1), BufferSlice(buffer, LOGITS, 1)
            with pytest.raises(ValueError, match="can be lent once"):
                client.submit(GenerationRequest(both[0], 1, GREEDY, output=both[1]))
            buffer.release()
            with pytest.raises(BufferGone):
                client.submit(GenerationRequest([1], 1, GREEDY, output=both[1]))


async def test_stream_with_a_buffer_ends_with_its_backend_and_others_go_on(socket_path: Path) -> None:
    client = BackendClient(socket_path, buffers=ON_HOST)
    await client.start()
    with scripted(socket_path, step_s=0.001):
        await until(lambda: client.ready)
        buffer = client.take_buffer()
        prompt = BufferSlice(client.take_buffer(), EMBEDDINGS, 2)
        lending = [
            client.submit(GenerationRequest([1], 20_000, GREEDY, output=BufferSlice(buffer, LOGITS, 1))),
            client.submit(GenerationRequest(prompt, 20_000, GREEDY)),
        ]
        other = client.submit(GenerationRequest([2], 300, GREEDY))
        for stream in lending:
            await anext(stream)
    for stream in lending:
        batches = [batch async for batch in stream]
        assert (batches[-1].finish, batches[-1].failure) == (Finish.FAILED, FailureCode.UNAVAILABLE)
    with pytest.raises(BufferGone, match="connection"):
        buffer.view()
    buffer.release()
    with scripted(socket_path):
        assert [token async for batch in other for token in batch.token_ids] == expected_tokens([2], 300)
        client.take_buffer().release()
        await client.close()


async def test_request_that_is_never_sent_keeps_its_buffer(socket_path: Path) -> None:
    with scripted(socket_path) as backend:
        async with connected(socket_path) as client:
            backend.engine.paused = True
            buffer = client.take_buffer()
            session = client._connection.session
            assert session is not None
            session.send = lambda *_: False  # type: ignore[method-assign]
            session.send_prompt = lambda *_: False  # type: ignore[method-assign]
            stream = client.submit(GenerationRequest([1], 1, GREEDY, output=BufferSlice(buffer, LOGITS, 1)))
            with pytest.raises(BufferGone, match="lent"):
                buffer.view()
            stream.cancel()
            assert (await anext(stream)).finish is Finish.CANCELLED
            assert buffer.num_rows == 0
            buffer.view()
            del session.send, session.send_prompt
            client._send()


async def test_backend_without_shared_buffers_refuses_with_the_reason(
    socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with BackendProcess(socket_path):
        client = BackendClient(socket_path, buffers=ON_HOST)
        await client.start()
        await until(lambda: "this backend shares no buffers" in caplog.text)
        with pytest.raises(BufferGone):
            client.take_buffer()
        with pytest.raises(BackendUnavailable):
            client.submit(GenerationRequest([1], 1, GREEDY))
        await client.close()


async def test_client_that_cannot_open_the_gpu_uses_host_buffers(
    socket_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def no_device(_uuid: bytes) -> FakeDevice:
        raise DeviceError("no driver")

    device = FakeDevice(tmp_path)
    exporter = BufferExporter(BOTH, CONTENTS, 8 * BLOCK, device)
    with ScriptedBackend(socket_path, Script(exporter=exporter)):
        client = BackendClient(socket_path, buffers=BufferRequest(2, 4096, BOTH), open_device=no_device)
        await client.start()
        await until(lambda: client.ready)
        assert client.take_buffer().view().nbytes == 4096
        assert caplog.text.count("cannot be opened: no driver") == 1
        assert device.num_allocated == 0  # the client had reported its buffers closed
        await client.close()
    with pytest.raises(ValueError, match="pass open_device"):
        BackendClient(socket_path, buffers=BufferRequest(1, 1, BOTH))
