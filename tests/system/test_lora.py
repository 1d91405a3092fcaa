"""LoRA adapters over HTTP, with the real processes and the demo model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from penstock.backend.model_names import DEMO_MODEL_DIR
from tests.checkpoints import load_oracle
from tests.lora import make_adapter, merge
from tests.system.processes import Command, backends_of, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "penstock-demo"
PROMPT = list(range(300, 372))
"""Two whole pages, and a part of a third."""
SERVE = ("serve", MODEL, "--gpu", "none", "--port", "0", "--kv-budget", "100MB", "--dtype", "fp32")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model = load_oracle(DEMO_MODEL_DIR)
    return {
        name: make_adapter(model, tmp_path_factory.mktemp(name), seed=seed, rank=8, size=0.03)
        for seed, name in enumerate(("sql", "chat"))
    }


@pytest.fixture(scope="module")
def serve(adapters: dict[str, Path]) -> Iterator[Command]:
    modules = [f"{name}={directory}" for name, directory in adapters.items()]
    serve = Command("penstock.main", *SERVE, "--lora-modules", *modules)
    with running(serve):
        yield serve


@pytest.fixture(scope="module")
def http(serve: Command) -> Iterator[httpx.Client]:
    url = serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)
    with httpx.Client(base_url=url, timeout=60.0, verify=False) as client:  # noqa: S501
        yield client


def complete(http: httpx.Client, model: str | None, max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    response = http.post("/v1/completions", json=body | {"model": model, "return_token_ids": True} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def greedy(model: Any, count: int) -> list[int]:
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def test_each_name_has_its_own_tokens_and_no_pages_of_another(http: httpx.Client, adapters: dict[str, Path]) -> None:
    """One after the other, with equal prompts: what is cached is of the same model."""
    expected = {MODEL: greedy(load_oracle(DEMO_MODEL_DIR), 12)}
    for name, directory in adapters.items():
        expected[name] = greedy(merge(load_oracle(DEMO_MODEL_DIR), directory), 12)
    assert len(set(map(tuple, expected.values()))) == 3
    for turn in range(2):
        for name, tokens in expected.items():
            answer = complete(http, name)
            assert answer["model"] == name
            assert answer["choices"][0]["token_ids"] == tokens
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (0 if turn == 0 else len(PROMPT) - 1)
    assert complete(http, None)["choices"][0]["token_ids"] == expected[MODEL]


def test_adapters_are_models_whose_parent_is_the_base_model(http: httpx.Client) -> None:
    models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert [(name, model["parent"]) for name, model in models.items()] == [
        (MODEL, None), ("sql", MODEL), ("chat", MODEL)
    ]  # fmt: skip
    assert models["sql"]["root"] == "sql"
    assert http.get("/v1/models/chat").json() == models["chat"]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = http.post("/v1/chat/completions", json=chat | {"model": "chat", "stream": False}).json()
    assert answer["model"] == "chat"
    unknown = http.post("/v1/chat/completions", json=chat | {"model": "sq"})
    assert unknown.status_code == 404
    assert 'this server has "penstock-demo", "sql", "chat"' in unknown.json()["error"]["message"]
    response = http.post("/v1/responses", json={"model": "sql", "input": "Hi", "max_output_tokens": 16}).json()
    assert response["model"] == "sql"


async def test_streams_of_all_names_at_once_share_sequences_only_with_their_own(http: httpx.Client) -> None:
    """Two equal prompts for each name. In their steps rows of all adapters are mixed."""

    fields = {"prompt": [[7, 8, 9]] * 2, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    bodies = [fields | {"model": name, "return_token_ids": True} for name in (MODEL, "sql", "chat")]
    async with httpx.AsyncClient(base_url=http.base_url, timeout=60.0, verify=False) as client:  # noqa: S501

        async def coalesced() -> int:
            lines = (await client.get("/metrics")).text.splitlines()
            (line,) = [line for line in lines if line.startswith("penstock_requests_coalesced_total")]
            return int(float(line.split()[-1]))

        alone = [await client.post("/v1/completions", json=body) for body in bodies]
        before = await coalesced()
        together = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        assert await coalesced() - before == 3
    tokens, expected = (
        [[choice["token_ids"] for choice in answer.json()["choices"]] for answer in answers]
        for answers in (together, alone)
    )
    assert tokens == expected
    assert all(first == second for first, second in tokens)
    assert len({tuple(first) for first, _ in tokens}) == 3


def test_stream_keeps_its_adapter_when_the_backend_is_killed(http: httpx.Client, serve: Command) -> None:
    expected = complete(http, "sql", 150)["choices"][0]["token_ids"]
    body = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True, "model": "sql"}
    tokens: list[int] = []
    (pid,) = backends_of(serve)
    with http.stream("POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                had_any = bool(tokens)
                tokens += [token for choice in json.loads(line[6:])["choices"] for token in choice["token_ids"]]
                if tokens and not had_any:
                    os.kill(pid, signal.SIGKILL)
    assert tokens == expected
    assert backends_of(serve) != [pid]
