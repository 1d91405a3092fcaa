"""Answers of the real processes compared with transformers and with each other: logprobs, streams, grammars."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
import torch

import penstock.backend.demo_model
from tests.checkpoints import load_oracle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUESTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "What does os.path.join do?"}]},
    COMPLETIONS: {"prompt": "def read_lines(path):\n"},
}
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def oracle() -> Any:
    return load_oracle(Path(next(iter(penstock.backend.demo_model.__path__))))


@pytest.fixture
async def http(served_demo: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served_demo, timeout=60.0, verify=False) as client:  # noqa: S501
        yield client


async def whole(http: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    response = await http.post(path, json={"max_tokens": 24, "temperature": 0, **REQUESTS[path], **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def events(http: httpx.AsyncClient, path: str, **fields: Any) -> list[Any]:
    body = {"max_tokens": 24, "temperature": 0, **REQUESTS[path], **fields}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    *data, done = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(event) for event in data]


def text_of(choice: Any) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def from_chunks(chunks: list[Any]) -> list[Any]:
    """The choices of a stream's chunks: (text, finish reason, log probabilities)."""
    choices: dict[int, list[Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], ["", None, []])
            choice[0] += piece["text"] if "text" in piece else piece["delta"].get("content", "")
            choice[1] = piece["finish_reason"] or choice[1]
            choice[2] += flat(piece["logprobs"])
    return [tuple(choices[index]) for index in sorted(choices)]


def flat(logprobs: Any) -> list[Any]:
    """One entry per token, from any endpoint's format."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(
        zip(
            logprobs["tokens"],
            logprobs["token_logprobs"],
            logprobs["top_logprobs"],
            logprobs["text_offset"],
            strict=True,
        )
    )


def log_softmax(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab]: row i is for the token after the first i + 1."""
    with torch.inference_mode():
        logits: torch.Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def assert_likeliest(reported: list[float], row: torch.Tensor) -> None:
    expected = row.topk(len(reported)).values
    assert reported == pytest.approx(expected.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.4, "seed": 5, "top_p": 0.8, "presence_penalty": 1.5, "logit_bias": {"300": 20}}],
    ids=["greedy", "sampled"],
)
async def test_chat_logprobs_match_transformers(http: httpx.AsyncClient, oracle: Any, sampling: Any) -> None:
    """Logprobs are of the model's own distribution, before filters and penalties."""
    answer = await whole(http, CHAT, logprobs=True, top_logprobs=5, return_token_ids=True, **sampling)
    (choice,) = answer["choices"]
    prompt, generated = answer["prompt_token_ids"], choice["token_ids"]
    rows = log_softmax(oracle, prompt + generated)[len(prompt) - 1 :]
    assert len(generated) == len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    for token, row, entry in zip(generated, rows, choice["logprobs"]["content"], strict=False):
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=TOLERANCE)
        assert_likeliest([top["logprob"] for top in entry["top_logprobs"]], row)


