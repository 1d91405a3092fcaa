"""all-MiniLM-L6-v2 against what sentence-transformers computes: transformers in fp32, mean pooling, length 1."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.encoder.forward_pass import EncoderPass
from tests.backend.passes.encoder.driver import run_rows
from tests.real_models import download_timeout

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = download_timeout

TEXTS = (
    "A man is eating food.",
    "The quarterly report shows that revenue grew by 12.5 % while costs stayed flat.",
    "def add(a, b): return a + b",
    "Größe, naïve café, 東京タワー and emoji 🚀!",
    "How do I reset the password of my account? I have tried the link in the e-mail twice, and it has expired.",
    "no",
    " ".join(f"Sentence number {i} of a long document about rivers, bridges and locks." for i in range(12)),
)
LARGEST_DISTANCE = {("fp32", "none"): 1e-5, ("bf16", "none"): 1e-3, ("bf16", "int8"): 6e-3}
"""--dtype and --quantize → 1 - cosine. Rounding only the weights to int8 costs 0.0027 for one word, else 0.0005."""


@pytest.fixture(scope="module")
def rows(minilm_dir: Path) -> list[NDArray[np.int32]]:
    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    tokenizer.no_padding()
    return [np.array(tokenizer.encode(text).ids, np.int32) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(minilm_dir: Path, rows: list[NDArray[np.int32]]) -> NDArray[np.float32]:
    pooling = json.loads((minilm_dir / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"]
    model = AutoModel.from_pretrained(minilm_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(input_ids=torch.from_numpy(row).long()[None]).last_hidden_state[0] for row in rows]
    vectors: NDArray[np.float32] = torch.nn.functional.normalize(torch.stack([s.mean(0) for s in states])).numpy()
    return vectors


@pytest.mark.parametrize(("dtype", "quantize"), LARGEST_DISTANCE)
def test_vectors_are_those_of_sentence_transformers(
    dtype: str, quantize: str, minilm_dir: Path, rows: list[NDArray[np.int32]], expected: NDArray[np.float32]
) -> None:
    forward_pass = EncoderPass.load(minilm_dir, PassOptions(dtype=dtype, quantize=quantize))
    found = np.stack(run_rows(forward_pass, rows, "embed"))
    forward_pass.close()
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    assert 1 - (found * expected).sum(axis=1).min() <= LARGEST_DISTANCE[dtype, quantize]
