"""Decoders that give vectors and scores, against transformers: whole, in chunks, alone and in batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from tests.backend.passes.decoder.pooled_driver import NO, PAGE, YES, last_hidden, run, write_words
from tests.backend.passes.encoder.driver import cosine, random_rows
from tests.checkpoints import make_config, make_model

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backend.forward_pass import IBatchedForwardPass


def load(path: Path, **options: Any) -> IBatchedForwardPass:
    settings = replace(PassOptions(dtype="fp32"), **options)
    spec = DecoderPass.describe(path, settings)
    forward_pass = DecoderPass.load(path, settings)
    assert (forward_pass.spec.pooled, forward_pass.spec.generates) == (spec.pooled, False)
    forward_pass.create_cache(64, PAGE, "fp32")
    return forward_pass


@pytest.mark.parametrize("preset", ["qwen3", "mistral"])
@pytest.mark.parametrize("cpu_path", ["native", "torch"])
def test_an_embedding_is_the_last_hidden_state(
    preset: str, cpu_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu_path == "torch":
        monkeypatch.setattr("penstock.backend.passes.decoder.cpu_pass.load_kernels", lambda _: None)
    model = make_model(preset).model  # its files have no lm_head, and no prefix
    model.save_pretrained(tmp_path)
    forward_pass = load(tmp_path)
    assert forward_pass.spec.pooled == {"embed": 64}
    rows = random_rows((1, 5, 40, 100))
    together = run(forward_pass, rows, "embed")
    in_chunks = run(forward_pass, rows, "embed", chunk=33)
    for row, result, other in zip(rows, together, in_chunks, strict=True):
        assert min(cosine(last_hidden(model, row), each) for each in (result, other)) > 0.99999
        if cpu_path == "native":
            np.testing.assert_array_equal(result, other)
            np.testing.assert_array_equal(run(forward_pass, [row], "embed")[0], result)
    forward_pass.close()


def test_any_decoder_embeds_if_asked_to(tmp_path: Path) -> None:
    model = make_model("llama2")
    model.save_pretrained(tmp_path)
    forward_pass = load(tmp_path, task="embed", quantize="int8")
    rows = random_rows((7, 50))
    for row, result in zip(rows, run(forward_pass, rows, "embed"), strict=True):
        assert cosine(last_hidden(model.model, row), result) > 0.99
    forward_pass.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_compares_yes_with_no(tied: bool, tmp_path: Path) -> None:
    model = make_model("qwen3", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    write_words(tmp_path)
    forward_pass = load(tmp_path, task="rerank")
    assert forward_pass.spec.pooled == {"classify": 1}
    rows = random_rows((3, 60))
    for row, result in zip(rows, run(forward_pass, rows, "classify"), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(row.astype(np.int64))[None]).logits[0, -1]
        np.testing.assert_allclose(result, [(logits[YES] - logits[NO]).item()], rtol=1e-3, atol=1e-4)
    forward_pass.close()


def test_a_score_head_reads_the_last_token(tmp_path: Path) -> None:
    config = make_config("qwen3", num_labels=3)
    torch.manual_seed(1)
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    forward_pass = load(tmp_path)
    rows = random_rows((2, 31))
    for row, result in zip(rows, run(forward_pass, rows, "classify"), strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.from_numpy(row.astype(np.int64))[None]).logits[0]
        np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-4)
    forward_pass.close()


def test_what_a_decoder_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    options = PassOptions(dtype="fp32", task="classify")
    with pytest.raises(StartupError, match="Qwen3ForCausalLM has no head that classifies"):
        DecoderPass.describe(tmp_path, options)
    with pytest.raises(StartupError, match="json does not exist; a reranker"):
        DecoderPass.load(tmp_path, replace(options, task="rerank"))
    with pytest.raises(StartupError, match="--task is 'sing'; it must be one of auto"):
        DecoderPass.describe(tmp_path, replace(options, task="sing"))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "x.Pooling"}]')
    with pytest.raises(StartupError, match="the pooling of a decoder is mean; only lasttoken"):
        DecoderPass.describe(tmp_path, replace(options, task="auto"))
