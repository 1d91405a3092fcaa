"""Bodies as large as the server accepts: errors in them are found without visiting every part one by one."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.formats.completion import CompletionFormat
from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.choices.choice import Choice
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.parsing.deltas import Delta, ScoredToken
from penstock.frontend.schemas.chat import is_shallow
from penstock.frontend.schemas.decoding import decode_chat, decode_completion
from penstock.frontend.transport.errors import ApiError
from tests.frontend.formats.scoring import ScoringBackend
from tests.frontend.harness import ClientConnection, make_app, model_card, served_model

_JSON = st.recursive(
    st.none() | st.integers(0, 9) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=20,
)


def _depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@given(value=_JSON, limit=st.integers(0, 6))
def test_nesting_depth_is_measured(value: Any, limit: int) -> None:
    assert is_shallow(value, limit) is (_depth(value) <= limit)


@pytest.mark.parametrize(
    ("prompt", "param", "shown"),
    [
        ([[0]] * 200_000, "prompt", "got 200000"),
        (["a"] * 200_000, "prompt", "got 200000"),
        ([0] * 400_000 + ["a"], "prompt[400000]", "mix"),
        ([0] * 400_000 + [[]], "prompt[400000]", "mix"),
        ([[0], []], "prompt[1]", "empty"),
    ],
)
def test_lists_of_prompts_are_checked(prompt: list[Any], param: str, shown: str) -> None:
    with pytest.raises(ApiError, match=shown) as refused:
        decode_completion(msgspec.json.encode({"prompt": prompt}))
    assert refused.value.param == param


@pytest.mark.parametrize("as_text", [False, True])
def test_schema_that_is_too_long_is_refused_for_its_length(as_text: bool) -> None:
    schema = {"enum": [0] * 500_000}
    fields = {"guided_json": msgspec.json.encode(schema).decode() if as_text else schema}
    with pytest.raises(ApiError, match="guided_json: 1000010 characters"):
        requested_grammar(decode_chat(msgspec.json.encode({"messages": [{"role": "user", "content": "a"}], **fields})))


async def test_schema_nested_as_deep_as_a_body_may_be_is_refused(connection: ClientConnection) -> None:
    schema = b'{"a":' * 900 + b"{}" + b"}" * 900
    response = await connection.post("/v1/completions", b'{"prompt":"a","guided_json":%b}' % schema)
    assert (response.status, response.error["param"]) == (400, "guided_json")


@pytest.mark.parametrize("end", ["}", "]", ',"n":0}'])
def test_garbage_collector_runs_again_after_a_large_body(end: str) -> None:
    data = f'{{"prompt":{[0] * 50_000}{end}'.encode()
    try:
        decode_completion(data)
    except ApiError:
        assert end != "}"
    assert gc.isenabled()


@pytest.mark.parametrize(
    "options", [{}, {"echo": True}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}]
)
async def test_prompt_logprobs_are_encoded_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    threads: list[threading.Thread] = []
    whole = CompletionFormat.whole

    def noted(answer: CompletionFormat, messages: list[ChoiceOutput]) -> bytes:
        threads.append(threading.current_thread())
        return whole(answer, messages)

    monkeypatch.setattr(CompletionFormat, "whole", noted)
    connection = ClientConnection(make_app(ScoringBackend()))
    assert (await connection.post("/v1/completions", {"prompt": "the cat", **options})).status == 200
    is_scored = "prompt_logprobs" in options or len(options) == 2
    assert (threads == [threading.main_thread()]) is not is_scored
    await connection.end()


async def test_at_most_two_of_the_longest_texts_are_tokenized_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = served_model(model_card()).tokenizer
    lock, pairs = threading.Lock(), threading.Barrier(2)
    running: set[int] = set()
    most: list[int] = []

    def encode(texts: list[str], add_special_tokens: bool, _mark: str = "") -> list[list[int]]:
        with lock:
            running.add(threading.get_ident())
            most.append(len(running))
        pairs.wait(30)
        with lock:
            running.discard(threading.get_ident())
        return [[len(texts), add_special_tokens]]

    monkeypatch.setattr(tokenizer, "_encode", encode)
    text = "x" * 300_000
    encoded = await asyncio.gather(*(tokenizer.encode([text], add_special_tokens=False) for _ in range(8)))
    assert encoded == [[[1, False]]] * 8
    assert max(most) == 2


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_streamed_echo_is_encoded_in_a_thread_and_equals_the_whole_one(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    threads: list[threading.Thread] = []
    write, logprobs = CompletionFormat._piece, Choice.prompt_logprobs

    def noted_piece(answer: CompletionFormat, index: int, piece: Delta, *more: bytes) -> bytes:
        if len(piece.logprobs) > 90:
            threads.append(threading.current_thread())
        return write(answer, index, piece, *more)

    def noted_logprobs(choice: Choice, text: str = "") -> list[ScoredToken]:
        threads.append(threading.current_thread())
        return logprobs(choice, text)

    monkeypatch.setattr(CompletionFormat, "_piece", noted_piece)
    monkeypatch.setattr(Choice, "prompt_logprobs", noted_logprobs)
    connection = ClientConnection(make_app(ScoringBackend()))
    body = {"prompt": "the cat 猫 " * 60, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    whole = (await connection.post("/v1/completions", body)).json()["choices"][0]
    events = (await connection.post("/v1/completions", {**body, "stream": True})).events()
    pieces = [event["choices"][0] for event in events[:-1]]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    streamed = [piece["logprobs"]["tokens"] for piece in pieces if piece["logprobs"]]
    assert [token for tokens in streamed for token in tokens] == whole["logprobs"]["tokens"]
    assert len(threads) == 3
    assert threading.main_thread() not in threads
    await connection.end()
