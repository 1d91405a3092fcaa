"""Prompts given as embeddings, on the CPU: compared with transformers, and with the same prompts as tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.forward_pass import FROM_EMBEDDINGS, NOT_FINITE
from tests.backend.passes.conftest import MakeOps
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.decoder.test_decoder_pass import make_pass, oracle, prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HIDDEN = 64


def looked_up(architecture: str, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Their rows of the checkpoint's embedding table, [n, hidden]."""
    with torch.inference_mode():
        rows: NDArray[np.float32] = oracle(architecture).get_input_embeddings()(torch.tensor(tokens)).numpy()
    return rows


def oracle_logits(architecture: str, embeddings: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits after the embeddings and then the tokens, [vocab]."""
    rows = np.concatenate([embeddings, looked_up(architecture, tokens)]) if tokens else embeddings
    with torch.inference_mode():
        logits: NDArray[np.float32] = oracle(architecture)(inputs_embeds=torch.from_numpy(rows)[None]).logits[0, -1]
    return np.asarray(logits)


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("architecture", ["llama3", "llama-tied", "qwen3"])
def test_embeddings_of_tokens_have_the_same_bits_as_the_tokens(
    architecture: str, chunk: int | None, make_deterministic: MakeOps
) -> None:
    driver = Driver(make_pass(architecture, make_deterministic), num_pages=96, page_size=8)
    batch = prompts((1, 17, 40))
    pairs = [(driver.add(prompt), driver.add_embedded(looked_up(architecture, prompt))) for prompt in batch]
    logits = driver.prefill(chunk)
    for by_tokens, by_embeddings in pairs:
        np.testing.assert_array_equal(logits[by_tokens.slot], logits[by_embeddings.slot])
    driver.decode(6)
    for by_tokens, by_embeddings in pairs:
        assert by_tokens.tokens[-7:] == by_embeddings.tokens[-7:]


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_arbitrary_embeddings_match_transformers(chunk: int | None, make_ops: MakeOps) -> None:
    rng = np.random.default_rng(1)
    driver = Driver(make_pass("llama3", make_ops), num_pages=64, page_size=8)
    assert driver.forward_pass.spec.embedding_size == HIDDEN
    given = [rng.normal(0.0, 0.2, (length, HIDDEN)).astype(np.float32) for length in (1, 16, 33)]
    rows = [driver.add_embedded(embeddings) for embeddings in given]
    driver.add(prompts((21,))[0])
    logits = driver.prefill(chunk)
    for row, embeddings in zip(rows, given, strict=True):
        np.testing.assert_allclose(logits[row.slot], oracle_logits("llama3", embeddings, []), atol=1e-3, rtol=0)
    driver.decode(5)
    for row, embeddings in zip(rows, given, strict=True):
        generated = row.tokens[row.num_prompt_tokens :]
        chosen = [int(oracle_logits("llama3", embeddings, generated[:count]).argmax()) for count in range(6)]
        assert generated == chosen


def test_nan_embeddings_affect_their_own_row_only(make_ops: MakeOps) -> None:
    driver = Driver(make_pass("llama3", make_ops), num_pages=6, page_size=8)
    prompt = prompts((17,))[0]
    embeddings = looked_up("llama3", prompt).copy()
    embeddings[5] = np.nan
    bad, good = driver.add_embedded(embeddings), driver.add(prompt)
    driver.prefill()
    assert bad.tokens[-1] == NOT_FINITE
    expected = int(oracle_logits("llama3", looked_up("llama3", prompt), []).argmax())
    assert good.tokens[-1] == expected
    for row in (bad, good):
        driver.remove(row)
    # In pages that hold NaN.
    after = [driver.add(prompt), driver.add_embedded(looked_up("llama3", prompt))]
    driver.prefill(7)
    assert [row.tokens[-1] for row in after] == [expected] * 2


def test_step_whose_embeddings_do_not_match_its_tokens_is_refused(make_ops: MakeOps) -> None:
    driver = Driver(make_pass("llama3", make_ops), num_pages=16, page_size=8)
    row = driver.add_embedded(looked_up("llama3", prompts((9,))[0]))
    batch = driver.build([(row, 9)])
    for embeddings in ((), batch.embeddings * 2, (replace(batch.embeddings[0], first=1),)):
        with pytest.raises(ValueError, match="9 tokens are FROM_EMBEDDINGS"):
            driver.forward_pass.forward(replace(batch, embeddings=embeddings))
    tokens = np.where(batch.input_ids == FROM_EMBEDDINGS, 3, 0).astype(np.int32)
    with pytest.raises(ValueError, match="0 tokens are FROM_EMBEDDINGS"):
        driver.forward_pass.forward(replace(batch, input_ids=tokens))
