"""Loans, returns and buffer requests that are refused, and bounds of their messages."""

from __future__ import annotations

import msgspec
import pytest

from penstock.shm.client import BufferSlice
from penstock.shm.messages import (
    MAX_CONTEXT_TOKENS,
    MAX_SHARED_BUFFERS,
    PROTOCOL_VERSION,
    BufferContent,
    BufferGrant,
    BufferKind,
    BufferRef,
    BufferRequest,
    BufferReturn,
    FailureCode,
    Hello,
    Welcome,
    WireError,
    decode_hello,
    decode_to_backend,
    decode_welcome,
    encode,
)
from tests.shm.buffers.buffer_backend import CONTENTS, TurnedBackend, TurnedClient, WelcomeRefused, make_generate
from tests.shm.buffers.host.harness import EMBEDDINGS, LOGITS, ROW_BYTES, TOKENS
from tests.shm.scripted_backend import model_card


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
    client.send(make_generate(1, output=BufferRef(0, 5, LOGITS, 1)))
    backend.submission()
    client.session.send_cancel(1)
    backend.until(lambda: any(type(event).__name__ == "Cancellation" for event in backend.events))
    (exported,) = [peer.buffers for peer in backend.link._frontends.values()]
    assert exported is not None
    client.send(make_generate(2, **changes))
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
    client.send(make_generate(1, output=BufferRef(1, 1, LOGITS, 1)))
    client.send(make_generate(2, output=BufferRef(1, 2, LOGITS, 1)))
    first = backend.submission().output
    backend.until(lambda: backend.link.counters.faults == 1)
    assert first is not None
    assert first.needs_row(0)


def test_client_without_buffers_cannot_lend(backend: TurnedBackend) -> None:
    with backend.client(None) as client:
        client.send(make_generate(1, output=BufferRef(0, 1, LOGITS, 1)))
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
        lent = buffers.lend(None, BufferSlice(buffer, LOGITS, 1))
        if lent["output"].generation == 1:
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
        decode_to_backend(encode(make_generate(1, **{field: ref})))


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
    welcome = Welcome(1, b"i" * 16, 2, 4, 4096, 256, model_card(), grant)
    assert decode_welcome(encode(welcome)) == welcome
    assert len(encode(welcome)) < 1 << 15
    for bad in ((b"h" * 63,), (b"h" * 65,), (*handles, handles[0])):
        wrong = msgspec.structs.replace(welcome, buffers=msgspec.structs.replace(grant, memory_handles=bad))
        with pytest.raises(WireError):
            decode_welcome(encode(wrong))
