"""GGUF files written by the gguf package: weights, logits and tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

from penstock.backend.checkpoint.config.tensors import LayerWeights
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.files.generation_config import read_generation_defaults
from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.hub import resolve_config, resolve_model
from penstock.backend.checkpoint.quantization.modes import has_cpu_kernels
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, PackedForm, StackedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import BlockWeight, Int4Weight
from penstock.backend.checkpoint.weight_forms.stacked_weights import decoded
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.process import cache_directory
from penstock.shm.messages import Sampling
from tests.backend.checkpoint.gguf.converted_tensors import as_converted, converted
from tests.backend.checkpoint.gguf.writer import (
    GgufFile,
    byte_level_vocabulary,
    from_model,
    fuse_qkv,
    interleave,
)
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.decoder.quantized_oracle import relative_error, replace_linear
from tests.checkpoints import load_oracle, make_checkpoint, make_model
from tests.lora import make_adapter, merge

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "gguf"


def mixed(name: str) -> str:
    """A file of many types, as llama.cpp's mixtures are."""
    types = {
        "q_proj": "Q4_K",
        "k_proj": "Q5_K",
        "v_proj": "Q6_K",
        "o_proj": "IQ4_NL",
        "gate_proj": "Q4_1",
        "up_proj": "Q5_1",
        "down": "Q5_0",
        "lm_head": "Q8_0",
        "embed": "Q6_K",
    }
    return next((kind for part, kind in types.items() if part in name), "Q4_0")


def low_bits(name: str) -> str:
    """Types of few bits. IQ2_XXS has no form of its own: gate is dequantised, and with it up."""
    types = {"q_proj": "Q2_K", "k_proj": "Q3_K", "v_proj": "Q3_K", "o_proj": "IQ4_XS", "gate": "IQ2_XXS", "up": "TQ2_0"}
    return next((kind for part, kind in types.items() if part in name), "IQ3_S")


def all_of(kind: str) -> Any:
    return lambda _: kind


CASES: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "llama, mixed": ("llama", "llama2", mixed, {}),
    "llama, low bits": ("llama", "llama2", low_bits, {}),
    "llama, Q4_0": ("llama", "llama2", all_of("Q4_0"), {}),
    "llama, tied, Q4_0": ("llama", "llama-tied", all_of("Q4_0"), {}),
    "llama, tied, Q6_K": ("llama", "llama-tied", all_of("Q6_K"), {}),
    "llama, F16": ("llama", "llama2", all_of("F16"), {}),
    "qwen2, Q8_0": ("qwen2", "qwen2", all_of("Q8_0"), {}),
    "qwen3, Q4_K": ("qwen3", "qwen3", all_of("Q4_K"), {"head_dim": 64}),
    "phi3, F32": ("phi3", "phi3", all_of("F32"), {"sliding_window": None}),
}


def make_file(case: str, pre: str = "llama-bpe") -> tuple[GgufFile, Any]:
    arch, preset, type_of, overrides = CASES[case]
    model = make_model(preset, **SIZES | overrides)
    file = from_model(arch, model, type_of, byte_level_vocabulary(SIZES["vocab_size"], pre))
    model.load_state_dict(file.exact, strict=False)
    return file, model


def last_logits(model_dir: Path, prompt: list[int]) -> NDArray[np.float32]:
    """After the prompt, in fp32."""
    options = PassOptions(dtype="fp32", max_running=4, max_batch_tokens=128)
    forward_pass = CpuDecoderPass.load(model_dir, options)
    assert forward_pass.spec == CpuDecoderPass.describe(model_dir, options)
    driver = Driver(forward_pass, num_pages=8, page_size=16)
    row = driver.add(prompt)
    logits: NDArray[np.float32] = driver.prefill()[row.slot]
    forward_pass.close()
    return logits


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantised_weights_in_transformers(case: str, tmp_path: Path) -> None:
    file, model = make_file(case)
    is_packed = "F" not in case
    if is_packed:
        for name in [name for name in file.exact if file.exact[name].dim() == 2 and "embed" not in name]:
            replace_linear(model, name.removesuffix(".weight"), file.exact[name])
        if "tied" in case:
            replace_linear(model, "model.embed_tokens", file.exact["model.embed_tokens.weight"])
    model_dir = resolve_model(str(file.write(tmp_path / "model.gguf")))
    prompt = np.random.default_rng(0).integers(0, 256, 33).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].numpy()
    logits = last_logits(model_dir, prompt)
    # Where a number lies halfway between two steps, it may be rounded either way, and all that follows changes a bit.
    assert relative_error(logits, expected) < (0.05 if is_packed else 1e-4)


