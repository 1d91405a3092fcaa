"""Greedy answers of the real model against fp32, and its token ids against llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock.backend.checkpoint.hub import resolve_model
from penstock.tools.bench.components.scored_model import scored_model
from tests.real_models import download_timeout

pytestmark = download_timeout

RECORDED = Path(__file__).parent / "recorded"
LARGEST_GAP = 0.35
"""In nats: below it, rounding to 16 bits and 8-bit activations may swap the two likeliest tokens."""


@pytest.fixture(scope="module")
def model_dir(real_gguf: Path, own_caches: None) -> Path:
    return resolve_model(str(real_gguf))


def test_each_token_of_a_greedy_answer_is_the_one_of_fp32(model_dir: Path) -> None:
    """After fp32's own tokens before it, so that one near tie does not change all that follows."""
    chats: list[dict[str, Any]] = json.loads((RECORDED / "chats.json").read_text())
    differences = []
    with scored_model(model_dir) as model:
        for chat in chats:
            tokens = np.array(chat["prompt"] + chat["answer"], np.int32)
            ranks = model.score(tokens, len(chat["prompt"])).ranks
            gaps = np.array(chat["gaps"])
            differences += [
                (chat["question"], int(place), int(ranks[place]), gaps[place]) for place in np.flatnonzero(ranks > 1)
            ]
            assert len(gaps) == len(ranks) > 0
    assert [difference for difference in differences if difference[3] > LARGEST_GAP] == []
    assert len(differences) <= sum(len(chat["answer"]) for chat in chats) // 20


def test_text_has_the_token_ids_of_llama_cpp(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    cases: list[dict[str, Any]] = json.loads((RECORDED / "token_ids.json").read_text())
    found = {case["text"]: tokenizer.encode(case["text"], add_special_tokens=False).ids for case in cases}
    assert found == {case["text"]: case["ids"] for case in cases}
