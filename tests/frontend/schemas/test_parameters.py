"""Every generation parameter of chats and completions: its effect on the backend's request and on the answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.shm.client import GenerationRequest
from penstock.shm.messages import Constraints, Sampling
from tests.frontend.formats.scoring import ScoringBackend
from tests.frontend.harness import (
    END_TOKEN,
    TOKENIZER,
    ClientConnection,
    FakeBackend,
    make_app,
    model_card,
    model_keeper,
    served_model,
    token_ids,
)
from tests.frontend.schemas.llama_cpp_cases import LLAMA_CPP_CASES

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BASE: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "seed": 11, "temperature": 0.5},
    COMPLETIONS: {"prompt": "the cat", "seed": 11, "temperature": 0.5},
}
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
STREAMS = pytest.mark.parametrize("stream", [False, True])
MARK = TOKENIZER.token_to_id("<|im_end|>")


@pytest.fixture
def backend() -> ScoringBackend:
    return ScoringBackend()


async def ask(connection: ClientConnection, path: str, *, stream: bool = False, **fields: Any) -> Any:
    """Return the choices, whole or joined from a stream, with each text under "text"; and the usage."""
    body = {**BASE[path], **fields, "stream": stream}
    if stream:
        body.setdefault("stream_options", {"include_usage": True})
    response = await connection.post(path, body)
    assert response.status == 200, response.body
    if not stream:
        answer = response.json()
        for choice in answer["choices"]:
            if path == CHAT:
                choice["text"] = choice.pop("message")["content"]
        return answer
    *events, done = response.events()
    assert done == "[DONE]"
    return joined(events)


def joined(events: list[Any]) -> Any:
    answer: dict[str, Any] = {"choices": {}, "usage": events[-1].get("usage")}
    for event in events:
        if "prompt_token_ids" in event:
            assert event is events[0]
            answer["prompt_token_ids"] = event["prompt_token_ids"]
        for piece in event["choices"]:
            is_first = piece["index"] not in answer["choices"]
            choice = answer["choices"].setdefault(
                piece["index"], {"index": piece["index"], "text": "", "logprobs": None}
            )
            choice["text"] += piece["text"] if "text" in piece else piece["delta"].get("content", "")
            for name in ("finish_reason", "stop_reason"):
                if piece.get(name) is not None:
                    choice[name] = piece[name]
            if "prompt_token_ids" in piece:
                assert is_first
                choice["prompt_token_ids"] = piece["prompt_token_ids"]
            if "token_ids" in piece:
                choice.setdefault("token_ids", []).extend(piece["token_ids"])
            if piece["logprobs"] is not None:
                choice["logprobs"] = _extended(choice["logprobs"], piece["logprobs"])
    answer["choices"] = [answer["choices"][index] for index in sorted(answer["choices"])]
    return answer


def _extended(logprobs: Any, more: Any) -> Any:
    if logprobs is None:
        return more
    return {name: part if part is None else logprobs[name] + part for name, part in more.items()}


def changed(request: GenerationRequest, **changes: Any) -> GenerationRequest:
    """Return the request with changed fields, its own or its sampling's."""
    sampling = {name: changes.pop(name) for name in list(changes) if name in Sampling.__struct_fields__}
    return dataclasses.replace(request, sampling=msgspec.structs.replace(request.sampling, **sampling), **changes)