_SAME = ("gemma", "gemma2", "gemma3", "granite", "cohere2", "starcoder2", "glm4", "gpt-oss", "smollm3")
ARCHITECTURES = {
    "qwen2-moe": "qwen2moe",
    "qwen3-moe": "qwen3moe",
    "qwen2-vl": "qwen2vl",
    "qwen3-vl": "qwen3vl",
    "qwen3-vl-moe": "qwen3vlmoe",
    "qwen3-next": "qwen3next",
    "qwen3.5": "qwen35",
    "qwen3.5-moe": "qwen35moe",
    "mixtral": "llama",
    **{name: name for name in _SAME},
    "gemma3n": "gemma3n",
    "ministral3": "mistral3",
    "phi3-longrope": "phi3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "cohere-qk-norm": "command-r",
    "glm": "chatglm",
}
"""Preset of a checkpoint → architecture of its GGUF file."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"decoder_sparse_step": 1, "use_sliding_window": False},
    **{name: {"mlp_only_layers": []} for name in ("qwen3-moe", "qwen3-vl-moe", "qwen3-next")},
    "mixtral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "gemma3n": {"vocab_size_per_layer_input": 256},
    "granite": {"attention_bias": False},
    "olmo3": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.2,
                "beta_fast": 16.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "glm4": {"attention_bias": False},
    "cohere-qk-norm": {"attention_bias": False, "tie_word_embeddings": True},
    "gpt-oss": {"swiglu_limit": 7.0},
}
"""Settings that GGUF files lack, with the values of existing models."""


@pytest.mark.parametrize("preset", ARCHITECTURES)
def test_logits_of_each_architecture_are_those_of_its_checkpoint(preset: str, tmp_path: Path) -> None:
    """With a prompt beyond windows and LongRoPE's short factors."""
    checkpoint = make_checkpoint(preset, tmp_path / "checkpoint", vocab_size=320, **OVERRIDES.get(preset, {}))
    model = load_oracle(checkpoint)
    tensors = converted(ARCHITECTURES[preset], load_file(checkpoint / "model.safetensors"), model.config)
    file = from_model(ARCHITECTURES[preset], model, all_of("F32"), byte_level_vocabulary(320), tensors)
    if preset == "glm":
        fuse_qkv(file)
    model_dir = resolve_model(str(file.write(tmp_path / "model.gguf")))
    prompt = np.random.default_rng(0).integers(0, 256, 80).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].numpy()
    assert relative_error(last_logits(model_dir, prompt), expected) < 1e-4


@pytest.mark.parametrize(("preset", "arch"), [("granite", "granite"), ("qwen2", "qwen2"), ("glm4", "glm4")])
def test_adapter_of_the_checkpoint_works_over_its_gguf_file(preset: str, arch: str, tmp_path: Path) -> None:
    """Of Granite the file has q and k in another order, of GLM-4 in the checkpoint's, where neighbours rotate too."""
    checkpoint = make_checkpoint(preset, tmp_path / "checkpoint", vocab_size=320, **OVERRIDES.get(preset, {}))
    model, tensors = load_oracle(checkpoint), load_file(checkpoint / "model.safetensors")
    file = from_model(arch, model, all_of("F32"), byte_level_vocabulary(320), tensors)
    model_dir = resolve_model(str(file.write(tmp_path / "model.gguf")))
    adapter = make_adapter(model, tmp_path / "adapter")
    prompt = np.random.default_rng(0).integers(0, 256, 80).tolist()
    with torch.inference_mode():
        plain = model(torch.tensor([prompt])).logits[0, -1].numpy()
        expected = merge(model, adapter)(torch.tensor([prompt])).logits[0, -1].numpy()
    forward_pass = CpuDecoderPass.load(model_dir, PassOptions(dtype="fp32", max_running=4, max_batch_tokens=256))
    driver = Driver(forward_pass, num_pages=64, page_size=8)
    forward_pass.put_adapter(3, forward_pass.read_adapter(adapter))
    row, other = driver.add(prompt), driver.add(prompt)
    row.adapter = 3
    found = driver.prefill()
    assert relative_error(found[row.slot], expected) < 1e-4
    assert relative_error(found[other.slot], plain) < 1e-4
    forward_pass.put_adapter(3, None)
    again = driver.add(prompt)
    again.adapter = 3
    assert relative_error(driver.prefill()[again.slot], plain) < 1e-4
    forward_pass.close()


