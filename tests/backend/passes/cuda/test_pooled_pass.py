"""Decoders that give vectors and scores on a GPU, on the emulator, against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from penstock.backend.forward_pass import DeviceLost, PassOptions
from penstock.backend.passes.cuda.device import cuda_device
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from tests.backend.passes.cuda.emulated_device import EmulatedDevice
from tests.backend.passes.cuda.tiny_models import decode_replays
from tests.backend.passes.decoder.pooled_driver import NO, PAGE, YES, last_hidden, run, write_words
from tests.backend.passes.encoder.driver import cosine, random_rows
from tests.checkpoints import make_config, make_model

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backend.forward_pass import IBatchedForwardPass

SIZES = {"num_hidden_layers": 2, "head_dim": 64}
CHUNK = 33
LENGTHS = (1, 5, CHUNK + 1, 90)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    """The device that the pass opens as a GPU."""
    device = EmulatedDevice()
    monkeypatch.setattr(cuda_device, "open_gpu", lambda _: device)
    return device


def load(path: Path, dtype: str = "fp32", **options: Any) -> IBatchedForwardPass:
    settings = PassOptions(device="cuda:0", dtype=dtype, max_running=6, max_batch_tokens=160, **options)
    forward_pass = DecoderPass.load(path, settings)
    assert forward_pass.spec == DecoderPass.describe(path, settings)
    assert forward_pass.spec.runs_ahead
    forward_pass.create_cache(48, PAGE, dtype)
    return forward_pass


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_embedding_is_the_last_hidden_state(dtype: str, device: EmulatedDevice, tmp_path: Path) -> None:
    model = make_model("qwen3", **SIZES).model
    model.save_pretrained(tmp_path)
    forward_pass = load(tmp_path, dtype)
    assert forward_pass.spec.pooled == {"embed": 64}
    rows = random_rows(LENGTHS)
    expected = [last_hidden(model, row) for row in rows]
    limit = 0.99999 if dtype == "fp32" else 0.999
    for chunk in (1000, CHUNK):
        found = run(forward_pass, rows, "embed", chunk)
        assert min(cosine(a, b) for a, b in zip(expected, found, strict=True)) > limit
    num_replays = decode_replays(forward_pass)
    for row in (0, 2):  # one token, and one token after a chunk
        (alone,) = run(forward_pass, [rows[row]], "embed", CHUNK)
        assert cosine(expected[row], alone) > limit
    assert decode_replays(forward_pass) == num_replays + 2
    forward_pass.close()


def test_a_reranker_compares_yes_with_no(tmp_path: Path) -> None:
    model = make_model("qwen3", tie_word_embeddings=True, **SIZES)
    model.save_pretrained(tmp_path)
    write_words(tmp_path)
    forward_pass = load(tmp_path, task="rerank")
    assert forward_pass.spec.pooled == {"classify": 1}
    rows = random_rows(LENGTHS)
    for row, result in zip(rows, run(forward_pass, rows, "classify", CHUNK), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(row.astype(np.int64))[None]).logits[0, -1]
        np.testing.assert_allclose(result, [(logits[YES] - logits[NO]).item()], rtol=1e-3, atol=1e-4)
    forward_pass.close()


def test_a_score_head_reads_the_last_token(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.Qwen3ForSequenceClassification(make_config("qwen3", num_labels=3, **SIZES)).eval()
    model.save_pretrained(tmp_path)
    forward_pass = load(tmp_path)
    rows = random_rows((1, 31))
    for row, result in zip(rows, run(forward_pass, rows, "classify"), strict=True):
        with torch.no_grad():
            wanted = model(input_ids=torch.from_numpy(row.astype(np.int64))[None]).logits[0]
        np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-4)
    forward_pass.close()


@pytest.mark.usefixtures("choosy_library")
def test_a_deterministic_vector_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    make_model("qwen3", **SIZES).model.save_pretrained(tmp_path)
    forward_pass = load(tmp_path, "bf16", deterministic=True)
    rows = random_rows(LENGTHS)
    together, in_chunks = (run(forward_pass, rows, "embed", chunk) for chunk in (1000, CHUNK))
    for row, *results in zip(rows, together, in_chunks, strict=True):
        (alone,) = run(forward_pass, [row], "embed")
        for result in results:
            np.testing.assert_array_equal(result, alone)
    forward_pass.close()


def test_a_broken_device_is_named(device: EmulatedDevice, tmp_path: Path) -> None:
    make_model("qwen3", **SIZES).model.save_pretrained(tmp_path)
    forward_pass = load(tmp_path)
    device.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="a step of 3 tokens in 1 rows: CUDA error: an illegal memory access"):
        run(forward_pass, random_rows((3,)), "embed")
