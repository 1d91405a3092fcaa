"""The examples that `penstock serve` prints ask each model for what it does."""

from __future__ import annotations

import json

import pytest

from penstock.tools.serve import shown_models
from penstock.tools.welcome import ShownModel, Welcome


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
