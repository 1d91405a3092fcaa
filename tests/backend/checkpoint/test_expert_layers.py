"""Mixtures of experts in config.json, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from penstock.backend.checkpoint.config.decoder_config import ClampedGate, Experts
from penstock.backend.checkpoint.config_json import parse_decoder_config
from tests.checkpoints import make_config, make_model
from tests.presets import EXPERT_PRESETS, PRESETS


def oracle_experts(config: Any) -> Experts | None:
    if not hasattr(config, "num_experts_per_tok"):
        return None
    limit = getattr(config, "swiglu_limit", None)
    return Experts(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        width=getattr(config, "moe_intermediate_size", config.intermediate_size),
        normalises=getattr(config, "norm_topk_prob", True),
        shared_width=getattr(config, "shared_expert_intermediate_size", None),
        biased=limit is not None,
        clamped_gate=None if limit is None else ClampedGate(config.swiglu_alpha, limit),
    )


@pytest.mark.parametrize("architecture", EXPERT_PRESETS)
def test_layers_with_experts_match_transformers(architecture: str) -> None:
    values = make_config(architecture).to_dict()
    config = parse_decoder_config(values | {"architectures": [PRESETS[architecture].model]})
    model = make_model(architecture).model
    mlps = [layer.mlp for layer in getattr(model, "language_model", model).layers]
    assert config.layer_has_experts == tuple(hasattr(mlp, "experts") for mlp in mlps)
    everywhere = ("mixtral", "gpt-oss", "qwen3.5-moe", "qwen3.5-moe-vision")
    assert len(set(config.layer_has_experts)) == (1 if architecture in everywhere else 2)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen2Moe", "Qwen3Next", "Mixtral", "GptOss"])
def test_absent_keys_have_the_defaults_of_transformers(family: str) -> None:
    theirs = getattr(transformers, f"{family}Config")()
    dims = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values = {key: getattr(theirs, key) for key in (*dims, "max_position_embeddings")}
    assert parse_decoder_config(values | {"architectures": [f"{family}ForCausalLM"]}).experts == oracle_experts(theirs)
