"""Quantised checkpoints of models that only the pass transformers serves: the weights that its models have."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backend.passes.transformers_model.model import load_model, read_facts
from tests.backend.checkpoint.formats.test_fused_experts import write_pair
from tests.backend.checkpoint.formats.test_stored_formats import CASES
from tests.backend.passes.transformers_model.families import make_family

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
PLAIN = ("embed_tokens", "lm_head", "mlp.gate.")


def weights_of(model_dir: Path) -> dict[str, torch.Tensor]:
    return load_model(model_dir, read_facts(model_dir, "fp32", None), CPU).state_dict()


@pytest.mark.parametrize(
    ("family", "case"),
    [("deepseek-v3", "fp8, small blocks"), ("arcee", "fp8, one scale"), ("arcee", "packed int4"), ("arcee", "nvfp4")],
)
def test_weights_are_those_that_the_checkpoint_stands_for(family: str, case: str, tmp_path: Path) -> None:
    """Also of matrices that are no multiple of a block, as DeepSeek V3 has one."""
    config, quantize, _ = CASES[case]
    model_dir, rng = make_family(family, tmp_path), np.random.default_rng(0)
    file = model_dir / "model.safetensors"
    stored, exact = load_file(file), {}
    for name, tensor in list(stored.items()):
        if tensor.dim() == 2 and not any(part in name for part in PLAIN):
            del stored[name]
            parts, exact[name] = quantize(rng, *tensor.shape)
            stored |= {f"{name.removesuffix('.weight')}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, file, metadata={"format": "pt"})
    values = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    found = weights_of(model_dir)
    compared = exact.keys() & found.keys()  # experts are one tensor in transformers
    assert len(compared) >= 18
    assert all(torch.equal(found[name], exact[name].float()) for name in compared)


def test_experts_in_mxfp4_are_those_of_floats(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, (121, 128))
    found, expected = weights_of(pair.packed), weights_of(pair.plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
