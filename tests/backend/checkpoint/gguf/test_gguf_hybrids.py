"""GGUF files of hybrids in quantised types, against their numbers in F32; other tests compare F32 with transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.hub import resolve_model
from tests.backend.checkpoint.gguf.converted_tensors import converted
from tests.backend.checkpoint.gguf.test_gguf_models import last_logits
from tests.backend.checkpoint.gguf.writer import byte_level_vocabulary, from_model
from tests.backend.passes.decoder.quantized_oracle import relative_error
from tests.checkpoints import load_oracle, make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

TYPES = {"in_proj": "Q5_K", "out_proj": "Q6_K", "down": "Q6_K", "shared_expert_gate": "F32", "lm_head": "Q6_K"}
"""As of Q4_K_M; other matrices are Q4_K."""
WHOLE = ("embed", "router", "mlp.gate.", "conv1d", "in_proj_a", "in_proj_b", "in_proj_ba")
SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "head_dim": 64,
}
EXPERTS = {
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 2,
    "mlp_only_layers": [],
}
"""Each token uses both, because a choice would make a small difference a large one."""


def type_of(name: str) -> str:
    if any(part in name for part in WHOLE):
        return "F32"
    return next((kind for part, kind in TYPES.items() if part in name), "Q4_K")


@pytest.mark.parametrize(
    ("preset", "arch"), [("qwen3.5", "qwen35"), ("qwen3-next", "qwen3next"), ("qwen3.5-moe", "qwen35moe")]
)
def test_quantised_hybrid_has_the_logits_of_its_numbers(
    preset: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights so small that a layer does not enlarge what rounding changes."""
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")
    checkpoint = make_checkpoint(preset, tmp_path / "model", **SIZES | ({} if preset == "qwen3.5" else EXPERTS))
    model, stored = load_oracle(checkpoint), load_file(checkpoint / "model.safetensors")
    tensors = {
        name: 0.4 * tensor if tensor.dim() > 1 else tensor
        for name, tensor in converted(arch, stored, model.config).items()
    }
    file = from_model(arch, model, type_of, byte_level_vocabulary(320), tensors)
    kinds = {kind.name for _, kind in file.tensors.values()}
    assert {"Q4_K", "Q5_K", "Q6_K"} <= kinds
    exact = {
        name: (np.asarray(gguf.dequantize(content, kind), np.float32), gguf.GGMLQuantizationType.F32)
        for name, (content, kind) in file.tensors.items()
    }
    prompt = np.random.default_rng(0).integers(0, 256, 80).tolist()
    found, expected = (
        last_logits(resolve_model(str(own.write(tmp_path / f"{number}.gguf"))), prompt)
        for number, own in enumerate((file, replace(file, tensors=exact)))
    )
    assert relative_error(found, expected) < 0.02
