"""config.json → DecoderConfig, against transformers' own config classes and rotary modules."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.backend.checkpoint.config.architectures.names import SUPPORTED_ARCHITECTURES, find_architecture
from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.checkpoint.config_json import (
    parse_decoder_config,
    read_declared_dtype,
    read_decoder_config,
)
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from tests.backend.checkpoint.test_config_defaults import oracle_eps
from tests.checkpoints import make_config, make_model
from tests.presets import PRESETS

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"]}
MIXTRAL = {"architectures": ["MixtralForCausalLM"]}


def hf_values(architecture: str, **overrides: Any) -> dict[str, Any]:
    """The content of config.json as transformers writes it."""
    config = make_config(architecture, **overrides)
    config.architectures = [PRESETS[architecture].model]
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def text_model(model: Any) -> Any:
    """The decoder of a model, which may read images too."""
    whole = model.model
    return getattr(whole, "language_model", getattr(whole, "text_model", whole))


def oracle_rope(model: Any, num_positions: int, layer_type: str | None) -> tuple[torch.Tensor, float]:
    """inv_freq and attention factor in transformers, for a sequence of num_positions."""
    rotary = text_model(model).rotary_emb
    positions = torch.arange(num_positions)[None]
    if layer_type is None:
        rotary(torch.zeros(1), positions)
        return rotary.inv_freq, rotary.attention_scaling
    rotary(torch.zeros(1), positions, layer_type)
    return getattr(rotary, f"{layer_type}_inv_freq"), getattr(rotary, f"{layer_type}_attention_scaling")


def assert_rope_equal(config: DecoderConfig, model: Any, num_positions: int) -> None:
    """Compare both ropes, if the model has two."""
    kinds = [None] if config.window_rope is None else ["full_attention", "sliding_attention"]
    for rope, kind in zip(config.ropes[: len(kinds)], kinds, strict=True):
        inv_freq, attention_factor = oracle_rope(model, num_positions, kind)
        # torch's powers are not always the nearest numbers.
        np.testing.assert_array_max_ulp(np.array(rope.inv_freq, np.float32), inv_freq.numpy(), 4)
        assert rope.rotary_dim == 2 * len(inv_freq)
        assert rope.attention_factor == pytest.approx(attention_factor, abs=1e-12)


@pytest.mark.parametrize("architecture", PRESETS)
def test_dimensions_and_rope_match_transformers(architecture: str) -> None:
    model = make_model(architecture)
    config = parse_decoder_config(hf_values(architecture))
    theirs = text_model(model).config
    theirs.allow_global_per_layer_attribute_access = True
    attention = next(layer.self_attn for layer in text_model(model).layers if hasattr(layer, "self_attn"))
    assert config.architecture == PRESETS[architecture].model
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (256, theirs.hidden_size, 96)
    assert (config.num_layers, config.num_heads) == (theirs.num_hidden_layers, 4)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == attention.head_dim
    assert config.norm_eps == oracle_eps(theirs)
    assert config.max_context_tokens == 512
    assert config.tie_embeddings == model.config.tie_word_embeddings
    projections = getattr(attention, "q_proj", None) or attention.qkv_proj
    assert config.qkv_bias == (projections.bias is not None)
    assert config.output_bias == (attention.o_proj.bias is not None)
    assert (config.qk_norm is not None) == hasattr(attention, "q_norm")
    assert config.score_scale == attention.scaling
    assert_rope_equal(config, model, num_positions=512)


@pytest.mark.parametrize("architecture", PRESETS)
def test_windows_and_nope_layers_match_transformers(architecture: str) -> None:
    model = make_model(architecture)
    config = parse_decoder_config(hf_values(architecture))
    layers = [getattr(layer, "self_attn", layer) for layer in text_model(model).layers]
    # These have one window for all layers in their config; the others have one per layer.
    one_for_all = architecture.startswith(("mistral", "mixtral", "phi3", "phi4", "starcoder2"))
    whole = text_model(model).config.sliding_window if one_for_all else None
    assert config.layer_window_tokens == tuple(getattr(layer, "sliding_window", whole) for layer in layers)
    if architecture == "cohere2":
        assert config.layer_uses_rope == tuple(window is not None for window in config.layer_window_tokens)
    else:
        assert config.layer_uses_rope == tuple(bool(getattr(layer, "use_rope", True)) for layer in layers)


@pytest.mark.parametrize(
    ("architecture", "older", "newer"),
    [
        (
            "Gemma3ForCausalLM",
            {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        ),
        (
            "Olmo3ForCausalLM",
            {"rope_scaling": YARN | {"rope_type": "yarn"}},
            {"full_attention": YARN | {"rope_type": "yarn"}},
        ),
    ],
)
def test_both_spellings_of_rope_per_layer_type_are_read(
    architecture: str, older: dict[str, Any], newer: dict[str, Any]
) -> None:
    values = LLAMA | {"architectures": [architecture]}
    config = parse_decoder_config(values | older)
    assert config == parse_decoder_config(values | {"rope_parameters": newer})
    assert config.rope != config.window_rope


def test_null_switches_a_soft_cap_off() -> None:
    values = LLAMA | {"architectures": ["Gemma2ForCausalLM"]}
    off = parse_decoder_config(values | {"attn_logit_softcapping": None, "final_logit_softcapping": None}).scales
    assert (off.scores_softcap, off.logits_softcap) == (None, None)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn untruncated": {"rope_type": "yarn", "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, **YARN},
    "yarn mscale": {"rope_type": "yarn", "mscale": 1.2, "mscale_all_dim": 0.7, **YARN},
    "yarn attention factor": {"rope_type": "yarn", "attention_factor": 1.3, **YARN},
}


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_every_rope_type_has_the_frequencies_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    settings = {"rope_parameters": rope | {"rope_theta": 50_000.0}, "head_dim": head_dim}
    config = parse_decoder_config(hf_values("llama2", **settings))
    assert_rope_equal(config, make_model("llama2", **settings), num_positions=512)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_older_spelling_of_rope_settings_is_read(rope: dict[str, Any]) -> None:
    scaling = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    older = parse_decoder_config(LLAMA | {"rope_theta": 50_000.0, "rope_scaling": scaling})
    newer = parse_decoder_config(LLAMA | {"rope_parameters": rope | {"rope_theta": 50_000.0}})
    assert older == newer
    assert older != parse_decoder_config(LLAMA)


def test_longrope_uses_short_factors_within_the_original_context() -> None:
    values = hf_values("phi3-longrope")
    model = make_model("phi3-longrope")
    short, long = parse_decoder_config(values, max_context_tokens=64), parse_decoder_config(values)
    assert (short.max_context_tokens, long.max_context_tokens) == (64, 512)
    assert short.rope.inv_freq != long.rope.inv_freq
    assert_rope_equal(short, model, num_positions=64)
    assert_rope_equal(long, model, num_positions=65)


def test_yarn_extends_the_context_by_its_factor() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parse_decoder_config(LLAMA | {"rope_scaling": rope}).max_context_tokens == 2048


def test_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(StartupError, match=r"--max-context is 513.*1 to 512"):
        parse_decoder_config(LLAMA, max_context_tokens=513)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"architecture 'MambaForCausalLM': --forward-pass transformers may"),
        ({"architectures": []}, r"architecture None: --forward-pass transformers may serve it"),
        ({"architectures": [["x"]]}, r"architecture \['x'\]: "),
        ({"architectures": None, "model_type": "mamba"}, r"architecture None: "),
        ({"rope_theta": float("inf")}, r"rope_theta is inf; expected `float` <= 1000"),
        ({"num_experts": 8}, r"num_experts is 8; .*without experts only"),
        (MIXTRAL | {"num_local_experts": 0}, r"num_local_experts is 0; expected `int` >= 1"),
        (MIXTRAL | {"num_local_experts": 5000}, r"num_local_experts is 5000; expected `int` <= 4096"),
        (MIXTRAL | {"num_experts_per_tok": 9}, r"num_experts_per_tok is 9; it must be at most .* experts, 8"),
        (MIXTRAL | {"num_experts": 4, "num_local_experts": 8}, r"num_experts is 4 and num_local_experts 8"),
        (MIXTRAL | {"num_hidden_layers": 17, "num_experts": 4096}, r"17 layers have 4096 experts each; at most 65536"),
        ({"quantization_config": {"quant_method": "aqlm"}}, r"quant_method is 'aqlm'; supported are .*gptq"),
        ({"quantization_config": "gptq"}, r"quantization_config is 'gptq'; it must be an object"),
        ({"hidden_act": "gelu"}, r'hidden_act is "gelu"; only "silu"'),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0; expected `int` >= 1"),
        ({"num_attention_heads": "4"}, r"num_attention_heads is '4'; expected `int`, got `str`"),
        ({"num_attention_heads": 3}, r"num_attention_heads is 3, not a multiple of num_key_value_heads, 2"),
        ({"num_attention_heads": 6}, r"hidden_size is 64, not a multiple of num_attention_heads, 6"),
        ({"head_dim": 15}, r"head_dim is 15; it must be even"),
        ({"hidden_size": 10**30}, r"hidden_size is 1000000.*; expected"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000; expected `int` <= 1024"),
        ({"vocab_size": -1}, r"vocab_size is -1"),
        ({"vocab_size": True}, r"vocab_size is True; expected `int`"),
        ({"max_position_embeddings": 1 << 40}, r"max_position_embeddings is 1099511627776"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps is 0.0"),
        ({"rope_theta": 0.5}, r"rope_theta is 0.5"),
        ({"rope_scaling": {"type": "fancy"}}, r'rope type "fancy" is not supported; default, linear'),
        ({"rope_scaling": {"type": "linear"}}, r'"linear" needs factor, which is missing'),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, r"rope_scaling.factor is -2; expected `float` >= 1e-06"),
        ({"rope_scaling": LLAMA3 | {"type": "llama3", "high_freq_factor": 1.0}}, r"high_freq_factor is 1.0"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, r"short_factor with 8 numbers; it has 1"),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0] * 8}}, r"long_factor with 8 numbers; it is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"per layer type are not supported"),
        (
            GEMMA3 | {"rope_parameters": {"chunked_attention": {}}},
            r"has 'chunked_attention'; supported layer",
        ),
        (GEMMA3 | {"use_bidirectional_attention": True}, r"use_bidirectional_attention is True; .*without it only"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50.0; .*without it only"),
        (GEMMA3 | {"hidden_activation": "relu"}, r'hidden_activation is "relu"; only "gelu_pytorch_tanh"'),
        (GEMMA3 | {"sliding_window": None}, r"sliding_window is null; this architecture needs a number"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar is 0; expected `float` >= 1e-06"),
        ({"partial_rotary_factor": 0.2}, r"head_dim 16 with partial_rotary_factor 0.2 rotates 3"),
    ],
)
def test_unsupported_configuration_is_refused_with_field_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        parse_decoder_config(LLAMA | change)


def test_text_model_has_the_defaults_of_the_hub() -> None:
    """The file of gemma-3-4b-it says no more about its text model."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = parse_decoder_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert (config.max_context_tokens, config.tie_embeddings) == (131_072, True)
    assert config.layer_window_tokens[:6] == (1024,) * 5 + (None,)
    assert config.window_rope is not None
    assert config.rope.inv_freq[0] == config.window_rope.inv_freq[0] / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config is None; Mistral3ForConditionalGeneration needs an object"),
        (
            {"text_config": LLAMA | {"model_type": "ministral"}},
            "text_config.model_type is 'ministral'; of Mistral3ForConditionalGeneration supported are mistral, mini",
        ),
        ({"text_config": LLAMA, "quantization_config": {"quant_method": "fp9"}}, "'fp9'"),
        ({"text_config": LLAMA | {"vocab_size": 0}}, "vocab_size is 0"),
    ],
)
def test_text_model_that_is_not_supported_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        parse_decoder_config({"architectures": ["Mistral3ForConditionalGeneration"]} | change)


