"""DecoderPass against transformers, for every architecture, however the prompts are cut and whoever shares the batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from backend.checkpoint.config_json import read_decoder_config
from backend.checkpoint.weights import open_weights
from backend.passes.decoder.forward_pass import DecoderPass, make_cpu_ops
from tests.checkpoints import PRESETS, load_oracle, make_checkpoint
from tests.decoder.driver import Driver

PROMPT_LENGTHS = (1, 7, 16, 17, 45, 70)


@cache
def checkpoint(architecture: str) -> Path:
    return make_checkpoint(architecture, Path(mkdtemp()))


@cache
def oracle(architecture: str) -> Any:
    return load_oracle(checkpoint(architecture))


@cache
def oracle_logits(architecture: str, prompt: tuple[int, ...]) -> Any:
    with torch.inference_mode():
        return oracle(architecture)(torch.tensor([prompt])).logits[0].numpy()


def make_pass(architecture: str) -> DecoderPass:
    model_dir = checkpoint(architecture)
    config = read_decoder_config(model_dir)
    with open_weights(model_dir, config) as weights:
        return DecoderPass(config, weights, make_cpu_ops(config, torch.float32, 512), torch.float32, 32)


def prompts(seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 256, n).tolist()) for n in PROMPT_LENGTHS]


@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
@pytest.mark.parametrize("architecture", PRESETS)
def test_logits_of_ragged_prompts_are_those_of_transformers(architecture: str, chunk: int | None) -> None:
    driver = Driver(make_pass(architecture), num_pages=64, page_size=8)
    rows = [driver.add(prompt) for prompt in prompts()]
    logits = driver.prefill(chunk)
    for row, prompt in zip(rows, prompts(), strict=True):
        np.testing.assert_allclose(logits[row.slot], oracle_logits(architecture, prompt)[-1], atol=1e-3, rtol=0)
