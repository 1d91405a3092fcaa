"""The examples that `penstock serve` prints ask each model for what it does."""

from __future__ import annotations

import json

import pytest

from penstock.tools.serve import shown_models
from penstock.tools.welcome import ShownModel, Use, Welcome


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
    listed = {"data": [{"id": "m", "capabilities": {name: name == capability for name in names}}]}
    models = shown_models(json.dumps(listed).encode(), "other")
    text = Welcome("http://127.0.0.1:8000", models).examples()
    assert f"curl -N http://127.0.0.1:8000{path} " in text
    assert ("client = openai.OpenAI" in text) == (call is not None)
    assert call is None or call in text


def test_without_a_list_the_example_is_a_chat() -> None:
    assert shown_models(None, "demo") == (ShownModel("demo", "chat"),)


@pytest.mark.parametrize(
    ("address", "use", "shown"),
    [
        ("http://0.0.0.0:8000", "chat", "Or open http://127.0.0.1:8000/ in a browser."),
        ("http://127.0.0.1:8000", "embeddings", None),
        ("unix:/run/web.sock", "chat", None),
    ],
)
def test_browsers_are_sent_to_a_page_that_they_can_reach(address: str, use: Use, shown: str | None) -> None:
    lines = Welcome(address, (ShownModel("m", use),)).examples().splitlines()
    assert [line.strip() for line in lines if "browser" in line] == ([] if shown is None else [shown])
