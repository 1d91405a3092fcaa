"""Parameters in any combination: either refused, or answered the same streamed and whole."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from tests.system.test_answers import CHAT, COMPLETIONS, flat, from_chunks

FIELDS: dict[str, list[Any]] = {
    "max_tokens": [1, 2, 9, 30],
    "n": [1, 2, 3],
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.5, 1],
    "top_k": [-1, 5],
    "min_p": [0, 0.2],
    "typical_p": [0.5],
    "repetition_penalty": [1.3],
    "dry_multiplier": [0.8],
    "xtc_probability": [0.5],
    "top_n_sigma": [1.0],
    "dynatemp_range": [0.4],
    "presence_penalty": [1.0, -1],
    "frequency_penalty": [0.5],
    "logit_bias": [{"300": 50}, {"5": -100}],
    "allowed_token_ids": [[300, 301, 302], list(range(100, 400))],
    "bad_words": [["the", "def x"], ["a"]],
    "min_tokens": [1, 5],
    "stop": ["\n", ["e", "the"], "def"],
    "stop_token_ids": [[300], [13, 14]],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "return_token_ids": [True],
    "truncate_prompt_tokens": [3, -1],
    "truncation_side": ["right"],
    "priority": [3],
    "guided_regex": ["[a-z]+", "[0-9]{2}( [a-z])?"],
    "guided_choice": [["a", "b c"]],
    "response_format": [{"type": "json_object"}],
    "add_special_tokens": [True, False],
}
OF_CHAT: dict[str, list[Any]] = {
    "messages": [[{"role": "user", "content": "Say something about files"}]],
    "logprobs": [True],
    "top_logprobs": [2],
    "add_generation_prompt": [False],
    "tool_choice": ["required"],
    "tools": [[{"function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}}]],
}
OF_COMPLETION: dict[str, list[Any]] = {
    "prompt": ["def f(", [5, 6, 300], ["import os", "x"], "猫 🐈"],
    "echo": [True],
    "logprobs": [0, 3],
}


def any_body(rng: random.Random, own: dict[str, list[Any]]) -> dict[str, Any]:
    pool = {**FIELDS, **own}
    body = {name: rng.choice(pool[name]) for name in rng.sample(list(pool), rng.randint(2, 7))}
    needed = next(iter(own))
    return {"max_tokens": 20, "seed": rng.randrange(1000), needed: rng.choice(own[needed]), **body}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_any_combination_is_refused_or_answered_alike_streamed_and_whole(served_demo: str, path: str) -> None:
    rng = random.Random(path)
    num_answered = 0
    with httpx.Client(base_url=served_demo, timeout=60.0, verify=False) as http:  # noqa: S501
        for _ in range(40):
            body = any_body(rng, OF_CHAT if path == CHAT else OF_COMPLETION)
            whole = http.post(path, json=body)
            stream = http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
            assert whole.status_code == stream.status_code, (body, whole.text)
            if whole.status_code == 400:
                assert whole.json()["error"]["param"] is not None, (body, whole.text)
                assert whole.json() == stream.json()
                continue
            assert whole.status_code == 200, (body, whole.text)
            num_answered += 1
            answer = whole.json()
            chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
            expected = [
                (text_of(choice), choice["finish_reason"], flat(choice["logprobs"])) for choice in answer["choices"]
            ]
            assert from_chunks(chunks) == expected, body
            usages = (answer["usage"], chunks[-1]["usage"])
            counts = [{name: usage[name] for name in usage if name.endswith("_tokens")} for usage in usages]
            assert counts[0] == counts[1], body
    assert num_answered > 20


def text_of(choice: Any) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    return text
