"""Settings of Gemma 4 that would change results in silence are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from penstock.backend.checkpoint.config_json import parse_decoder_config
from penstock.backend.errors import StartupError
from tests.backend.checkpoint.test_config_json import LLAMA


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'; text is causal"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; no layer before these has keys"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads is 3; num_attention_heads, 4, is no multiple"),
        ({"hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input is 262144; it must be vocab_size, 256"),
        ({"enable_moe_block": True}, "enable_moe_block is true and num_experts is missing"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is .*; the same for all layers of full"),
        ({"per_layer_config": {"2": {"sliding_window": 8}}}, "per_layer_config has 'sliding_window'; head_dim and"),
    ],
)
def test_variations_of_gemma4_that_are_not_served_are_refused(values: dict[str, Any], message: str) -> None:
    own = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "attention_k_eq_v": True}
    base = LLAMA | {"architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0, **own}
    assert parse_decoder_config(base | {"use_bidirectional_attention": "vision"}).full_heads == (2, 512)
    with pytest.raises(StartupError, match=message):
        parse_decoder_config(base | values)


def test_default_rope_with_a_partial_factor_turns_all_dimensions_as_in_transformers() -> None:
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    theirs = transformers.Gemma4TextConfig(rope_parameters=ropes)
    config = parse_decoder_config(theirs.to_dict() | {"architectures": ["Gemma4ForCausalLM"]})
    rotary: Any = Gemma4TextRotaryEmbedding(theirs)
    for own, name in zip(config.ropes, ropes, strict=True):
        torch.testing.assert_close(torch.tensor(own.inv_freq), getattr(rotary, f"{name}_inv_freq"), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx is 1 and altup_correct_scale True; 0 and true are supported"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 entries for 2 layers"),
        ({"intermediate_size": [96, 64]}, r"intermediate_size is \[96, 64\]; the same in all layers is supported"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; no layer before these has keys"),
        ({"altup_num_inputs": 9}, "altup_num_inputs"),
    ],
)
def test_variations_of_gemma3n_that_are_not_served_are_refused(values: dict[str, Any], message: str) -> None:
    base = LLAMA | {"architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 0, "num_hidden_layers": 2}
    assert parse_decoder_config(base).streams is not None
    with pytest.raises(StartupError, match=message):
        parse_decoder_config(base | values)
