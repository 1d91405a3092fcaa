"""Buffers that a client lends with its requests: whose they are at each moment, and what is refused."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from penstock.shm.buffers.buffer_export import BufferExporter
from penstock.shm.buffers.device_api import DeviceError, DeviceRow
from penstock.shm.client import (
    BackendClient,
    BackendUnavailable,
    BufferGone,
    BuffersExhausted,
    BufferSlice,
    GenerationRequest,
)
from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import (
    MAX_CONTEXT_TOKENS,
    MAX_SHARED_BUFFERS,
    NO_TOKEN,
    PROTOCOL_VERSION,
    BufferContent,
    BufferGrant,
    BufferKind,
    BufferRef,
    BufferRequest,
    BufferReturn,
    FailureCode,
    Finish,
    Hello,
    Sampling,
    Welcome,
    WireError,
    decode_hello,
    decode_to_backend,
    decode_welcome,
    encode,
)
from tests.shm.buffers.buffer_backend import (
    BLOCK,
    BOTH,
    CONTENTS,
    HIDDEN,
    VOCAB,
    TurnedBackend,
    TurnedClient,
    WelcomeRefused,
    make_submit,
)
from tests.shm.buffers.fake_device import FakeDevice
from tests.shm.client.test_client import at_base, until
from tests.shm.scripted_backend import BackendProcess, Script, ScriptedBackend, expected_tokens, model_card

GREEDY = Sampling(temperature=0.0)
LOGITS, TOKENS, EMBEDDINGS = BufferContent.LOGITS, BufferContent.TOKENS, BufferContent.PROMPT_EMBEDDINGS
ROW_BYTES = 4 * VOCAB
ON_HOST = BufferRequest(2, 4 * ROW_BYTES)


@pytest.fixture
def backend(socket_path: Path) -> Iterator[TurnedBackend]:
    backend = TurnedBackend(socket_path)
    yield backend
    backend.until(lambda: not backend.link.balance())
    backend.close()


@pytest.fixture
def client(backend: TurnedBackend) -> Iterator[TurnedClient]:
    with backend.client(ON_HOST) as client:
        yield client


def row(value: float) -> memoryview:
    return memoryview(array("f", [value]) * VOCAB)


# One loan after the other


def test_lent_buffer_returns_with_the_written_rows(backend: TurnedBackend, client: TurnedClient) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    client.submit(1, output=BufferSlice(buffer, LOGITS, 4))
    with pytest.raises(BufferGone, match="lent"):
        buffer.rows()
    submission = backend.submission()
    assert submission.output is not None
    for index in range(3):
        submission.output.write(index, row(index))
    backend.link.push(submission.frontend, 1, 7, Finish.STOP)
    client.receive_until(lambda: buffers.num_returned == 1)
    assert buffer.num_rows == 3
    assert buffer.rows().shape == (3, VOCAB)
    assert buffer.rows().tolist() == [[0.0] * VOCAB, [1.0] * VOCAB, [2.0] * VOCAB]
    buffer.release()
    with pytest.raises(BufferGone, match="free"):
        buffer.rows()


def test_writes_after_the_end_beyond_the_loan_or_out_of_order_are_dropped(
    backend: TurnedBackend, client: TurnedClient
) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    client.submit(1, output=BufferSlice(buffer, LOGITS, 2))
    loan = backend.submission().output
    assert loan is not None
    loan.write(1, row(9.0))  # row 0 is not there yet
    loan.write(0, row(1.0))
    loan.write(0, row(2.0))  # a step that was done again
    assert not loan.needs_row(2)
    loan.write(2, row(9.0))
    backend.link.push(client.session.epoch, 1, NO_TOKEN, Finish.LENGTH)
    loan.write(1, row(9.0))
    client.receive_until(lambda: buffers.num_returned == 1)
    assert buffer.rows().tolist() == [[2.0] * VOCAB]
    assert bytes(buffer.view()[ROW_BYTES:]) == bytes(4096 * 4 - ROW_BYTES)


def test_later_loan_shows_nothing_of_an_earlier_one(backend: TurnedBackend, client: TurnedClient) -> None:
    """One tenant's logits are not read as another's: only rows that this loan has written are."""
    buffers = client.session.buffers
    assert buffers is not None
    for request_id, num_written in ((1, 4), (2, 1), (3, 0)):
        buffer = buffers.take()
        assert buffer.index == 0
        with pytest.raises(BufferGone, match="was not lent with a request"):
            buffer.rows()
        client.submit(request_id, output=BufferSlice(buffer, LOGITS, 4))
        loan = backend.submission().output
        assert loan is not None
        for index in range(num_written):
            loan.write(index, row(request_id))
        backend.link.push(client.session.epoch, request_id, NO_TOKEN, Finish.LENGTH)
        client.receive_until(lambda number=request_id: buffers.num_returned == number)  # type: ignore[misc]
        assert buffer.rows().shape == (num_written, VOCAB)
        assert buffer.rows().tolist() == [[float(request_id)] * VOCAB] * num_written
        buffer.release()


def test_cancelled_request_returns_its_buffer(backend: TurnedBackend, client: TurnedClient) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    client.submit(1, output=BufferSlice(buffer, LOGITS, 2))
    loan = backend.submission().output
    assert loan is not None
    buffer.release()
    assert buffers.num_free == 1  # not before it is back
    client.session.send_cancel(1)
    client.receive_until(lambda: buffers.num_free == 2)
    loan.write(0, row(1.0))
    assert buffers.num_lent == buffers.num_returned == 1


def test_buffer_of_a_prompt_returns_once_it_is_copied(backend: TurnedBackend, client: TurnedClient) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    tokens = array("i", [3, 1, 4, 1, 5])
    buffer.view()[:20] = tokens.tobytes()
    client.submit(1, prompt=BufferSlice(buffer, TOKENS, 5), num_prompt_tokens=5)
    assert backend.submission().tokens == tokens.tobytes()
    client.receive_until(lambda: buffers.num_returned == 1)
    buffer.release()


def embeddings(num_rows: int, first: float = 1.0) -> bytes:
    """Rows of first, first + 1 and so on."""
    return b"".join((array("f", [first + index]) * HIDDEN).tobytes() for index in range(num_rows))


@pytest.mark.parametrize("with_output", [False, True])
def test_embeddings_are_read_in_place_and_return_at_the_end(
    backend: TurnedBackend, client: TurnedClient, *, with_output: bool
) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    prompt, output = buffers.take(), buffers.take()
    prompt.view()[: 5 * 4 * HIDDEN] = embeddings(5)
    wanted = BufferSlice(output, LOGITS, 2) if with_output else None
    client.submit(1, BufferSlice(prompt, EMBEDDINGS, 5), wanted, num_prompt_tokens=5)
    submission = backend.submission()
    loan = submission.embeddings
    assert loan is not None
    assert (submission.tokens, loan.device_reads, submission.output is not None) == (b"", False, with_output)
    for first, num_rows in ((3, 2), (0, 5), (1, 1), (3, 2)):  # in any order, and again
        assert loan.read_rows(first, num_rows) == embeddings(num_rows, 1.0 + first)
    for first, num_rows in ((0, 6), (-1, 2), (5, 1), (2, -1)):
        with pytest.raises(ValueError, match="5 are lent"):
            loan.read_rows(first, num_rows)
    with pytest.raises(TypeError, match="not page-locked"):
        loan.copy_rows(0, 1, DeviceRow(0, 0))
    backend.link.push(submission.frontend, 1, 7)
    client.receive_until(lambda: client.outputs)
    assert buffers.num_returned == 0
    with pytest.raises(BufferGone, match="lent"):
        prompt.view()
    backend.link.push(submission.frontend, 1, 7, Finish.STOP)
    client.receive_until(lambda: buffers.num_returned == 1 + with_output)
    prompt.view()[:4] = b"next"
    assert loan.read_rows(0, 2) == bytes(2 * 4 * HIDDEN)


def test_embeddings_of_a_rejected_or_cancelled_request_return(
    backend: TurnedBackend, client: TurnedClient
) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    client.submit(1, BufferSlice(buffer, EMBEDDINGS, 2), num_prompt_tokens=2)
    client.session.send_cancel(1)
    client.receive_until(lambda: buffers.num_returned == 1)
    backend.submission()
    client.submit(2, BufferSlice(buffer, EMBEDDINGS, 2), num_prompt_tokens=2)
    backend.link.push(backend.submission().frontend, 2, NO_TOKEN, Finish.REJECTED)
    client.receive_until(lambda: buffers.num_returned == 2)
    (exported,) = [peer.buffers for peer in backend.link._frontends.values()]
    assert exported is not None
    assert exported.num_lent == exported.num_returned == 2
    assert not any(peer._loans for peer in backend.link._frontends.values())


def test_loans_of_a_dead_client_end(backend: TurnedBackend) -> None:
    with backend.client(ON_HOST) as client:
        buffers = client.session.buffers
        assert buffers is not None
        client.submit(1, output=BufferSlice(buffers.take(), LOGITS, 1))
        loan = backend.submission().output
        assert loan is not None
    backend.until(lambda: any(isinstance(event, FrontendDeath) for event in backend.events))
    assert not loan.needs_row(0)
    loan.write(0, row(1.0))


# What a client may not do


@pytest.mark.parametrize(
    "changes",
    [
        {"output": BufferRef(2, 1, LOGITS, 1)},
        {"output": BufferRef(0, 0, LOGITS, 1)},
        {"output": BufferRef(0, 5, LOGITS, 1)},
        {"output": BufferRef(0, 9, LOGITS, 5)},
        {"output": BufferRef(0, 9, TOKENS, 1)},
        {"output": BufferRef(0, 9, BufferContent.HIDDEN_STATES, 1)},
        {"output": BufferRef(0, 9, LOGITS, 1), "may_share": True},
        {"output": BufferRef(0, 9, LOGITS, 1), "tokens": bytes(8)},
        {"tokens": BufferRef(0, 9, LOGITS, 1)},
        {"tokens": BufferRef(0, 9, BufferContent.HIDDEN_STATES, 1)},
        {"tokens": BufferRef(0, 5, EMBEDDINGS, 1)},
        {"tokens": BufferRef(2, 9, EMBEDDINGS, 1)},
        {"tokens": BufferRef(0, 9, EMBEDDINGS, 2)},
        {"tokens": BufferRef(0, 9, EMBEDDINGS, 1), "num_prompt_tokens": 2},
        {"tokens": BufferRef(0, 9, EMBEDDINGS, 513), "num_prompt_tokens": 513},
        {"tokens": BufferRef(0, 9, EMBEDDINGS, 1), "may_share": True},
        {"tokens": BufferRef(0, 9, EMBEDDINGS, 1), "num_prompt_logprobs": 0},
        {"tokens": BufferRef(0, 9, EMBEDDINGS, 1), "output": BufferRef(0, 10, LOGITS, 1)},
        {"output": BufferRef(0, 9, EMBEDDINGS, 1)},
        {"tokens": BufferRef(0, 9, TOKENS, ROW_BYTES * 4)},
        {"tokens": BufferRef(0, 9, TOKENS, 1), "num_prompt_tokens": 2},
        {"tokens": BufferRef(0, 9, TOKENS, 1), "output": BufferRef(0, 9, LOGITS, 1)},
    ],
    ids=lambda changes: " ".join(map(repr, changes.values())),
)
def test_forged_or_stale_loan_is_rejected(
    backend: TurnedBackend, client: TurnedClient, changes: dict[str, object]
) -> None:
    client.send(make_submit(1, output=BufferRef(0, 5, LOGITS, 1)))
    backend.submission()
    client.session.send_cancel(1)
    backend.until(lambda: any(type(event).__name__ == "Cancellation" for event in backend.events))
    (exported,) = [peer.buffers for peer in backend.link._frontends.values()]
    assert exported is not None
    client.send(make_submit(2, **changes))
    backend.until(lambda: backend.link.counters.faults == 1)
    assert exported.num_lent == exported.num_returned
    outputs: list[FailureCode] = []

    def rejected() -> object:
        for message in client.session.receive():
            outputs.extend(FailureCode(failure.code) for failure in message.failures)
        return outputs

    backend.until(rejected)
    assert outputs == [FailureCode.BAD_DESCRIPTOR]


def test_buffer_cannot_be_lent_twice(backend: TurnedBackend, client: TurnedClient) -> None:
    client.send(make_submit(1, output=BufferRef(1, 1, LOGITS, 1)))
    client.send(make_submit(2, output=BufferRef(1, 2, LOGITS, 1)))
    first = backend.submission().output
    backend.until(lambda: backend.link.counters.faults == 1)
    assert first is not None
    assert first.needs_row(0)


def test_client_without_buffers_cannot_lend(backend: TurnedBackend) -> None:
    with backend.client(None) as client:
        client.send(make_submit(1, output=BufferRef(0, 1, LOGITS, 1)))
        backend.until(lambda: backend.link.counters.faults == 1)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (BufferReturn(0, 1, 1), "which is not lent"),
        (BufferReturn(1, 1, 0), "which is not lent"),
        (BufferReturn(9, 1, 0), "which is not lent"),
        (BufferReturn(0, 2, 5), "5 rows"),
    ],
)
def test_client_rejects_the_return_of_what_it_has_not_lent(
    client: TurnedClient, returned: BufferReturn, message: str
) -> None:
    buffers = client.session.buffers
    assert buffers is not None
    buffer = buffers.take()
    for _ in range(2):
        submit = buffers.lend_with(make_submit(1), None, BufferSlice(buffer, LOGITS, 1))
        assert submit.output is not None
        if submit.output.generation == 1:
            buffers.take_back(0, 1)
    with pytest.raises(ValueError, match=message):
        buffers.accept((returned,))


@pytest.mark.parametrize(
    ("buffer_request", "reason"),
    [
        (BufferRequest(1, 4096, (BufferKind.CUDA,)), "can use cuda buffers, the backend shares host buffers"),
        (BufferRequest(64, 1 << 30), "64 shared buffers of 1073741824 bytes; 1073741824 of"),
    ],
)
def test_impossible_buffer_request_is_refused_with_the_reason(
    backend: TurnedBackend, buffer_request: BufferRequest, reason: str
) -> None:
    with pytest.raises(WelcomeRefused, match=reason):
        backend.invite(buffer_request)
    assert backend.exporter.held_bytes == 0


# BackendClient


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
            buffer = client.take_buffer()
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
                each.view()  # ours again, with the end of the stream
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
            session.send_with_buffer = lambda *_: False  # type: ignore[method-assign]
            session.send_submit = lambda *_: False  # type: ignore[method-assign]
            stream = client.submit(GenerationRequest([1], 1, GREEDY, output=BufferSlice(buffer, LOGITS, 1)))
            with pytest.raises(BufferGone, match="lent"):
                buffer.view()
            stream.cancel()
            assert (await anext(stream)).finish is Finish.CANCELLED
            assert buffer.num_rows == 0
            buffer.view()
            del session.send_with_buffer, session.send_submit
            client._send()


async def test_backend_without_shared_buffers_refuses_with_the_reason(socket_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
        assert device.num_allocated == 0  # it had reported its buffers closed
        await client.close()
    with pytest.raises(ValueError, match="pass open_device"):
        BackendClient(socket_path, buffers=BufferRequest(1, 1, BOTH))


# Messages


@pytest.mark.parametrize(
    "ref",
    [
        BufferRef(MAX_SHARED_BUFFERS, 1, LOGITS, 1),
        BufferRef(-1, 1, LOGITS, 1),
        BufferRef(0, -1, LOGITS, 1),
        BufferRef(0, 1 << 63, LOGITS, 1),
        BufferRef(0, 1, LOGITS, 0),
        BufferRef(0, 1, LOGITS, MAX_CONTEXT_TOKENS + 1),
        BufferRef(0, 1, 4, 1),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("field", ["tokens", "output"])
def test_buffer_reference_outside_its_bounds_is_a_wire_error(ref: BufferRef, field: str) -> None:
    with pytest.raises(WireError):
        decode_to_backend(encode(make_submit(1, **{field: ref})))


@pytest.mark.parametrize(
    "buffer_request",
    [
        BufferRequest(0, 1),
        BufferRequest(65, 1),
        BufferRequest(1, 0),
        BufferRequest(1, (1 << 30) + 1),
        BufferRequest(1, 1, ()),
    ],
)
def test_buffer_request_outside_its_bounds_is_a_wire_error(buffer_request: BufferRequest) -> None:
    with pytest.raises(WireError):
        decode_hello(encode(Hello(PROTOCOL_VERSION, buffer_request)))


def test_longest_grant_fits_a_welcome_and_invalid_handles_do_not() -> None:
    handles = (b"h" * 64,) * MAX_SHARED_BUFFERS
    grant = BufferGrant(BufferKind.CUDA, MAX_SHARED_BUFFERS, 1 << 30, (CONTENTS * 3)[:8], bytes(16), handles, handles)
    welcome = Welcome(1, b"i" * 16, "ipc:///x", 2, 4, 4096, 256, model_card(), grant)
    assert decode_welcome(encode(welcome)) == welcome
    assert len(encode(welcome)) < 1 << 15
    for bad in ((b"h" * 63,), (b"h" * 65,), (*handles, handles[0])):
        wrong = msgspec.structs.replace(welcome, buffers=msgspec.structs.replace(grant, memory_handles=bad))
        with pytest.raises(WireError):
            decode_welcome(encode(wrong))
