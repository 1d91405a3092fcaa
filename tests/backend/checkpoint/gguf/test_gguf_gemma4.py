"""GGUF files of Gemma 4, whose layers differ in size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.gguf.tokenizer import GgufTokenizer, check_tokenizer
from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.errors import StartupError
from tests.backend.checkpoint.gguf.test_gguf_models import last_logits
from tests.backend.checkpoint.gguf.writer import byte_level_vocabulary, gemma4_file
from tests.backend.passes.decoder.quantized_oracle import relative_error
from tests.checkpoints import make_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")


@pytest.mark.parametrize("preset", ["gemma4-e", "gemma4", "gemma4-moe"])
def test_layers_of_gemma4_that_differ_have_the_logits_of_transformers(preset: str, tmp_path: Path) -> None:
    tables = {"vocab_size_per_layer_input": 320} if preset == "gemma4-e" else {}
    model = make_model(preset, vocab_size=320, **tables)
    model_dir = resolve_model(str(gemma4_file(model, byte_level_vocabulary(320)).write(tmp_path / "model.gguf")))
    prompt = np.random.default_rng(0).integers(0, 256, 33).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].numpy()
    assert relative_error(last_logits(model_dir, prompt), expected) < 1e-4


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("feed_forward_length", [96, 96, 100], "feed_forward_length is .*unknown sizes of layers"),
        ("attention.head_count_kv", [2, 1, 1], "head_count_kv is .*one number for layers with a window and one"),
        ("attention.head_count_kv", [2, 1], "expected 3 integers"),
    ],
)
def test_sizes_that_fit_no_kind_of_layer_are_refused(key: str, value: list[int], message: str, tmp_path: Path) -> None:
    file = gemma4_file(make_model("gemma4", vocab_size=320), byte_level_vocabulary(320))
    file.metadata[f"gemma4.{key}"] = value
    with pytest.raises(StartupError, match=message):
        resolve_model(str(file.write(tmp_path / "model.gguf")))


def test_tokenizer_merges_across_words_and_falls_back_to_bytes() -> None:
    tokens = ["<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "\u2581a\u2581"]
    values = {"model": "gemma4", "tokens": tokens, "merges": ["\u2581 a", "\u2581a \u2581"], "bos_token_id": 0}
    values["token_type"] = [3, *[6] * 256, *[1] * 5]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    tokenizer = Tokenizer.from_str(check_tokenizer(GgufTokenizer(metadata).tokenizer_json()))
    encoded = tokenizer.encode("b a b\u00e9")
    assert encoded.tokens == ["<bos>", "b", "\u2581a\u2581", "b", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "b a b\u00e9"