# fields, expected changes in the request that reaches the backend
REACHING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 7}, {"max_tokens": 7}),
    ({"temperature": 1.25}, {"temperature": 1.25}),
    ({"temperature": 2}, {"temperature": 2.0}),
    ({"temperature": 0}, {"temperature": 0.0, "seed": 0}),
    ({"top_p": 0.9}, {"top_p": 0.9}),
    ({"top_k": 40}, {"top_k": 40}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"min_p": 0.1, "typical_p": 0.4}, {"min_p": 0.1, "typical_p": 0.4}),
    *LLAMA_CPP_CASES,
    ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ({"presence_penalty": -1.5, "frequency_penalty": 2}, {"presence_penalty": -1.5, "frequency_penalty": 2.0}),
    ({"logit_bias": {"9": 1.5, "5": -100}}, {"logit_bias": ((5, -100.0), (9, 1.5))}),
    ({"logit_bias": {}}, {}),
    ({"logit_bias": [[9, 1.5], ["5", False]]}, {"logit_bias": ((5, -100.0), (9, 1.5))}),
    ({"logit_bias": {"the": 2}}, {"logit_bias": ((token_ids("the")[0], 2.0),)}),
    ({"seed": -2}, {"seed": (1 << 63) - 2}),
    ({"stop_token_ids": [8, 8]}, {"stop_token_ids": (END_TOKEN, 8)}),
    ({"ignore_eos": True}, {"stop_token_ids": ()}),
    ({"ignore_eos": True, "stop_token_ids": [8]}, {"stop_token_ids": (8,)}),
    ({"min_tokens": 3}, {"constraints": Constraints(min_tokens=3)}),
    ({"min_tokens": 0}, {}),
    ({"allowed_token_ids": [9, 5, 9]}, {"constraints": Constraints(allowed_token_ids=(5, 9))}),
    (
        {"bad_words": ["cat"]},
        {"constraints": Constraints(bad_words=tuple(sorted({tuple(token_ids("cat")), tuple(token_ids(" cat"))})))},
    ),
    ({"bad_words": []}, {}),
    ({"priority": -3}, {"priority": -3}),
    ({"stop": ["a", "b"]}, {}),
    ({"skip_special_tokens": False}, {}),
    ({"include_stop_str_in_output": True}, {}),
    ({"return_token_ids": True}, {}),
    ({"truncate_prompt_tokens": 900}, {}),
    ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, {}),
    ({"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}, {}),
    ({"safety_identifier": "x", "prompt_cache_key": "y", "spaces_between_special_tokens": False}, {}),
    ({"response_format": {"type": "text"}}, {}),
    ({"structured_outputs": {}}, {}),
    ({"add_special_tokens": False}, {}),
]
REACHING_FROM_CHAT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_completion_tokens": 5, "max_tokens": 9}, {"max_tokens": 5}),
    ({"logprobs": True}, {"num_logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 20}, {"num_logprobs": 20}),
    ({"logprobs": False, "top_logprobs": 0}, {}),
    ({"add_generation_prompt": True, "continue_final_message": False}, {}),
    ({"chat_template_kwargs": {"anything": [1]}}, {}),
]
REACHING_FROM_COMPLETION: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logprobs": 0}, {"num_logprobs": 0}),
    ({"logprobs": 5}, {"num_logprobs": 5}),
    ({"echo": True}, {}),
    ({"echo": True, "logprobs": 2}, {"num_logprobs": 2, "num_prompt_logprobs": 2}),
    ({"echo": True, "max_tokens": 0}, {"max_tokens": 1}),
    ({"echo": True, "max_tokens": 0, "logprobs": 1}, {"max_tokens": 1, "num_logprobs": 1, "num_prompt_logprobs": 1}),
    ({"n": 1, "best_of": 1}, {}),
]


@STREAMS
@pytest.mark.parametrize(
    ("path", "fields", "changes"),
    [
        *((path, *case) for path in (CHAT, COMPLETIONS) for case in REACHING),
        *((CHAT, *case) for case in REACHING_FROM_CHAT),
        *((COMPLETIONS, *case) for case in REACHING_FROM_COMPLETION),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_parameter_reaches_the_backend(
    connection: ClientConnection, backend: ScoringBackend, path: str, fields: Any, changes: Any, stream: bool
) -> None:
    backend.text = ""
    await ask(connection, path)
    plain = backend.last
    assert plain == changed(
        GenerationRequest(plain.token_ids, 1000 - len(plain.token_ids), Sampling(temperature=0.5, seed=11)),
        stop_token_ids=(END_TOKEN,),
        may_share=True,
        batch_delivery=True,
        group=plain.group,
    )
    await ask(connection, path, stream=stream, **fields)
    batch_delivery = not stream and "stop" not in fields
    assert backend.last == changed(plain, group=backend.last.group, batch_delivery=batch_delivery, **changes)


@PATHS
async def test_request_for_prompt_logprobs_reaches_the_backend(
    connection: ClientConnection, backend: ScoringBackend, path: str
) -> None:
    await ask(connection, path, prompt_logprobs=3)
    assert (backend.last.num_prompt_logprobs, backend.last.sampling.num_logprobs) == (3, -1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(0, 3)),
        ({"truncate_prompt_tokens": -1}, slice(-999, None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 400}, slice(-600, None)),
    ],
)
@PATHS
async def test_prompt_is_truncated_as_requested(
    connection: ClientConnection, backend: ScoringBackend, path: str, fields: Any, expected: slice
) -> None:
    text = "a sentence with many words " * 300
    whole = token_ids(text)
    if path == CHAT:
        whole = token_ids(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    answer = await ask(connection, path, **body, **fields)
    assert list(backend.last.token_ids) == whole[expected]
    assert answer["usage"]["prompt_tokens"] == len(whole[expected])


@PATHS
@STREAMS
@pytest.mark.parametrize(
    ("fields", "text", "finish_reason", "stop_reason"),
    [
        ({}, "Hello, world!", "stop", None),
        ({"max_tokens": 4}, None, "length", None),
        ({"stop": "wor"}, "Hello, ", "stop", "wor"),
        ({"stop": ["x", "wor"], "include_stop_str_in_output": True}, "Hello, wor", "stop", "wor"),
        ({"stop_token_ids": token_ids("w")}, "Hello, ", "stop", token_ids("w")[0]),
        ({"stop_token_ids": token_ids("w"), "include_stop_str_in_output": True}, "Hello, w", "stop", token_ids("w")[0]),
        ({"include_stop_str_in_output": True}, "Hello, world!", "stop", None),
        ({"stop": "wor", "min_tokens": len(token_ids("Hello, world"))}, "Hello, world!", "stop", None),
        ({"stop": "o", "min_tokens": len(token_ids("Hello"))}, "Hello, w", "stop", "o"),
        ({"skip_special_tokens": False, "stop": "nothing"}, "Hello, world!", "stop", None),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_finish_and_stop_reason_report_what_ended_the_text(
    connection: ClientConnection,
    backend: ScoringBackend,
    path: str,
    stream: bool,
    fields: Any,
    text: str | None,
    finish_reason: str,
    stop_reason: Any,
) -> None:
    for batch_size in (1, 3, 100):
        backend.batch_size = batch_size
        (choice,) = (await ask(connection, path, stream=stream, **fields))["choices"]
        expected = TOKENIZER.decode(token_ids("Hello, world!")[:4]) if text is None else text
        assert (choice["text"], choice["finish_reason"]) == (expected, finish_reason)
        assert choice.get("stop_reason") == stop_reason


@PATHS
@STREAMS
async def test_special_tokens_are_shown_if_requested(
    connection: ClientConnection, backend: ScoringBackend, path: str, stream: bool
) -> None:
    backend.of = lambda _: [*token_ids("a"), MARK, *token_ids("b")]
    for fields, text in (({}, "ab"), ({"skip_special_tokens": False}, "a<|im_end|>b")):
        (choice,) = (await ask(connection, path, stream=stream, **fields))["choices"]
        assert choice["text"] == text


@PATHS
@STREAMS
@pytest.mark.parametrize("batch_size", [1, 4, 100])
async def test_token_ids_include_all_generated_tokens(
    connection: ClientConnection, backend: ScoringBackend, path: str, stream: bool, batch_size: int
) -> None:
    backend.text, backend.batch_size = "été 猫", batch_size
    answer = await ask(connection, path, stream=stream, return_token_ids=True, n=2)
    ids = [*token_ids("été 猫"), END_TOKEN]
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids, ids]
    assert answer["usage"]["completion_tokens"] == 2 * len(ids)
    prompt = list(backend.last.token_ids)
    if path == CHAT:
        assert answer["prompt_token_ids"] == prompt
    else:
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompt, prompt]
    plain = await ask(connection, path, stream=stream)
    assert "prompt_token_ids" not in str(plain)
    assert "'token_ids'" not in str(plain)


@PATHS
@STREAMS
async def test_each_choice_has_its_own_text(
    connection: ClientConnection, backend: ScoringBackend, path: str, stream: bool
) -> None:
    backend.of = lambda request: token_ids(str(request.sampling.seed))
    answer = await ask(connection, path, stream=stream, n=3)
    seeds = [str(each.request.sampling.seed) for each in backend.streams]
    assert [choice["text"] for choice in answer["choices"]] == seeds
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(seeds)) == 3
    assert answer["usage"]["completion_tokens"] == sum(len(token_ids(seed)) + 1 for seed in seeds)


async def test_best_of_returns_the_choices_with_the_likeliest_tokens(
    connection: ClientConnection, backend: ScoringBackend
) -> None:
    backend.of = lambda _: token_ids(str(len(backend.streams)))
    backend.offset = -0.5  # each stream is likelier than the one before
    answer = await ask(connection, COMPLETIONS, prompt=["a", "b"], n=2, best_of=4)
    assert [choice["text"] for choice in answer["choices"]] == ["3", "2", "7", "6"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 8 * 2
    assert answer["choices"][0]["logprobs"] is None
    assert all(each.request.sampling.num_logprobs == 0 for each in backend.streams)


async def test_best_of_ranks_by_the_mean_over_all_tokens_with_the_end(
    connection: ClientConnection, backend: ScoringBackend
) -> None:
    # Each token scores -0.5 minus its position: a longer text has a lower mean in any batching
    backend.of = lambda _: token_ids("xyz"[len(backend.streams) :])
    for batch_size in (1, 100):
        backend.batch_size = batch_size
        backend.streams.clear()
        answer = await ask(connection, COMPLETIONS, best_of=3)
        assert [choice["text"] for choice in answer["choices"]] == ["z"]


@PATHS
async def test_usage_in_every_chunk_grows_with_the_answer(
    connection: ClientConnection, backend: ScoringBackend, path: str
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**BASE[path], "stream": True, "stream_options": options}
    *events, done = (await connection.post(path, body)).events()
    assert done == "[DONE]"
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (path != CHAT, len(token_ids("Hello, world!")) + 1)
    assert {event["usage"]["prompt_tokens"] for event in events} == {len(backend.last.token_ids)}
    assert events[-1]["choices"] == []


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_end|>\n"),
        ({"continue_final_message": True, "add_generation_prompt": False}, ""),
        ({"continue_final_message": True}, ""),
    ],
)
@pytest.mark.parametrize("content", ["Once upon", [{"type": "text", "text": "Once upon"}]])
async def test_prompt_end_follows_add_generation_prompt_and_continue_final_message(
    connection: ClientConnection, backend: ScoringBackend, fields: Any, ending: str, content: Any
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    await ask(connection, CHAT, messages=messages, **fields)
    prompt = TOKENIZER.decode(list(backend.last.token_ids), skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nOnce upon" + ending


async def test_chat_template_kwargs_reach_the_template(backend: ScoringBackend) -> None:
    served = served_model(model_card(), backend, template="{{ style }}:{{ messages[0]['content'] }}")
    connection = ClientConnection(make_app(backend, keeper=model_keeper(backend, served)))
    await ask(connection, CHAT, chat_template_kwargs={"style": "brief"})
    assert TOKENIZER.decode(list(backend.last.token_ids)) == "brief:hi"
    for name in ("messages", "add_generation_prompt", "tools"):
        body = {**BASE[CHAT], "chat_template_kwargs": {name: []}}
        response = await connection.post(CHAT, body)
        assert (response.status, response.error["param"]) == (400, f"chat_template_kwargs.{name}")
    await connection.end()


@pytest.mark.parametrize(("path", "struct"), [(CHAT, ChatBody), (COMPLETIONS, CompletionBody)])
async def test_null_fields_are_treated_as_absent(
    connection: ClientConnection, backend: ScoringBackend, path: str, struct: type[msgspec.Struct]
) -> None:
    nulls = {field.name: None for field in msgspec.structs.fields(struct)}
    await ask(connection, path)
    plain = backend.last
    assert (await connection.post(path, {**nulls, **BASE[path]})).status == 200
    assert backend.last == changed(plain, group=backend.last.group)


@pytest.mark.parametrize(
    ("fields", "batch_delivery"),
    [
        ({}, True),
        ({"n": 2, "logprobs": 1}, True),
        ({"stream": True}, False),
        ({"stop": ["x"]}, False),
    ],
)
async def test_batch_delivery_is_off_only_if_tokens_are_read_one_by_one(
    backend: FakeBackend, connection: ClientConnection, fields: dict[str, Any], batch_delivery: bool
) -> None:
    response = await connection.request("POST", "/v1/completions", {"prompt": "the cat", "max_tokens": 3, **fields})
    assert response.status == 200
    assert backend.last.batch_delivery is batch_delivery
