"""Encoders against transformers: every family, every head, alone and in mixed batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.encoder.forward_pass import EncoderPass
from tests.backend.passes.encoder.driver import cosine, random_rows, run_rows
from tests.encoder_checkpoints import PRESETS, make_encoder, make_sentence_encoder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

WITHOUT_WORDS = ("deberta-v2",)
HEADS = {
    "token_embed": "Model",
    "classify": "ForSequenceClassification",
    "token_classify": "ForTokenClassification",
    "sparse": "ForMaskedLM",
}
CASES = [
    (preset, kind)
    for preset in PRESETS
    for kind in HEADS
    if not (kind == "sparse" and preset in WITHOUT_WORDS)
    and (kind != "token_classify" or preset in ("bert", "modernbert", "deberta-v2"))
]


@torch.no_grad()
def expected(model: Any, row: NDArray[np.int32], kind: str, second_start: int = 0) -> NDArray[np.float32]:
    inputs = {"input_ids": torch.from_numpy(row.astype(np.int64))[None], "attention_mask": torch.ones(1, len(row))}
    if second_start:
        inputs["token_type_ids"] = (torch.arange(len(row)) >= second_start).long()[None]
    outputs = model(**inputs)
    result = outputs.last_hidden_state[0] if kind in ("token_embed", "embed") else outputs.logits[0]
    if kind == "sparse":
        result = torch.log1p(torch.relu(result)).amax(0)
    numbers: NDArray[np.float32] = result.numpy()
    return numbers


@pytest.mark.parametrize(("preset", "kind"), CASES)
def test_a_head_gives_what_transformers_gives(preset: str, kind: str, tmp_path: Path) -> None:
    model = make_encoder(preset, HEADS[kind], tmp_path)
    forward_pass = EncoderPass.load(tmp_path, PassOptions(dtype="fp32"))
    rows = random_rows((1, 17, 150))
    results = run_rows(forward_pass, rows, kind)
    assert forward_pass.spec.pooled[kind] == results[0].shape[-1]
    assert [cosine(expected(model, row, kind), result) for row, result in zip(rows, results, strict=True)] == (
        pytest.approx([1.0] * len(rows), abs=1e-5)
    )
    forward_pass.close()


@pytest.mark.parametrize("preset", ["bert", "mpnet", "modernbert", "nomic", "deberta-v2"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_bf16_and_int8_stay_close(preset: str, quantize: str, tmp_path: Path) -> None:
    model = make_encoder(preset, "Model", tmp_path)
    forward_pass = EncoderPass.load(tmp_path, PassOptions(dtype="bf16", quantize=quantize))
    rows = random_rows()
    for row, result in zip(rows, run_rows(forward_pass, rows, "token_embed"), strict=True):
        assert cosine(expected(model, row, "embed"), result) > (0.999 if quantize == "none" else 0.99)
    forward_pass.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["bert", "mpnet", "modernbert", "deberta-v2"])
def test_a_row_has_the_same_bits_in_any_batch(preset: str, dtype: str, tmp_path: Path) -> None:
    has_words = preset not in WITHOUT_WORDS
    make_encoder(preset, "ForMaskedLM" if has_words else "Model", tmp_path)
    forward_pass = EncoderPass.load(tmp_path, PassOptions(dtype=dtype))
    rows = random_rows((1, 16, 33, 5, 64, 150, 7))
    sparse = "sparse" if has_words else "embed"
    kinds = ["embed", "token_embed", sparse, sparse, "embed", "token_embed", "embed"]
    together = run_rows(forward_pass, rows, kinds)
    behind_others = run_rows(forward_pass, rows[::-1], kinds[::-1])[::-1]
    for row, kind, result, other in zip(rows, kinds, together, behind_others, strict=True):
        np.testing.assert_array_equal(run_rows(forward_pass, [row], kind)[0], result)
        np.testing.assert_array_equal(other, result)
    forward_pass.close()


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("lengths", [(1,), (90,), (3, 1, 40, 2), tuple(range(1, 40)), (300, 5)], ids=len)
@pytest.mark.parametrize("preset", ["bert", "mpnet", "modernbert", "nomic"])
def test_first_tokens_alone_have_the_bits_of_a_whole_pass(
    preset: str, lengths: tuple[int, ...], quantize: str, tmp_path: Path
) -> None:
    """When only first tokens are pooled, the last layer computes nothing else; as a whole and in parts of
    the threads."""
    make_encoder(preset, "Model", tmp_path, max_position_embeddings=320)
    forward_pass = EncoderPass.load(tmp_path, PassOptions(dtype="bf16", quantize=quantize))
    rows = random_rows(lengths)
    for _ in range(2):  # recorded, and run again
        whole = run_rows(forward_pass, rows, "token_embed")
        for tokens, first in zip(whole, run_rows(forward_pass, rows, "embed"), strict=True):
            np.testing.assert_array_equal(first, tokens[0])
    forward_pass.close()


def test_relative_positions_hold_for_rows_of_several_blocks(tmp_path: Path) -> None:
    model = make_encoder("deberta-v2", "Model", tmp_path, max_position_embeddings=600)
    forward_pass = EncoderPass.load(tmp_path, PassOptions(dtype="fp32"))
    (row,) = random_rows((590,))
    assert cosine(expected(model, row, "token_embed"), run_rows(forward_pass, [row], "token_embed")[0]) > 0.99999
    forward_pass.close()


def test_second_texts_have_token_types_of_their_own(tmp_path: Path) -> None:
    model = make_encoder("bert", "ForSequenceClassification", tmp_path, num_labels=1)
    forward_pass = EncoderPass.load(tmp_path, PassOptions(dtype="fp32"))
    rows, seconds = random_rows((30, 12, 30)), [11, 0, 5]
    results = run_rows(forward_pass, rows, "classify", seconds)
    for row, second, result in zip(rows, seconds, results, strict=True):
        np.testing.assert_allclose(result, expected(model, row, "classify", second), rtol=1e-4, atol=1e-5)
    forward_pass.close()


def _weighted_mean(x: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.arange(1, len(x) + 1)[:, None]
    mean: NDArray[np.float32] = (x * weights).sum(0) / weights.sum()
    return mean


POOLED: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "pooling_mode_cls_token": lambda x: x[0],
    "pooling_mode_mean_tokens": lambda x: x.mean(0),
    "pooling_mode_max_tokens": lambda x: x.max(0),
    "pooling_mode_lasttoken": lambda x: x[-1],
    "pooling_mode_weightedmean_tokens": _weighted_mean,
    "pooling_mode_mean_sqrt_len_tokens": lambda x: x.sum(0) / np.sqrt(len(x)),
}


@pytest.mark.parametrize("mode", POOLED)
def test_a_pooling_mode_is_that_of_sentence_transformers(mode: str, tmp_path: Path) -> None:
    model = make_sentence_encoder("bert", tmp_path, {mode: True})
    forward_pass = EncoderPass.load(tmp_path, PassOptions(dtype="fp32"))
    rows = random_rows()
    for row, result in zip(rows, run_rows(forward_pass, rows, "embed"), strict=True):
        assert cosine(POOLED[mode](expected(model, row, "embed")), result) > 0.99999
    forward_pass.close()


def test_modes_are_concatenated_and_projected(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pooling = {"pooling_mode_mean_tokens": True}
    model = make_sentence_encoder("distilbert", tmp_path, pooling, dense=24)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    forward_pass = EncoderPass.load(tmp_path, PassOptions(dtype="fp32"))
    assert (forward_pass.spec.max_context_tokens, forward_pass.spec.pooled["embed"]) == (40, 24)
    tensors = load_file(tmp_path / "2_Dense" / "model.safetensors")
    rows = random_rows((3, 40))
    for row, result in zip(rows, run_rows(forward_pass, rows, "embed"), strict=True):
        mean = torch.from_numpy(expected(model, row, "embed").mean(0))
        wanted = torch.tanh(tensors["linear.weight"] @ mean + tensors["linear.bias"])
        assert cosine(wanted, result) > 0.99999
    forward_pass.close()
