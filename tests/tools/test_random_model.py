"""`penstock random-model`: transformers and Penstock both load what it writes."""

from __future__ import annotations

import json
import stat
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.files.generation_config import read_generation_defaults
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.tools.random_model import (
    SPECIAL_TOKENS,
    ModelDims,
    RandomModelOptions,
    run_random_model,
    write_random_model,
)

if TYPE_CHECKING:
    from pathlib import Path

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1000,
    "max_context": 256,
    "experts": 4,
    "experts_per_token": 2,
    "expert_size": 48,
}
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "smollm3", "phi3")


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_and_penstock_load_every_architecture(architecture: Any, tie: bool, tmp_path: Path) -> None:
    out = tmp_path / "model"
    write_random_model(out, ModelDims(**TINY, architecture=architecture, tie=tie))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    config = read_decoder_config(out)
    assert model.dtype == torch.bfloat16
    assert config.tie_embeddings == tie
    with open_weights(out, config) as weights:
        assert weights.choose_dtype("auto") is Dtype.BF16
        theirs, layer = model.model.layers[1].mlp, weights.layer(1, Dtype.BF16)
        if architecture == "qwen3-moe":
            assert layer.expert_down is not None
            assert torch.equal(layer.expert_down.view(4, 64, 48), theirs.experts.down_proj)
        else:
            torch.testing.assert_close(layer.down, theirs.down_proj.weight.detach(), rtol=0, atol=0)
    assert model(torch.arange(8)[None]).logits.shape == (1, 8, 1000)


def test_weights_depend_on_the_seed_and_have_the_stated_deviation(tmp_path: Path) -> None:
    first, again, other = (
        write_and_load(tmp_path / name, ModelDims(**TINY, seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert first[name].float().std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(first["model.norm.weight"], torch.ones(64, dtype=torch.bfloat16))


def write_and_load(out: Path, dims: ModelDims) -> dict[str, torch.Tensor]:
    write_random_model(out, dims)
    tensors: dict[str, torch.Tensor] = load_file(out / "model.safetensors")
    return tensors


def test_greedy_output_never_ends_by_chance(tmp_path: Path) -> None:
    for name, tie in (("tied", True), ("untied", False)):
        tensors = write_and_load(tmp_path / name, ModelDims(**TINY, tie=tie))
        head = tensors["model.embed_tokens.weight" if tie else "lm_head.weight"]
        (end,) = read_generation_defaults(tmp_path / name).eos_token_ids
        assert head[end].count_nonzero() == 0
        assert head[end + 1].count_nonzero() > 0


def test_large_models_are_sharded(tmp_path: Path) -> None:
    out = tmp_path / "model"
    num_bytes = write_random_model(out, ModelDims(**TINY), max_shard_bytes=100_000)
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (out / "model.safetensors").exists()
    with open_weights(out, read_decoder_config(out)) as weights:
        assert weights.stored_bytes == num_bytes
    assert all(stat.S_IMODE(shard.stat().st_mode) == 0o644 for shard in shards)


@pytest.mark.parametrize("vocab_size", [512, 5000, 32000])
def test_tokenizer_has_the_requested_vocabulary_and_every_id_decodes_to_text(vocab_size: int, tmp_path: Path) -> None:
    out = tmp_path / "model"
    write_random_model(out, ModelDims(**TINY | {"vocab_size": vocab_size}))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocab_size
    texts = [tokenizer.decode([i]) for i in range(vocab_size)]
    assert texts[: len(SPECIAL_TOKENS)] == [""] * len(SPECIAL_TOKENS)
    assert all(texts[len(SPECIAL_TOKENS) :])


@pytest.mark.parametrize("text", ["Hello, the world of streams!", "naïve ☃ 😀\n\ttab", "", "0123 --- ÿ\x00"])
def test_text_survives_encoding_and_decoding(text: str, tmp_path: Path) -> None:
    out = tmp_path / "model"
    write_random_model(out, ModelDims(**TINY | {"vocab_size": 20_000}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_renders(tmp_path: Path) -> None:
    out = tmp_path / "model"
    write_random_model(out, ModelDims(**TINY))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 300}, "vocab_size is 300; it must be from 512 to 900000"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000"),
        ({"heads": 0}, "num_attention_heads is 0"),
        ({"heads": 5}, "num_attention_heads is 5, not a multiple of num_key_value_heads, 2"),
        ({"layers": -1}, "num_hidden_layers is -1"),
        ({"hidden_size": 66}, "hidden_size is 66, not a multiple"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused_and_nothing_is_written(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=message):
        write_random_model(tmp_path / "model", ModelDims(**TINY | change))
    assert not (tmp_path / "model").exists()


def test_directory_with_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(StartupError, match="is not empty"):
        write_random_model(tmp_path, ModelDims(**TINY))
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_command_reports_the_size_and_fails_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = RandomModelOptions(out=tmp_path / "model", **TINY)
    assert run_random_model(options) == 0
    assert f"{options.out}: " in capsys.readouterr().err
    assert json.loads((options.out / "config.json").read_text())["hidden_size"] == 64
    with pytest.raises(SystemExit) as exited:
        run_random_model(options)
    assert exited.value.code == 1
    assert capsys.readouterr().err == f"penstock random-model: {options.out} is not empty\n"


def test_defaults_are_the_model_of_the_benchmarks() -> None:
    assert asdict(ModelDims()) == {
        "hidden_size": 768,
        "layers": 12,
        "heads": 12,
        "kv_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32000,
        "tie": True,
        "dtype": "bf16",
        "architecture": "llama",
        "experts": 64,
        "experts_per_token": 8,
        "expert_size": 384,
        "max_context": 4096,
        "seed": 0,
    }
