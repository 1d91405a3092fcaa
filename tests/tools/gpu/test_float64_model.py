"""The decoder in float64, and the rule by which passes agree with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.tools.gpu.cases.check import Mismatch
from penstock.tools.gpu.checks import pass_agreement
from penstock.tools.gpu.checks.float64_model import Float64Model
from penstock.tools.random_weights import TINY_FAMILY, RandomWeights
from tests.checkpoints import load_oracle, make_checkpoint
from tests.presets import PRESETS
from tests.tools.gpu.device_context import Record, make_device_context

if TYPE_CHECKING:
    from pathlib import Path

_NUM_TOKENS = 40
NOT_IN_FLOAT64 = ("gemma3n", "gemma4", "qwen3-next", "qwen3.5")
FAMILIES = sorted(name for name in PRESETS if name != "gemma3-vision" and not name.startswith(NOT_IN_FLOAT64))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_equal_those_of_transformers_with_weights_in_float64(architecture: str, tmp_path: Path) -> None:
    """transformers rounds norms, softmax and rotations to fp32 even then; hence the tolerance."""
    directory = make_checkpoint(architecture, tmp_path)
    config = read_decoder_config(directory, _NUM_TOKENS)  # LongRoPE rotates by the longest context
    with open_weights(directory, config) as weights:
        model = Float64Model(config, weights)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, _NUM_TOKENS)
    with torch.inference_mode():
        oracle = load_oracle(directory).double()
        oracle.set_experts_implementation("eager")  # the other one has no float64
        expected = oracle(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert pass_agreement.largest_error(model.logits(tokens), expected) < 1e-5


def test_a_pass_with_a_wrong_row_or_a_larger_error_does_not_agree(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, context = TINY_FAMILY["llama"], make_device_context()

    def compare(dtype: str = "bf16") -> None:
        pass_agreement._compare_logits(record.results, context, f"x.{dtype}", config, dtype)

    compare()
    found = record.findings()["x.bf16"]
    assert isinstance(found.value, float)
    assert 1e-3 < found.value < 3e-2, found.detail
    run = pass_agreement._fed_logits

    def with_one_row_of_another(forward_pass: object, *arguments: object) -> object:
        logits = run(forward_pass, *arguments)  # type: ignore[arg-type]
        if not isinstance(getattr(forward_pass, "_ops", None), TorchOps):
            logits[2, 3] = logits[1, 3]
        return logits

    monkeypatch.setattr(pass_agreement, "_fed_logits", with_one_row_of_another)
    with pytest.raises(Mismatch, match="error to float64 of a row's logits"):
        compare("fp32")


def test_float64_model_is_not_the_pass_it_checks() -> None:
    """A weight that is changed by as much as bf16 rounds shows in its logits, far above its own error."""
    config = TINY_FAMILY["qwen3"]
    exact, rounded = (RandomWeights(config, dtype, torch.device("cpu")) for dtype in (torch.float32, torch.bfloat16))
    rounded._embedding.copy_(exact._embedding)
    tokens = np.arange(30)
    error = pass_agreement.largest_error(
        Float64Model(config, rounded).logits(tokens), Float64Model(config, exact).logits(tokens)
    )
    assert error > 1e-4