def test_axes_and_layers_of_pictures_are_checked() -> None:
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}, "model_type": "qwen2_vl"}
    with pytest.raises(StartupError, match=r"mrope_section is \[2, 3, 4\]; its sum must be 8"):
        parse_decoder_config(LLAMA | rope | {"architectures": ["Qwen2VLForConditionalGeneration"]})
    vision = {"text_config": LLAMA | {"model_type": "qwen3_vl_text"}, "vision_config": {}}
    with pytest.raises(StartupError, match="3 entries; a model of 3 layers supports up to 2"):
        parse_decoder_config({"architectures": ["Qwen3VLForConditionalGeneration"]} | vision)


def test_missing_dimension_is_named() -> None:
    with pytest.raises(StartupError, match="missing required field `hidden_size`"):
        parse_decoder_config({key: value for key, value in LLAMA.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 3}, "gives no window"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        parse_decoder_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"]} | change)


def test_too_few_nope_flags_are_refused() -> None:
    with pytest.raises(StartupError, match="no_rope_layers has 1 entries for 3 layers"):
        parse_decoder_config(LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]})


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"[NaN]", b'{"vocab_size": NaN', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000]
)
def test_config_that_is_not_a_json_object_is_refused_with_its_file_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(StartupError, match=r"config\.json is not a JSON object"):
        read_decoder_config(tmp_path)


