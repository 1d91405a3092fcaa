"""`penstock serve --persist-kv`: pages of the KV cache that outlive their backend."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import pytest

from penstock.backend.options import BackendOptions
from penstock.serve.backend_children import BackendChildren
from penstock.serve.options import ServeOptions, backend_options
from tests.serve.serve_process import Serve, Start

KEPT = "pages are kept for the next backend"
PROMPT = [20 + number % 200 for number in range(300)]
PAGE_TOKENS = 16


def complete(client: httpx.Client, key: str, prompt: list[int]) -> tuple[int, str]:
    """Return the number of cached tokens, and the text."""
    body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], answer.json()["choices"][0]["text"]


def kill_the_backend(serve: Serve) -> None:
    (pid,) = serve.pids("penstock.backend.main")
    os.kill(pid, signal.SIGKILL)
    serve.errors.wait_for(KEPT)


def test_successor_of_a_killed_backend_finds_each_tenants_pages(start: Start) -> None:
    options = ("--forward-pass", "decoder", "--gpu", "none", "--kv-budget", "20MB", "--page-size", str(PAGE_TOKENS))
    serve = start(*options, "--persist-kv", "8MB", environment={"PENSTOCK_API_KEY": "one,two"})
    serve.errors.wait_for(KEPT)
    serve.wait_until_ready()
    with httpx.Client(base_url=f"http://127.0.0.1:{serve.port}", timeout=60) as client:
        computed, text = complete(client, "one", PROMPT)
        complete(client, "two", [9] * 40)  # the last pages are copied with the next steps
        kill_the_backend(serve)
        cached, same_text = complete(client, "one", PROMPT)
        assert (computed, text) == (0, same_text)
        assert cached >= len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS
        assert complete(client, "two", PROMPT) == (0, text)
    assert serve.stop() == 0


def test_backends_have_memory_of_their_own_and_one_that_ends_first_leaves_it_to_its_successor() -> None:
    children = BackendChildren(print, 30.0, 1, may_die_often=False, crashes=None, persist_kv=1 << 20)
    first = children.prepare(BackendOptions(flight_recorder=0))
    other, successor = children.prepare(first.options), children.prepare(first.options, first)
    fds = [prepared.pages_fd for prepared in (first, other, successor)]
    files = [os.fstat(fd) for fd in fds if fd is not None]
    assert [found.st_size for found in files] == [1 << 20] * 3
    assert files[0].st_ino == files[2].st_ino != files[1].st_ino
    assert first.pages_fd in first.spec("backend").pass_fds
    for prepared in (first, other, successor):
        prepared.close()


def test_models_that_sleep_keep_no_pages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        backend_options(ServeOptions(models=("a=x", "b=y"), sleep_after_s=5.0, persist_kv=1 << 30))
    assert "--persist-kv is 1.07 GB, but models that sleep give all memory back" in capsys.readouterr().err
