"""Decoded messages are within their bounds; everything else raises WireError and no other error."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shm import messages as wire
from penstock.shm.messages import (
    MAX_CONTEXT_TOKENS,
    MAX_INLINE_PROMPT_TOKENS,
    MAX_TO_BACKEND_BYTES,
    MAX_TO_FRONTEND_BYTES,
    ArenaRef,
    Cancel,
    Credit,
    Failure,
    Generate,
    Hello,
    Sampling,
    Started,
    StepOutputs,
    Welcome,
    WireError,
    decode_hello,
    decode_to_backend,
    decode_to_frontend,
    decode_welcome,
    encode,
)
from tests.shm.scripted_backend import model_card

DECODERS = [decode_to_backend, decode_to_frontend, decode_hello, decode_welcome]

u63 = st.integers(0, (1 << 63) - 1)
i31 = st.integers(0, (1 << 31) - 1)


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


samplings = st.builds(
    Sampling,
    temperature=floats(0, 100),
    top_p=floats(1e-9, 1),
    top_k=i31,
    min_p=floats(0, 1),
    repetition_penalty=floats(0.01, 100),
    presence_penalty=floats(-2, 2),
    frequency_penalty=floats(-2, 2),
    logit_bias=st.lists(st.tuples(i31, floats(-100, 100)), max_size=5).map(tuple),
    seed=u63,
)
refs = st.builds(ArenaRef, slot=st.integers(0, 65535), sequence=u63, num_bytes=st.integers(4, 4 * MAX_CONTEXT_TOKENS))
names = st.builds(wire.StreamName, st.binary(max_size=16), st.text(min_size=1, max_size=128))
headers: dict[str, Any] = {
    "request_id": u63,
    "tokens": st.binary(min_size=4, max_size=64) | refs,
    "num_prompt_tokens": st.integers(1, MAX_CONTEXT_TOKENS),
}
texts = headers | {
    "max_tokens": st.integers(1, MAX_CONTEXT_TOKENS),
    "sampling": samplings,
    "stop_token_ids": st.lists(i31, max_size=64).map(tuple),
}
terms = st.builds(wire.QuoteTerms, st.integers(1, 1024), i31)
sizes = st.integers(1, 1 << 26)
pictures = st.builds(
    wire.Picture,
    st.lists(st.tuples(i31, st.integers(1, MAX_CONTEXT_TOKENS)), min_size=1, max_size=4).map(tuple),
    st.binary(min_size=32, max_size=32),
    st.lists(sizes, min_size=1, max_size=5).map(tuple),
    st.tuples(sizes, sizes, sizes),
    st.none() | refs,
)
generates = st.builds(
    Generate,
    **texts,
    pictures=st.lists(pictures, max_size=3).map(tuple),
    linger=st.none()
    | st.builds(wire.Linger, names, st.integers(1, 3600), st.integers(0, 65535), st.binary(max_size=9)),
    refuse_late=st.none() | terms,
)
pools = st.builds(wire.Pool, **headers, pooled=st.builds(wire.Pooled, st.sampled_from(["embed", "sparse"])))
questions = st.builds(wire.StreamQuestion, names, st.sampled_from(["read", "drop"]))
requests = (
    generates
    | pools
    | st.builds(wire.AskQuote, **texts, terms=terms)
    | st.builds(wire.CancelOther, request_id=u63, target=st.builds(wire.RequestName, u63, u63))
    | st.builds(wire.AskStream, request_id=u63, question=questions)
)
cancels = st.builds(Cancel, u63, u63, st.sampled_from(wire.Keep))
several = st.builds(wire.PoolBatch, st.lists(pools, min_size=1, max_size=3).map(tuple))
to_backend = requests | several | cancels | st.builds(Credit, st.integers(1, 1 << 16))


@given(to_backend)
def test_messages_decode_to_what_was_encoded(message: wire.ToBackend) -> None:
    assert decode_to_backend(encode(message)) == message


@given(st.lists(st.tuples(u63, st.integers(-1, (1 << 31) - 1), st.integers(0, 5)), max_size=20))
def test_step_outputs_keep_their_columns(events: list[tuple[int, int, int]]) -> None:
    outputs = StepOutputs(
        7,
        array("Q", [e[0] for e in events]).tobytes(),
        array("i", [e[1] for e in events]).tobytes(),
        bytes(e[2] for e in events),
        tuple(Started(e[0], 3, 0.25) for e in events),
        tuple(Failure(e[0], 1, 2) for e in events),
    )
    assert decode_to_frontend(encode(outputs)) == outputs


@given(st.binary(min_size=32, max_size=32), st.integers(1, 300))
def test_ids_of_a_picture_are_negative_and_its_own(digest: bytes, count: int) -> None:
    ids = wire.picture_token_ids(digest, count)
    assert max(ids) <= -2
    assert ids == wire.picture_token_ids(digest, 300)[:count]
    assert ids != wire.picture_token_ids(bytes([digest[0] ^ 1]) + digest[1:], count)


def test_columns_of_unequal_length_are_refused() -> None:
    for ids, tokens, finishes in ((7, 4, 1), (8, 3, 1), (8, 4, 2), (0, 0, 1)):
        with pytest.raises(WireError, match="differ in length"):
            decode_to_frontend(encode(StepOutputs(0, bytes(ids), bytes(tokens), bytes(finishes))))


@settings(max_examples=400)
@given(st.binary(max_size=300))
def test_random_bytes_raise_only_wire_errors(data: bytes) -> None:
    for decode in DECODERS:
        try:
            message = decode(data)
        except WireError:
            continue
        assert encode(message)


@settings(max_examples=400)
@given(to_backend, st.data())
def test_damaged_messages_raise_only_wire_errors_or_stay_within_bounds(message: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        decoded = decode_to_backend(damaged)
    except WireError:
        return
    # Decoded messages are within bounds: they pass the same checks again.
    assert decode_to_backend(encode(decoded)) == decoded


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x96\x01\x00\xc6\xff\xff\xff\xff",
        b"\x91" * 1_000_000,
        b"\x81" * 1_000_000,
        b"\xdd\x00\x00\x00\x01" * 200_000,
        b"\xd9\x02\xff\xfe",
        b"\x92\xa1\xff\x00",
        b"\xc1",
        encode(Cancel(1)) + b"\x00",
    ],
    ids=[
        "empty",
        "array-2^32",
        "map-2^32",
        "bin-2^32",
        "field-2^32",
        "depth",
        "map-depth",
        "depth-32",
        "utf8",
        "tag-utf8",
        "reserved",
        "trailing",
    ],
)
def test_malformed_bytes_raise_wire_errors(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(WireError):
            decode(data)


GENERATE = Generate(request_id=1, tokens=b"\0" * 8, num_prompt_tokens=2, max_tokens=3, sampling=Sampling())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", -1),
        ("request_id", 1 << 63),
        ("request_id", 1.5),
        ("request_id", True),
        ("request_id", None),
        ("tokens", b""),
        ("tokens", b"\0" * (4 * MAX_INLINE_PROMPT_TOKENS + 1)),
        ("tokens", "text"),
        ("tokens", [1, 2]),
        ("tokens", [1 << 16, 0, 4]),
        ("tokens", [0, 0, 3]),
        ("tokens", [0, 0, 4 * MAX_CONTEXT_TOKENS + 1]),
        ("num_prompt_tokens", 0),
        ("num_prompt_tokens", MAX_CONTEXT_TOKENS + 1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1 << 63),
        ("stop_token_ids", list(range(65))),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1 << 31]),
        ("sampling", [float("nan")]),
        ("sampling", [-0.1]),
        ("sampling", [100.5]),
        ("sampling", [1.0, 0.0]),
        ("sampling", [1.0, 1.0, 1 << 31]),
        ("sampling", [float("inf")]),
        ("sampling", [1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, [[1, 0.0]] * 301]),
        ("sampling", [1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, [[1, float("nan")]]]),
        ("sampling", [1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, [], 0, "more"]),
    ],
)
def test_each_field_of_a_generate_is_bounded(field: str, value: object) -> None:
    columns: list[object] = msgspec.to_builtins(GENERATE, builtin_types=(bytes,))
    columns[1 + Generate.__struct_fields__.index(field)] = value
    with pytest.raises(WireError):
        decode_to_backend(msgspec.msgpack.encode(columns))


def test_unknown_fields_and_tags_are_refused() -> None:
    for columns in ([2, 1, 1, 1, 1], [2, 1, 1, 3], [9, 1], ["2", 1], [2], [None, 1], {"type": 2}):
        with pytest.raises(WireError):
            decode_to_backend(msgspec.msgpack.encode(columns))
    with pytest.raises(WireError):
        decode_to_backend(encode(Hello(1)))
    with pytest.raises(WireError):
        decode_to_frontend(encode(Cancel(1)))


def test_longest_messages_fit_their_limits() -> None:
    biggest = (1 << 31) - 1
    bias = tuple((biggest, -99.123456789) for _ in range(300))
    generate = Generate(
        request_id=(1 << 63) - 1,
        tokens=b"\xff" * (4 * MAX_INLINE_PROMPT_TOKENS),
        num_prompt_tokens=MAX_CONTEXT_TOKENS,
        max_tokens=MAX_CONTEXT_TOKENS,
        sampling=Sampling(
            *(1.1, 0.9, biggest, 0.1, 0.9, 1.1, 0.1, 0.1),
            *(1.1, 1.1, biggest, MAX_CONTEXT_TOKENS, b"\xff" * wire.MAX_BREAKER_BYTES, 0.1, 0.1, 1.1, 1.1, 1.1),
            *(bias, (1 << 63) - 1, 20),
        ),
        stop_token_ids=(biggest,) * 64,
        constraints=wire.Constraints(
            wire.Grammar("json_schema", "\U0001f408" * wire.MAX_GRAMMAR_CHARACTERS),
            (biggest,) * 8,
            (biggest,) * 4096,
            ((biggest,) * 16,) * 64,
            biggest,
            biggest,
            (biggest,) * 8,
        ),
        linger=wire.Linger(wire.StreamName(b"t" * 16, "\U0001f408" * 128), 3600, 65535, b"r" * wire.MAX_RECORD_BYTES),
    )
    assert decode_to_backend(encode(generate)) == generate
    assert len(encode(generate)) < MAX_TO_BACKEND_BYTES
    pool = wire.Pool(
        request_id=generate.request_id,
        tokens=b"\xff" * 4 * MAX_INLINE_PROMPT_TOKENS,
        num_prompt_tokens=biggest,
        salt=b"s" * 16,
        tenant=b"t" * 16,
        timeout_ms=1 << 31,
        admitted_ns=generate.request_id,
        pooled=wire.Pooled("token_classify", MAX_CONTEXT_TOKENS, 1 << 16, group=generate.request_id),
        adapter="\U0001f408" * 64,
    )
    assert len(encode(wire.PoolBatch((pool,) * wire.MAX_POOL_BATCH))) < MAX_TO_BACKEND_BYTES
    events = wire.MAX_STEP_EVENTS
    outputs = StepOutputs(
        (1 << 63) - 1,
        b"\xff" * 8 * events,
        b"\xff" * 4 * events,
        b"\x01" * events,
        (Started((1 << 63) - 1, biggest, 1.1),) * events,
        (Failure((1 << 63) - 1, 255, biggest),) * events,
        record=wire.StreamRecord((1 << 63) - 1, b"r" * wire.MAX_RECORD_BYTES),
    )
    assert len(encode(outputs)) < MAX_TO_FRONTEND_BYTES


def test_welcome_carries_the_model_and_bounds_the_identity() -> None:
    welcome = Welcome(1, b"i" * 16, 2, 4, 4096, 256, model_card())
    assert decode_welcome(encode(welcome)) == welcome
    for bad in (b"i" * 15, b"i" * 17):
        with pytest.raises(WireError):
            decode_welcome(encode(msgspec.structs.replace(welcome, identity=bad)))
