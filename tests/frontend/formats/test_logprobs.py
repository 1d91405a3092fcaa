"""Log probabilities of answer and prompt as clients get them, streamed and whole, in all shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from penstock.frontend.schemas.generation import MAX_LOGPROB_CELLS, MAX_PROMPT_LOGPROB_CELLS
from penstock.shm.messages import MAX_LOGPROBS
from tests.frontend.formats.scoring import ScoringBackend, entry, named_logprob
from tests.frontend.harness import END_TOKEN, TOKENIZER, VOCAB_SIZE, ClientConnection, model_card, token_ids
from tests.frontend.schemas.test_parameters import CHAT, COMPLETIONS, PATHS, STREAMS, ask

TEXTS = ["Hello, world!", "été 猫 🐈", "猫猫"]
BATCHES = pytest.mark.parametrize("batch_size", [1, 3, 100])


@pytest.fixture
def backend() -> ScoringBackend:
    return ScoringBackend()


@cache
def gpt2_alphabet() -> dict[str, int]:
    alphabet = {chr(byte): byte for byte in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    others = (byte for byte in range(256) if byte not in alphabet.values())
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(list(others))}


def raw(token_id: int) -> bytes:
    """Return a token's bytes in this tokenizer, whose tokens are in GPT-2's alphabet."""
    alphabet = gpt2_alphabet()
    token = TOKENIZER.id_to_token(token_id)
    return token.encode() if token.startswith("<|") else bytes(alphabet[character] for character in token)


def shown(token_id: int) -> str:
    return raw(token_id).decode(errors="replace")


def legacy(token_id: int) -> str:
    try:
        return raw(token_id).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw(token_id))


@STREAMS
@BATCHES
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [0, 1, 3, 20])
async def test_chat_has_logprobs(
    connection: ClientConnection, backend: ScoringBackend, text: str, width: int, batch_size: int, stream: bool
) -> None:
    backend.text, backend.batch_size = text, batch_size
    (choice,) = (await ask(connection, CHAT, stream=stream, logprobs=True, top_logprobs=width))["choices"]
    ids = token_ids(text)
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert bytes(byte for reported in content for byte in reported["bytes"]).decode() == text
    for position, (token, reported) in enumerate(zip(ids, content, strict=True)):
        expected = entry(token, position, width)
        assert (reported["token"], reported["logprob"]) == (shown(token), expected.logprob)
        assert reported["top_logprobs"] == [
            {"token": shown(top), "logprob": logprob, "bytes": list(raw(top))}
            for top, logprob in zip(expected.top_ids, expected.top_logprobs, strict=True)
        ]
        assert len(reported["top_logprobs"]) == width


@STREAMS
@BATCHES
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [0, 1, 5])
async def test_completion_has_logprobs(
    connection: ClientConnection, backend: ScoringBackend, text: str, width: int, batch_size: int, stream: bool
) -> None:
    backend.text, backend.batch_size = text, batch_size
    (choice,) = (await ask(connection, COMPLETIONS, stream=stream, logprobs=width))["choices"]
    reported, ids = choice["logprobs"], token_ids(text)
    expected = [entry(token, position, width) for position, token in enumerate(ids)]
    assert reported["tokens"] == [legacy(token) for token in ids]
    assert reported["token_logprobs"] == [one.logprob for one in expected]
    for token, one, top in zip(ids, expected, reported["top_logprobs"], strict=True):
        likeliest = dict(zip(map(legacy, one.top_ids), one.top_logprobs, strict=True))
        assert top == {legacy(token): one.logprob} | likeliest | {legacy(token): one.logprob}
    ends = [len(TOKENIZER.decode(ids[:count]).rstrip("\ufffd")) for count in range(len(ids) + 1)]
    assert reported["text_offset"] == ends[:-1]


@STREAMS
@PATHS
async def test_named_tokens_are_reported_after_the_generated_one(
    connection: ClientConnection, backend: ScoringBackend, path: str, stream: bool
) -> None:
    backend.text = "a cat"
    ids = token_ids(backend.text)
    named = [9, ids[0], 4, 9]
    fields = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1}
    (choice,) = (await ask(connection, path, stream=stream, **fields, logprob_token_ids=named))["choices"]
    sampling = backend.last.sampling
    assert (sampling.num_logprobs, sampling.logprob_token_ids, sampling.num_reported) == (0, (9, ids[0], 4), 3)
    logprobs = choice["logprobs"]
    tops = logprobs["top_logprobs"] if path == COMPLETIONS else [each["top_logprobs"] for each in logprobs["content"]]
    for position, (token, top) in enumerate(zip(ids, tops, strict=True)):
        own = entry(token, position, 0).logprob
        values = {token: own} | {each: named_logprob(each, position) for each in (9, ids[0], 4)}
        if path == COMPLETIONS:
            assert top == {legacy(each): value for each, value in (values | {token: own}).items()}
        else:
            assert [(each["token"], each["logprob"]) for each in top] == [
                (shown(each), value) for each, value in values.items()
            ]
    for empty in ([], None):
        await ask(connection, path, stream=stream, **fields, logprob_token_ids=empty)
        assert (backend.last.sampling.num_logprobs, backend.last.sampling.logprob_token_ids) == (1, ())


@STREAMS
async def test_log_probabilities_name_tokens_by_id(
    connection: ClientConnection, backend: ScoringBackend, stream: bool
) -> None:
    backend.text, prompt = TEXTS[1], token_ids("the cat")
    ids = token_ids(backend.text)
    fields = {"stream": stream, "return_tokens_as_token_ids": True}
    (choice,) = (await ask(connection, CHAT, logprobs=True, top_logprobs=2, **fields))["choices"]
    assert choice["text"] == backend.text
    for position, (token, reported) in enumerate(zip(ids, choice["logprobs"]["content"], strict=True)):
        names = [f"token_id:{each}" for each in (token, *entry(token, position, 2).top_ids)]
        assert [each["token"] for each in (reported, *reported["top_logprobs"])] == names
        assert bytes(reported["bytes"]).decode() == names[0]
    (choice,) = (await ask(connection, COMPLETIONS, echo=True, logprobs=1, **fields))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in (*prompt, *ids, END_TOKEN)]
    assert set(choice["logprobs"]["top_logprobs"][-1]) == {f"token_id:{END_TOKEN}", f"token_id:{END_TOKEN + 1}"}


@STREAMS
async def test_echoed_prompt_comes_first_with_its_logprobs(
    connection: ClientConnection, backend: ScoringBackend, stream: bool
) -> None:
    prompt = "猫 sat"
    (choice,) = (await ask(connection, COMPLETIONS, stream=stream, prompt=prompt, echo=True, logprobs=2))["choices"]
    reported, ids = choice["logprobs"], [*token_ids(prompt), *token_ids("Hello, world!"), END_TOKEN]
    assert choice["text"] == prompt + "Hello, world!"
    assert reported["tokens"] == [legacy(token) for token in ids]
    assert (reported["token_logprobs"][0], reported["top_logprobs"][0]) == (None, None)
    assert reported["token_logprobs"][1] == entry(ids[1], 1, 2).logprob
    assert reported["token_logprobs"][len(token_ids(prompt))] == entry(0, 0, 2).logprob
    for token, offset in zip(ids, reported["text_offset"], strict=True):
        if "\ufffd" not in shown(token) and token != END_TOKEN:
            assert choice["text"][offset:].startswith(shown(token))
    assert reported["text_offset"] == sorted(reported["text_offset"])


@STREAMS
@pytest.mark.parametrize("prompt", ["a cat", token_ids("a cat"), ["a cat", "a cat"]])
async def test_echo_with_max_tokens_0_returns_only_the_prompt(
    connection: ClientConnection, backend: ScoringBackend, prompt: Any, stream: bool
) -> None:
    answer = await ask(connection, COMPLETIONS, stream=stream, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    num_prompts = 2 if isinstance(prompt, list) and isinstance(prompt[0], str) else 1
    assert len(answer["choices"]) == num_prompts
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("a cat", "length")
        assert choice["logprobs"]["tokens"] == [shown(token) for token in token_ids("a cat")]
        assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == num_prompts * len(token_ids("a cat"))


async def test_prompt_with_a_leading_special_token_is_echoed_as_sent(
    connection: ClientConnection, backend: ScoringBackend
) -> None:
    """Token ids are echoed as the model sees them, a text as the client wrote it."""
    ids = [END_TOKEN, *token_ids("a cat")]
    (choice,) = (await ask(connection, COMPLETIONS, prompt=ids, echo=True, max_tokens=0, logprobs=0))["choices"]
    assert choice["text"] == "<|end|>a cat"
    assert choice["logprobs"]["text_offset"][:2] == [0, len("<|end|>")]
    (choice,) = (await ask(connection, COMPLETIONS, prompt="<|end|>a", echo=True, max_tokens=0))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("<|end|>a", None)


@PATHS
async def test_prompt_logprobs_are_keyed_by_token_id(
    connection: ClientConnection, backend: ScoringBackend, path: str
) -> None:
    answer = await ask(connection, path, prompt_logprobs=2, n=2)
    prompt = list(backend.last.token_ids)
    every = [answer["prompt_logprobs"]] if path == CHAT else [one["prompt_logprobs"] for one in answer["choices"]]
    assert len(every) == (1 if path == CHAT else 2)
    for reported in every:
        assert len(reported) == len(prompt)
        assert reported[0] is None
        for position, (token, ranked) in enumerate(zip(prompt[1:], reported[1:], strict=True), start=1):
            one = entry(token, position, 2)
            likeliest = {"logprob": one.top_logprobs[0], "rank": 1, "decoded_token": shown(one.top_ids[0])}
            own = {"logprob": one.logprob, "rank": 2, "decoded_token": shown(token)}
            assert ranked == {str(token): own, str(one.top_ids[0]): likeliest}
    assert answer["choices"][0]["logprobs"] is None


@PATHS
@STREAMS
async def test_answer_has_no_logprobs_unless_requested(
    connection: ClientConnection, backend: ScoringBackend, path: str, stream: bool
) -> None:
    for fields in ({}, {"logprobs": None}, {"n": 2}):
        answer = await ask(connection, path, stream=stream, **fields)
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        assert "prompt_logprobs" not in answer


@PATHS
@STREAMS
async def test_end_token_has_logprobs_if_token_ids_are_returned(
    connection: ClientConnection, backend: ScoringBackend, path: str, stream: bool
) -> None:
    fields = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    (choice,) = (await ask(connection, path, stream=stream, return_token_ids=True, **fields))["choices"]
    reported = choice["logprobs"]["content"] if path == CHAT else choice["logprobs"]["tokens"]
    assert len(reported) == len(choice["token_ids"]) == len(token_ids("Hello, world!")) + 1
    assert choice["text"] == "Hello, world!"


@PATHS
@STREAMS
async def test_logprobs_end_with_the_stop_string(
    connection: ClientConnection, backend: ScoringBackend, path: str, stream: bool
) -> None:
    """All tokens up to the one that completes the stop string have log probabilities."""
    ids = token_ids("Hello, world!")
    count = next(count for count in range(len(ids)) if "wor" in TOKENIZER.decode(ids[:count]))
    fields = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    for backend.batch_size in (1, 100):
        (choice,) = (await ask(connection, path, stream=stream, stop="wor", **fields))["choices"]
        reported = choice["logprobs"]
        tokens = [one["token"] for one in reported["content"]] if path == CHAT else reported["tokens"]
        assert tokens == [shown(token) for token in ids[:count]]


async def test_minus_infinity_is_reported_as_a_number(connection: ClientConnection, backend: ScoringBackend) -> None:
    backend.offset = float("inf")
    backend.text = "a"
    await ask(connection, CHAT)
    (choice,) = (await ask(connection, CHAT, logprobs=True))["choices"]
    assert choice["logprobs"]["content"][0]["logprob"] == -9999.0


@pytest.mark.parametrize(
    ("path", "fields", "param", "reported"),
    [
        (CHAT, {"logprobs": 1}, "logprobs", "got int 1"),
        (CHAT, {"logprobs": "true"}, "logprobs", "true"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs", "logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 5}, "top_logprobs", "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": MAX_LOGPROBS + 1}, "top_logprobs", "20, got 21"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "got bool true"),
        (COMPLETIONS, {"logprobs": MAX_LOGPROBS + 1}, "logprobs", "20, got 21"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs", "-1"),
        (COMPLETIONS, {"prompt_logprobs": MAX_LOGPROBS + 1}, "prompt_logprobs", "20, got 21"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
        (CHAT, {"prompt_logprobs": True}, "prompt_logprobs", "true"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        (CHAT, {"logprob_token_ids": [3]}, "logprob_token_ids", "needs logprobs"),
        (CHAT, {"logprobs": False, "logprob_token_ids": [3]}, "logprob_token_ids", "needs logprobs"),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [3, VOCAB_SIZE]}, "logprob_token_ids", "vocabulary"),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [-1]}, "logprob_token_ids[0]", "-1"),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [3] * 129}, "logprob_token_ids", "128"),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": 3}, "logprob_token_ids", "3"),
        (
            COMPLETIONS,
            {"logprobs": 1, "logprob_token_ids": [3], "echo": True, "max_tokens": 0},
            "logprob_token_ids",
            "max_tokens 0",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_unavailable_logprobs_are_refused(
    connection: ClientConnection, path: str, fields: Any, param: str, reported: str
) -> None:
    response = await connection.post(path, {"messages": [{"role": "user", "content": "hi"}], "prompt": "x", **fields})
    assert (response.status, response.error["param"]) == (400, param)
    assert response.error["message"].startswith(f"{param}: ")
    assert reported in response.error["message"]


async def test_penalties_and_logprobs_of_the_prompt_go_together(
    connection: ClientConnection, backend: ScoringBackend
) -> None:
    await ask(connection, COMPLETIONS, echo=True, logprobs=0, presence_penalty=1, frequency_penalty=0.5)
    sampling = backend.last.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 20, "n": 16, "max_tokens": 20_000}, "logprobs"),
        (COMPLETIONS, {"logprobs": 20, "n": 16, "prompt": [[5]] * 8, "max_tokens": 2000}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 20, "n": 16, "prompt": [5] * 2000, "max_tokens": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 20, "prompt": [5] * 30_000, "max_tokens": 0}, "logprobs"),
    ],
)
async def test_answer_that_would_be_too_large_is_refused(
    connect: Callable[..., ClientConnection], backend: ScoringBackend, path: str, fields: Any, param: str
) -> None:
    backend.model = model_card(max_context_tokens=1 << 20)
    response = await connect().post(path, {"messages": [{"role": "user", "content": "hi"}], "prompt": "x", **fields})
    assert (response.status, response.error["param"]) == (400, param)
    limit = MAX_PROMPT_LOGPROB_CELLS if len(fields.get("prompt", ())) >= 2000 else MAX_LOGPROB_CELLS
    assert f"the limit is {limit}" in response.error["message"]
    assert backend.streams == []
