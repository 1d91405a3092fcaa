"""Adapters that are loaded and unloaded while two workers serve the demo model, and their backend is killed."""

from __future__ import annotations

import json
import os
import shutil
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
KEY = "an-admin-key"
COUNT = 150


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    model = load_oracle(DEMO_MODEL_DIR)
    for seed, name in enumerate(("sql", "chat")):
        make_adapter(model, root / name, seed=seed, rank=8, size=0.03)
    make_adapter(model, root / "wide", rank=400)
    shutil.copytree(root / "sql", root.parent / "outside")
    (root / "link").symlink_to(root.parent / "outside")
    shutil.copytree(root / "sql", root / "broken")
    weights = root / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    return root


@pytest.fixture(scope="module")
def serve(root: Path) -> Iterator[Command]:
    options = ("--lora-dir", str(root), "--lora-budget", "3MB", "--admin-key", KEY, "--workers", "2")
    serve = Command(
        "penstock.main",
        "serve",
        "penstock-demo",
        "--gpu",
        "none",
        "--port",
        "0",
        "--kv-budget",
        "100MB",
        "--dtype",
        "fp32",
        *options,
    )
    with running(serve):
        yield serve


@pytest.fixture(scope="module")
def url(serve: Command) -> str:
    return serve.wait_for(r"^Ready: (http://\S+)/v1$").group(1)


def post(url: str, path: str, **body: Any) -> httpx.Response:
    """On a new connection, which any worker may take."""
    headers = {"authorization": f"Bearer {body.pop('key', KEY)}"}
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60.0, verify=False)  # noqa: S501


def load(url: str, name: str, path: str, **body: Any) -> httpx.Response:
    return post(url, "/v1/load_lora_adapter", lora_name=name, lora_path=path, **body)


def unload(url: str, name: str) -> httpx.Response:
    return post(url, "/v1/unload_lora_adapter", lora_name=name)


def complete(url: str, model: str) -> httpx.Response:
    return post(url, "/v1/completions", model=model, **_body())


def tokens_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def _body() -> dict[str, Any]:
    fields = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": PROMPT} | fields


def names(url: str) -> set[str]:
    """As several connections learn them."""
    found = {
        tuple(sorted(model["id"] for model in httpx.get(f"{url}/v1/models", verify=False).json()["data"]))  # noqa: S501
        for _ in range(8)
    }
    assert len(found) == 1
    return set(found.pop())


def expected(adapter: Path) -> list[int]:
    model = merge(load_oracle(DEMO_MODEL_DIR), adapter)
    with torch.inference_mode():
        generated = model.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
    tokens: list[int] = generated[0, len(PROMPT) :].tolist()
    return tokens


@pytest.mark.parametrize(
    ("name", "path", "status", "message"),
    [
        (MODEL, "sql", 400, "is the name of the model"),
        ("a b", "sql", 400, "a name is 1 to 128 letters"),
        ("new", "../outside", 400, "outside of the server's --lora-dir"),
        ("new", "/etc", 400, "outside of the server's --lora-dir"),
        ("new", "link", 400, "outside of the server's --lora-dir"),
        ("new", "none", 400, "has no directory"),
        ("new", "a\0b", 400, "is no usable path"),
        ("new", "n" * 256, 400, "is no usable path"),
        ("new", "broken", 400, "is truncated"),
        ("new", "wide", 400, "of --lora-budget"),
    ],
)
def test_bad_adapter_is_refused_and_changes_nothing(url: str, name: str, path: str, status: int, message: str) -> None:
    response = load(url, name, path)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert names(url) == {MODEL}


def test_only_an_administrator_changes_adapters(url: str) -> None:
    assert load(url, "sql", "sql", key="other").status_code == 403
    assert post(url, "/v1/unload_lora_adapter", lora_name="sql", key="other").status_code == 403
    assert post(url, "/v1/load_lora_adapter", lora_name="sql").status_code == 400
    assert unload(url, "sql").status_code == 404


def test_adapters_come_and_go_while_requests_run(url: str, serve: Command, root: Path) -> None:
    base = tokens_of(complete(url, MODEL))
    assert load(url, "mine", "sql").json() == {"id": "mine", "object": "lora_adapter", "is_loaded": True}
    assert names(url) == {MODEL, "mine"}
    again = load(url, "mine", "chat")
    assert (again.status_code, "mine has already been loaded" in again.text) == (400, True)
    sql = expected(root / "sql")
    assert tokens_of(complete(url, "mine")) == sql
    assert tokens_of(complete(url, MODEL)) == base

    (pid,) = backends_of(serve)
    assert _stream(url, lambda: os.kill(pid, signal.SIGKILL)) == sql
    assert backends_of(serve) != [pid]
    assert names(url) == {MODEL, "mine"}

    assert _stream(url, lambda: unload(url, "mine").raise_for_status()) == sql
    assert names(url) == {MODEL}
    assert {complete(url, "mine").status_code for _ in range(6)} == {404}

    load(url, "mine", str(root / "chat")).raise_for_status()
    assert tokens_of(complete(url, "mine")) == expected(root / "chat")
    unload(url, "mine").raise_for_status()


def test_seeded_stream_with_every_sampler_continues_after_a_kill(url: str, serve: Command) -> None:
    fields: dict[str, Any] = {
        "temperature": 1.2,
        "seed": 7,
        "dry_multiplier": 0.8,
        "dry_sequence_breakers": ["a", "the"],
    }
    fields |= {"xtc_probability": 0.5, "xtc_threshold": 0.05, "top_n_sigma": 1.5, "dynatemp_range": 0.5, "min_p": 0.01}
    expected = tokens_of(post(url, "/v1/completions", **_body() | fields))
    plain = tokens_of(post(url, "/v1/completions", **_body() | {"temperature": 1.2, "seed": 7}))
    (pid,) = backends_of(serve)
    assert _stream(url, lambda: os.kill(pid, signal.SIGKILL), **fields, model=MODEL) == expected != plain


def _stream(url: str, act: Any, **fields: Any) -> list[int]:
    """The tokens of a stream, of the adapter by default. Acts after its first token."""
    tokens: list[int] = []
    body = _body() | {"model": "mine", "stream": True} | fields
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60.0, verify=False) as response:  # noqa: S501
        for line in response.iter_lines():
            if line.startswith("data: {"):
                had_any = bool(tokens)
                tokens += [token for choice in json.loads(line[6:])["choices"] for token in choice["token_ids"]]
                if tokens and not had_any:
                    act()
    return tokens
