"""Absent keys of config.json have the defaults of transformers' config classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.ministral3.modeling_ministral3 import Ministral3RotaryEmbedding, get_llama_4_attn_scale

from penstock.backend.checkpoint.config.architectures.families import FAMILIES
from penstock.backend.checkpoint.config.decoder_config import Scales
from penstock.backend.checkpoint.config_json import parse_decoder_config
from penstock.backend.errors import StartupError
from penstock.backend.passes.ops.rope_table import RopeTable

CONFIGS = {
    **{f"Gemma{n}ForCausalLM": f"Gemma{n}TextConfig" for n in ("3", "3n", "4")},
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextConfig",
}
"""transformers' config classes whose names do not follow from the architecture's."""
SCALES = {
    "GemmaForCausalLM": Scales(embedding=3072**0.5),
    "Gemma2ForCausalLM": Scales(scores=1 / 16, embedding=2304**0.5, scores_softcap=50.0, logits_softcap=30.0),
    "Gemma3ForCausalLM": Scales(scores=1 / 16, embedding=2304**0.5),
    "Gemma3nForCausalLM": Scales(scores=1.0, embedding=2048**0.5, logits_softcap=30.0),
    "Gemma4ForCausalLM": Scales(scores=1.0, embedding=2304**0.5),
    "GraniteForCausalLM": Scales(scores=1.0),
    "CohereForCausalLM": Scales(logits=0.0625),
    "Cohere2ForCausalLM": Scales(logits=0.0625),
}


def oracle_eps(config: Any) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")
    return next(eps for name in names if (eps := getattr(config, name, None)) is not None)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(architecture: str) -> None:
    theirs = getattr(transformers, CONFIGS.get(architecture, architecture.replace("ForCausalLM", "Config")))()
    theirs.allow_global_per_layer_attribute_access = True
    dims = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    values = {key: getattr(theirs, key) for key in (*dims, "max_position_embeddings") if hasattr(theirs, key)}
    config = parse_decoder_config(values | {"architectures": [architecture]})
    assert config.tie_embeddings == theirs.tie_word_embeddings
    assert config.norm_eps == oracle_eps(theirs)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert config.head_dim == head_dim
    ropes = theirs.rope_parameters
    kinds = [ropes] if "rope_theta" in ropes else [ropes["full_attention"], ropes["sliding_attention"]]
    for rope, kind in zip(config.ropes[: len(kinds)], kinds, strict=True):
        is_proportional = kind["rope_type"] == "proportional"
        rotary_dim = 2 * head_dim if is_proportional else head_dim * kind.get("partial_rotary_factor", 1.0)
        assert rope.rotary_dim == rotary_dim
        assert rope.inv_freq[1] == pytest.approx(kind["rope_theta"] ** (-2 / rotary_dim), rel=1e-6)
    layer_types = getattr(theirs, "layer_types", None) or ["full_attention"] * config.num_layers
    if architecture == "MistralForCausalLM":
        layer_types = ["sliding_attention"] * config.num_layers
    window = {"GptOssForCausalLM": 128, "Gemma3nForCausalLM": 512, "Gemma4ForCausalLM": 512}.get(architecture, 4096)
    assert config.layer_window_tokens == tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    assert config.scales == SCALES.get(architecture, Scales())
    assert config.qkv_bias == bool(getattr(theirs, "attention_bias", architecture.startswith(("Qwen2", "Starcoder2"))))


@pytest.mark.parametrize(
    ("family", "rotary"), [("GptOss", GptOssRotaryEmbedding), ("Ministral3", Ministral3RotaryEmbedding)]
)
def test_models_without_rope_settings_have_those_of_transformers(family: str, rotary: Any) -> None:
    theirs = getattr(transformers, f"{family}Config")()
    values = {key: value for key, value in theirs.to_dict().items() if not key.startswith("rope")}
    rope = parse_decoder_config(values | {"architectures": [f"{family}ForCausalLM"]}).rope
    np.testing.assert_array_max_ulp(np.array(rope.inv_freq, np.float32), rotary(theirs).inv_freq.numpy(), 2)
    assert rope.attention_factor == pytest.approx(rotary(theirs).attention_scaling, rel=1e-12)


@pytest.mark.parametrize("is_part", [False, True])
def test_ministral_3_scales_queries_as_transformers_does(is_part: bool) -> None:
    theirs = transformers.Ministral3Config()
    values = theirs.to_dict() | {"architectures": ["Ministral3ForCausalLM"]}
    if is_part:
        values = {"text_config": values, "architectures": ["Mistral3ForConditionalGeneration"]}
    config = parse_decoder_config(values, max_context_tokens=70_000)
    assert config.query_rope is not None
    keys, queries = (torch.from_numpy(RopeTable(rope).cover(70_000)) for rope in (config.rope, config.query_rope))
    positions = torch.tensor([0, 16_383, 16_384, 33_000, 69_999])
    settings = theirs.rope_parameters
    scales = get_llama_4_attn_scale(
        positions[None], settings["llama_4_scaling_beta"], settings["original_max_position_embeddings"]
    )
    torch.testing.assert_close(queries[positions], keys[positions] * scales.view(-1, 1), rtol=1e-6, atol=1e-7)
    assert (config.rope_of_layer(3), config.query_rope_of_layer(3)) == (0, 1)


def test_scale_of_queries_that_rotate_in_part_is_refused() -> None:
    values = transformers.Ministral3Config().to_dict()
    values["rope_parameters"]["partial_rotary_factor"] = 0.5
    with pytest.raises(StartupError, match=r"llama_4_scaling_beta is 0.1 and 64 of 128 dimensions rotate; it is"):
        parse_decoder_config(values | {"architectures": ["Ministral3ForCausalLM"]})
