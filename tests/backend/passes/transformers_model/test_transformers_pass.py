"""TransformersPass against the model's own `generate`: whole, in chunks, and in any batch."""

from __future__ import annotations

import json
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.transformers_model import model as loading
from penstock.backend.passes.transformers_model.forward_pass import TransformersPass
from tests.backend.checkpoint.weight_files import name_twice, rewrite
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.decoder.test_scored_prompts import assert_scores, score
from tests.backend.passes.transformers_model.families import FAMILIES, REFUSED, make_family
from tests.checkpoints import load_oracle
from tests.temporary import make_shared_directory

FP32 = PassOptions(dtype="fp32", max_running=8)
PROMPTS = [np.random.default_rng(seed).integers(3, 256, length).tolist() for seed, length in enumerate((1, 9, 41))]
NUM_TOKENS = 24


@cache
def checkpoint(name: str) -> Path:
    return make_family(name, make_shared_directory())


@cache
def generated(name: str) -> list[list[int]]:
    return continue_prompts(load_oracle(checkpoint(name)))


def continue_prompts(oracle: Any) -> list[list[int]]:
    """The greedy continuation of each prompt by transformers."""
    oracle.generation_config.eos_token_id = None  # otherwise it stops there
    settings = transformers.GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    return [
        oracle.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def make_driver(model: str | Path, kv_dtype: str = "fp32") -> Driver:
    """model: a family's name, or a checkpoint."""
    path = checkpoint(model) if isinstance(model, str) else model
    return Driver(TransformersPass.load(path, FP32), num_pages=64, page_size=8, kv_dtype=kv_dtype)


@pytest.mark.parametrize(("name", "chunk"), list(zip(FAMILIES, cycle((None, 7)), strict=False)))
def test_family_continues_a_batch_as_generate_does(name: str, chunk: int | None) -> None:
    driver = make_driver(name)
    rows = [driver.add(prompt) for prompt in PROMPTS]
    driver.prefill(chunk)
    driver.decode(NUM_TOKENS - 1)
    assert [row.tokens[row.num_prompt_tokens :] for row in rows] == generated(name)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3", "opt"])
def test_prompt_token_by_token_beside_decoding_rows(name: str) -> None:
    driver = make_driver(name)
    first = driver.add(PROMPTS[1])
    driver.prefill(None)
    late = driver.add(PROMPTS[2])
    for _ in range(len(PROMPTS[2])):
        driver.step([(first, 1), (late, 1)])
    driver.decode(3)
    for row, expected in ((first, generated(name)[1]), (late, generated(name)[2])):
        tokens = row.tokens[row.num_prompt_tokens :]
        assert tokens[: len(expected)] == expected[: len(tokens)]
        assert len(tokens) >= 4


def test_prompts_are_scored_as_by_the_model_itself() -> None:
    oracle = load_oracle(checkpoint("gpt-oss"))
    for prompt, found in zip(PROMPTS[1:], score(make_driver("gpt-oss"), PROMPTS[1:], chunk=7), strict=True):
        with torch.inference_mode():
            assert_scores(found, oracle(torch.tensor([prompt])).logits[0].numpy(), prompt)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_cache_takes_the_bytes_that_the_spec_says(name: str) -> None:
    loaded = TransformersPass.load(checkpoint(name), FP32)
    assert loaded.spec == TransformersPass.describe(checkpoint(name), FP32)
    for kv_dtype, num_bytes in loaded.spec.kv_bytes_per_token.items():
        loaded.create_cache(4, 8, kv_dtype)
        assert loaded._cache is not None
        pages = (*loaded._cache.keys, *loaded._cache.values)
        tensors = [tensor for cache in pages for tensor in cache.tensors]
        assert sum(tensor.numel() * tensor.itemsize for tensor in tensors) == 4 * 8 * num_bytes


def test_weight_bytes_are_those_of_the_parameters() -> None:
    oracle = load_oracle(checkpoint("qwen3-moe"))
    assert TransformersPass.describe(checkpoint("qwen3-moe"), FP32).weight_bytes == 4 * oracle.num_parameters()
    bf16 = TransformersPass.describe(checkpoint("qwen3-moe"), PassOptions(dtype="bf16"))
    assert bf16.weight_bytes == 2 * oracle.num_parameters()


@pytest.mark.parametrize("name", REFUSED)
def test_model_with_another_cache_is_refused_by_name(name: str) -> None:
    with pytest.raises(StartupError, match=f"{REFUSED[name][0]}ForCausalLM {REFUSED[name][2]}"):
        TransformersPass.describe(checkpoint(name), FP32)


@pytest.mark.parametrize(("rows", "vocab_size"), [(300, 300), (576, 512)])
def test_resized_vocabulary_has_the_rows_that_can_be_sampled(rows: int, vocab_size: int, tmp_path: Path) -> None:
    """vocab_size in config.json is 512."""
    oracle = load_oracle(checkpoint("arcee"))
    oracle.resize_token_embeddings(rows)
    with torch.no_grad():
        oracle.get_output_embeddings().weight[512:] = 9.0
    oracle.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((checkpoint("arcee") / "config.json").read_bytes())
    oracle.resize_token_embeddings(vocab_size)
    driver = make_driver(tmp_path)
    added = [driver.add(prompt) for prompt in PROMPTS]
    driver.prefill(None)
    driver.decode(NUM_TOKENS - 1)
    assert [row.tokens[row.num_prompt_tokens :] for row in added] == continue_prompts(oracle)
    assert TransformersPass.describe(tmp_path, FP32).weight_bytes == 4 * oracle.num_parameters()


def edited(name: str, out: Path, **changes: Any) -> Path:
    """A copy of a family's checkpoint with other values in config.json."""
    for path in checkpoint(name).iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "unheard-of"}, "cannot read it"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method is 'gptq'; the forward pass tr"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000"),
        ({"num_hidden_layers": 4}, r"tensor model.layers.3.\S+ is missing"),
        ({"intermediate_size": 128}, r"has shape \[\d+, \d+\]; config.json makes it \[(64, )?128"),
    ],
)
def test_bad_configuration_is_one_line(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=reason) as refused:
        TransformersPass.load(edited("arcee", tmp_path, **changes), FP32)
    assert "\n" not in str(refused.value)