def test_quantised_experts_of_a_merged_tensor_run_as_they_are(tmp_path: Path) -> None:
    settings = {"vocab_size": 320, "moe_intermediate_size": 64, "mlp_only_layers": []}
    checkpoint = make_checkpoint("qwen3-moe", tmp_path / "checkpoint", **settings)
    model, tensors = load_oracle(checkpoint), load_file(checkpoint / "model.safetensors")
    type_of = lambda name: "Q8_0" if ".experts." in name else "F32"  # noqa: E731
    file = from_model("qwen3moe", model, type_of, byte_level_vocabulary(320), tensors)
    layer = read_layer(file, tmp_path)
    assert isinstance(layer.expert_down, BlockWeight)
    exact = file.exact["model.layers.0.mlp.experts.down_proj.weight"]
    assert torch.equal(layer.expert_down.dequantize(), exact.flatten(0, 1))
    gate, up = (file.exact[f"model.layers.0.mlp.experts.{part}_proj.weight"] for part in ("gate", "up"))
    assert isinstance(layer.expert_gate_up, BlockWeight)
    assert torch.equal(layer.expert_gate_up.dequantize(), torch.cat([gate, up], dim=1).flatten(0, 1))


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("gpt-oss", tmp_path / "checkpoint", vocab_size=320, hidden_size=64)
    model, tensors = load_oracle(checkpoint), as_converted(load_file(checkpoint / "model.safetensors"))
    type_of = lambda name: "MXFP4" if ".experts." in name and name.endswith("weight") else "F32"  # noqa: E731
    file = from_model("gpt-oss", model, type_of, byte_level_vocabulary(320), tensors)
    layer = read_layer(file, tmp_path)
    assert layer.expert_down is not None
    assert layer.expert_gate_up is not None
    assert layer.expert_down.form == layer.expert_gate_up.form == PackedForm(32, has_zeros=False)
    experts = "model.layers.0.mlp.experts"
    assert torch.equal(layer.expert_down.dequantize(), file.exact[f"{experts}.down_proj.weight"].flatten(0, 1))
    gate, up = (file.exact[f"{experts}.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(layer.expert_gate_up.dequantize(), torch.cat([gate, up], dim=1).flatten(0, 1))
    biases = torch.cat([file.exact[f"{experts}.{part}_proj.bias"] for part in ("gate", "up")], dim=1)
    assert layer.expert_gate_up_bias is not None
    assert torch.equal(layer.expert_gate_up_bias, biases.flatten().to(torch.bfloat16))


def test_q4_0_runs_in_the_int4_kernels_with_the_same_numbers(tmp_path: Path) -> None:
    file, _ = make_file("llama, Q4_0")
    layer = read_layer(file, tmp_path)
    weight = decoded(layer.down)
    assert isinstance(weight, Int4Weight)
    assert torch.equal(weight.dequantize(), file.exact["model.layers.0.mlp.down_proj.weight"])
    assert bool((weight.scales < 0).any())


def test_other_types_run_in_the_grouped_kernels_with_the_same_numbers(tmp_path: Path) -> None:
    """Types that share gate and up are widened to a form that holds both; q, k and v keep theirs."""
    file, model = make_file("llama, mixed")
    layer = read_layer(file, tmp_path)
    forms = {
        "qkv": StackedForm(
            tuple((GroupedForm(*form), 256) for form in ((4, 32, 256, True), (5, 32, 256, True), (6, 16, 256, False)))
        ),
        "o": GroupedForm(4, 32, 32, has_minima=False, codebook="iq4"),
        "gate_up": GroupedForm(8, 32, 32, has_minima=True),
        "down": GroupedForm(5, 32, 32, has_minima=False),
    }
    parts = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for field, form in forms.items():
        weight = getattr(layer, field)
        assert weight.form == form
        exact = [file.exact[f"model.layers.0.{name}.weight"] for name in parts[field]]
        if field == "qkv":  # rows stay in the file's order
            exact = [interleave(exact[0], heads["q_proj"]), interleave(exact[1], heads["k_proj"]), exact[2]]
        assert torch.equal(weight.dequantize(), torch.cat(exact))


def read_layer(file: GgufFile, directory: Path) -> LayerWeights[Any]:
    model_dir = resolve_model(str(file.write(directory / "model.gguf")))
    with open_weights(model_dir, read_decoder_config(model_dir), keeps=has_cpu_kernels) as weights:
        return weights.layer(0, Dtype.BF16)


def test_directory_is_made_once_for_a_state_of_the_file(tmp_path: Path, cache: Path) -> None:
    file, _ = make_file("llama, F16")
    path = file.write(tmp_path / "my model.gguf")
    first = resolve_config(str(path))
    assert first.parent == cache
    (first / "mark").touch()
    assert resolve_model(str(path), config_dir=first) == first
    assert (first / "mark").exists()
    path.touch()
    assert resolve_model(str(path)) != first
    assert len(list(cache.iterdir())) == 2


def test_cache_keeps_the_last_used_directories_whose_files_exist(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_directory, "MAX_KEPT", 3)
    file, _ = make_file("llama, F16")
    paths = [file.write(tmp_path / f"model-{number}.gguf") for number in range(5)]
    found = {}
    for age, path in enumerate(paths[:3]):
        found[path] = resolve_config(str(path))
        os.utime(found[path], (age, age))
    resolve_config(str(paths[0]))  # now the last used one
    paths[2].unlink()
    found |= {path: resolve_config(str(path)) for path in paths[3:]}
    assert set(cache.iterdir()) == {found[paths[0]], found[paths[3]], found[paths[4]]}


def test_tokenizer_template_and_end_tokens_come_from_the_file(tmp_path: Path) -> None:
    file, _ = make_file("llama, F16")
    model_dir = resolve_model(str(file.write(tmp_path / "model.gguf")))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    ends = tuple(tokens.index(token) for token in ("<|end_of_text|>", "<|eot_id|>"))
    defaults = read_generation_defaults(model_dir)
    assert defaults.eos_token_ids == ends
    assert defaults.sampling == Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    assert config["chat_template"] == file.metadata["tokenizer.chat_template"]
    assert config["bos_token"] == "<|begin_of_text|>"
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    encoding = tokenizer.encode("the order<|eot_id|> of\n 1234")
    assert encoding.ids[0] == tokens.index("<|begin_of_text|>")
    assert tokens.index("<|eot_id|>") in encoding.ids
    assert tokenizer.decode(encoding.ids) == "the order of\n 1234"


def test_shards_are_read_as_one_file(tmp_path: Path) -> None:
    file, _ = make_file("llama, mixed")
    names = list(file.tensors)
    whole = resolve_model(str(file.write(tmp_path / "model.gguf")))
    for number, part in enumerate((names[:9], names[9:]), 1):
        metadata = (file.metadata if number == 1 else {}) | {"split.count": 2, "split.no": number - 1}
        shard = GgufFile(file.arch, metadata, {name: file.tensors[name] for name in part})
        shard.write(tmp_path / f"m-0000{number}-of-00002.gguf")
    parts = resolve_model(str(tmp_path / "m-00001-of-00002.gguf"))
    config = read_decoder_config(whole)
    assert read_decoder_config(parts) == config
    with open_weights(whole, config) as one, open_weights(parts, config) as two:
        assert torch.equal(one.layer(1, Dtype.FP32).qkv, two.layer(1, Dtype.FP32).qkv)  # type: ignore[arg-type]


def test_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    """Llama 3.1's are a tensor in GGUF files."""
    file, _ = make_file("llama, F16")
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    file.tensors["rope_freqs.weight"] = (factors, gguf.GGMLQuantizationType.F32)
    config = read_decoder_config(resolve_model(str(file.write(tmp_path / "model.gguf"))))
    plain = read_decoder_config(resolve_model(str(make_file("llama, F16")[0].write(tmp_path / "plain.gguf"))))
    assert config.rope.attention_factor == 1.0
    np.testing.assert_allclose(config.rope.inv_freq, np.array(plain.rope.inv_freq) / factors, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "factor"),
    [({}, 1), ({"rope.scaling.factor": 4.0}, 4), ({"rope.scale_linear": 4.0}, 4), ({"rope.scaling.type": "none"}, 1)],
)
def test_a_factor_without_a_type_is_linear_scaling(change: dict[str, Any], factor: int, tmp_path: Path) -> None:
    """And without a factor nothing is scaled, although Ministral 3's own files have YaRN by default."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = make_model("ministral3", vocab_size=320, rope_parameters=rope)
    file = from_model("mistral3", model, all_of("F32"), byte_level_vocabulary(320))
    file.metadata |= {f"mistral3.{key}": value for key, value in change.items()}
    config = read_decoder_config(resolve_model(str(file.write(tmp_path / "model.gguf"))))
    dim = config.rope.rotary_dim
    expected = 10000.0 ** (-np.arange(0, dim, 2) / dim) / factor
    np.testing.assert_allclose(config.rope.inv_freq, expected, rtol=1e-5)
    assert config.query_rope is None


def test_gemma3_without_a_window_attends_to_all(tmp_path: Path) -> None:
    model = make_model("gemma3", vocab_size=320, num_hidden_layers=2)
    file = from_model("gemma3", model, all_of("F32"), byte_level_vocabulary(320))
    del file.metadata["gemma3.attention.sliding_window"]
    config = read_decoder_config(resolve_model(str(file.write(tmp_path / "model.gguf"))))
    assert config.layer_window_tokens == (None, None)