async def test_completion_logprobs_match_transformers(http: httpx.AsyncClient, oracle: Any) -> None:
    """With echo, the prompt's logprobs come first."""
    answer = await whole(http, COMPLETIONS, logprobs=3, echo=True, return_token_ids=True)
    (choice,) = answer["choices"]
    token_ids, logprobs = choice["prompt_token_ids"] + choice["token_ids"], choice["logprobs"]
    rows = log_softmax(oracle, token_ids)
    assert logprobs["token_logprobs"][0] is None
    assert len(logprobs["token_logprobs"]) == len(token_ids)
    for place in range(1, len(token_ids)):
        assert logprobs["token_logprobs"][place] == pytest.approx(
            rows[place - 1, token_ids[place]].item(), abs=TOLERANCE
        )
        likeliest = sorted(logprobs["top_logprobs"][place].values(), reverse=True)
        assert 3 <= len(likeliest) <= 4
        assert_likeliest(likeliest[:3], rows[place - 1])
    assert choice["text"].startswith(REQUESTS[COMPLETIONS]["prompt"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        is_shown = not token.startswith(("bytes:", "<|end"))
        assert choice["text"][offset:].startswith(token) or not is_shown


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_continuations_are_scored_as_lm_eval_asks_for_them(
    http: httpx.AsyncClient, oracle: Any, max_tokens: int
) -> None:
    """It sends token ids, and reads the log probabilities between the context and the generated token."""
    documents = [list(range(300, 300 + 5 * length)) for length in range(2, 14)]
    contexts = [len(document) // 2 for document in documents]
    fields = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    response = await http.post(COMPLETIONS, json={"prompt": documents, **fields})
    assert response.status_code == 200, response.text
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    for document, context, choice in zip(documents, contexts, choices, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(document) + max_tokens
        rows = log_softmax(oracle, document)[context - 1 : -1]
        scored = slice(context, len(document))
        expected = [row[token].item() for row, token in zip(rows, document[scored], strict=True)]
        assert logprobs["token_logprobs"][scored] == pytest.approx(expected, abs=TOLERANCE)
        is_likeliest = [
            own == max(top.values())
            for own, top in zip(logprobs["token_logprobs"][scored], logprobs["top_logprobs"][scored], strict=True)
        ]
        greedy = [row.argmax().item() == token for row, token in zip(rows, document[scored], strict=True)]
        assert is_likeliest == greedy


@PATHS
async def test_prompt_logprobs_match_transformers(http: httpx.AsyncClient, oracle: Any, path: str) -> None:
    """A chat's prompt contains the model's own end tokens."""
    messages = [
        *REQUESTS[CHAT]["messages"],
        {"role": "assistant", "content": "It joins."},
        {"role": "user", "content": "So?"},
    ]
    more = {"messages": messages} if path == CHAT else {}
    answer = await whole(http, path, prompt_logprobs=4, max_tokens=1, return_token_ids=True, **more)
    source = answer if path == CHAT else answer["choices"][0]
    prompt, entries = source["prompt_token_ids"], source["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(prompt) == answer["usage"]["prompt_tokens"]
    for place, row in enumerate(log_softmax(oracle, prompt)[:-1], start=1):
        own = entries[place][str(prompt[place])]
        assert own["logprob"] == pytest.approx(row[prompt[place]].item(), abs=TOLERANCE)
        assert own["rank"] == pytest.approx(1 + (row > row[prompt[place]]).sum().item(), abs=1)
        ranked = sorted(
            (entry for entry in entries[place].values() if entry["rank"] <= 4), key=lambda entry: entry["rank"]
        )
        assert_likeliest([entry["logprob"] for entry in ranked], row)


async def test_prompt_without_an_answer_is_scored_like_one_with_an_answer(http: httpx.AsyncClient) -> None:
    fields = {"logprobs": 2, "echo": True}
    (alone,) = (await whole(http, COMPLETIONS, max_tokens=0, **fields))["choices"]
    (answered,) = (await whole(http, COMPLETIONS, max_tokens=3, **fields))["choices"]
    assert flat(alone["logprobs"]) == flat(answered["logprobs"])[: len(flat(alone["logprobs"]))]
    assert alone["text"] == REQUESTS[COMPLETIONS]["prompt"]


COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"n": 2, "seed": 3, "temperature": 1.0},
    {"stop": ["\n", "the"], "include_stop_str_in_output": True},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 10},
    {"bad_words": ["the", "a"], "ignore_eos": True},
    {"response_format": {"type": "json_object"}, "max_tokens": 60},
    {"guided_regex": "[a-z]{3,9} 猫+", "seed": 1, "temperature": 1.5},
]


@PATHS
@pytest.mark.parametrize("fields", COMBINATIONS, ids=lambda value: str(value)[:40])
async def test_stream_equals_the_whole_answer(http: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    for more in ({}, logprobs):
        answer, chunks = await asyncio.gather(whole(http, path, **fields, **more), events(http, path, **fields, **more))
        expected = [
            (text_of(choice), choice["finish_reason"], flat(choice["logprobs"])) for choice in answer["choices"]
        ]
        assert from_chunks(chunks) == expected
        usages = [answer["usage"], chunks[-1]["usage"]]
        for usage in usages:  # either of the two may come first
            del usage["prompt_tokens_details"], usage["penstock"]
        assert usages[0] == usages[1]


ROW = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 99}, "tag": {"enum": ["red", "blue"]}},
    "required": ["id", "tag"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ROW, "minItems": 1, "maxItems": 3}


def is_valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


SNOWFLAKE = 1304857263918450739
CHOICES = ["yes", 'no "thanks"', "back\\slash", "ünï 🐈", "two\nlines", "a\x01b", "a<|end|>b<|endoftext|>"]
GUIDED: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, is_valid),
    ({"guided_json": SCHEMA}, is_valid),
    ({"guided_json": json.dumps(SCHEMA)}, is_valid),
    ({"guided_json": {"const": {"a<|end|>": SNOWFLAKE}}}, lambda text: json.loads(text) == {"a<|end|>": SNOWFLAKE}),
    ({"guided_json": SCHEMA, "ignore_eos": True}, is_valid),
    ({"guided_json": SCHEMA, "stop_token_ids": [31, 54, 71, 81]}, is_valid),
    ({"structured_outputs": {"json": SCHEMA}}, is_valid),
    ({"guided_regex": r"\d{3}-[A-F]{2}"}, re.compile(r"\d{3}-[A-F]{2}").fullmatch),
    ({"structured_outputs": {"regex": r"(ab){2,4}"}}, re.compile(r"(ab){2,4}").fullmatch),
    *(({"guided_choice": [choice]}, choice.__eq__) for choice in CHOICES),
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    ({"guided_grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{2,5}/'}, re.compile("<[a-z]{2,5}>").fullmatch),
    ({"structured_outputs": {"grammar": 'start: "x" "y"*\n'}}, re.compile("xy*").fullmatch),
]


@pytest.mark.parametrize(
    ("fields", "is_right"), GUIDED, ids=lambda value: str(value)[:50] if isinstance(value, dict) else ""
)
async def test_answer_has_the_requested_format(http: httpx.AsyncClient, fields: dict[str, Any], is_right: Any) -> None:
    """On both endpoints, for each of several choices, streamed and not."""
    fields = {**fields, "max_tokens": 200, "temperature": 1.2, "seed": 4, "n": 3}
    answers = await asyncio.gather(*(whole(http, path, **fields) for path in REQUESTS))
    streams = await asyncio.gather(*(events(http, path, **fields) for path in REQUESTS))
    for answer, chunks in zip(answers, streams, strict=True):
        texts = [text_of(choice) for choice in answer["choices"]]
        assert texts == [text for text, _, _ in from_chunks(chunks)]
        assert len(texts) == 3
        assert all(is_right(text) for text in texts), texts
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


async def test_equal_requests_coalesce_and_other_formats_do_not(http: httpx.AsyncClient) -> None:
    digits, letters = {"guided_regex": "[0-9]{150}"}, {"guided_regex": "[a-z]{150}"}
    formats = [digits] * 4 + [letters] * 2 + [{}]
    answers = await asyncio.gather(
        *(whole(http, COMPLETIONS, **fields, prompt="shared or not", max_tokens=300) for fields in formats)
    )
    texts = [text_of(answer["choices"][0]) for answer in answers]
    assert len(set(texts[:4])) == 1
    assert texts[0].isdigit()
    assert texts[4] == texts[5]
    assert texts[4].isalpha()
    joined = [answer["usage"]["penstock"]["coalesced"] for answer in answers]
    assert (sum(joined[:4]), sum(joined[4:6]), joined[6]) == (3, 1, False)


# fields, and the name of the parameter
BAD_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
    ({"guided_grammar": "}{\x1b[31m"}, "guided_grammar"),
    ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "[z-a]"}}, "structured_outputs.regex"),
    ({"guided_json": {"$ref": "http://169.254.169.254/x"}}, "guided_json"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "object", "minProperties": "x"}, "strict": True},
            }
        },
        "response_format",
    ),
    ({"guided_regex": "[0-9]", "allowed_token_ids": [5]}, "guided_regex"),
]