@pytest.mark.parametrize(
    "named",
    [
        {"architectures": ["LLaMAForCausalLM"]},
        {"architectures": ["YiForCausalLM"]},
        {"architectures": ["LlamaModel"]},
        {"architectures": None, "model_type": "llama"},
    ],
)
def test_other_spellings_of_an_architecture_are_read(named: dict[str, Any]) -> None:
    assert parse_decoder_config(LLAMA | named) == parse_decoder_config(LLAMA)


def test_missing_architecture_of_any_decoder_follows_from_its_model_type() -> None:
    for preset in PRESETS:
        values = hf_values(preset)
        assert find_architecture(values | {"architectures": None}) == values["architectures"][0]


def test_config_as_pythons_json_writes_it_is_read(tmp_path: Path) -> None:
    """With a byte order mark of an editor, and numbers that are no JSON."""
    text = json.dumps(LLAMA | {"time_step_limit": [0.0, float("inf")], "initializer_range": float("nan")})
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_decoder_config(tmp_path) == parse_decoder_config(LLAMA)


def test_error_begins_with_the_file_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json does not exist"):
        read_decoder_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 0}))
    with pytest.raises(StartupError, match=r"config\.json: .*vocab_size is 0"):
        read_decoder_config(tmp_path)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({"dtype": "bfloat16"}, Dtype.BF16),
        ({"torch_dtype": "float16"}, Dtype.FP16),
        ({"torch_dtype": "int4"}, None),
        ({"dtype": ["float32"]}, None),
        ({}, None),
    ],
)
def test_declared_dtype_has_two_spellings(values: dict[str, Any], dtype: Dtype | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_declared_dtype(tmp_path) is dtype


SCALARS = st.none() | st.booleans() | st.integers(-2, 2048) | st.sampled_from([1e-300, 0.5, 1e300, 10**40, "yarn"])
ROPE_KEYS = ("type", "rope_type", "factor", "original_max_position_embeddings", "short_factor", "truncate")
JSON = SCALARS | st.lists(SCALARS, max_size=4) | st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS, max_size=4)
KEYS = (
    *LLAMA,
    *("head_dim", "rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "sliding_window"),
    *("attn_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier", "sliding_window_pattern"),
    *("layer_types", "no_rope_layers", "use_sliding_window", "quantization_config", "num_experts", "rms_norm_eps"),
    *("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step"),
    *("swiglu_limit", "swiglu_alpha"),
)


@given(
    st.sampled_from(SUPPORTED_ARCHITECTURES),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
)
def test_any_values_give_a_config_or_a_startup_error(architecture: str, changes: dict[str, Any]) -> None:
    try:
        config = parse_decoder_config(LLAMA | {"architectures": [architecture]} | changes)
    except StartupError:
        return
    assert len(config.layer_window_tokens) == len(config.layer_uses_rope) == config.num_layers
    assert 2 * len(config.rope.inv_freq) == config.rope.rotary_dim <= config.head_dim
    assert all(math.isfinite(frequency) for frequency in config.rope.inv_freq)
    assert config.num_heads % config.num_kv_heads == 0
