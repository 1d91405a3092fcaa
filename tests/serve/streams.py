"""Completions that stream from a server of a test, several at once, and what each of their choices received."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.system.processes import REPOSITORY

GREEDY_AND_SEEDED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 7, "logprobs": 2},
    {"seed": 8, "n": 2},
    {"seed": 9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"seed": 10, "guided_regex": "[a-z ]{3000}"},
    {"temperature": 0, "echo": True, "logprobs": 0},
)
SLOW = ("--forward-pass", "tests.passes:SlowFakePass")
"""Options of a server whose streams last long enough to be interrupted."""
IMPORTS_TESTS = {"PYTHONPATH": str(REPOSITORY)}
"""Environment of a server whose pass is one of the tests'."""


def bodies(max_tokens: int) -> list[dict[str, Any]]:
    return [
        {"model": "penstock-demo", "prompt": [20 + n] * 5, "max_tokens": max_tokens, "ignore_eos": True} | settings
        for n, settings in enumerate(GREEDY_AND_SEEDED)
    ]


@dataclass
class Choice:
    text: str = ""
    logprobs: list[float | None] = field(default_factory=list)


def all_choices(
    client: httpx.Client, requests: list[dict[str, Any]], when_all_run: Callable[[], None] = lambda: None
) -> list[list[Choice]]:
    """Return, for each body, what its choices streamed. Calls when_all_run once each answer has begun."""
    begun = threading.Barrier(len(requests), action=when_all_run)
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda body: choices_of(client, body, begun), requests))


def choices_of(client: httpx.Client, body: dict[str, Any], begun: threading.Barrier) -> list[Choice]:
    choices = [Choice() for _ in range(body.get("n", 1))]
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        is_first = True
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                if is_first:
                    begun.wait(60.0)
                is_first = False
                for event in json.loads(line[6:])["choices"]:
                    choice = choices[event["index"]]
                    choice.text += event["text"]
                    choice.logprobs += (event["logprobs"] or {}).get("token_logprobs") or []
    return choices


def samples(client: httpx.Client, name: str) -> list[float]:
    """The values of a metric, one for each replica."""
    lines = client.get("/metrics").text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
