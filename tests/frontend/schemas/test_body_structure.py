"""Bodies with too many values are refused before they are decoded; large ones are decoded beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.endpoints import chat_completions
from penstock.frontend.schemas import decoding
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.decoding import MAX_OBJECTS, MAX_STRINGS, check_structure
from penstock.frontend.transport.errors import ApiError
from tests.frontend.harness import ClientConnection

CHAT = "/v1/chat/completions"
HI = '"messages":[{"role":"user","content":"hi"}]'
TEXTS = st.text(alphabet='a"\\{[é,:', max_size=6)
BODIES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def count(value: Any) -> tuple[int, int]:
    """Return the numbers of objects and arrays, and of strings."""
    if isinstance(value, str):
        return 0, 1
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    counts = [count(each) for each in inner]
    num_names = len(value) if isinstance(value, dict) else 0
    return isinstance(value, dict | list) + sum(each[0] for each in counts), num_names + sum(each[1] for each in counts)


@given(body=BODIES, slice_bytes=st.integers(1, 40), ascii_only=st.booleans())
def test_values_are_counted_exactly_wherever_slices_end(body: Any, slice_bytes: int, ascii_only: bool) -> None:
    num_objects, num_strings = count(body)
    data = json.dumps(body, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "SMALL_BODY_BYTES", 0)
        patch.setattr(decoding, "_SLICE_BYTES", slice_bytes)
        patch.setattr(decoding, "MAX_OBJECTS", num_objects)
        patch.setattr(decoding, "MAX_STRINGS", num_strings)
        asyncio.run(check_structure(data))
        for limit, number in (("MAX_OBJECTS", num_objects), ("MAX_STRINGS", num_strings)):
            if number:
                patch.setattr(decoding, limit, number - 1)
                with pytest.raises(ApiError, match=f"more than {number - 1} "):
                    asyncio.run(check_structure(data))
                patch.setattr(decoding, limit, number)


def filled(before: str, item: str, after: str, number: int) -> bytes:
    return (before + ",".join([item] * number) + after).encode()


@pytest.mark.parametrize(
    ("path", "data", "limit"),
    [
        (CHAT, filled(f'{{{HI},"x":[', "[]", "]}", MAX_OBJECTS), f"{MAX_OBJECTS} objects"),
        (CHAT, filled(f'{{{HI},"chat_template_kwargs":{{"a":[', "{}", "]}}", MAX_OBJECTS), f"{MAX_OBJECTS} objects"),
        (CHAT, filled(f"{{{HI},", '"a":1', "}", MAX_STRINGS), f"{MAX_STRINGS} strings"),
        ("/v1/completions", filled('{"prompt":[', "[1]", "]}", MAX_OBJECTS), f"{MAX_OBJECTS} objects"),
        ("/v1/completions", filled('{"prompt":"a","stop":[', '"a"', "]}", MAX_STRINGS), f"{MAX_STRINGS} strings"),
        ("/v1/responses", filled('{"input":[', "{}", "]}", MAX_OBJECTS), f"{MAX_OBJECTS} objects"),
        ("/v1/messages", filled('{"max_tokens":1,"messages":[', "{}", "]}", MAX_OBJECTS), f"{MAX_OBJECTS} objects"),
        ("/detokenize", filled('{"tokens":[', "{}", "]}", MAX_OBJECTS), f"{MAX_OBJECTS} objects"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_body_with_too_many_values_is_refused(
    connection: ClientConnection, path: str, data: bytes, limit: str
) -> None:
    response = await connection.request("POST", path, data)
    assert response.status == 400
    assert f"the body has more than {limit}" in response.json()["error"]["message"]


async def test_texts_full_of_brackets_and_quotes_are_accepted(connection: ClientConnection) -> None:
    text = '{"' * (MAX_OBJECTS + 1) + "\\" * 7
    response = await connection.post("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 5})
    assert response.status == 200
    numbers = await connection.post("/v1/completions", {"prompt": [1] * 300_000, "truncate_prompt_tokens": 5})
    assert numbers.status == 200


@pytest.mark.parametrize("size", [10, 100_000])
async def test_only_large_bodies_are_decoded_in_a_thread(
    connection: ClientConnection, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    threads: list[threading.Thread] = []
    decode = chat_completions.decode_chat

    def noted(data: bytes) -> ChatBody:
        threads.append(threading.current_thread())
        return decode(data)

    monkeypatch.setattr(chat_completions, "decode_chat", noted)
    body = {"messages": [{"role": "user", "content": "x"}], "metadata": {}, "x": "a" * size}
    assert (await connection.post(CHAT, body)).status == 200
    assert (threads == [threading.main_thread()]) is (size == 10)


@pytest.mark.parametrize("size", [0, 1 << 16, 200_000])
@pytest.mark.parametrize("field", [b'"\xdc":1', b'"a":{"\xe7\x8c":[]}', b'"a\xff":null'])
async def test_names_that_are_not_utf_8_are_refused_wherever_they_are(
    connection: ClientConnection, field: bytes, size: int
) -> None:
    """The decoder skips unknown fields, and does not look at their names."""
    response = await connection.request("POST", CHAT, f"{{{HI},".encode() + b" " * size + field + b"}")
    assert response.status == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert "is not UTF-8" in response.json()["error"]["message"]


async def test_characters_across_slices_are_utf_8() -> None:
    for num_before in range(8):
        await check_structure(b" " * (decoding.SMALL_BODY_BYTES - num_before) + "é猫🐈".encode())