async def test_odd_tool_is_held_as_far_as_possible_or_refused_by_its_number(http: httpx.AsyncClient) -> None:
    odd = {"type": "object", "properties": {"a": {"const": 1}, "b": {"not": {}}, "c": {"type": "any"}}}
    odd |= {"required": ["a"], "additionalProperties": False}
    functions: list[dict[str, Any]] = [{"name": "good"}, {"name": "odd", "parameters": odd}]
    tools = [{"type": "function", "function": function} for function in functions]
    named = {"type": "function", "function": {"name": "odd"}}
    answer = await whole(http, CHAT, tools=tools, tool_choice=named, max_tokens=400)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] == 1
    functions[1]["strict"] = True
    response = await http.post(CHAT, json={**REQUESTS[CHAT], "tools": tools, "tool_choice": "required"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")
    assert 'Unimplemented keys: [\\"not\\"]' in error["message"]
    assert "json" not in error["message"]


async def test_bad_response_format_fails_only_its_own_request(http: httpx.AsyncClient) -> None:
    """Other requests run meanwhile and are not disturbed."""
    prompts = [f"def function_{number}(" for number in range(6)]
    alone = [
        text_of((await whole(http, COMPLETIONS, prompt=prompt, max_tokens=60))["choices"][0]) for prompt in prompts
    ]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(events(http, COMPLETIONS, prompt=prompt, max_tokens=60)) for prompt in prompts]
        for fields, param in BAD_FORMS:
            for stream in (False, True):
                response = await http.post(CHAT, json={**REQUESTS[CHAT], **fields, "max_tokens": 20, "stream": stream})
                assert response.status_code == 400, (fields, response.text)
                error = response.json()["error"]
                assert (error["param"], error["code"]) == (param, "invalid_value")
                assert error["message"].startswith(f"{param}: ")
                assert error["message"].isprintable()
                assert len(error["message"]) < 400
    assert [from_chunks(task.result())[0][0] for task in running] == alone


async def test_keyless_local_server_refuses_rebound_host_names(http: httpx.AsyncClient) -> None:
    rebound = await http.get("/v1/models", headers={"host": "evil.example.org"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
    assert (await http.get("/v1/models", headers={"host": "localhost"})).status_code == 200