def test_every_decoder_of_transformers_is_described_or_refused_in_one_line(tmp_path: Path) -> None:
    """With its default configuration, which some of them cannot compute with."""
    answers = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
        except StrictDataclassClassValidationError:
            continue  # gemma4_assistant's default is refused by itself
        try:
            TransformersPass.describe(tmp_path, PassOptions())
            answers[model_type] = ""
        except StartupError as error:
            answers[model_type] = str(error)
    assert len(answers) > 150
    assert [answer for answer in answers.values() if "\n" in answer or len(answer) > 500] == []
    assert answers["gemma4"] == answers["afmoe"] == answers["qwen3_next"] == ""
    assert "transformers' code for this model fails: TypeError: 'NoneType'" in answers["lfm2_moe"]


def test_tensor_named_twice_is_refused(tmp_path: Path) -> None:
    """The library takes the last place."""
    name_twice(edited("arcee", tmp_path) / "model.safetensors", "model.norm.weight")
    with pytest.raises(StartupError, match=r"the header: 'model\.norm\.weight' occurs twice"):
        TransformersPass.load(tmp_path, FP32)


def test_tensor_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    path = edited("arcee", tmp_path) / "model.safetensors"
    harmless = ("mtp.layers.0.x.weight", "model.layers.3.x.weight", "model.layers.0.self_attn.k_scale")
    rewrite(path, {name: torch.ones(2) for name in harmless})
    TransformersPass.load(tmp_path, FP32)
    rewrite(path, {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(StartupError, match=r"tensor 'model.layers.0.self_attn.q_proj.bias' has no place in ArceeForC"):
        TransformersPass.load(tmp_path, FP32)


def test_options_that_it_cannot_meet_are_refused() -> None:
    with pytest.raises(StartupError, match="--max-context is 513; this model supports 1 to 512"):
        TransformersPass.describe(checkpoint("arcee"), PassOptions(max_context_tokens=513))
    with pytest.raises(StartupError, match="needs a model"):
        TransformersPass.describe(None, FP32)


def test_attention_that_hides_something_is_noticed_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would find a model whose layers do more than they tell: here ours is made wrong instead."""

    class Wrong(loading.ShapeProbe):
        def __call__(self, call: Any) -> torch.Tensor:
            return 2 * super().__call__(call)

    monkeypatch.setattr(loading, "ShapeProbe", Wrong)
    with pytest.raises(StartupError, match="over paged attention its logits differ"):
        TransformersPass.load(checkpoint("arcee"), FP32)


def test_argument_that_the_attention_does_not_know_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.backend.passes.transformers_model import attention

    monkeypatch.setattr(attention, "_USED", attention._USED - {"s_aux"})
    with pytest.raises(StartupError, match="its attention takes s_aux"):
        TransformersPass.load(checkpoint("gpt-oss"), FP32)
