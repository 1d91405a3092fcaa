"""The examples that `penstock serve` prints ask each model for what it does."""

from __future__ import annotations

import json

import pytest

from penstock.serve.command import shown_models
from penstock.serve.welcome import ShownModel, Welcome


@pytest.mark.parametrize(
    ("capability", "path", "call"),
    [
        ("structured_output", "/v1/chat/completions", "client.chat.completions.create"),
        ("embeddings", "/v1/embeddings", "client.embeddings.create"),
        ("rerank", "/v1/rerank", None),
        ("classify", "/classify", None),
    ],
)
def test_example_asks_for_what_the_model_does(capability: str, path: str, call: str | None) -> None:
    names = ("structured_output", "embeddings", "rerank", "classify")
    capabilities = {name: name == capability for name in names}
    entry = {"id": "m", "root": "m", "capabilities": capabilities, "quantization": "none", "max_model_len": 512}
    listed = {"data": [entry | {"kv_cache_tokens": None, "max_tokens_per_second": None}]}
    models = shown_models(json.dumps(listed).encode(), "other")
    text = Welcome("http://127.0.0.1:8000", models).examples()
    assert f"curl -N http://127.0.0.1:8000{path} " in text
    assert ("client = openai.OpenAI" in text) == (call is not None)
    assert call is None or call in text


def test_without_a_list_the_example_is_a_chat() -> None:
    assert shown_models(None, "demo") == (ShownModel("demo", "chat"),)


def test_alias_is_not_shown_as_a_further_model() -> None:
    entry = {"root": "m", "capabilities": dict.fromkeys(("structured_output", "embeddings", "rerank"), True)}
    entry |= {"quantization": "none", "max_model_len": 9, "kv_cache_tokens": None, "max_tokens_per_second": None}
    listed = json.dumps({"data": [{**entry, "id": name} for name in ("m", "gpt-4o")]})
    assert [model.name for model in shown_models(listed.encode(), "other")] == ["m"]


@pytest.mark.parametrize(
    ("address", "shown"),
    [("http://0.0.0.0:8000", ["http://127.0.0.1:8000/"]), ("unix:/run/web.sock", [])],
)
def test_browsers_are_sent_to_a_page_that_they_can_reach(address: str, shown: list[str]) -> None:
    lines = Welcome(address, (ShownModel("m"),)).summary().splitlines()
    assert [line.split()[1] for line in lines if line.split()[0] == "Page"] == shown


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (
            ShownModel("m", quantization="int8", context_tokens=4096, kv_tokens=65_536, tokens_per_s=123.4),
            {
                "Model": "m (int8)",
                "Context": "4,096 tokens; the KV cache holds 65,536 of all requests",
                "Speed": "at most about 123 tokens/s for one request (one step timed at start, without delivery)",
            },
        ),
        (ShownModel("e", "embeddings", context_tokens=512), {"Model": "e", "Context": "512 tokens"}),
        (ShownModel("m"), {"Model": "m"}),
    ],
)
def test_summary_shows_only_what_is_known(model: ShownModel, shown: dict[str, str]) -> None:
    lines = Welcome("unix:/run/web.sock", (model,)).summary().splitlines()
    assert dict(line.strip().split(maxsplit=1) for line in lines) == shown
